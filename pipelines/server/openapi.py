"""The OpenAPI document: responses, errors and API keys; FastAPI describes the request bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema

import castiron
from castiron.pipelines.api.api_errors import ANTHROPIC_TYPES, TYPES, ApiError, is_anthropic, is_ollama

DESCRIPTION = "Language models on a CPU, with OpenAI's, Anthropic's and Ollama's APIs. A server without API keys requires none."
# For the document only: `App` checks keys, before it reads a body.
KEYS = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="x-api-key", auto_error=False))]
ERRORS = {
    400: "the request is invalid; the message names the field and what to do",
    401: "the API key is missing or wrong",
    403: "the Host header is not this machine's, and the server is for this machine only",
    404: "no such model or response",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "a web page sent a body that is not application/json",
    429: "the requests in flight use all memory of this client or of all clients",
    500: "the server failed on this request",
    503: "the queue is full, or the server is shutting down",
    504: "the request takes longer than the server allows",
}
SCHEMA = "#/components/schemas/{model}"
# Error statuses of every request, and additional ones of requests with a body.
ANY, BODY = (401, 403, 500), (400, 404, 408, 413, 415, 429, 503, 504)


class Answer(BaseModel):
    """Base class of the schemas of responses; a response may have more fields than its schema."""

    model_config = ConfigDict(extra="allow")


def _answer(name: str, **fields: Any) -> Any:
    return create_model(name, __base__=Answer, **{key: (kind, ...) for key, kind in fields.items()})


def _error_type(types: Mapping[int, str]) -> Any:
    return Annotated[str, Field(json_schema_extra={"enum": sorted({*types.values(), "invalid_request_error"})})]


Object = dict[str, Any]
_OpenAIErrorDetail = _answer("OpenAIErrorDetail", message=str, type=_error_type(TYPES), param=str | None, code=str | None)
_AnthropicErrorDetail = _answer("AnthropicErrorDetail", message=str, type=_error_type(ANTHROPIC_TYPES))
OpenAIError = _answer("OpenAIError", error=_OpenAIErrorDetail)
AnthropicError = _answer("AnthropicError", type=Literal["error"], error=_AnthropicErrorDetail)
OllamaError = _answer("OllamaError", error=str)
_COMPLETION = {"id": str, "created": int, "model": str, "choices": list[Object], "usage": Object}
ChatCompletion = _answer("ChatCompletion", object=Literal["chat.completion"], **_COMPLETION)
Completion = _answer("Completion", object=Literal["text_completion"], **_COMPLETION)
Infill = _answer("Infill")
Embeddings = _answer("Embeddings", object=Literal["list"], data=list[Object], model=str, usage=Object)
ResponseAnswer = _answer(
    "ResponseAnswer", id=str, object=Literal["response"], created_at=int, status=str, model=str, output=list[Object]
)  # fmt: skip
DeletedResponse = _answer("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])
InputTokens = _answer("InputTokens", object=Literal["response.input_tokens"], input_tokens=int)
MessageAnswer = _answer(
    "MessageAnswer", id=str, type=Literal["message"], role=Literal["assistant"], model=str, content=list[Object],
    stop_reason=str, usage=Object,
)  # fmt: skip
TokenCount = _answer("TokenCount", input_tokens=int)
Ranking = _answer("Ranking", id=str, model=str, results=list[Object], usage=Object)
ModelInfo = _answer(
    "ModelInfo", id=str, object=Literal["model"], created=int, owned_by=Literal["castiron"], context_length=int
)  # fmt: skip
ModelList = _answer("ModelList", object=Literal["list"], data=list[ModelInfo])
Tokens = _answer("Tokens", tokens=list[int], count=int, context_length=int)
Detokenized = _answer("Detokenized", content=str, prompt=str)
Scores = _answer("Scores", id=str, object=Literal["list"], model=str, data=list[Object], usage=Object)
Properties = _answer("Properties", default_generation_settings=Object, total_slots=int, model_alias=str, chat_template=str)
Slot = _answer("Slot", id=int, n_ctx=int, is_processing=bool)
TokenizerInfo = _answer("TokenizerInfo", tokenizer_class=str, model_max_length=int)
OllamaChat = _answer("OllamaChat", model=str, created_at=str, message=Object, done=Literal[True])
OllamaCompletion = _answer("OllamaCompletion", model=str, created_at=str, response=str, done=Literal[True])
OllamaEmbeddings = _answer("OllamaEmbeddings", model=str, embeddings=list[list[float]])
OllamaEmbedding = _answer("OllamaEmbedding", embedding=list[float])
OllamaModels = _answer("OllamaModels", models=list[Object])
OllamaModel = _answer("OllamaModel", details=Object, model_info=Object, capabilities=list[str])
Version = _answer("Version", version=str)
Health = _answer("Health", status=Literal["ok", "stopping"])


def errors(path: str, statuses: Iterable[int] = (), *, key: bool = True) -> dict[int | str, dict[str, Any]]:
    """Describe a route's errors in its API's format, for FastAPI's argument `responses`."""
    model = AnthropicError if is_anthropic(path) else OllamaError if is_ollama(path) else OpenAIError
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*ANY, *statuses} - (set() if key else {401})):
        error = ApiError(status, ERRORS[status])
        shown, _ = error.response(path)
        headers = {name: {"required": True, "schema": {"type": "string"}} for name in error.headers}
        schema = {"$ref": SCHEMA.format(model=model.__name__)}
        found[shown] = {"content": {"application/json": {"schema": schema}}, "description": ERRORS[status], "headers": headers}
    return found


def content(*media: str) -> dict[str, Any]:
    """Describe a text response with these content types, for FastAPI's argument `responses`."""
    return {"content": {each: {"schema": {"type": "string"}} for each in media}}


def description(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title="castiron", version=castiron.__version__, description=DESCRIPTION, routes=app.routes)
    records: list[Any] = [(error, "validation") for error in (OpenAIError, AnthropicError, OllamaError)]
    found["components"]["schemas"] |= models_json_schema(records, ref_template=SCHEMA)[1]["$defs"]
    for operations in found["paths"].values():
        for operation in operations.values():
            # `BodyRoute` replaces FastAPI's validation error 422.
            operation["responses"].pop("422", None)
    return found
