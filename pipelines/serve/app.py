"""The HTTP side: routes, who may ask, how much and how long, and answers to requests that go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
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
from castiron.pipelines.serve.api import Api, Job
from castiron.pipelines.serve.embeddings import EmbeddingsApi, EmbeddingsEngine
from castiron.pipelines.serve.errors import ApiError, api_error
from castiron.pipelines.serve.metrics import Metrics
from castiron.pipelines.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
    read,
)
from castiron.pipelines.serve.text_api import Limits, TextApi
from castiron.vmfb.bundle import Bundle, open_bundle

# For the log alone: the client is no longer there to read it. nginx's number.
LEFT = 499
# A body of a few megabytes takes no longer on any network.
BODY_SECONDS = 30.0
OPEN_PATHS = ("/", "/health")
# Sequences that may wait.
QUEUE = 64
# The page runs its own script and talks to this server, and nothing else.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


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
    store: PrefixStore | None = None,
    metrics: Metrics | None = None,
    draft: Bundle | None = None,
) -> Front:
    """The ASGI application that serves a bundle, or the one at a path, with OpenAI's API; `api` has its engine.

    `queue`: how many sequences may wait for a slot. `name`: the model's, by default the bundle's own, and then its directory's
    is taken for it too. `cors`: origins whose pages may ask, "*" for all. `template_args`: variables of the chat template,
    where a request gives no others. `store`: where states of long beginnings are kept. `metrics`: what counts, where several
    applications count together. `draft`: a bundle that proposes tokens where one request runs alone. Without `quiet` each
    request is a line on stderr. Its lifespan starts and stops the thread that runs the model, so that it serves once.
    PipelineError for a bundle without a tokenizer, and for a variable that its template does not read.
    """
    bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if bundle.tokenizer is None:
        raise PipelineError(f"{bundle.path} has no tokenizer, because its checkpoint had none: it cannot serve text")
    manifest, metrics = bundle.manifest, metrics or Metrics()
    names = [name] if name else list(dict.fromkeys([manifest.name, bundle.path.resolve().name.removesuffix(".castiron")]))
    api: TextApi
    if manifest.encoder:
        api = EmbeddingsApi(EmbeddingsEngine(Embedder(bundle, threads), queue, metrics), names, limits)
    else:
        proposing = open_draft(draft, bundle, threads) if draft else None
        text, scheduler = load_text(bundle, template_args), Scheduler(bundle, threads, metrics, store, proposing)
        metrics.watch(scheduler)
        api = Api(Engine(scheduler, queue), text, names, manifest, limits)
    return create_app(api, metrics, api_keys=api_keys, quiet=quiet, cors=cors)


def create_app(api: TextApi, metrics: Metrics, *, api_keys: Sequence[str], quiet: bool, cors: Sequence[str] = ()) -> Front:
    """The routes of `api`, behind what happens to every request."""
    started = int(time.time())
    page = files("castiron.pipelines.serve").joinpath("chat.html").read_text("utf-8")

    async def chat(request: Request) -> Response:
        body = read(ChatRequest, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        return await _answer(request, api, body, await api.chat(body))

    async def complete(request: Request) -> Response:
        body = read(CompletionRequest, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        return await _answer(request, api, body, await api.complete(body))

    async def embeddings(request: Request) -> Response:
        body = read(EmbeddingsRequest, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        request.state.job = job = await api.embeddings(body)
        return JSONResponse(await _while_connected(request.receive, _in_time(api, job.answer())))

    async def tokenize(request: Request) -> Response:
        body = read(TokenizeRequest, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        tokens = await api.tokenize(body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "context_length": api.context})

    async def detokenize(request: Request) -> Response:
        body = read(DetokenizeRequest, await _body(request, api.limits.body_bytes))
        api.check_model(body.model)
        return JSONResponse({"content": await api.detokenize(body.tokens)})

    def described(name: str) -> dict:
        return {"id": name, "object": "model", "created": started, "owned_by": "castiron", **api.described}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described(api.names[0])]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        api.check_model(name)
        return JSONResponse(described(name))

    async def health(_: Request) -> Response:
        healthy = api.engine.healthy
        return JSONResponse({"status": "ok" if healthy else "stopping"}, 200 if healthy else 503)

    async def show_metrics(_: Request) -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    async def home(_: Request) -> Response:
        if not api.chats:
            return PlainTextResponse(f"{api.names[0]} encodes texts: POST them to /v1/embeddings\n")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(page, headers=headers)

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
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/", home),
    ]
    handlers = {
        ApiError: lambda _, error: _refusal(error),
        PipelineError: lambda _, error: _refusal(api_error(error)),
        HTTPException: lambda _, error: _refusal(_plain(error), error.headers),
        ClientLeft: lambda *_: Response(status_code=LEFT),
        ClientDisconnect: lambda *_: Response(status_code=LEFT),
        # Starlette raises it again for the log once this is sent.
        Exception: lambda *_: _refusal(ApiError(500, "the server failed on this request; other requests are not affected")),
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return Front(app, api, metrics, {route.path for route in routes}, api_keys, quiet, cors)


class Front:
    """What happens to every request, whatever its route: the key is asked for, the answer counted and logged."""

    def __init__(
        self, app: ASGIApp, api: TextApi, metrics: Metrics, paths: set[str], api_keys: Sequence[str], quiet: bool,
        cors: Sequence[str] = (),
    ):  # fmt: skip
        self.app, self.api, self.metrics, self.paths, self.quiet = app, api, metrics, paths, quiet
        self.api_keys = [key.encode() for key in api_keys]
        # Browsers ask for leave without the key, and want to read a refusal too.
        self.answer: ASGIApp = self._with_key
        if cors:
            self.answer = CORSMiddleware(
                self._with_key,
                allow_origins=cors,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["status"] = LEFT

        async def sent(message):
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
            await send(message)

        try:
            await self.answer(scope, receive, sent)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests_total.add(1, path, str(state["status"]))
            if not self.quiet and path not in ("/health", "/metrics"):
                job = state.get("job")
                words = f"{scope['method']} {scope['path']!a} {state['status']}"
                say(f"{words}: {job.summary}" if job else words)

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may(scope):
            await self.app(scope, receive, send)
        else:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            await _refusal(ApiError(401, message, code="invalid_api_key"))(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        if not self.api_keys or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # Every key is compared, so that the time tells nothing.
        found = [hmac.compare_digest(key.strip(), known) for known in self.api_keys]
        return scheme.lower() == b"bearer" and any(found)


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
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body of this request did not arrive within {BODY_SECONDS:.0f} s") from None
    return bytes(data)


async def _answer(request: Request, api: Api, body, job: Job) -> Response:
    """The response to a request whose sequences are queued."""
    request.state.job = job
    if body.stream:
        options = body.stream_options
        return EventStream(api, job, bool(options and options.include_usage))
    try:
        answer = await _while_connected(request.receive, _in_time(api, api.whole(job)))
    finally:
        api.close(job)
    return JSONResponse(answer)


class EventStream(Response):
    """Chunks as server-sent events. The first one decides about the status, so that a request that fails before it
    has said anything is an ordinary error."""

    def __init__(self, api: Api, job: Job, include_usage: bool):
        self.api, self.job, self.include_usage = api, job, include_usage
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._stream(send))
        except ClientLeft:
            scope["state"]["status"] = LEFT
        except ApiError as error:
            await _refusal(error)(scope, receive, send)
        finally:
            self.api.close(self.job)

    async def _stream(self, send: Send) -> None:
        started = False

        async def event(data: str) -> None:
            nonlocal started
            if not started:
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                # For nginx, which would collect the events otherwise.
                headers.append((b"x-accel-buffering", b"no"))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        async def all_chunks() -> None:
            async for chunk in self.api.chunks(self.job, self.include_usage):
                await event(_json(chunk))

        try:
            await _in_time(self.api, all_chunks())
        except ApiError as error:
            if not started:
                raise
            await event(_json(error.body))
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _in_time(api: TextApi, work: Coroutine):
    """The result of `work`; ApiError if it takes longer than a request may."""
    try:
        async with asyncio.timeout(api.limits.seconds):
            return await work
    except TimeoutError:
        message = f"the request took longer than the {api.limits.seconds:g} s that this server allows"
        raise ApiError(504, message, code="timeout") from None


async def _while_connected(receive: Receive, work: Coroutine):
    """The result of `work`, which is cancelled, with ClientLeft, when the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientLeft
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refusal(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error.body, error.status, {**error.headers, **(headers or {})})


def _plain(error: HTTPException) -> ApiError:
    """An unknown path or a method that it does not have."""
    words = {404: "there is no such path on this server", 405: "this path does not take that method"}
    return ApiError(error.status_code, words.get(error.status_code, error.detail))


def _json(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
