"""Answer records in OpenAI's batch format without HTTP; needs the extra `serve`.

The format is that of https://platform.openai.com/docs/api-reference/batch. A request has custom_id,
method, url and body; a result has id, custom_id, response {status_code, request_id, body}, error.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from castiron.pipelines.api.anthropic.messages import MessagesRequest, start_message
from castiron.pipelines.api.api_errors import ApiError, api_error
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.embeddings import EmbeddingsApi
from castiron.pipelines.api.generation_api import GenerationApi
from castiron.pipelines.api.model_api import Limits, ModelApi
from castiron.pipelines.api.openai.chat import start_chat, start_completion
from castiron.pipelines.api.openai.records import ChatRequest, CompletionRequest
from castiron.pipelines.api.openai.responses import start_response
from castiron.pipelines.api.openai.responses_records import ResponsesRequest
from castiron.pipelines.api.request_body import Body, parse_body
from castiron.pipelines.api.request_fields import EmbeddingsRequest, GenerationFields, RerankRequest
from castiron.pipelines.batch.records import Outcome, Record, Work
from castiron.pipelines.engine.engine import EventStream
from castiron.pipelines.engine.request import Request
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.embedder import Embedder, Tokens
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.bundle.manifest import Manifest

FIELDS = ("custom_id", "method", "url", "body")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# By URL: the dataclass of the request body, and a function of (API, body) that starts the answer.
ENDPOINTS: dict[str, tuple[type[Body], Callable[[Any, Any], Coroutine[Any, Any, Any]]]] = {
    "/v1/chat/completions": (ChatRequest, start_chat),
    "/v1/completions": (CompletionRequest, start_completion),
    RESPONSES: (ResponsesRequest, start_response),
    MESSAGES: (MessagesRequest, start_message),
    "/v1/embeddings": (EmbeddingsRequest, lambda api, body: api.embeddings(body)),
    "/v1/rerank": (RerankRequest, lambda api, body: api.rerank(body)),
}


class Collector:
    """The engine of the server's API classes in a batch job, whose own engine runs the requests.

    `submit` does nothing. Embeddings are computed immediately.
    """

    # A record may have any number of answers.
    capacity = math.inf

    def __init__(self, embedder: Embedder | None):
        self.embedder = embedder

    def submit(self, requests: list[Request]) -> EventStream:
        return EventStream(None, requests)

    async def vectors(self, texts: Sequence[Tokens], dimensions: int | None) -> list[np.ndarray]:
        return [self.embedder.vector(text, dimensions) for text in texts] if self.embedder else []


class OpenAI:
    """Converts records in OpenAI's batch format to engine requests, and builds their answers.

    A record gets the same answer as the same request to `castiron serve`.
    """

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, names: list[str], embedder: Embedder | None = None):
        """Prepare to answer; embedder: None for a model that generates text."""
        self.loop = asyncio.new_event_loop()
        self.api: ModelApi
        engine: Any = Collector(embedder)
        if embedder:
            self.api = EmbeddingsApi(engine, names, Limits())
        else:
            self.api = GenerationApi(engine, tokenizer, names, manifest, Limits())

    def samples(self, record: Record) -> bool:
        if not isinstance(self.api, GenerationApi):
            return False
        try:
            body = _body(record.fields)
        except PipelineError:
            return False
        if body.get("seed") not in (None, -1):
            return False
        temperature = body.get("temperature")
        return bool(self.api.sampling.temperature if temperature is None else temperature)

    def work(self, record: Record, seed: int) -> Work:
        fields, url = _request(record.fields)
        kind, start = ENDPOINTS[url]
        if issubclass(kind, GenerationFields):
            if fields.get("stream"):
                raise ApiError(
                    400, "stream is true, but batch jobs do not stream; remove stream", "stream", "unsupported_parameter"
                )
            fields = fields | ({"seed": seed} if self.samples(record) else {})
        body = parse_body(kind, json.dumps(fields).encode())
        self.api.check_model(body.model)
        job = self.loop.run_until_complete(start(self.api, body))
        if not isinstance(job, Job):
            return Work(record, lambda: self._answered(record, job))
        # Release the server's limit on requests in flight: the job already limits them to the engine's slots.
        job.share.release()
        return Work(record, lambda: self._answered(record, job, job.requests), job.requests, job.stream.add)

    def failed(self, record: Record, error: Exception) -> Outcome:
        if isinstance(error, ApiError):
            return self._outcome(record, error.response(str(record.fields.get("url"))), None, failed=True)
        return self._outcome(record, None, {"code": "invalid_request", "message": str(error)}, failed=True)

    def _answered(self, record: Record, job: Any, requests: Sequence[Request] = ()) -> Outcome:
        try:
            body = self.loop.run_until_complete(job.answer())
        except (ApiError, PipelineError) as error:
            return self.failed(record, error if isinstance(error, ApiError) else api_error(error))
        counts = {"generated": sum(len(r.tokens) for r in requests), "cached": sum(r.cached for r in requests)}
        counts["prompt"] = (job.usage if requests else body["usage"])["prompt_tokens"]
        return self._outcome(record, (200, body), None, **counts)

    def _outcome(
        self, record: Record, answer: tuple[int, Any] | None, error: Any, failed: bool = False, **counts: int
    ) -> Outcome:
        name = record.fields.get("custom_id")
        response = answer and {"status_code": answer[0], "request_id": record.key, "body": answer[1]}
        found = {"id": f"batch_req_{record.key}", "custom_id": name if isinstance(name, str) else None, "response": response}
        return Outcome({**found, "error": error}, failed, **counts)


def _request(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if unknown := [name for name in fields if name not in FIELDS]:
        raise PipelineError(f"unknown field: {unknown[0][:40]!r}; use {', '.join(FIELDS)}")
    if not isinstance(fields.get("custom_id"), str):
        raise PipelineError('custom_id is missing or not a string; give each record a string, such as "request-1"')
    if fields.get("method", "POST") != "POST":
        raise PipelineError(f"unsupported method: {str(fields['method'])[:40]}; use POST")
    url = fields.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        found = "missing" if url is None else f"{str(url)[:40]!r}"
        raise PipelineError(f"url is {found}; use one of {', '.join(ENDPOINTS)}")
    return _body(fields), url


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    body = fields.get("body")
    if isinstance(body, str):
        # In a table bodies may be text, because all values of a column have the same type.
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PipelineError(f"body is not JSON: {error}; give a JSON object") from None
    if not isinstance(body, dict):
        raise PipelineError("body is missing or not a JSON object; put the fields of the request into body")
    return body
