"""Ollama's descriptions of the models: the answers to /api/tags, /api/ps and /api/show."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from castiron.pipelines.api.generation_api import SWITCHES
from castiron.pipelines.api.model_api import Limits, default_sampling
from castiron.pipelines.api.ollama.records import TAG
from castiron.pipelines.text.chat_template import variables_of
from castiron.pipelines.text.reasoning import marks_of
from castiron.vmfb.bundle.manifest import WEIGHTS, Manifest

# Version of Ollama whose API is implemented. Some clients require a minimum version.
OLLAMA_VERSION = "0.13.0"
# Keys of model_info, after the architecture, by the HF config's key.
MODEL_INFO = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv", "vocab_size": "vocab_size",
}  # fmt: skip
# Ollama's expiry date of a model that stays open is also in the far future.
FOREVER = timedelta(days=100 * 365)


def listed_model(name: str, manifest: Manifest, date: datetime) -> dict[str, Any]:
    """Return a model's entry in the answer to /api/tags."""
    tagged, weights = name if ":" in name else name + TAG, manifest.files[WEIGHTS]
    return {
        "name": tagged, "model": tagged, "modified_at": date.isoformat(), "size": weights.size,
        "digest": weights.sha256, "details": _details(manifest),
    }  # fmt: skip


def running_model(name: str, manifest: Manifest, size: int, keep: float | None) -> dict[str, Any]:
    """Return an open model's entry in the answer to /api/ps.

    size: bytes of weights and states. keep: seconds until it is closed; None if it stays open.
    """
    now = datetime.now(UTC)
    expires = now + (FOREVER if keep is None else timedelta(seconds=keep))
    found = listed_model(name, manifest, now) | {"size": size, "size_vram": 0, "expires_at": expires.isoformat()}
    del found["modified_at"]
    return found | {"context_length": _context(manifest)}


def shown_model(name: str, manifest: Manifest, template: str | None, date: datetime, limits: Limits) -> dict[str, Any]:
    """Return the answer to /api/show, which describes a model."""
    family, parameters = _family(manifest), {"num_ctx": _context(manifest)}
    if not manifest.encoder:
        parameters |= default_sampling(manifest, limits).settings
    config = manifest.config
    information = {f"{family}.{key}": config[name] for name, key in MODEL_INFO.items() if config.get(name) is not None}
    return {
        "modelfile": f"FROM {name}\n", "template": template or "", "license": "", "details": _details(manifest),
        "parameters": "\n".join(f"{key:30} {value:g}" for key, value in parameters.items()),
        "model_info": {"general.architecture": family, f"{family}.context_length": _context(manifest), **information},
        "capabilities": _capabilities(manifest, template or ""), "modified_at": date.isoformat(),
    }  # fmt: skip


def _family(manifest: Manifest) -> str:
    return str(manifest.config.get("model_type", "unknown"))


def _context(manifest: Manifest) -> int:
    return manifest.encoder.max_tokens if manifest.encoder else manifest.context


def _details(manifest: Manifest) -> dict[str, Any]:
    family, codecs = _family(manifest), manifest.codecs
    return {
        "parent_model": "", "format": str(manifest.source.get("format", "")), "family": family, "families": [family],
        # The manifest does not have the number of parameters.
        "parameter_size": "", "quantization_level": max(codecs, key=lambda codec: codecs[codec], default="").upper(),
    }  # fmt: skip


def _capabilities(manifest: Manifest, template: str) -> list[str]:
    if manifest.encoder:
        return [] if manifest.encoder.relevance else ["embedding"]
    reasons = marks_of(template, ()) or {*SWITCHES, "reasoning_effort"} & {*variables_of(template)}
    # Tools are described to every model with a chat template.
    found = {"tools": template, "thinking": reasons, "insert": manifest.tokens.fim}
    return ["completion", *(name for name, has in found.items() if has)]
