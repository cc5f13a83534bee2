"""GET /openapi.json: what the routes take and answer, as OpenAPI 3.1, for tools that make clients and requests of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import castiron
from castiron.pipelines.serve import messages_request, responses_request, schemas
from castiron.pipelines.serve.errors import ANTHROPIC_TYPES, TYPES, ApiError, speaks_anthropic
from castiron.pipelines.serve.page import PARTS
from castiron.pipelines.serve.text_api import on_the_side

PATH = "/openapi.json"
JSON, HTML, PLAIN, EVENTS = "application/json", "text/html", "text/plain", "text/event-stream"
# Where a schema or a response of `components` is.
SCHEMA, RESPONSE = "#/components/schemas/{model}", "#/components/responses/{}"
# What may be refused of every request, and of one with a body.
ANY, BODY = (401, 403, 500), (400, 404, 408, 413, 415, 429, 503, 504)
REFUSALS = {
    400: "the request is wrong; the message says where and what to do",
    401: "the API key is missing or wrong",
    403: "a server for its own machine was asked by a name that may be another site's",
    404: "there is no such model or response",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "a web page sent something else than application/json",
    429: "this client's requests under way hold all the memory that there is for them",
    500: "the server failed on this request",
    503: "the queue is full, or the server is ending",
    504: "the request took longer than the server allows",
}

TEXT, COUNT, LIST, OBJECT = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "array"}, {"type": "object"}
IDS = {"type": "array", "items": COUNT}


def fields(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has at least these; a string stands for itself."""
    schemas_of = {name: {"const": each} if isinstance(each, str) else each for name, each in properties.items()}
    return {"type": "object", "properties": schemas_of, "required": list(properties)}


MODEL = fields(id=TEXT, object="model", created=COUNT, owned_by="castiron", context_length=COUNT)
RERANKED = fields(id=TEXT, model=TEXT, results=LIST, usage=OBJECT)
STATUS = fields(status={"enum": ["ok", "stopping"]})


@dataclass(frozen=True)
class Operation:
    """One method of one path: the model of its body, the schema of what it answers with 200 and of what type that is, what it
    refuses besides `ANY`, whether it asks for a key and whether its answer can be a stream."""

    summary: str
    body: type[schemas.Body] | None
    answer: dict[str, Any]
    media: Sequence[str] = (JSON,)
    refusals: Sequence[int] = ()
    key: bool = True
    streams: bool = False


def _asked(summary: str, body: type[schemas.Body], answer: dict, *, streams: bool = False) -> Operation:
    return Operation(summary, body, answer, (JSON, EVENTS) if streams else (JSON,), BODY, streams=streams)


def _completion(kind: str) -> dict[str, Any]:
    return fields(id=TEXT, object=kind, created=COUNT, model=TEXT, choices=LIST, usage=OBJECT)


_RERANK = _asked("how relevant documents are to a query", schemas.RerankRequest, RERANKED)
OPERATIONS = {
    "POST /v1/chat/completions": _asked(
        "an answer to a conversation", schemas.ChatRequest, _completion("chat.completion"), streams=True
    ),
    "POST /v1/completions": _asked(
        "what goes on from a text", schemas.CompletionRequest, _completion("text_completion"), streams=True
    ),
    "POST /v1/embeddings": _asked(
        "vectors of texts", schemas.EmbeddingsRequest, fields(object="list", data=LIST, model=TEXT, usage=OBJECT)
    ),
    "POST /v1/responses": _asked(
        "an answer, as OpenAI's responses have it", responses_request.ResponsesRequest,
        fields(id=TEXT, object="response", created_at=COUNT, status=TEXT, model=TEXT, output=LIST), streams=True,
    ),
    "POST /v1/responses/input_tokens": _asked(
        "the tokens of a response's prompt", responses_request.InputTokensRequest,
        fields(object="response.input_tokens", input_tokens=COUNT),
    ),
    "GET /v1/responses/{name}": Operation(
        "a response that is kept", None, fields(id=TEXT, object="response", output=LIST), refusals=(400, 404)
    ),
    "DELETE /v1/responses/{name}": Operation(
        "forgets a response", None, fields(id=TEXT, object="response", deleted={"const": True}), refusals=(404,)
    ),
    "POST /v1/messages": _asked(
        "an answer, as Anthropic's messages have it", messages_request.MessagesRequest,
        fields(id=TEXT, type="message", role="assistant", model=TEXT, content=LIST, stop_reason=TEXT, usage=OBJECT),
        streams=True,
    ),
    "POST /v1/messages/count_tokens": _asked(
        "the tokens of a message's prompt", messages_request.CountTokensRequest, fields(input_tokens=COUNT)
    ),
    "POST /v1/rerank": _RERANK, "POST /v2/rerank": _RERANK, "POST /rerank": _RERANK,
    "GET /v1/models": Operation("the models", None, fields(object="list", data={"type": "array", "items": MODEL})),
    "GET /v1/models/{name}": Operation("one model", None, MODEL, refusals=(404,)),
    "POST /tokenize": _asked(
        "the tokens of a text or of messages", schemas.TokenizeRequest,
        fields(tokens=IDS, count=COUNT, context_length=COUNT),
    ),
    "POST /detokenize": _asked(
        "the text of tokens", schemas.DetokenizeRequest, fields(content=TEXT, prompt=TEXT)
    ),
    "GET /tokenizer_info": Operation("what the tokenizer is", None, fields(tokenizer_class=TEXT, model_max_length=COUNT)),
    "GET /health": Operation("whether it serves", None, STATUS, key=False),
    "GET /metrics": Operation("numbers for Prometheus", None, TEXT, (PLAIN,)),
    "GET /": Operation("the chat page, or what a model that has none is for", None, TEXT, (HTML, PLAIN), key=False),
    "GET /page/{file}": Operation(
        "a file of the chat page", None, TEXT, ("text/javascript", "text/css", "image/svg+xml"), (404,), key=False
    ),
    f"GET {PATH}": Operation("this description", None, fields(openapi=TEXT, info=OBJECT, paths=OBJECT, components=OBJECT)),
}  # fmt: skip
# What a server of several models hands on to them.
POSTED = tuple(name for name in OPERATIONS if name.startswith("POST "))


