"""Describe a bundle, or a checkpoint before it is compiled."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.cli.options import add_checkpoint, add_options
from castiron.pipelines.locate import is_bundle
from castiron.pipelines.terminal import Progress, counted, megabytes, sanitised

if TYPE_CHECKING:
    from castiron.vmfb.bundle.manifest import Manifest

EXAMPLES = """\
examples:
  castiron inspect model.gguf --tensors
  castiron inspect build/smollm2-135m-instruct --json

--json prints one object: a bundle's manifest; or a checkpoint's path, format, config, ignored_keys
(config keys without an effect on the model), left_out (tensors that are not part of the text model,
by prefix), quantization_config (that of config.json, or null), refused (why it cannot be compiled,
or null), needs (absent if refused: bytes of the bundle's weights, of the largest_weight, and of the
states of one sequence of `context` positions), parameters, tensors, tokenizer, chat_template,
bos_token_id, eos_token_ids, encodes (whether it is an embedding model).
"""
# Keys of config.json that are shown.
SHOWN_CONFIG = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, metavar="MODEL|DIR", help="checkpoint, name on the hub or in the catalogue, or bundle")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of a checkpoint")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    facts, lines = bundle(args.model) if is_bundle(Path(args.model)) else checkpoint(args.model, args.tensors)
    print(json.dumps(facts, ensure_ascii=False) if args.json else sanitised("\n".join(lines)))
    return 0


def bundle(path: str) -> tuple[dict, list[str]]:
    """Return (a bundle's manifest as a JSON object, the lines that `castiron inspect` prints)."""
    from castiron.pipelines.checkpoints.hf.tensor_layouts import in_words
    from castiron.pipelines.engine.memory import mapped_weights, needed, slots_of, warn_of_shortage
    from castiron.pipelines.text.tool_formats import HERMES, ToolFormat
    from castiron.vmfb.bundle.bundle import open_bundle
    from castiron.vmfb.bundle.manifest import dump

    manifest = open_bundle(path, run=False).manifest
    slots, target, tool_format = slots_of(manifest), manifest.target, ToolFormat.of(manifest)
    runs_on = f"{target.driver} driver" if target.driver else f"{target.arch}, {target.isa or 'no kernels'}"
    warn_of_shortage(mapped_weights(manifest))
    source, facts = manifest.source, manifest.compile
    hub, adapter, text, module = source.get("hub"), source.get("adapter"), source.get("calibrated"), facts.get("custom_module")
    ignored, left_out = source.get("ignored_keys"), source.get("left_out")
    matmuls, tuned = len(facts.get("matmuls", ())), facts.get("tuned")
    rounded = "; ".join(f"{n} of {matmuls} matmuls {way}" for way, n in facts.get("arithmetic", {}).items())
    rows: list[tuple[str, str | None]] = [
        ("bundle", f"{manifest.name} ({manifest.config.get('model_type', 'unknown type')})"),
        ("from", f"{source.get('path') or source.get('model', 'unknown')} ({source.get('format', '?')})"),
        ("on the hub", hub and " ".join(hub.values())),
        ("ignored keys", ignored and ", ".join(ignored) + " (by --ignore-key)"),
        ("left out", left_out and in_words(left_out)),
        ("adapter", adapter and f"{adapter['path']} of rank {adapter['rank']}, merged (sha256 {adapter['sha256'][:16]}…)"),
        ("calibrated", text and f"on {text['path']} (sha256 {text['sha256'][:16]}…)"),
        ("numerics", manifest.numerics + (f" ({rounded})" if rounded else "")),
        ("made with", f"{manifest.lowering} lowering, {manifest.weights} weights, {manifest.cache} cache"),
        ("weights", ", ".join(f"{count} {codec}" for codec, count in manifest.codecs.items())),
        *encoder(manifest),
        ("context", f"{manifest.context} positions, up to {manifest.max_context} with --context"),
        ("LongRoPE", (original := manifest.original_context) and f"long factors in sequences of more than {original} tokens"),
        ("states", ", ".join(f"{state.name} {state.of(1)} {state.kind}" for state in manifest.states)),
        ("memory", f"{needed(manifest)}" + (f", in castiron serve {needed(manifest, slots)}" if slots > 1 else "")),
        ("functions", ", ".join(function.name for function in manifest.functions)),
        ("target", f"{target.name} ({runs_on})"),
        ("tuned", f"{len(tuned)} of {matmuls} matmuls, for {counted(facts.get('threads', 0), 'thread')}" if tuned else "no"),
        ("module", module and f"not castiron's: {module['module']} ({module['sha256'][:16]}…)"),
        ("versions", f"castiron {manifest.versions.castiron}, IREE {manifest.versions.iree}"),
        ("tokenizer", "yes" if "tokenizer.json" in manifest.files else "none: takes token ids only"),
        ("tool calls", tool_format.example() if tool_format else f"{HERMES.example()} (the chat template has none)"),
        ("accuracy", manifest.accuracy and str(manifest.accuracy)),
        ("speed", manifest.speed and json.dumps(manifest.speed)),
        *((name, f"{megabytes(file.size)}  sha256 {file.sha256[:16]}…") for name, file in manifest.files.items()),
    ]
    return json.loads(dump(manifest)), table(rows)


def encoder(manifest: Manifest) -> list[tuple[str, str]]:
    """Return rows (label, text) about an embedding model or reranker; [] for other models."""
    if (facts := manifest.encoder) is None:
        return []
    if facts.relevance:
        size = f"two texts of at most {facts.max_tokens} tokens together"
        return [("reranks", f"{size}: {facts.pooling} pooling, {facts.relevance} of one number")]
    dense = "".join(f", a layer of {features}" for features in facts.dense)
    vector = f"{manifest.hidden} numbers{' of length 1' * facts.normalised}"
    rows = [("encodes", f"texts of at most {facts.max_tokens} tokens: {facts.pooling} pooling{dense}, vectors of {vector}")]
    default = f"; {facts.default_prompt} by default" if facts.default_prompt is not None else ""
    return [*rows, ("prompts", ", ".join(facts.prompts) + default)] if facts.prompts else rows


def checkpoint(path: str, tensors: bool) -> tuple[dict, list[str]]:
    from castiron.emitter.codecs import row_bytes
    from castiron.emitter.graph.types import EmitError
    from castiron.emitter.models import ignored_keys
    from castiron.pipelines.checkpoints.checkpoint import CheckpointError
    from castiron.pipelines.checkpoints.hf.quantisation_methods import describe
    from castiron.pipelines.checkpoints.hf.tensor_layouts import in_words
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.compile.build_model import build_module
    from castiron.pipelines.compile.compile_options import Options, context_of, max_context_of
    from castiron.pipelines.engine.memory import Needed, state_bytes, warn_of_shortage

    with Progress() as progress:
        found = open_checkpoint(path, progress)
    # Compute sizes from shapes, because reading a tensor can mean converting it.
    sizes = {
        name: prod(tensor.shape[:-1]) * row_bytes(tensor.codec, tensor.shape[-1]) for name, tensor in found.tensors.items()
    }
    ignored: Sequence[str] = ()
    refused: str | None = None
    needs: list[tuple[str, str]] = []
    facts: dict = {}
    try:
        ignored = ignored_keys(found.config)
        # Other functions read the same weights and states.
        options = Options(prefill=(), batch=(), verify_widths=())
        module, context = build_module(found, options), context_of(found.config, options)
        packed = [param.type.nbytes for param in module.params.values()]
        states = next(iter(module.functions.values())).states
        memory = Needed(sum(packed), state_bytes(states, context, max_context_of(found.config, options)))
        warn_of_shortage(memory.weights)
        needs = [
            ("bundle", f"{megabytes(memory.weights)}, packed in parts of at most {megabytes(max(packed))}"),
            ("memory", f"{memory}, for a context of {context} positions"),
        ]
        facts["needs"] = {
            "weights": memory.weights, "largest_weight": max(packed), "states": memory.state, "context": context
        }  # fmt: skip
    except (EmitError, CheckpointError) as error:
        refused = str(error)
    elements = sum(prod(tensor.shape) for tensor in found.tensors.values())
    counts = Counter(tensor.codec for tensor in found.tensors.values())
    rows = [
        ("checkpoint", f"{found.path} ({found.format})"),
        *((name, str(found.config[name])) for name in SHOWN_CONFIG if name in found.config),
        ("parameters", f"{elements:,} in {len(found.tensors)} tensors, {megabytes(sum(sizes.values()))}"),
        ("tensors", ", ".join(f"{count} {codec}" for codec, count in counts.most_common())),
        ("quantised", found.quantization_config and describe(found.quantization_config)),
        ("left out", found.left_out and in_words(found.left_out)),
        ("encodes", found.encoding and f"texts, by {found.encoding.pooling.mode} pooling"),
        ("tokenizer", "yes" if found.tokenizer else "none: its bundle takes token ids only"),
        ("chat template", "yes" if found.chat_template else "none"),
        ("ignored keys", ignored and f"{', '.join(ignored)} (without effect on the model)"),
        *needs,
        ("not compiled", refused),
        ("end of text", ", ".join(map(str, found.eos_token_ids)) or "unknown"),
    ]
    lines = table(rows)
    if tensors:
        lines += [f"  {name}  {list(t.shape)}  {t.codec}  {megabytes(sizes[name])}" for name, t in found.tensors.items()]
    facts |= {
        "path": str(found.path),
        "format": found.format,
        "config": found.config,
        "ignored_keys": list(ignored),
        "left_out": dict(found.left_out),
        "quantization_config": found.quantization_config,
        "refused": refused,
        "parameters": elements,
        "tensors": {
            name: {"shape": list(t.shape), "codec": t.codec, "bytes": sizes[name]} for name, t in found.tensors.items()
        },
        "tokenizer": found.tokenizer is not None,
        "chat_template": found.chat_template,
        "bos_token_id": found.bos_token_id,
        "eos_token_ids": list(found.eos_token_ids),
        "encodes": found.encoding is not None,
    }
    return facts, lines


def table(rows: Sequence[tuple[str, object]]) -> list[str]:
    """Return a line "name  value" for each pair, with values aligned; leave empty values out."""
    rows = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
