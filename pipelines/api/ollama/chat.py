"""Ollama's API: bodies, conversion to chat, answers, and descriptions of models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from castiron.pipelines.api.answer_format import requested_format
from castiron.pipelines.api.api_errors import ApiError, invalid
from castiron.pipelines.api.blocks_reply import Block, BlocksReply
from castiron.pipelines.api.embeddings import EmbeddingsJob
from castiron.pipelines.api.generation_api import SWITCHES, GenerationApi
from castiron.pipelines.api.model_api import Limits, ModelApi, default_sampling, run_in_thread
from castiron.pipelines.api.request_body import Body, Unsupported, fields_renamed, is_allowed, parse_record
from castiron.pipelines.api.schemas import ChatRequest, EmbeddingsRequest, Objects, TokenId, is_one_or_more
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
# Tag that Ollama adds to a model's name without a tag.
TAG = ":latest"
# Options that are chat fields of the same name.
OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty",
    "stop", "seed",
)  # fmt: skip
# llama.cpp, which runs Ollama's models, replaces numbers outside these limits by the nearest limit.
LIMITS = {"temperature": (0, float("inf")), "top_k": (0, float("inf")), "top_p": (0, 1), "min_p": (0, 1)}
# The only supported values of options that would change the answer.
FIXED_OPTIONS = {"mirostat": (0,), "typical_p": (1, is_one_or_more), "tfs_z": (1,)}
# Names of this API's fields, by the chat fields that they are converted to.
FIELDS = {
    "response_format": "format", "reasoning_effort": "think", "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in OPTIONS},
}  # fmt: skip

ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(TAG))]
Images = Annotated[Any, Unsupported([])]


class OllamaBody(Body):
    """The fields that all requests to Ollama's API have.

    As in Ollama, unknown fields have no effect.
    expected: {field: description of its valid values}, for error messages.
    """

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    expected: ClassVar[dict[str, str]] = {
        "format": "json or a JSON schema", "think": "true, false, low, medium, high or max",
    }  # fmt: skip

    model: ModelName | None = None
    options: dict[str, Any] | None = None
    # It has no effect: `castiron serve --keep-alive` decides when a model is closed.
    keep_alive: Any = None


class OllamaGeneration(OllamaBody):
    """The fields of /api/chat and /api/generate."""

    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Whether to leave out the oldest messages of a conversation that is too long for the context.
    truncate: bool | None = True
    # Castiron's field: whether the answer has a receipt for `castiron audit`.
    receipt: bool | None = None


class OllamaFields(ChatRequest):
    """A chat request whose penalties may be any numbers, as in Ollama."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class OllamaMessage(Body):
    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Objects | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaGeneration):
    """The body of POST /api/chat; a request without messages only loads the model."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = []
    tools: Annotated[Objects, Field(max_length=128)] | None = None


class OllamaGenerateRequest(OllamaGeneration):
    """The body of POST /api/generate; a request without a prompt only loads the model.

    raw: whether to use the prompt as it is, without the chat template. context: token ids from the
    answer to an earlier request, to put before the prompt.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool | None = None
    context: Annotated[list[TokenId], Field(fail_fast=True)] = []
    template: Annotated[Any, Unsupported("")] = None
    images: Images = None


