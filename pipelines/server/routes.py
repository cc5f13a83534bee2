"""The HTTP endpoints, and the chat page, whose files are in the folder `page`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, Literal, get_type_hints

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import castiron
from castiron.pipelines.api.anthropic.messages import CountTokensRequest, MessagesRequest, count_message_tokens, start_message
from castiron.pipelines.api.api_errors import ApiError, invalid
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.ollama import chat as ollama
from castiron.pipelines.api.ollama import records as ollama_records
from castiron.pipelines.api.ollama.models import OLLAMA_VERSION, listed_model, running_model, shown_model
from castiron.pipelines.api.openai import chat as openai
from castiron.pipelines.api.openai.infill import InfillRequest, start_infill
from castiron.pipelines.api.openai.records import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from castiron.pipelines.api.openai.responses import count_response_tokens, start_response
from castiron.pipelines.api.openai.responses_records import InputTokensRequest, ResponsesRequest
from castiron.pipelines.api.request_fields import EmbeddingsRequest, RerankRequest, ScoreRequest
from castiron.pipelines.server import openapi
from castiron.pipelines.server.exchange import Exchange, answer_request, exchange_of
from castiron.pipelines.server.metrics import MEDIA_TYPE, Metrics

OPENAPI = "/openapi.json"
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HOME = "chat.html"
PAGE = files("castiron.pipelines.server").joinpath("page")
PARTS = tuple(sorted(
    f"{folder}{file.name}" for folder in ("", "vendor/") for file in PAGE.joinpath(folder).iterdir()
    if file.name != HOME and file.name.endswith((".css", ".js", ".svg"))
))  # fmt: skip
# URL paths of the page's files.
PATHS = tuple(f"/page/{name}" for name in PARTS)
# Scripts, styles and data come from this server only, and text never becomes HTML or code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers check for a newer page, because the server may have been updated.
    "Cache-Control": "no-cache",
}
# Paths that need no API key.
OPEN_PATHS = ("/", "/health", "/ping", *PATHS)
# Ollama's paths that change the models of a server.
MANAGEMENT = ("/api/pull", "/api/push", "/api/create", "/api/copy")
NO_MANAGEMENT = "this server cannot add, change or delete models; start it with the models: castiron serve MODEL [MODEL ...]"


def page(name: str = HOME) -> Response:
    """Return an HTTP response that contains a file of the chat page, by default its HTML."""
    return Response(PAGE.joinpath(name).read_bytes(), media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=HEADERS)


def add_routes(app: FastAPI, metrics: Metrics) -> None:
    """Add the endpoints of the models in `app.state.models` to a FastAPI application."""
    _add_posts(app)
    _add_ollama_models(app)
    _add_gets(app, metrics)


def _route(add: Callable, path: str, answer: Any = None, *errors: int, key: bool = True, **options: Any) -> Callable:
    """Return a decorator that adds a route; errors: its statuses besides those of all routes."""
    responses = openapi.errors(path, errors, key=key) | options.pop("responses", {})
    return add(path, response_model=answer, responses=responses, dependencies=openapi.KEYS if key else None, **options)


def _add_posts(app: FastAPI) -> None:
    models, store = app.state.models, app.state.responses

    def post(*paths: str, answer: Any, stream: bool = False, media_type: str = "text/event-stream") -> Callable:
        """Return a decorator that adds a handler of POST requests.

        The handler returns an awaitable of the JSON response, or of a `Job` that generates it.
        """
        # No schema: readers of the document differ in whether it describes an event or the text of all events.
        streams: dict[int | str, dict[str, Any]] = {200: {"content": {media_type: {}}}} if stream else {}

        def add(handler: Callable[[ModelApi, Any, Exchange], Any]) -> None:
            async def endpoint(request: Request, body) -> Response:
                exchange, start = exchange_of(request.scope), time.monotonic()
                api = await exchange.exits.enter_async_context(models.use(body.model))
                exchange.load_seconds = time.monotonic() - start
                return await answer_request(request, handler(api, body, exchange), stream and body.stream)

            endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
            endpoint.__annotations__["body"] = get_type_hints(handler)["body"]
            for path in paths:
                _route(app.post, path, answer, *openapi.BODY, responses=streams)(endpoint)

        return add

    @post("/v1/chat/completions", answer=openapi.ChatCompletion, stream=True)
    def chat(api: ModelApi, body: ChatRequest, _: Exchange) -> Any:
        """Answer a conversation."""
        return openai.start_chat(api, body)

    @post("/v1/completions", answer=openapi.Completion, stream=True)
    def complete(api: ModelApi, body: CompletionRequest, _: Exchange) -> Any:
        """Continue a text."""
        return openai.start_completion(api, body)

    @post("/infill", answer=openapi.Infill, stream=True)
    def infill(api: ModelApi, body: InfillRequest, _: Exchange) -> Any:
        """Generate the text between a prefix and a suffix, in the format of llama.cpp's API."""
        return start_infill(api, body)

    @post("/v1/responses", answer=openapi.ResponseAnswer, stream=True)
    def respond(api: ModelApi, body: ResponsesRequest, exchange: Exchange) -> Any:
        """Answer a conversation, in the format of OpenAI's Responses API."""
        return start_response(api, body, store, exchange.api_key)

    @post("/v1/responses/input_tokens", answer=openapi.InputTokens)
    async def count_input(api: ModelApi, body: InputTokensRequest, exchange: Exchange) -> dict:
        """Count the prompt tokens of a request, in the format of OpenAI's Responses API."""
        count = await count_response_tokens(api, body, store, exchange.api_key)
        return {"object": "response.input_tokens", "input_tokens": count}

    @post("/v1/messages", answer=openapi.MessageAnswer, stream=True)
    def send_message(api: ModelApi, body: MessagesRequest, _: Exchange) -> Any:
        """Answer a conversation, in the format of Anthropic's Messages API."""
        return start_message(api, body)

    @post("/v1/messages/count_tokens", answer=openapi.TokenCount)
    async def count_tokens(api: ModelApi, body: CountTokensRequest, _: Exchange) -> dict:
        """Count the prompt tokens of a request, in the format of Anthropic's Messages API."""
        return {"input_tokens": await count_message_tokens(api, body)}

    @post("/v1/embeddings", answer=openapi.Embeddings)
    def embeddings(api: ModelApi, body: EmbeddingsRequest, _: Exchange) -> Any:
        """Embed texts."""
        return api.embeddings(body)

    # Cohere's, Jina's and vLLM's clients use different paths.
    @post("/v1/rerank", "/v2/rerank", "/rerank", answer=openapi.Ranking)
    def rerank(api: ModelApi, body: RerankRequest, _: Exchange) -> Any:
        """Order documents by their relevance to a query."""
        return api.rerank(body)

    @post("/v1/score", "/score", answer=openapi.Scores)
    def score(api: ModelApi, body: ScoreRequest, _: Exchange) -> Any:
        """Return the relevance of each pair of texts, in the format of vLLM's API."""
        return api.score(body)

    @post("/tokenize", answer=openapi.Tokens)
    async def tokenize(api: ModelApi, body: TokenizeRequest, _: Exchange) -> dict:
        """Return the tokens of a text or of messages."""
        tokens = await openai.tokenize(api, body)
        return {"tokens": tokens, "count": len(tokens), "context_length": api.context, "max_model_len": api.context}

    @post("/detokenize", answer=openapi.Detokenized)
    async def detokenize(api: ModelApi, body: DetokenizeRequest, _: Exchange) -> dict:
        """Return the text of tokens."""
        text = await api.detokenize(body.tokens)
        # llama.cpp reads content and vLLM prompt.
        return {"content": text, "prompt": text}

    ndjson = "application/x-ndjson"

    @post("/api/chat", answer=openapi.OllamaChat, stream=True, media_type=ndjson)
    def ollama_chat(api: ModelApi, body: ollama_records.OllamaChatRequest, exchange: Exchange) -> Any:
        """Answer a conversation, in the format of Ollama's API."""
        return ollama.start_ollama_chat(api, body, exchange.load_seconds)

    @post("/api/generate", answer=openapi.OllamaCompletion, stream=True, media_type=ndjson)
    def ollama_generate(api: ModelApi, body: ollama_records.OllamaGenerateRequest, exchange: Exchange) -> Any:
        """Answer a prompt, in the format of Ollama's API."""
        return ollama.start_ollama_generate(api, body, exchange.load_seconds)

    @post("/api/embed", answer=openapi.OllamaEmbeddings)
    def ollama_embed(api: ModelApi, body: ollama_records.OllamaEmbedRequest, exchange: Exchange) -> Any:
        """Embed texts, in the format of Ollama's API."""
        return ollama.start_ollama_embed(api, body, exchange.load_seconds)

    @post("/api/embeddings", answer=openapi.OllamaEmbedding)
    def ollama_embeddings(api: ModelApi, body: ollama_records.OllamaEmbeddingsRequest, _: Exchange) -> Any:
        """Embed a text, in the format of Ollama's older API."""
        return ollama.start_ollama_embeddings(api, body)


