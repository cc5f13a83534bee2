"""One HTTP request and its response, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.byte_limit import ByteShare
from castiron.pipelines.api.model_api import run_in_thread
from castiron.pipelines.api.request_body import parse_body

# Status in the log and metrics of a request whose client left before the response, as in nginx.
CLIENT_LEFT = 499
# Max seconds to receive a body of a few megabytes.
BODY_SECONDS = 30.0
# Seconds between comments in a stream. Clients ignore comments, but without them some clients and proxies close a connection
# while the model reads a long prompt.
KEEP_ALIVE = 15.0
# Max bytes of a body that is parsed on the event loop: passing it to a thread would take longer.
SMALL_BODY = 16_000


@dataclass
class Exchange:
    """One HTTP request and its response.

    is_receiving: whether more of the request body will arrive.
    exits: context managers to exit after the response.
    job: computes the answer; its `summary` is logged.
    load_seconds: how long the request waited until its model was open.
    deadline: when `seconds` are over, on the event loop's clock.
    """

    client: str
    api_key: bytes
    seconds: float
    body: ByteShare
    is_receiving: bool
    exits: AsyncExitStack = field(default_factory=AsyncExitStack)
    status: int = CLIENT_LEFT
    error: ApiError | None = None
    job: Any = None
    load_seconds: float = 0.0
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = asyncio.get_running_loop().time() + self.seconds


def exchange_of(scope: Scope) -> Exchange:
    """Return the `Exchange` of an HTTP request, given the request's ASGI scope."""
    return scope["state"]["exchange"]


class BodyRoute(APIRoute):
    """A route that calls its endpoint with the validated body.

    FastAPI's own would validate on the event loop, collect every error, and require a content type.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        (record,) = (param.field_info.annotation for param in self.dependant.body_params)

        async def handle(request: Request) -> Response:
            limits = request.app.state.models.limits
            data = await read_body(request, limits.body_bytes)
            given = record, data, limits.strict_requests
            body = parse_body(*given) if len(data) < SMALL_BODY else await run_in_thread(parse_body, *given)
            return await self.endpoint(request, body)

        return handle


async def read_body(request: Request, limit: int) -> bytes:
    """Return the request body; ApiError if it is too large, too slow or of a wrong type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and "origin" in request.headers:
        # A page of any site can send other content types without a preflight request. Only browsers send an Origin header, so
        # other clients may leave the content type out.
        raise ApiError(415, f"content type {kind!r:.60} is not accepted from web pages; send 'Content-Type: application/json'")
    too_large = ApiError(413, f"request body too large: the limit is {limit} bytes; send less", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large
    data, share = bytearray(), exchange_of(request.scope).body
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                share.take(len(part))
                data += part
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408, f"request body incomplete after {BODY_SECONDS:.0f} s; send the whole body within that time"
        ) from None
    return bytes(data)


async def answer_request(request: Request, work: Awaitable[Any], stream: bool | None) -> Response:
    """Await a dict or a job, and return it as a response, which may be a stream."""
    exchange = exchange_of(request.scope)

    async def finish(work: Awaitable[Any]) -> Any:
        return await while_connected(request.receive, before_deadline(exchange, work))

    result = await finish(work)
    if isinstance(result, dict):
        return JSONResponse(result)
    exchange.job = result
    if stream:
        return StreamResponse(result)
    try:
        return JSONResponse(await finish(result.answer()))
    finally:
        if isinstance(result, Job):
            result.close()


class StreamResponse(Response):
    """A response that streams the events of a job, as server-sent events or lines of JSON.

    Status 200 is sent with the first event or keep-alive comment. A request that fails before that
    has its own status; one that fails later ends with an error event.
    """

    def __init__(self, job: Job):
        self.job, self.is_started, self._sending = job, False, asyncio.Lock()
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            await while_connected(receive, self._stream(send, exchange))
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except ApiError as error:
            exchange.error = error
            await error_response(error, scope["path"])(scope, receive, send)
        finally:
            self.job.close()

    async def _stream(self, send: Send, exchange: Exchange) -> None:
        async def chunks() -> None:
            async for chunk in self.job.chunks():
                await self._send(send, chunk)

        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await before_deadline(exchange, chunks())
        except ApiError as error:
            if not self.is_started:
                raise
            exchange.error = error
            for chunk in self.job.reply.fail(error):
                await self._send(send, chunk)
        finally:
            keep_alive.cancel()
        if self.job.reply.last:
            await self._send(send, self.job.reply.last)
        await send({"type": "http.response.body", "body": b""})

    async def _keep_alive(self, send: Send) -> None:
        # Clients that read lines of JSON parse every line.
        while not self.job.reply.is_ndjson:
            await asyncio.sleep(KEEP_ALIVE)
            await self._write(send, ": keep-alive\n\n")

    async def _send(self, send: Send, event: dict | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        if not self.job.reply.is_ndjson:
            name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
            text = f"{name}data: {text}\n"
        await self._write(send, f"{text}\n")

    async def _write(self, send: Send, text: str) -> None:
        async with self._sending:
            if not self.is_started:
                self.is_started = True
                media_type = b"application/x-ndjson" if self.job.reply.is_ndjson else b"text/event-stream; charset=utf-8"
                # By default nginx buffers the events.
                headers = [(b"content-type", media_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def before_deadline(exchange: Exchange, work: Awaitable) -> Any:
    """Await `work` and return its result; raise ApiError 504 at `exchange.deadline`."""
    try:
        async with asyncio.timeout_at(exchange.deadline):
            return await work
    except TimeoutError:
        message = f"the request takes longer than the {exchange.seconds:g} s that this server allows; ask for fewer tokens"
        raise ApiError(504, message, code="timeout") from None


async def while_connected(receive: Receive, work: Coroutine) -> Any:
    """Await `work`; if the client disconnects, cancel it and raise ClientDisconnect."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def error_response(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    status, body = error.response(path)
    return JSONResponse(body, status, {**error.headers, **(headers or {})})
