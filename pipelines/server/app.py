"""The ASGI application, which adds authentication, limits, metrics and a log to the endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from castiron.pipelines.api.api_errors import ApiError, api_error, http_error
from castiron.pipelines.api.async_engine import AsyncEngine
from castiron.pipelines.api.byte_limit import CACHE_SALT, CLIENT, ByteLimit
from castiron.pipelines.api.embeddings import EmbeddingsApi, EmbeddingsEngine
from castiron.pipelines.api.generation_api import GenerationApi
from castiron.pipelines.api.model_api import Limits, ModelApi, names_of
from castiron.pipelines.api.openai.responses import ResponseStore
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.exchange import CLIENT_LEFT, BodyRoute, Exchange, error_response, exchange_of
from castiron.pipelines.server.metrics import Metrics, ModelMetrics
from castiron.pipelines.server.routes import OPEN_PATHS, add_routes
from castiron.pipelines.server.served_models import ModelPool, check_tokenizer
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.embedder import Embedder
from castiron.pipelines.text.generate import open_draft
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle

# Max memory of request bodies in flight, as a number of bodies of max size: of all clients, of one client.
BODIES, BODIES_PER_CLIENT = 16, 4
# Max characters of an error message in the log, because it may quote the request.
MAX_LOGGED = 300
# Default max sequences of one client that wait for a slot.
QUEUE = 64
# Bits of an IPv6 address that identify the network of one customer.
NETWORK_BITS = 64


def api_key(scope: Scope) -> bytes:
    """Return the API key in the header Authorization or x-api-key (Anthropic's), or b""."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


class Access:
    """The access rules of a server: which requests it accepts, and which client sent a request."""

    def __init__(
        self, keys: Sequence[str] = (), origins: Sequence[str] = (), local: bool = False, share_prefixes: bool = False
    ):
        """Accept requests with one of the `keys`, or all requests if there are none.

        origins: sites whose pages may send requests, "*" for all.
        local: whether the server listens on this machine only.
        share_prefixes: whether clients with different keys share prefixes.
        """
        self.keys = [key.encode(errors="surrogateescape") for key in keys]
        self.origins, self.local, self.share_prefixes = origins, local, share_prefixes
        self.names = {urlsplit(origin).hostname for origin in origins}

    def key(self, scope: Scope) -> int | None:
        """Return the index in `self.keys` of the request's API key; None if it has no valid key."""
        given = api_key(scope)
        # The request's key is compared with every key, so that the time reveals nothing about them.
        found = [hmac.compare_digest(given, known) for known in self.keys]
        return found.index(True) if any(found) else None

    def client(self, scope: Scope) -> str:
        """Return the name of a client: its API key, its IPv4 address or its IPv6 /64 network.

        The field `user` is not used, because one client could send many names.
        """
        key = self.key(scope)
        return _network((scope.get("client") or ("",))[0]) if key is None else f"key {key}"

    def cache_salt(self, scope: Scope) -> str:
        """Return the salt of a request's prompts: a hash of its key, which survives a restart."""
        return hashlib.sha256(api_key(scope)).hexdigest() if self.keys and not self.share_prefixes else ""

    def is_host_allowed(self, scope: Scope) -> bool:
        """Return whether the server accepts the request's Host header.

        A local server without keys accepts only addresses and names of this machine, and allowed
        origins, so that no site can rebind its name to this machine and use the server.
        """
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self.local or self.keys or "*" in self.origins or not host:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return "." not in name or name.endswith(".localhost") or name in self.names or _address(name) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _network(address: str) -> str:
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))
    return address


def open_app(
    bundle: Bundle | str | Path,
    *,
    api_keys: Sequence[str] = (),
    cors: Sequence[str] = (),
    local: bool = False,
    share_prefixes: bool = False,
    quiet: bool = True,
    **options,
) -> App:
    """Return an ASGI application, which can run once, that serves a bundle.

    cors: origins whose pages may send requests, "*" for all. local, share_prefixes: as in `Access`.
    options: keyword arguments of `open_api`.
    """
    metrics = Metrics()
    access = Access(api_keys, cors, local, share_prefixes)
    return App(ModelPool.single(open_api(bundle, metrics, **options)), metrics, access, quiet=quiet)


def open_api(
    bundle: Bundle | str | Path,
    metrics: Metrics,
    *,
    threads: int | None = None,
    queue: int = QUEUE,
    names: Sequence[str] = (),
    limits: Limits = Limits(),
    template_args: Mapping[str, object] | None = None,
    parse_special: bool = False,
    store: PrefixStore | None = None,
    draft: Bundle | None = None,
) -> ModelApi:
    """Open a bundle and return the endpoints of its model.

    queue: max sequences of one client that may wait while the batch is full.
    names: names that requests may use; by default those of the bundle and of its directory.
    parse_special: whether special tokens in messages become tokens instead of text.
    Raises PipelineError without a tokenizer, or for template_args that the template does not read.
    """
    bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    check_tokenizer(bundle)
    manifest = bundle.manifest
    names = list(names or names_of(bundle))
    counting = ModelMetrics(metrics, names[0])
    if manifest.encoder:
        return EmbeddingsApi(EmbeddingsEngine(Embedder(bundle, threads), queue, counting.embedded), names, limits)
    text = load_tokenizer(bundle, template_args, parse_special)
    proposing = open_draft(draft, bundle, threads) if draft else None
    engine = Engine(bundle, threads, observer=counting, store=store, draft=proposing)
    counting.watch(engine.scheduler)
    return GenerationApi(AsyncEngine(engine, queue), text, names, manifest, limits)