def _add_ollama_models(app: FastAPI) -> None:
    models = app.state.models

    @_route(app.get, "/api/tags", openapi.OllamaModels)
    async def tags(request: Request) -> Response:
        """List the models."""
        found = [listed_model(model.name, model.manifest, models.start_date) for model in models.models]
        return JSONResponse({"models": found})

    @_route(app.get, "/api/ps", openapi.OllamaModels)
    async def running(request: Request) -> Response:
        """List the models that are open."""
        opened = [model for model in models.models if model.api]
        return JSONResponse({"models": [running_model(m.name, m.manifest, m.bytes, models.keep) for m in opened]})

    @_route(app.get, "/api/version", openapi.Version)
    async def ollama_version(request: Request) -> Response:
        """Return the version of Ollama whose API this server has."""
        return JSONResponse({"version": OLLAMA_VERSION})

    @_route(app.post, "/api/show", openapi.OllamaModel, *openapi.BODY)
    async def show(request: Request, body: ollama_records.OllamaShowRequest) -> Response:
        """Describe one model."""
        model = models.find(body.model or body.name)
        return JSONResponse(shown_model(model.name, model.manifest, model.template, models.start_date, models.limits))

    async def manage(request: Request, body: ollama_records.OllamaBody) -> Response:
        """Return an error: the models of this server are fixed."""
        raise ApiError(400, NO_MANAGEMENT, code="unsupported")

    async def delete_model(request: Request) -> Response:
        """Return an error: the models of this server are fixed."""
        raise ApiError(400, NO_MANAGEMENT, code="unsupported")

    for path in MANAGEMENT:
        _route(app.post, path, None, *openapi.BODY)(manage)
    _route(app.delete, "/api/delete", None, 400)(delete_model)