class OllamaEmbedRequest(OllamaBody):
    """The body of POST /api/embed; by default, long texts are truncated."""

    input: str | Annotated[list[str], Field(max_length=2048, fail_fast=True)] = ""
    truncate: bool | None = True
    dimensions: int | None = Field(None, ge=1)


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of POST /api/embeddings, the older form of /api/embed."""

    prompt: str = ""


class OllamaShowRequest(OllamaBody):
    """The body of POST /api/show; older clients send `name` instead of `model`."""

    name: ModelName | None = None


async def start_ollama_chat(api: ModelApi, body: OllamaChatRequest, load_seconds: float) -> Any:
    """Start to answer an /api/chat request.

    load_seconds: how long it took to open the model for this request; the answer reports it.
    Returns the `Job` that generates the answer. If there are no messages, returns the answer
    itself.
    """
    if not isinstance(api, GenerationApi):
        return await api.chat(body)
    reply = OllamaReply(api, body, load_seconds)
    if not body.messages:
        return reply.opened
    last = body.messages[-1]
    is_unfinished = last.role == "assistant" and bool(last.content) and not last.tool_calls
    with fields_renamed(FIELDS):
        chat = await run_in_thread(lambda: _chat_request(body, _messages(body.messages), body.tools))
        return await api.chat(chat, lambda: reply, continue_last=is_unfinished, drops_oldest=body.truncate is not False)


async def start_ollama_generate(api: ModelApi, body: OllamaGenerateRequest, load_seconds: float) -> Any:
    """Start to answer an /api/generate request.

    load_seconds: how long it took to open the model for this request; the answer reports it.
    Returns the `Job` that generates the answer. If there is no prompt or suffix, returns the answer
    itself.
    """
    if not isinstance(api, GenerationApi):
        return await api.complete(body)
    reply = OllamaReply(api, body, load_seconds)
    if not (body.prompt or body.suffix):
        return reply.opened
    messages = [{"role": "system", "content": body.system}] if body.system else []
    is_raw = bool(body.raw or body.suffix or api.tokenizer.chat_template is None)
    with fields_renamed(FIELDS):
        chat = await run_in_thread(_chat_request, body, [*messages, {"role": "user", "content": body.prompt}])
        api.check_length(len(body.prompt) + len(body.suffix), "prompt")
        fim = await api.fim("suffix") if body.suffix else None
        if fim:
            ids = await run_in_thread(fim.prompt, body.prompt, body.suffix)
        elif is_raw:
            ids = await run_in_thread(api.tokenizer.encode, body.prompt)
        else:
            ids = await api.render(chat.messages, await api.template_args(chat))
        api.check_ids(body.context, "context")
        if body.context and ids[:1] == [api.tokenizer.bos]:
            ids = ids[1:]
        grammar = await api.grammar(requested_format(chat))
        return await api.start_job(
            chat, [[*body.context, *ids]], "prompt", reply, body.top_logprobs or 0 if body.logprobs else None,
            max_tokens=chat.max_tokens, grammar=grammar, reasoning=not is_raw, stop_tokens=fim.ends if fim else (),
        )  # fmt: skip


async def start_ollama_embed(api: ModelApi, body: OllamaEmbedRequest, load_seconds: float) -> Any:
    """Tokenize the texts of an /api/embed request.

    load_seconds: how long it took to open the model for this request; the answer reports it.
    Returns an `EmbeddingsJob`, which computes the answer. If there is no text, returns the answer
    itself.
    """
    start, head = time.monotonic() - load_seconds, {"model": body.model or api.names[0]}
    if not body.input:
        return head | {"embeddings": []}
    job = await api.embeddings(EmbeddingsRequest(input=body.input, truncate=body.truncate, dimensions=body.dimensions))

    async def answer() -> dict:
        found = await job.answer()
        return head | {
            "embeddings": [row["embedding"] for row in found["data"]], "total_duration": _nanoseconds(time.monotonic() - start),
            "load_duration": _nanoseconds(load_seconds), "prompt_eval_count": found["usage"]["prompt_tokens"],
        }  # fmt: skip

    return EmbeddingsJob(job.texts, answer)


async def start_ollama_embeddings(api: ModelApi, body: OllamaEmbeddingsRequest) -> Any:
    """Tokenize the text of an /api/embeddings request.

    Returns an `EmbeddingsJob`, which computes the answer. If there is no text, returns the answer
    itself.
    """
    if not body.prompt:
        return {"embedding": []}
    job = await start_ollama_embed(api, OllamaEmbedRequest(model=body.model, input=body.prompt), 0.0)

    async def answer() -> dict:
        return {"embedding": (await job.answer())["embeddings"][0]}

    return replace(job, answer=answer)


def _chat_request(body: OllamaGeneration, messages: list[dict], tools: Iterable[dict] | None = None) -> ChatRequest:
    given = {"messages": messages, "tools": [{"type": "function", **tool} for tool in tools or ()] or None}
    given |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs if body.logprobs else None}
    given["receipt"] = body.receipt
    if body.format == "json":
        given["response_format"] = {"type": "json_object"}
    elif body.format:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    if isinstance(body.think, str):
        given["reasoning_effort"] = body.think
    elif body.think is not None:
        given["thinking"] = {"type": "enabled" if body.think else "disabled"}
    return parse_record(OllamaFields, given | _sampling_fields(body.options or {}))


def _messages(messages: Iterable[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format."""
    found = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content, "reasoning_content": message.thinking}
        if message.role == "tool":
            fields |= {"tool_call_id": message.tool_call_id, "name": message.tool_name}
        found.append({name: value for name, value in fields.items() if value is not None})
        if message.tool_calls:
            found[-1]["tool_calls"] = [{"id": call.get("id"), "function": call.get("function")} for call in message.tool_calls]
    return found


