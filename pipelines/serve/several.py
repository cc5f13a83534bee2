"""Several bundles behind one address: each is opened when a request first names it, and closed when none has for a while."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from castiron.pipelines.cli import explain
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.engine import Engine, Stopping
from castiron.pipelines.measuring.memory import needed, slots_of, total_bytes
from castiron.pipelines.progress import say
from castiron.pipelines.serve.answers import noted, refusal, unknown
from castiron.pipelines.serve.app import Front, _body
from castiron.pipelines.serve.dialects import stored_routes
from castiron.pipelines.serve.errors import ApiError, api_error
from castiron.pipelines.serve.metrics import Metrics
from castiron.pipelines.serve.models import described, listed
from castiron.pipelines.serve.openapi import POSTED, description_route
from castiron.pipelines.serve.page import page, page_routes
from castiron.pipelines.serve.schemas import TokenizeRequest, read
from castiron.pipelines.serve.text_api import Limits
from castiron.vmfb.bundle import Bundle


class Served:
    """A bundle with its name, the application that serves it while it is open, and how many requests are using it."""

    def __init__(self, bundle: Bundle, name: str):
        self.bundle, self.name = bundle, name
        self.names = {name, bundle.manifest.name, _directory(bundle)}
        self.template = bundle.chat_template
        self.front: Front | None = None
        # Who holds it opens or closes.
        self.lock = asyncio.Lock()
        self.users, self.left = 0, 0.0
        need = needed(bundle.manifest, slots := slots_of(bundle.manifest))
        self.bytes = need.weights + need.state * slots


class Several:
    """An ASGI application that hands a request on to the bundle that its `model` names, the first without one.

    Requests for a bundle that is being opened wait for it, those for others do not. To the process it is an engine.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        open: Callable[[Bundle, str, Metrics], Front],
        *,
        keep: float,
        limits: Limits = Limits(),
        memory: int | None = None,
    ):
        """`open(bundle, name, metrics)` loads one. `keep`: seconds without a request after which one is closed. Before one is
        opened, others that nobody uses are closed until all have room in `memory` bytes, by default the machine's.
        PipelineError for bundles without a tokenizer, or that cannot be told apart."""
        self.models = [Served(bundle, name) for bundle, name in zip(bundles, _names(bundles), strict=True)]
        self.open, self.keep, self.limits, self.memory = open, keep, limits, memory or total_bytes()
        self.metrics, self.started, self.draining = Metrics(), int(time.time()), False
        routes = [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._one),
            *stored_routes(),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/", self._page),
            *page_routes(),
        ]
        routes.append(description_route(routes, POSTED))
        # Those of the bundles are known when one is open.
        self.paths = {route.path for route in routes}
        handlers = {
            ApiError: lambda request, error: refusal(error, request.url.path),
            HTTPException: unknown,
        }
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A path that no model has opens none.
        if scope["type"] != "http" or f"{scope['method']} {scope['path']}" not in POSTED:
            await self.app(scope, receive, send)
            return
        try:
            data = await _body(Request(scope, receive), self.limits.body_bytes)
            # It is counted, and has its room to the end of the answer.
            del scope["state"]["body"]
            model = self.model(_named(data))
            front = await self._enter(model)
        except (ApiError, PipelineError) as error:
            refused = error if isinstance(error, ApiError) else api_error(error)
            await noted(Request(scope), refused)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        try:
            await front.app(scope, _again(data, receive), send)
        finally:
            self._leave(model)

    def model(self, name: str | None) -> Served:
        """The model that a request names; ApiError 404 for one that is not here."""
        found = self.models[:1] if name is None else [m for m in self.models if m.name == name]
        found = found or [model for model in self.models if name in model.names]
        if len(found) != 1:
            message = f"the model {name!r} does not exist; this server has {', '.join(repr(m.name) for m in self.models)}"
            raise ApiError(404, message, "model", "model_not_found")
        return found[0]

    async def _enter(self, model: Served) -> Front:
        """The model's application, in use until `_leave`; ApiError if it cannot be opened."""
        model.users += 1
        try:
            # Whoever waits may leave, and the others still want it.
            return await asyncio.shield(asyncio.ensure_future(self._opened(model)))
        except BaseException:
            self._leave(model)
            raise

    def _leave(self, model: Served) -> None:
        model.users -= 1
        model.left = time.monotonic()
        if not model.users:
            loop = asyncio.get_running_loop()
            loop.call_later(self.keep, lambda: loop.create_task(self._close_idle(model)))

    async def _opened(self, model: Served) -> Front:
        async with model.lock:
            if self.draining:
                raise Stopping
            if model.front is None:
                await self._make_room(model)
                loop, start = asyncio.get_running_loop(), time.monotonic()
                try:
                    front = await loop.run_in_executor(None, self.open, model.bundle, model.name, self.metrics)
                except Exception as error:
                    sentence = explain(error)
                    if sentence is None:
                        raise
                    say(f"{model.name} cannot be opened: {sentence}")
                    raise ApiError(
                        500, f"the model {model.name!r} cannot be opened: {sentence}", "model", "model_failure"
                    ) from None
                self.paths |= front.paths
                front.api.engine.start(loop)
                model.front = front
                say(f"{model.name} opened in {time.monotonic() - start:.1f} s")
            return model.front

    async def _make_room(self, model: Served) -> None:
        """Closes models that nobody uses, the longest unused first, until there is memory for this one."""
        for other in sorted(self.models, key=lambda m: m.left):
            # One that is being opened counts as open.
            opened = [m for m in self.models if m is not model and (m.front or m.lock.locked())]
            if sum(m.bytes for m in opened) + model.bytes <= self.memory:
                return
            if other.front and not other.users and not other.lock.locked():
                await self._close(other)

    async def _close_idle(self, model: Served) -> None:
        """Closes the model if it has not been used for `keep` seconds."""
        if not model.users and time.monotonic() - model.left >= self.keep:
            await self._close(model)

    async def _close(self, model: Served) -> None:
        async with model.lock:
            front, model.front = model.front, None
            if front is None:
                return
            if isinstance(front.api.engine, Engine):
                self.metrics.forget(model.name)
            held = [front]
            del front

            def close() -> None:
                held.pop().api.engine.stop()
                # What refers to itself would keep the weights and the states. After this call the thread of it might still
                # hold the engine, which would keep them too.
                gc.collect()

            await asyncio.get_running_loop().run_in_executor(None, close)
            say(f"{model.name} closed")

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette):
        try:
            yield
        finally:
            self.stop()

    async def _list(self, _: Request) -> Response:
        return JSONResponse(listed([self._described(model, model.name) for model in self.models]))

    async def _one(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._described(self.model(name), name))

    def _described(self, model: Served, name: str) -> dict:
        """What `create_app` says of a model, and whether it is open now."""
        loaded = model.front is not None
        return described(name, self.started, model.bundle.manifest, model.template, self.limits, loaded=loaded)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok" if self.healthy else "stopping"}, 200 if self.healthy else 503)

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, _: Request) -> Response:
        return page()

    # What the process asks of an engine.

    @property
    def _engines(self) -> list:
        return [model.front.api.engine for model in self.models if model.front]

    @property
    def healthy(self) -> bool:
        return not self.draining and all(engine.healthy for engine in self._engines)

    @property
    def unfinished(self) -> int:
        return sum(engine.unfinished for engine in self._engines)

    @property
    def lost(self) -> Exception | None:
        return next((engine.lost for engine in self._engines if engine.lost), None)

    def drain(self) -> None:
        self.draining = True
        for engine in self._engines:
            engine.drain()

    def abort(self) -> None:
        for engine in self._engines:
            engine.abort()

    def stop(self) -> None:
        self.draining = True
        for engine in self._engines:
            engine.stop()


def _directory(bundle: Bundle) -> str:
    return bundle.path.resolve().name.removesuffix(".castiron")


def _names(bundles: Sequence[Bundle]) -> list[str]:
    """A name for each: its own, or where others have that too its directory's; PipelineError if that is no difference."""
    own = [bundle.manifest.name for bundle in bundles]
    names = [_directory(bundle) if own.count(name) > 1 else name for bundle, name in zip(bundles, own)]
    for bundle, name in zip(bundles, names):
        if bundle.tokenizer is None:
            raise PipelineError(f"{bundle.path} has no tokenizer, because its checkpoint had none: it cannot serve text")
        if names.count(name) > 1:
            raise PipelineError(f"two models are called {name}, and a request could not say which: rename a bundle's directory")
    return names


def _named(data: bytes) -> str | None:
    """The model that a body names; ApiError for one that is no JSON."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        # In the words of a server of one model.
        read(TokenizeRequest, data)
        raise ApiError(400, "the body of this request is not valid JSON") from None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None


def _again(data: bytes, receive: Receive) -> Receive:
    """What gives a body that was read once more, and then what is still to come."""
    parts = [{"type": "http.request", "body": data, "more_body": False}]

    async def replayed():
        return parts.pop() if parts else await receive()

    return replayed