def endpoints(models: ModelPool, metrics: Metrics) -> FastAPI:
    """Return a FastAPI application with the endpoints, without keys, limits and log."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI):
        models.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            models.stop()

    errors = (ApiError, PipelineError, HTTPException, RequestValidationError, ClientDisconnect, Exception)
    app = FastAPI(
        lifespan=lifespan, exception_handlers=dict.fromkeys(errors, _handle_error), openapi_url=None, docs_url=None,
        redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    app.router.route_class = BodyRoute
    app.state.models, app.state.responses = models, ResponseStore()
    add_routes(app, metrics)
    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    path, headers = request.url.path, None
    match error:
        case ApiError():
            found = error
        case PipelineError():
            found = api_error(error)
        case HTTPException():
            found, headers = http_error(error.status_code, error.detail, path), error.headers
        case RequestValidationError():
            # The path is invalid; `BodyRoute` validates bodies.
            found = http_error(404, "", path)
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case _:
            # Starlette raises the error again after the response, so that it is logged.
            found = ApiError(500, "the server failed on this request; try again, and report the error in the server's log")
    exchange_of(request.scope).error = found
    return error_response(found, path, headers)


class App:
    """An ASGI application that checks keys and hosts, applies limits, and logs responses."""

    def __init__(self, models: ModelPool, metrics: Metrics, access: Access = Access(), *, quiet: bool = True):
        self.models, self.metrics, self.access, self.quiet = models, metrics, access, quiet
        self.app = endpoints(models, metrics)
        self.paths = {route.path for route in self.app.routes}
        body_bytes = models.limits.body_bytes
        self.bodies = ByteLimit("bodies", BODIES * body_bytes, BODIES_PER_CLIENT * body_bytes)
        # CORS is outside authentication: browsers send preflight requests without a key, and pages must be able to read a 401.
        self._answer: ASGIApp = self._with_key
        if access.origins:
            self._answer = CORSMiddleware(
                self._with_key, allow_origins=access.origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
                allow_private_network=True,
            )  # fmt: skip

    @property
    def api(self) -> ModelApi | None:
        """The endpoints of the first model, or None while this model is closed."""
        return self.models.models[0].api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = self._exchange(scope)
        # A HEAD request is answered as GET, and uvicorn leaves the body out.
        inner = {**scope, "state": {**scope.get("state", {}), "exchange": exchange}}
        inner["method"] = "GET" if scope["method"] == "HEAD" else scope["method"]

        async def receive_part():
            message = await receive()
            exchange.is_receiving = message.get("more_body", False)
            return message

        async def send_part(message):
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if exchange.is_receiving:
                    # Nobody reads the rest of the body, so no other request can follow on this connection.
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            async with exchange.exits:
                await self._answer(inner, receive_part, send_part)
        finally:
            exchange.body.release()
            self._count(scope, exchange)

    def _exchange(self, scope: Scope) -> Exchange:
        headers, client = dict(scope["headers"]), self.access.client(scope)
        is_receiving = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        return Exchange(client, api_key(scope), self.models.limits.seconds, self.bodies.share(client), is_receiving)

    def _count(self, scope: Scope, exchange: Exchange) -> None:
        path = scope["path"] if scope["path"] in self.paths else "other"
        error = exchange.error
        self.metrics.answered(path, scope["method"], exchange.status, error and error.code)
        if not self.quiet and path not in ("/health", "/ping", "/metrics"):
            details = [exchange.job.summary] if exchange.job else []
            details += [error.message[:MAX_LOGGED]] if error else []
            line = f"{scope['method']} {scope['path'][:200]!a} {exchange.status}"
            print_message(f"{line}: {'; '.join(details)}" if details else line)

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        if self.access.keys and scope["path"] not in OPEN_PATHS and self.access.key(scope) is None:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            exchange.error = ApiError(401, message, code="invalid_api_key")
        elif not self.access.is_host_allowed(scope):
            message = "unknown host: this server serves this machine only; use localhost, or start it with --api-key or --cors"
            exchange.error = ApiError(403, message, code="unknown_host")
        if exchange.error:
            await error_response(exchange.error, scope["path"])(scope, receive, send)
        else:
            CLIENT.set(exchange.client)
            CACHE_SALT.set(self.access.cache_salt(scope))
            await self.app(scope, receive, send)