def _sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Ollama's `options` to fields of OpenAI's chat request.

    Unknown options have no effect. An option that is known but not supported, such as mirostat,
    raises ApiError unless it has its default value.
    """
    for name, allowed in FIXED_OPTIONS.items():
        if options.get(name) is not None and not is_allowed(options[name], allowed):
            raise invalid(f"options.{name}", f"options.{name}: this server supports only the value {allowed[0]}; leave it out")
    found = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    for name, (low, high) in LIMITS.items():
        if isinstance(value := found.get(name), int | float):
            found[name] = min(max(value, low), high)
    # A negative seed means a random one, and num_predict below 1 means no limit.
    if isinstance(seed := found.get("seed"), int | float) and seed < 0:
        del found["seed"]
    limit = options.get("num_predict")
    return found if limit is None or type(limit) in (int, float) and limit < 1 else {**found, "max_tokens": limit}


class OllamaReply(BlocksReply):
    """A builder of the answer to /api/chat or /api/generate: one JSON object, or a stream."""

    is_ndjson = True

    def __init__(self, api: GenerationApi, body: OllamaGeneration, load_seconds: float):
        """Prepare to build the answer to the request `body`.

        load_seconds: how long it took to open the model; the answer reports it.
        """
        super().__init__(body.model or api.names[0], api.token_bytes, bool(body.logprobs))
        self.is_chat = isinstance(body, OllamaChatRequest)
        self.has_context = isinstance(body, OllamaGenerateRequest) and not (body.raw or body.suffix)
        self.load_seconds = load_seconds

    @property
    def opened(self) -> dict:
        """The complete answer to a request without a prompt, which only loads the model."""
        return self._object() | {"done": True, "done_reason": "load"}

    def fill(self, block: Block, text: str, logprobs: list[dict]) -> Iterable[dict]:
        if block.kind != "call":
            part = replace(block, text=text)
            yield self._object(part) | {"done": False} | ({"logprobs": logprobs} if logprobs else {})

    def close(self, block: Block) -> Iterable[dict]:
        if block.kind == "call":
            yield self._object(block) | {"done": False}

    def finish(self, usage: dict) -> Iterable[dict]:
        assert self.end
        (request,) = self.requests
        times = request.timing
        end: dict[str, Any] = {
            "done": True, "done_reason": "stop" if self.end.reason == "stop" else "length",
            "total_duration": _nanoseconds(time.monotonic() - times.arrived + self.load_seconds),
            "load_duration": _nanoseconds(self.load_seconds),
            "prompt_eval_count": len(request.prompt), "prompt_eval_duration": _nanoseconds(times.first - times.started),
            "eval_count": len(request.tokens), "eval_duration": _nanoseconds(times.last - times.first),
        }  # fmt: skip
        if self.has_context:
            end["context"] = [*request.prompt.tolist(), *request.tokens]
        end |= self.receipt(0)
        self.answer = self._object(*self.blocks) | end
        if logprobs := [each for block in self.blocks for each in block.logprobs]:
            self.answer["logprobs"] = logprobs
        yield self._object() | end

    def fail(self, error: ApiError) -> Iterable[dict]:
        yield {"error": error.message}

    def _object(self, *blocks: Block) -> dict[str, Any]:
        texts = {kind: "".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "reasoning")}
        content: dict[str, Any] = {"content" if self.is_chat else "response": texts["text"]}
        if texts["reasoning"]:
            content["thinking"] = texts["reasoning"]
        calls = [block for block in blocks if block.kind == "call"]
        if calls:
            functions = [{"name": block.name, "arguments": block.arguments} for block in calls]
            content["tool_calls"] = [{"id": block.call_id, "function": each} for block, each in zip(calls, functions)]
        if self.is_chat:
            content = {"message": {"role": "assistant", **content}}
        return {"model": self.head["model"], "created_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}", **content}


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def listed_model(name: str, manifest: Manifest, date: datetime) -> dict[str, Any]:
    """Return a model's entry in the answer to /api/tags.

    date: when the model was made available.
    """
    tagged, weights = name if ":" in name else name + TAG, manifest.files[WEIGHTS]
    return {
        "name": tagged, "model": tagged, "modified_at": date.isoformat(), "size": weights.size,
        "digest": weights.sha256, "details": _details(manifest),
    }  # fmt: skip


def running_model(name: str, manifest: Manifest, size: int, keep: float | None) -> dict[str, Any]:
    """Return an open model's entry in the answer to /api/ps.

    size: bytes of the model's weights and states.
    keep: seconds until the model is closed; None if it stays open.
    """
    now = datetime.now(UTC)
    expires = now + (FOREVER if keep is None else timedelta(seconds=keep))
    found = listed_model(name, manifest, now) | {"size": size, "size_vram": 0, "expires_at": expires.isoformat()}
    del found["modified_at"]
    return found | {"context_length": _context(manifest)}


def shown_model(name: str, manifest: Manifest, template: str | None, date: datetime, limits: Limits) -> dict[str, Any]:
    """Return the answer to /api/show, which describes a model.

    template: the model's chat template, or None.
    date: when the model was made available.
    limits: the server's limits; the answer contains their default sampling options.
    """
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
