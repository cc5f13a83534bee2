"""Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.embeddings import EmbeddingsJob
from castiron.pipelines.api.generation import CallableFunction, Generation, plain_message
from castiron.pipelines.api.generation_api import GenerationApi, generating
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.ollama.records import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
)
from castiron.pipelines.api.replies import Block, BlocksReply
from castiron.pipelines.api.request_fields import EmbeddingsRequest

# This API's names of fields of `Generation`.
NAMES = {"reasoning_effort": "think"}


async def start_ollama_chat(model: ModelApi, body: OllamaChatRequest, load_seconds: float) -> Job | dict[str, Any]:
    """Start to answer /api/chat; without messages, return the answer itself."""
    api = generating(model)
    reply = OllamaReply(api, body, load_seconds)
    return await api.start(parse_ollama_chat(body), reply) if body.messages else reply.opened


def parse_ollama_chat(body: OllamaChatRequest) -> Generation:
    last = body.messages[-1]
    functions = [tool.function for tool in body.tools or ()]
    return Generation(
        param="messages", names=NAMES, messages=[message.plain for message in body.messages],
        functions=[CallableFunction(each.name, each.description, each.parameters, bool(each.strict)) for each in functions],
        continues_last_message=last.role == "assistant" and bool(last.content) and not last.tool_calls,
        drops_oldest=body.truncate is not False, has_reasoning=True, **body.generation_options,
    )  # fmt: skip


async def start_ollama_generate(model: ModelApi, body: OllamaGenerateRequest, load_seconds: float) -> Job | dict[str, Any]:
    """Start to answer /api/generate; without a prompt, return the answer itself."""
    api = generating(model)
    reply = OllamaReply(api, body, load_seconds)
    if not (body.prompt or body.suffix):
        return reply.opened
    messages = [plain_message("system", body.system)] if body.system else []
    messages.append(plain_message("user", body.prompt))
    is_raw = bool(body.raw or body.suffix or api.tokenizer.chat_template is None)
    generation = Generation(
        param="prompt", names=NAMES, messages=messages, has_reasoning=not is_raw, **body.generation_options
    )  # fmt: skip
    api.check_length(len(body.prompt) + len(body.suffix), "prompt")
    fim = await api.fim("suffix") if body.suffix else None
    if fim:
        ids = await run_in_thread(fim.prompt, body.prompt, body.suffix)
    elif is_raw:
        ids = await run_in_thread(api.tokenizer.encode, body.prompt)
    else:
        ids = await api.prompt(generation, None)
    api.check_ids(body.context, "context")
    if body.context and ids[:1] == [api.tokenizer.bos]:
        ids = ids[1:]
    generation = replace(generation, prompts=[[*body.context, *ids]], end_tokens=fim.ends if fim else ())
    return await api.start(generation, reply)


async def start_ollama_embed(api: ModelApi, body: OllamaEmbedRequest, load_seconds: float) -> Any:
    """Tokenize the texts of /api/embed; without a text, return the answer itself."""
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
    """Tokenize the text of /api/embeddings; without a text, return the answer itself."""
    if not body.prompt:
        return {"embedding": []}
    job = await start_ollama_embed(api, OllamaEmbedRequest(model=body.model, input=body.prompt), 0.0)

    async def answer() -> dict:
        return {"embedding": (await job.answer())["embeddings"][0]}

    return replace(job, answer=answer)


class OllamaReply(BlocksReply):
    """The answer to /api/chat or /api/generate."""

    is_ndjson = True

    def __init__(self, api: GenerationApi, body: OllamaGeneration, load_seconds: float):
        """Prepare the answer; load_seconds: how long it took to open the model."""
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
