"""Answers on their way to who asked: whole, as a stream of events, or refused; while the client is there and there is time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from castiron.pipelines.serve.api import Api, Job
from castiron.pipelines.serve.errors import ApiError, http_error
from castiron.pipelines.serve.schemas import Asking
from castiron.pipelines.serve.text_api import TextApi

# For the log alone: the client is no longer there to read it. nginx's number.
LEFT = 499


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def answered(request: Request, api: TextApi, body: Asking, start: Coroutine[Any, Any, Job]) -> Response:
    """The response to a request whose sequences `start` queues."""
    request.state.job = job = await awaited(request, api, start)
    if body.stream:
        return EventStream(api, job)
    try:
        answer = await awaited(request, api, api.whole(job))
    finally:
        api.close(job)
    return JSONResponse(answer)


class EventStream(Response):
    """What a reply tells as server-sent events, named by their type where they have one. The first one decides about the
    status, so that a request that fails before it has said anything is an ordinary error."""

    def __init__(self, api: Api, job: Job):
        self.api, self.job = api, job
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send, scope["state"]["until"]))
        except ClientLeft:
            scope["state"]["status"] = LEFT
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
        finally:
            self.api.close(self.job)

    async def _stream(self, send: Send, until: float) -> None:
        started = False

        async def event(data: str, kind: str | None = None) -> None:
            nonlocal started
            if not started:
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                # For nginx, which would collect the events otherwise.
                headers.append((b"x-accel-buffering", b"no"))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            text = f"event: {kind}\ndata: {data}\n\n" if kind else f"data: {data}\n\n"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def all_chunks() -> None:
            async for chunk in self.api.chunks(self.job):
                await event(_json(chunk), chunk.get("type"))

        try:
            await in_time(self.api, until, all_chunks())
        except ApiError as error:
            if not started:
                raise
            for chunk in self.job.reply.fail(error):
                await event(_json(chunk), chunk.get("type"))
        if self.job.reply.last:
            await event(self.job.reply.last)
        await send({"type": "http.response.body", "body": b""})


async def awaited(request: Request, api: TextApi, work: Coroutine):
    """The result of `work`, while the client is there and there is time."""
    return await while_connected(request.receive, in_time(api, request.state.until, work))


async def in_time(api: TextApi, until: float, work: Coroutine):
    """The result of `work`; ApiError if it is not there when the loop's clock says `until`."""
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError:
        message = f"the request took longer than the {api.limits.seconds:g} s that this server allows"
        raise ApiError(504, message, code="timeout") from None


async def while_connected(receive: Receive, work: Coroutine):
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


def noted(request: Request, error: ApiError) -> Response:
    """A refusal that is counted by its code."""
    request.state.code = error.code
    return refusal(error, request.url.path)


def refusal(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """In the shape of the API that has the path."""
    status, body = error.told(path)
    return JSONResponse(body, status, {**error.headers, **(headers or {})})


def unknown(request: Request, error: HTTPException) -> Response:
    """A path that is none, or a method that it has not."""
    path = request.url.path
    return refusal(http_error(error.status_code, error.detail, path), path, error.headers)


def _json(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
