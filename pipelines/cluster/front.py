"""The HTTP side of a deployment: reads a request, hands it to a replica, and to another one if that dies before it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from castiron.pipelines.cluster.prefix_router import beginnings
from castiron.pipelines.serve.answers import refusal
from castiron.pipelines.serve.errors import ApiError, speaks_anthropic
from castiron.pipelines.serve.metrics import labelled

# What a call ends with when its replica is no longer there.
GONE = (RayActorError, ObjectLostError, WorkerCrashedError)
# How often one request is handed on; more replicas than these do not die of anything but the request itself.
ATTEMPTS = 4
# Of a scope, what is told a replica: plain values all.
TOLD = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "headers", "client", "server")


@dataclass(frozen=True)
class Call:
    """A request as a replica has it: what it says of itself, its body, and the marks of its prompt's beginnings."""

    scope: Mapping[str, Any]
    body: bytes
    beginnings: tuple[bytes, ...]


class Front:
    """The ASGI application of the ingress, over a handle to the replicas."""

    def __init__(self, replicas: DeploymentHandle, body_bytes: int):
        """Of a body more than `body_bytes` is not read: the replica refuses it."""
        self.replicas, self.body_bytes = replicas, body_bytes

    def application(self) -> Starlette:
        return Starlette(routes=[Route("/metrics", self.metrics), Mount("/", self.forward)])

    async def metrics(self, request: Request) -> Response:
        """Those of all replicas, with the label `replica`; a replica's refusal where a key is missing."""
        call = Call(_told(request.scope), b"", ())
        answers = await self.replicas.broadcast("whole", call).results_async(return_exceptions=True)
        pages = dict(answer for answer in answers if not isinstance(answer, BaseException))
        refused = next((response for response in pages.values() if response[0] != 200), None)
        if refused:
            return Response(refused[1], refused[0], media_type="application/json")
        text = labelled("replica", {name: body.decode() for name, (_, body) in sorted(pages.items())})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any other request."""
        body = await _body(receive, self.body_bytes)
        call = Call(_told(scope), body, beginnings(body) if scope["method"] == "POST" else ())
        answering = asyncio.create_task(self._answer(call, scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        started: Message | None = None
        for attempt in range(ATTEMPTS):
            # Who has died is known a moment later.
            await asyncio.sleep(0.2 * attempt)
            response = self.replicas.options(stream=True).answer.remote(call)
            try:
                async for messages in response:
                    for message in messages:
                        started = started or message
                        await send(message)
                return
            except GONE:
                if started:
                    await _cut_off(started, scope["path"], send)
                    return
            except (BackPressureError, DeploymentUnavailableError):
                return await _refuse(503, "the server is busy; try again later", scope, receive, send)
            finally:
                # Whoever asked may have left; of a call that has ended nothing is left to cancel.
                response.cancel()
        message = f"{ATTEMPTS} replicas ended on this request one after another before they had begun to answer"
        await _refuse(502, message, scope, receive, send)


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    await refusal(ApiError(status, message), scope["path"])(scope, receive, send)


async def _cut_off(started: Message, path: str, send: Send) -> None:
    """Says in a stream of events that there is no more; any other answer is broken off, so that nobody takes it for whole."""
    if not any(value.startswith(b"text/event-stream") for name, value in started["headers"] if name == b"content-type"):
        raise ConnectionResetError("the replica ended in the middle of its answer")
    error = ApiError(502, "the replica ended in the middle of this answer; ask again")
    # Anthropic's clients pass over an event without a name.
    name, body = ("event: error\n", error.anthropic_body) if speaks_anthropic(path) else ("", error.body)
    await send({"type": "http.response.body", "body": f"{name}data: {json.dumps(body)}\n\n".encode()})


async def _body(receive: Receive, limit: int) -> bytes:
    """The body, or of one that is too long more than `limit`."""
    data, more = bytearray(), True
    while more and len(data) <= limit:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(data)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(scope: Scope) -> dict[str, Any]:
    return {name: scope[name] for name in TOLD if name in scope} | {"headers": list(scope["headers"])}
