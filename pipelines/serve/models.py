"""What /v1/models says of a model, by the names of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from castiron.pipelines.generation.chat_template import variables_of
from castiron.pipelines.generation.model_sampling import model_sampling, settings
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.serve.text_api import Limits
from castiron.vmfb.manifest import Manifest

# OpenAI's default.
TEMPERATURE = 1.0


def usual_sampling(manifest: Manifest, limits: Limits) -> Sampling:
    """How tokens are drawn where a request says nothing of it; PipelineError for a generation_config that cannot be used."""
    found = model_sampling(manifest.generation) or Sampling(TEMPERATURE)
    return found if limits.temperature is None else replace(found, temperature=limits.temperature)


def described(name: str, started: int, manifest: Manifest, template: str | None, limits: Limits, **more: Any) -> dict[str, Any]:
    """A model; `started`: when its server did, in seconds since 1970; `template`: that of its chats, whose variables a request
    may give."""
    date = datetime.fromtimestamp(started, UTC)
    if facts := manifest.encoder:
        context = facts.max_tokens
        does = {} if facts.relevance else {"dimensions": manifest.hidden, "prompts": dict(facts.prompts)}
    else:
        context, does = manifest.context, {
            "sampling": settings(usual_sampling(manifest, limits)), "chat_template": template is not None,
            "template_variables": variables_of(template or ""),
        }  # fmt: skip
    return {
        "id": name, "object": "model", "created": started, "owned_by": "castiron", "type": "model", "display_name": name,
        "created_at": f"{date:%Y-%m-%dT%H:%M:%SZ}", "lifecycle": "active", "context_length": context,
        "max_input_tokens": context, "max_tokens": context,
        # vLLM's name.
        "max_model_len": context, **does, **more,
    }  # fmt: skip


def listed(models: list[dict[str, Any]]) -> dict[str, Any]:
    """All of them, on one page."""
    return {"object": "list", "data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
