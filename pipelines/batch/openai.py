"""Rows of OpenAI's batch format, answered by the server's own endpoints without HTTP; needs the extra `serve`.

The file format is that of https://platform.openai.com/docs/api-reference/batch: custom_id, method, url and body in; id,
custom_id, response {status_code, request_id, body} and error out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from castiron.pipelines.batch.repeatable import repeatable
from castiron.pipelines.batch.requests import Outcome, Work
from castiron.pipelines.batch.row import Row
from castiron.pipelines.embedding import Embedder, Tokens
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.text import Text
from castiron.pipelines.serve import dialects
from castiron.pipelines.serve.api import Api, Job
from castiron.pipelines.serve.embeddings import EmbeddingsApi
from castiron.pipelines.serve.errors import ApiError, api_error
from castiron.pipelines.serve.messages_request import MessagesRequest
from castiron.pipelines.serve.replies import usage
from castiron.pipelines.serve.responses_request import ResponsesRequest
from castiron.pipelines.serve.schemas import (
    Asking,
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    RerankRequest,
    read,
)
from castiron.pipelines.serve.text_api import Limits, TextApi
from castiron.vmfb.manifest import Manifest

FIELDS = ("custom_id", "method", "url", "body")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# The schema of a body, and what starts its answer.
ENDPOINTS: dict[str, tuple[type[Body], Callable[[Any, Any], Coroutine[Any, Any, Any]]]] = {
    "/v1/chat/completions": (ChatRequest, lambda api, body: api.chat(body)),
    "/v1/completions": (CompletionRequest, lambda api, body: api.complete(body)),
    RESPONSES: (ResponsesRequest, dialects.response),
    MESSAGES: (MessagesRequest, dialects.message),
    "/v1/embeddings": (EmbeddingsRequest, lambda api, body: api.embeddings(body)),
    "/v1/rerank": (RerankRequest, lambda api, body: api.rerank(body)),
}
# Of two names of one option the one that a body gives counts.
SAME = {"max_tokens": "max_completion_tokens", "repeat_penalty": "repetition_penalty"}
# How the job's options are called in a body that does not call them as a completion's does, and how their values are put.
NAMES: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    RESPONSES: {
        "max_tokens": ("max_output_tokens", lambda value: value),
        "response_format": ("text", lambda value: {"format": _schema(value) | {"name": "answer"}}),
    },
    MESSAGES: {
        "stop": ("stop_sequences", lambda value: value),
        "response_format": ("output_config", lambda value: {"format": _schema(value)}),
    },
}


class Collector:
    """In the place of an engine: sequences are made, and whoever asked for them runs them; vectors are made at once."""

    slots = 1

    def __init__(self, embedder: Embedder | None):
        self.embedder = embedder

    def submit(self, sequences: Any, tell: Any) -> None:
        pass

    async def vectors(self, texts: Sequence[Tokens], dimensions: int | None) -> list[np.ndarray]:
        return [self.embedder.vector(text, dimensions) for text in texts] if self.embedder else []


class OpenAI:
    """Rows whose bodies are answered as `castiron serve` answers them."""

    def __init__(
        self, manifest: Manifest, text: Text, names: list[str], defaults: Mapping[str, Any], embedder: Embedder | None = None
    ):
        """`names`: what a body may call the model. `defaults`: what counts for bodies that say nothing of it; an
        `embedder` where the bundle encodes texts."""
        self.defaults, self.loop = dict(defaults), asyncio.new_event_loop()
        self.api: TextApi
        engine: Any = Collector(embedder)
        if embedder:
            self.api = EmbeddingsApi(engine, names, Limits())
        else:
            self.api = Api(engine, text, names, manifest, Limits(temperature=defaults.get("temperature")))

    def draws(self, row: Row) -> bool:
        if not isinstance(self.api, Api):
            return False
        try:
            body = _body(row.fields)
        except PipelineError:
            return False
        if body.get("seed") is not None:
            return False
        asked = body.get("temperature")
        return bool(self.api.sampling.temperature if asked is None else asked)

    def work(self, row: Row, key: str, seed: int) -> Work:
        given, url = _request(row.fields)
        kind, start = ENDPOINTS[url]
        if issubclass(kind, Asking):
            if given.get("stream"):
                raise ApiError(400, "a batch has no streams; leave stream out", "stream", "unsupported_parameter")
            given = self._with_defaults(given, url) | ({"seed": seed} if self.draws(row) else {})
        body = read(kind, json.dumps(given).encode())
        self.api.check_model(body.model)
        job = self._wait(start(self.api, body))
        if not isinstance(job, Job):
            return Work(row, key, lambda: self._answered(row, key, job.answer()))
        # That it fits alone is all that is asked: of a window's rows only those in slots keep anything.
        job.share.give_back()
        tell = lambda sequence, event: job.events.put_nowait((sequence, event))
        return Work(row, key, lambda: self._answered(row, key, self.api.whole(job), job), job.sequences, tell)  # type: ignore

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        if isinstance(error, ApiError):
            told = _response(key, *error.told(str(row.fields.get("url"))))
            return self._outcome(row, key, {"response": told, "error": None}, failed=True)
        return self._outcome(
            row, key, {"response": None, "error": {"code": "invalid_request", "message": str(error)}}, failed=True
        )

    def _with_defaults(self, body: Mapping[str, Any], url: str) -> dict[str, Any]:
        """The body, and what the job says where it says nothing."""
        told = {name for name, value in body.items() if value is not None}
        found, names = dict(body), NAMES.get(url, {})
        for name, value in self.defaults.items():
            own, put = names.get(name, (name, lambda value: value))
            if name == "response_format" and {"grammar", "regex"} & told:
                continue
            if not {own, SAME.get(name)} & told:
                found[own] = put(value)
            elif name != own and isinstance(found.get(own), dict):
                # A body may say other things there.
                found[own] = put(value) | found[own]
        return found

    def _answered(self, row: Row, key: str, answer: Coroutine[Any, Any, dict], job: Job | None = None) -> Outcome:
        sequences = job.sequences if job else []
        counts = {"generated": sum(len(s.tokens) for s in sequences), "cached": sum(s.cached for s in sequences)}
        used = usage(list(zip(job.prompts, job.sequences))) if job else None
        try:
            body = self._wait(answer)
        except (ApiError, PipelineError) as error:
            return self.failed(row, key, error if isinstance(error, ApiError) else api_error(error))
        counts["prompt"] = (used or body["usage"])["prompt_tokens"]
        told = _response(key, 200, repeatable(body, key))
        return self._outcome(row, key, {"response": told, "error": None}, **counts)

    def _outcome(self, row: Row, key: str, result: Mapping[str, Any], failed: bool = False, **counts: int) -> Outcome:
        name = row.fields.get("custom_id")
        head = {"id": f"batch_req_{key}", "custom_id": name if isinstance(name, str) else None}
        return Outcome({**head, **result}, failed, keeps=False, **counts)

    def _wait(self, answer: Coroutine) -> Any:
        return self.loop.run_until_complete(answer)


def _schema(response_format: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "schema": response_format["json_schema"]["schema"]}


def _request(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The body and the url of a row; PipelineError for one that is no request."""
    if unknown := [name for name in fields if name not in FIELDS]:
        raise PipelineError(f"the row has a field {unknown[0][:40]!r}, which a batch does not know; it has {', '.join(FIELDS)}")
    if not isinstance(fields.get("custom_id"), str):
        raise PipelineError("custom_id must be a string")
    if fields.get("method", "POST") != "POST":
        raise PipelineError("method must be POST")
    url = fields.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise PipelineError(f"url must be one of {', '.join(ENDPOINTS)}")
    return _body(fields), url


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    body = fields.get("body")
    if isinstance(body, str):
        # As a table has it, whose columns have one type.
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PipelineError(f"body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise PipelineError("body must be an object")
    return body


def _response(key: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": key, "body": body}