def description_route(routes: Iterable[Route], more: Iterable[str] = ()) -> Route:
    """That of an app with `routes` besides, which hands the operations `more` on."""
    found = (*operations(routes), *more, f"GET {PATH}")

    async def describe(_: Request) -> Response:
        return Response(await on_the_side(description, found), media_type=JSON)

    return Route(PATH, describe)


def operations(routes: Iterable[Route]) -> list[str]:
    """The names that `OPERATIONS` has for what `routes` answer; HEAD goes without saying where there is GET."""
    found = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", re.sub("^/page/.*", "/page/{file}", route.path))
        found |= {f"{method} {path}": None for method in sorted((route.methods or set()) - {"HEAD"})}
    return list(found)


@cache
def description(names: tuple[str, ...]) -> bytes:
    """The document for the operations of these names, as JSON."""
    described = {name: OPERATIONS[name] for name in names}
    bodies = dict.fromkeys(operation.body for operation in described.values() if operation.body)
    _, bodies_of = models_json_schema([(body, "validation") for body in bodies], ref_template=SCHEMA)
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in described.items():
        method, path = name.split()
        paths.setdefault(path, {})[method.lower()] = _operation(name, path, operation)
    words = "Language models on a CPU, with OpenAI's and Anthropic's APIs. Without an API key, none is asked for."
    return json.dumps({
        "openapi": "3.1.0",
        "info": {"title": "castiron", "version": castiron.__version__, "description": words},
        "paths": paths,
        "components": {
            "schemas": bodies_of.get("$defs", {}) | _ERRORS,
            "responses": {_refusal(status, dialect): _refused(status, dialect) for status in REFUSALS for dialect in _ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
    }).encode()  # fmt: skip


def _operation(name: str, path: str, operation: Operation) -> dict[str, Any]:
    dialect = "AnthropicError" if speaks_anthropic(path) else "Error"
    stream = "; where the request says stream: true, as server-sent events from the first token on" * operation.streams
    content = {kind: {"schema": operation.answer if kind == JSON else TEXT} for kind in operation.media}
    answers: dict[str, Any] = {"200": {"description": operation.summary + stream, "content": content}}
    for status in sorted({*ANY, *operation.refusals} - ({401} if not operation.key else set())):
        shown, _ = ApiError(status, "").told(path)
        answers[str(shown)] = {"$ref": RESPONSE.format(_refusal(status, dialect))}
    if path == "/health":
        answers["503"] = {"description": "the server is ending", "content": content}
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", name).strip("_").lower(),
        "summary": operation.summary,
        "parameters": [_parameter(each) for each in re.findall(r"{(\w+)}", path)],
        "responses": answers,
    }
    if operation.body:
        schema = {"$ref": SCHEMA.format(model=operation.body.__name__)}
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return found if operation.key else found | {"security": []}


def _parameter(name: str) -> dict[str, Any]:
    schema = {"enum": list(PARTS)} if name == "file" else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _refusal(status: int, dialect: str) -> str:
    return f"{dialect}-{status}"


def _refused(status: int, dialect: str) -> dict[str, Any]:
    """The response to a request that is refused with `status`."""
    headers = {name: {"required": True, "schema": TEXT} for name in ApiError(status, "").headers}
    schema = {"$ref": SCHEMA.format(model=dialect)}
    return {"description": REFUSALS[status], "headers": headers, "content": {JSON: {"schema": schema}}}


def _types(known: Iterable[str]) -> dict[str, Any]:
    return {"enum": sorted({*known, "invalid_request_error"})}


_ORNULL = {"type": ["string", "null"]}
# The shapes that `ApiError` has, by the dialect.
_ERRORS = {
    "Error": fields(error=fields(message=TEXT, type=_types(TYPES.values()), param=_ORNULL, code=_ORNULL)),
    "AnthropicError": fields(type="error", error=fields(type=_types(ANTHROPIC_TYPES.values()), message=TEXT)),
}