def _add_gets(app: FastAPI, metrics: Metrics) -> None:
    models, store, get = app.state.models, app.state.responses, partial(_route, app.get)

    @get("/v1/responses/{name}", openapi.ResponseAnswer, 400, 404)
    async def stored(request: Request, name: str) -> Response:
        """Look up a stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise invalid("stream", "stream is not supported for a stored response; leave it out")
        return Response(store.body(exchange_of(request.scope).api_key, name), media_type="application/json")

    @_route(app.delete, "/v1/responses/{name}", openapi.DeletedResponse, 404)
    async def delete(request: Request, name: str) -> Response:
        """Delete a stored response."""
        store.delete(exchange_of(request.scope).api_key, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @get("/tokenizer_info", openapi.TokenizerInfo, 503)
    async def tokenizer_info(request: Request) -> Response:
        """Describe the tokenizer."""
        async with models.use(None) as api:
            return JSONResponse(api.tokenizer_info)

    @get("/props", openapi.Properties, 404, 503)
    async def properties(request: Request) -> Response:
        """Return a model's context length, slots and chat template, in llama.cpp's format."""
        async with models.use(request.query_params.get("model")) as api:
            return JSONResponse(api.properties)

    @get("/slots", list[openapi.Slot], 404, 503)
    async def slots(request: Request) -> Response:
        """Return which slots of a model run a request, in the format of llama.cpp's API."""
        async with models.use(request.query_params.get("model")) as api:
            found = api.slots
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
            raise ApiError(503, "all slots run a request; try again later", code="no_slot")
        return JSONResponse(found)

    @get("/version", openapi.Version)
    async def version(request: Request) -> Response:
        """Return the version of castiron."""
        return JSONResponse({"version": castiron.__version__})

    @get("/v1/models", openapi.ModelList)
    async def model_list(request: Request) -> Response:
        """List the models."""
        found = models.describe()
        page = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return JSONResponse({"object": "list", "data": found, **page})

    @get("/v1/models/{name:path}", openapi.ModelInfo, 404)
    async def model(request: Request, name: str) -> Response:
        """Describe one model."""
        return JSONResponse(models.describe(name)[0])

    stopping = {503: {"model": openapi.Health, "description": "the server is shutting down"}}

    # vLLM has /ping for SageMaker.
    @get("/ping", openapi.Health, key=False, responses=stopping)
    @get("/health", openapi.Health, key=False, responses=stopping)
    async def health(request: Request) -> Response:
        """Return whether the server accepts requests."""
        healthy = models.healthy
        return JSONResponse({"status": "ok" if healthy else "stopping"}, 200 if healthy else 503)

    @get("/metrics", response_class=PlainTextResponse)
    async def show_metrics(request: Request) -> Response:
        """Return metrics for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type=MEDIA_TYPE)

    @get("/", key=False, response_class=HTMLResponse, responses={200: openapi.content("text/plain")})
    async def home(request: Request) -> Response:
        """Return the chat page, or for an embedding model a text that names the endpoint to use."""
        return PlainTextResponse(models.home) if models.home else page()

    @get("/page/{file:path}", None, 404, key=False, response_class=Response,
         responses={200: openapi.content("text/javascript", "text/css", "image/svg+xml")})  # fmt: skip
    async def part(request: Request, file: Literal[PARTS]) -> Response:  # type: ignore[valid-type]
        """Return a file of the chat page."""
        return page(file)

    @get(OPENAPI)
    async def describe(request: Request) -> Response:
        """Return the OpenAPI description of this server."""
        return JSONResponse(await run_in_thread(openapi.description, app))
