"""The HTTP side: routes, who may ask, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from castiron.pipelines.embedding import Embedder
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.draft import open_draft
from castiron.pipelines.generation.engine import Engine
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.text import load_text
from castiron.pipelines.progress import say
from castiron.pipelines.serve import dialects
from castiron.pipelines.serve.answers import LEFT, ClientLeft, answered, awaited, noted, refusal, unknown
from castiron.pipelines.serve.api import Api
from castiron.pipelines.serve.clients import ASKER, Access, Shares, api_key
from castiron.pipelines.serve.embeddings import EmbeddingsApi, EmbeddingsEngine
from castiron.pipelines.serve.errors import ApiError, api_error
from castiron.pipelines.serve.metrics import Metrics
from castiron.pipelines.serve.models import described, listed
from castiron.pipelines.serve.openapi import description_route
from castiron.pipelines.serve.page import PATHS, page, page_routes
from castiron.pipelines.serve.responses_store import ResponseStore
from castiron.pipelines.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    Model,
    RerankRequest,
    TokenizeRequest,
    read,
)
from castiron.pipelines.serve.text_api import Limits, TextApi
from castiron.vmfb.bundle import Bundle, open_bundle

# A body of a few megabytes takes no longer on any network.
BODY_SECONDS = 30.0
# Largest bodies for which there is room at once, and those of one client.
BODIES, BODIES_EACH = 16, 4
OPEN_PATHS = ("/", "/health", *PATHS)
# Sequences that may wait.
QUEUE = 64


def open_app(
    bundle: Bundle | str | Path,
    *,
    threads: int | None = None,
    queue: int = QUEUE,
    name: str | None = None,
    api_keys: Sequence[str] = (),
    limits: Limits = Limits(),
    quiet: bool = True,
    cors: Sequence[str] = (),
    template_args: Mapping[str, object] | None = None,
    parse_special: bool = False,
    store: PrefixStore | None = None,
    metrics: Metrics | None = None,
    shared_prefixes: bool = False,
    local: bool = False,
    draft: Bundle | None = None,
) -> Front:
    """The ASGI application that serves a bundle, or the one at a path, with OpenAI's API; `api` has its engine.

    `queue`: how many sequences may wait for a slot. `name`: the model's, by default the bundle's own, and then its
    directory's is taken for it too. `cors`: origins whose pages may ask, "*" for all. `template_args`: variables of the
    chat template, where a request gives no others. `parse_special`: control words in messages are control tokens. `store`:
    where states of long beginnings are kept. `metrics`: what counts, where several applications count together.
    `shared_prefixes`: whether what prompts with different keys begin with is read once for all. `local`: whether it is for this
    machine alone. `draft`: a bundle that proposes tokens where one request runs alone. Without `quiet` each request is a line
    on stderr. Its lifespan starts and stops the thread that runs the model, so that it serves once.
    PipelineError for a bundle without a tokenizer, and for a variable that its template does not read.
    """
    bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if bundle.tokenizer is None:
        raise PipelineError(f"{bundle.path} has no tokenizer, because its checkpoint had none: it cannot serve text")
    manifest, metrics = bundle.manifest, metrics or Metrics()
    names = [name] if name else list(dict.fromkeys([manifest.name, bundle.path.resolve().name.removesuffix(".castiron")]))
    api: TextApi
    if manifest.encoder:
        api = EmbeddingsApi(EmbeddingsEngine(Embedder(bundle, threads), queue, metrics.model(names[0])), names, limits)
    else:
        text, counting = load_text(bundle, template_args, parse_special), metrics.model(names[0])
        proposing = open_draft(draft, bundle, threads) if draft else None
        scheduler = Scheduler(bundle, threads, counting, store, proposing)
        counting.watch(scheduler)
        api = Api(Engine(scheduler, queue), text, names, manifest, limits)
    return create_app(api, metrics, Access(api_keys, cors, shared_prefixes, local), quiet=quiet)


def create_app(api: TextApi, metrics: Metrics, access: Access, *, quiet: bool) -> Front:
    """The routes of `api`, behind what happens to every request."""
    started = int(time.time())

    async def take(request: Request, kind: type[Model]) -> Model:
        body = read(kind, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        return body

    async def chat(request: Request) -> Response:
        body = await take(request, ChatRequest)
        return await answered(request, api, body, api.chat(body))

    async def complete(request: Request) -> Response:
        body = await take(request, CompletionRequest)
        return await answered(request, api, body, api.complete(body))

    async def embeddings(request: Request) -> Response:
        body = await take(request, EmbeddingsRequest)
        request.state.job = job = await awaited(request, api, api.embeddings(body))
        return JSONResponse(await awaited(request, api, job.answer()))

    async def rerank(request: Request) -> Response:
        body = await take(request, RerankRequest)
        request.state.job = job = await awaited(request, api, api.rerank(body))
        return JSONResponse(await awaited(request, api, job.answer()))

    async def tokenize(request: Request) -> Response:
        body = await take(request, TokenizeRequest)
        tokens = await awaited(request, api, api.tokenize(body))
        found = {"tokens": tokens, "count": len(tokens), "context_length": api.context, "max_model_len": api.context}
        return JSONResponse(found)

    async def detokenize(request: Request) -> Response:
        body = await take(request, DetokenizeRequest)
        text = await awaited(request, api, api.detokenize(body.tokens))
        # llama.cpp's name and vLLM's.
        return JSONResponse({"content": text, "prompt": text})

    async def tokenizer_info(_: Request) -> Response:
        return JSONResponse(api.tokenizer_info)

    def about(name: str) -> dict:
        return described(name, started, api.manifest, api.text.chat_template, api.limits)

    async def models(_: Request) -> Response:
        return JSONResponse(listed([about(api.names[0])]))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        api.check_model(name)
        return JSONResponse(about(name))

    async def health(_: Request) -> Response:
        healthy = api.engine.healthy
        return JSONResponse({"status": "ok" if healthy else "stopping"}, 200 if healthy else 503)

    async def show_metrics(_: Request) -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    async def home(_: Request) -> Response:
        if not api.chats:
            return PlainTextResponse(f"{api.names[0]} encodes texts: POST them to {api.endpoint}\n")
        return page()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette):
        api.engine.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            api.engine.stop()

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *dialects.routes(api, take),
        # Clients that others wrote for have one or another of these.
        *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/", home),
        *page_routes(),
    ]
    routes.append(description_route(routes))
    handlers = {
        ApiError: noted,
        PipelineError: lambda request, error: noted(request, api_error(error)),
        HTTPException: unknown,
        ClientLeft: lambda *_: Response(status_code=LEFT),
        ClientDisconnect: lambda *_: Response(status_code=LEFT),
        # Starlette raises it again for the log once this is sent.
        Exception: lambda request, _: refusal(
            ApiError(500, "the server failed on this request; other requests are not affected"), request.url.path
        ),
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return Front(app, api, metrics, {route.path for route in routes}, access, quiet)


class Front:
    """What happens to every request, whatever its route: the key is asked for, the answer counted and logged."""

    def __init__(self, app: ASGIApp, api: TextApi, metrics: Metrics, paths: set[str], access: Access, quiet: bool):
        self.app, self.api, self.metrics, self.paths, self.quiet = app, api, metrics, paths, quiet
        self.responses = ResponseStore()
        self.access, most = access, api.limits.body_bytes
        self.bodies = Shares("bodies", BODIES * most, BODIES_EACH * most)
        # Browsers ask for leave without the key, and want to read a refusal too.
        self.answer: ASGIApp = self._with_key
        if access.origins:
            self.answer = CORSMiddleware(
                self._with_key,
                allow_origins=access.origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        until = asyncio.get_running_loop().time() + self.api.limits.seconds
        asker = self.access.asker(scope)
        body = self.bodies.of(asker.client)
        state.update(status=LEFT, responses=self.responses, client=api_key(scope), asker=asker, until=until, body=body)

        async def sent(message):
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
            await send(message)

        try:
            await self.answer(scope, receive, sent)
        finally:
            body.give_back()
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.answered(path, scope["method"], state["status"], state.get("code"))
            if not self.quiet and path not in ("/health", "/metrics"):
                job = state.get("job")
                words = f"{scope['method']} {scope['path']!a} {state['status']}"
                say(f"{words}: {job.summary}" if job else words)

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        asker = scope["state"]["asker"]
        if self.access.keys and asker.key is None and scope["path"] not in OPEN_PATHS:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            await refusal(ApiError(401, message, code="invalid_api_key"), scope["path"])(scope, receive, send)
        elif not self.access.named_here(scope):
            message = "this server is for its own machine: ask it as localhost, or start it with an --api-key or with --cors"
            await refusal(ApiError(403, message, code="unknown_host"), scope["path"])(scope, receive, send)
        else:
            ASKER.set(asker)
            await self.app(scope, receive, send)


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request; ApiError if a browser's is no JSON by its own word, if it is too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and "origin" in request.headers:
        # Other types a browser sends without asking first, in the name of whoever looks at another site's page; it says
        # then where that page is from. Everyone else need not name the only type there is.
        raise ApiError(415, "from a web page, send JSON with the header 'Content-Type: application/json'")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body of this request is larger than {limit} bytes", code="body_too_large")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large
    data, room = bytearray(), request.scope["state"].get("body")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if room:
                    room.take(len(part))
                data += part
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body of this request did not arrive within {BODY_SECONDS:.0f} s") from None
    return bytes(data)
