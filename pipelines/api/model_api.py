"""`ModelApi`: the endpoints that all models have, such as those of the tokenizer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.api.generation import Message
from castiron.pipelines.api.request_fields import EmbeddingsRequest, RerankRequest, ScoreRequest
from castiron.pipelines.engine.sampling import Sampling, model_sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import variables_of
from castiron.pipelines.text.embedder import RERANKERS
from castiron.pipelines.text.tokenizer import COUNTED, Tokenizer, tokenizer_errors
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.manifest import Manifest

# Default of `Limits.max_tokens`.
MAX_TOKENS = 8192
# OpenAI's default temperature.
TEMPERATURE = 1.0
# Fields of messages that are not checked: what a template does not show is shown as text, some templates leave earlier
# reasoning out, an id only links a call to its result, shared prefixes are always cached, and litellm's clients send its own
# fields back.
UNCHECKED = {
    "role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "cache_control",
    "provider_specific_fields",
}  # fmt: skip
# Values of message fields that mean the same as leaving the field out.
EMPTY: tuple[Any, ...] = (None, [], "")
# Max distinct (role, field) pairs of messages: the check of each renders the conversation, and no template reads more.
MAX_FIELDS = 24

Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Limits:
    """Limits and defaults for the requests to a server.

    seconds: max duration of a request, including the wait in the queue.
    temperature, repeat_penalty: None for the model's defaults.
    strict_requests: whether a request field that has no effect is an error.
    max_tokens: max tokens of an answer whose request sets no limit.
    """

    seconds: float = 600.0
    body_bytes: int = 4_000_000
    temperature: float | None = None
    repeat_penalty: float | None = None
    priorities: bool = False
    strict_requests: bool = False
    max_tokens: int = MAX_TOKENS


class ModelEngine(Protocol):
    """The thread that runs a model: `AsyncEngine` or `EmbeddingsEngine`."""

    slots: int

    @property
    def healthy(self) -> bool: ...

    @property
    def unfinished(self) -> int: ...

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...

    def stop(self) -> None: ...


class ModelApi:
    """The endpoints that every model has, independent of HTTP; ApiError 400 for others."""

    # Whether the chat page can use the model.
    has_chat = True
    # Main endpoint of a model that cannot chat.
    endpoint = "/v1/embeddings"

    def __init__(self, engine: ModelEngine, tokenizer: Tokenizer, names: list[str], manifest: Manifest, limits: Limits):
        """Serve a model under its `names`; answers contain the first one."""
        self.engine: ModelEngine = engine
        self.tokenizer, self.names, self.limits = tokenizer, tuple(names), limits
        self.manifest, self.context, self.vocab = manifest, manifest.context, manifest.vocab

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if `name` is not a name of this model."""
        if name and name not in self.names:
            raise unknown_model(name, self.names[:1])

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the chat template's variables besides messages and tools."""
        return frozenset(variables_of(self.tokenizer.chat_template or ""))

    async def embeddings(self, body: EmbeddingsRequest) -> Any:
        raise ApiError(
            400,
            f"{self.names[0]} is not an embedding model and cannot embed text; use a server with an embedding "
            "model, or generate text at /v1/chat/completions",
            "model",
            "model_not_supported",
        )

    async def _cannot_rank(self, _: RerankRequest | ScoreRequest) -> Any:
        message = f"{self.names[0]} generates text and cannot rerank; rerank with {RERANKERS}"
        raise ApiError(400, message, "model", "model_not_supported")

    rerank = score = _cannot_rank

    @property
    def properties(self) -> dict[str, Any]:
        """The answer to llama.cpp's /props: context length, number of slots, and chat template."""
        sampling = {} if self.manifest.encoder else default_sampling(self.manifest, self.limits).settings
        return {"default_generation_settings": {"n_ctx": self.context, "params": sampling}, "total_slots": self.engine.slots,
                "model_alias": self.names[0], "chat_template": self.tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False}}  # fmt: skip

    @property
    def slots(self) -> list[dict[str, Any]]:
        """The answer to llama.cpp's /slots; with n requests, the first n are processing."""
        return [{"id": i, "n_ctx": self.context, "is_processing": i < self.engine.unfinished} for i in range(self.engine.slots)]

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """The answer to vLLM's /tokenizer_info, which the evaluation tool lm-eval reads."""
        text = self.tokenizer
        special = {name: text.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **special,
                "chat_template": text.chat_template, "model_max_length": self.context}  # fmt: skip

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        self.check_ids(tokens, "tokens")

        def decode() -> str:
            with tokenizer_errors():
                return self.tokenizer.backend.decode(tokens, False)

        return await run_in_thread(decode)

    async def render(
        self, messages: Sequence[Message], template_args: Mapping[str, Any] = MappingProxyType({}), *,
        continue_last: bool = False, param: str = "messages",
    ) -> list[int]:  # fmt: skip
        """Return the token ids of messages rendered by the chat template.

        Raises ApiError for fields that the template ignores and for messages that cannot fit.
        """
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param, "no_chat_template")
        if len(messages) > self.context:
            raise self.too_long(param, f"there are {len(messages)} messages; send fewer")
        self.check_length(sum(len(message["content"]) for message in messages), param)

        def encode() -> list[int]:
            render = lambda some: self.tokenizer.render_chat(some, **template_args)
            if self.limits.strict_requests:
                check_fields_are_read(render, messages)
            encode_chat = self.tokenizer.encode_unfinished_chat if continue_last else self.tokenizer.encode_chat
            return encode_chat(messages, **template_args)

        return await run_in_thread(encode)

    def check_length(self, characters: int, param: str) -> None:
        """Raise ApiError 400 if so many characters cannot fit; tokenizing takes seconds."""
        if characters > COUNTED and characters > (limit := self.context * self.tokenizer.longest_token):
            have = "have" if param == "messages" else "has"
            raise self.too_long(param, f"the {param} {have} {characters} characters; shorten to {limit} or fewer")

    def too_long(self, param: str, reason: str) -> ApiError:
        """Return an ApiError 400 for a text that is too long for the context."""
        return ApiError(
            400, f"this model's maximum context length is {self.context} tokens; {reason}", param, "context_length_exceeded"
        )

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raise ApiError 400 for the field `param` if a token id is not in the vocabulary."""
        if tokens and max(tokens) >= self.vocab:
            raise invalid(param, f"{param} has token {max(tokens)}, outside the vocabulary; use token ids below {self.vocab}")


def check_fields_are_read(render: Render, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 400 if removing a field of a message does not change the rendered text.

    For each role and field, only the first message that has both is tried.
    """
    # Pairs that are not checked. A template may ignore a tool result's name: the call has the function's name too.
    seen: set[tuple[str, str]] = {("tool", "name")}
    rendered: str | None = None
    for index, message in enumerate(messages):
        role = message["role"]
        for name, value in message.items():
            if (role, name) in seen or value in EMPTY or name in UNCHECKED:
                continue
            seen.add((role, name))
            if name == "name" and all(other.get("name") == value for other in messages if other["role"] == role):
                # If all messages of the role have the same name, the template may ignore it.
                continue
            changed = {key: each for key, each in message.items() if key != name}
            try:
                rendered = render(messages) if rendered is None else rendered
                is_ignored = render([*messages[:index], changed, *messages[index + 1 :]]) == rendered
            except PipelineError:
                # A template that fails without the field reads it.
                is_ignored = False
            if is_ignored or len(seen) > MAX_FIELDS:
                raise unsupported(
                    f"messages.{index}.{name[:40]}",
                    f"this model's chat template ignores the field {name[:40]!r} of messages; leave it out",
                )


def default_sampling(manifest: Manifest, limits: Limits) -> Sampling:
    """Return the defaults of sampling: those of `limits` before the model's generation_config."""
    found = model_sampling(manifest.generation) or Sampling(TEMPERATURE)
    given = {"temperature": limits.temperature, "repeat_penalty": limits.repeat_penalty}
    return found.with_options(**{name: value for name, value in given.items() if value is not None})


def unknown_model(name: str | None, known: Iterable[str]) -> ApiError:
    return ApiError(
        404, f"the model {name!r:.80} does not exist; this server has {', '.join(map(repr, known))}", "model", "model_not_found"
    )


async def run_in_thread(function: Callable, *arguments):
    """Run a slow function in a thread; a cancellation takes effect after it has ended.

    Raises ApiError 503 if no thread can be started.
    """
    try:
        work = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    except RuntimeError as error:
        raise ApiError(503, f"the server is out of memory: {error}; try again later", code="out_of_memory") from None
    # Reading the exception keeps asyncio from logging the error of a cancelled request.
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
    return work.result()


def names_of(bundle: Bundle, model: str | None = None) -> list[str]:
    """Return the names by which requests may call a bundle; answers contain the first one.

    model: the path or name by which the operator chose it; None for the name in the manifest.
    """
    path = bundle.path.resolve()
    if model is not None and Path(model).exists():
        # A link, as in the hub's cache, keeps its own name.
        model = os.path.basename(os.path.abspath(model))
    names = [model or bundle.manifest.name, bundle.manifest.name, path.name]
    return [name.removesuffix(".gguf").removesuffix(".castiron") for name in names]
