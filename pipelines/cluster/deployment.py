"""A Ray Serve deployment of a bundle.

HTTP requests arrive at processes called fronts, which forward them to replicas of the model. A
front prefers the replica whose prefix cache has the longest prefix of the request's prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from castiron.pipelines.api.api_errors import ApiError, is_anthropic
from castiron.pipelines.api.model_api import Limits
from castiron.pipelines.cluster.actors import cpus_of_actor
from castiron.pipelines.cluster.bundle_source import BundleSource, bundle_at
from castiron.pipelines.server.app import QUEUE, open_app
from castiron.pipelines.server.exchange import error_response, while_connected
from castiron.pipelines.server.metrics import MEDIA_TYPE, labelled

# Prompts are hashed in blocks: bytes of a block (about 64 tokens), and max blocks of a prompt.
BLOCK, MAX_BLOCKS = 256, 64
# Max prefix hashes that a router stores.
MAX_PREFIXES = 100_000
# Exceptions of a call to a replica that died.
REPLICA_LOST = (RayActorError, ObjectLostError, WorkerCrashedError)
# Max replicas that a request is sent to: if so many die, the request is probably the cause.
ATTEMPTS = 4
# The keys of an ASGI scope whose values can be serialised.
SCOPE_KEYS = (
    "method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "headers", "client", "server",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """An HTTP request that an ingress process (`Front`) forwards to a replica of the model.

    scope: its ASGI scope. prefixes: hashes of the prompt's prefixes.
    """

    scope: Mapping[str, Any]
    body: bytes
    prefixes: tuple[bytes, ...]


def prefix_hashes(body: bytes) -> tuple[bytes, ...]:
    """Return hashes of a prompt's first block of BLOCK bytes, of its first two blocks, and so on.

    body: JSON of a generation request; for any other body, the result is empty.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    # The fields of a prompt, in the order in which templates render them.
    names = ("tools", "instructions", "system", "messages", "input", "prompt") if isinstance(value, dict) else ()
    text = "".join(json.dumps(value[name], ensure_ascii=False) for name in names if name in value)
    data, hashes, digest = text.encode("utf-8", "surrogatepass"), [], hashlib.blake2b(digest_size=16)
    for start in range(0, min(len(data) // BLOCK, MAX_BLOCKS) * BLOCK, BLOCK):
        digest.update(data[start : start + BLOCK])
        hashes.append(digest.digest())
    return tuple(hashes)


class PrefixRouter(RequestRouter):
    """A router that prefers the replica with the longest prefix of the prompt in its cache.

    Each process that receives HTTP requests has its own, which knows only what it has routed.
    Ray's prefix router (in ray.serve.llm) is not used, because it imports vLLM or SGLang.
    """

    def initialize_state(self, slots: int) -> None:  # type: ignore[override]
        """Initialise the router; slots: number of requests that a replica runs at the same time."""
        self.slots = slots
        self.replica_of: OrderedDict[bytes, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the longest prefix's replica unless it alone is full, two random ones, all."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        # Wait before the next attempt if no replica is free.
        pending_request.routing_context.should_backoff = True
        ids = [self.replica_of[prefix] for prefix in reversed(_prefixes(pending_request)) if prefix in self.replica_of]
        reader = next((self.curr_replicas[replica] for replica in ids if replica in self.curr_replicas), None)
        return [two, candidate_replicas] if reader is None or self._is_full(reader) else [[reader], two, candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that the replica now has this request's prompt in its prefix cache."""
        for prefix in _prefixes(pending_request):
            self.replica_of[prefix] = replica_id
            self.replica_of.move_to_end(prefix)
        while len(self.replica_of) > MAX_PREFIXES:
            self.replica_of.popitem(last=False)

    def _is_full(self, replica: RunningReplica) -> bool:
        lengths = {found: self.replica_queue_len_cache.get(found) or 0 for found in self.curr_replicas}
        return lengths[replica.replica_id] >= self.slots > min(lengths.values())


def _prefixes(pending: PendingRequest) -> tuple[bytes, ...]:
    return getattr(pending.args[0], "prefixes", ()) if pending.args else ()


class Front:
    """An ingress process of the deployment, which forwards HTTP requests to replicas."""

    def __init__(self, replicas: DeploymentHandle, body_bytes: int):
        self.replicas, self.body_bytes = replicas, body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/metrics", self.metrics), Mount("/", self.forward)])

    async def metrics(self, request: Request) -> Response:
        """Return the Prometheus metrics of all replicas; the label `replica` names the replica."""
        call = Call(_plain_scope(request.scope), b"", ())
        answers = await self.replicas.broadcast("complete_answer", call).results_async(return_exceptions=True)
        pages = dict(answer for answer in answers if not isinstance(answer, BaseException))
        for status, body in pages.values():
            if status != 200:
                return Response(body, status, media_type="application/json")
        text = labelled("replica", {name: body.decode() for name, (_, body) in sorted(pages.items())})
        return PlainTextResponse(text, media_type=MEDIA_TYPE)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for any path except /metrics; cancel it if the client disconnects."""
        body = await _read_body(receive, self.body_bytes)
        call = Call(_plain_scope(scope), body, prefix_hashes(body) if scope["method"] == "POST" else ())
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._answer(call, scope, receive, send))

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        started: Message | None = None
        status, reason = 502, f"{ATTEMPTS} replicas ended before they answered this request"
        for attempt in range(ATTEMPTS):
            # Wait before another attempt, because Ray needs time to detect that a replica died.
            await asyncio.sleep(0.2 * attempt)
            response = self.replicas.options(stream=True).answer.remote(call)
            try:
                async for messages in response:
                    for message in messages:
                        started = started or message
                        await send(message)
                return
            except REPLICA_LOST:
                if started:
                    await _send_lost(started, scope["path"], send)
                    return
            except (BackPressureError, DeploymentUnavailableError):
                status, reason = 503, "the server is busy; try again later"
                break
            finally:
                # Also ends the call if the client has disconnected.
                response.cancel()
        await error_response(ApiError(status, reason), scope["path"])(scope, receive, send)


async def _send_lost(started: Message, path: str, send: Send) -> None:
    """Report to a client that its replica died in the middle of the response.

    An event stream gets an error event. Any other response is cut with ConnectionResetError,
    because a normal end would make it look complete.
    """
    if not any(value.startswith(b"text/event-stream") for name, value in started["headers"] if name == b"content-type"):
        raise ConnectionResetError("the replica ended in the middle of its answer; the client must send the request again")
    error = ApiError(502, "the replica ended in the middle of its answer; send the request again")
    # Only Anthropic's events have names.
    name, body = ("event: error\n", error.anthropic_body) if is_anthropic(path) else ("", error.body)
    await send({"type": "http.response.body", "body": f"{name}data: {json.dumps(body)}\n\n".encode()})


async def _read_body(receive: Receive, limit: int) -> bytes:
    data, more = bytearray(), True
    while more and len(data) <= limit:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(data)


def _plain_scope(scope: Scope) -> dict[str, Any]:
    return {name: scope[name] for name in SCOPE_KEYS if name in scope} | {"headers": list(scope["headers"])}


class Replica:
    """A Ray actor that runs the ASGI application of `castiron.open_app` without a socket."""

    async def __init__(self, bundle: BundleSource, threads: int | None, options: Mapping[str, Any]):
        self.app = open_app(bundle_at(bundle), threads=threads or cpus_of_actor(), **options)
        self.app.models.start(asyncio.get_running_loop())
        self.name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        """Yield the ASGI messages of the response, in lists of those that are ready together."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(call, queue))
        try:
            while True:
                messages = [await queue.get()]
                while not queue.empty():
                    messages.append(queue.get_nowait())
                if found := [message for message in messages if message]:
                    yield found
                if messages[-1] is None:
                    return
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def complete_answer(self, call: Call) -> tuple[str, tuple[int, bytes]]:
        """Return (name of the replica, (HTTP status, body))."""
        messages = [message async for found in self.answer(call) for message in found]
        return self.name, (messages[0]["status"], b"".join(message.get("body", b"") for message in messages))

    async def _run(self, call: Call, queue: asyncio.Queue) -> None:
        bodies: Iterator[Message] = iter([{"type": "http.request", "body": call.body, "more_body": False}])

        async def receive() -> Message:
            # Waits forever after the body; a front cancels this task when its client disconnects.
            return next(bodies, None) or await asyncio.get_running_loop().create_future()

        try:
            await self.app({"type": "http", "asgi": {"version": "3.0"}, **call.scope}, receive, queue.put)
        except Exception:
            # The application has sent an error response already.
            traceback.print_exc()
        finally:
            queue.put_nowait(None)

    def check_health(self) -> None:
        if not self.app.models.healthy:
            raise RuntimeError("health check failed: the thread that runs the model has ended; Ray Serve restarts the replica")

    def __del__(self) -> None:
        if hasattr(self, "app"):
            self.app.models.stop()


def deployment(
    bundle: BundleSource,
    *,
    replicas: int | tuple[int, int] = 1,
    fronts: int = 1,
    cpus: float = 1,
    threads: int | None = None,
    slots: int = 8,
    queue: int = QUEUE,
    limits: Limits = Limits(),
    ray_actor_options: Mapping[str, Any] = {},
    **options: Any,
) -> serve.Application:
    """Return a Ray Serve application with the endpoints of `castiron serve`, for `serve.run`.

    Args:
        bundle: path on every node, URL for fsspec, or result of `castiron.ray.store`.
        replicas: their number, or (minimum, maximum); then each gets about `slots` requests.
        fronts: number of processes that read and route requests.
        threads: by default the CPUs of a replica.
        slots: requests that a replica runs at once; should be the bundle's largest batch size.
        queue: max requests that wait in each front.
        limits, options: as in `castiron.open_app`.
    """
    count: dict[str, Any] = {"num_replicas": replicas}
    if not isinstance(replicas, int):
        scaling = AutoscalingConfig(min_replicas=replicas[0], max_replicas=replicas[1], target_ongoing_requests=slots)
        count = {"autoscaling_config": scaling}
    model = serve.deployment(Replica).options(
        name="model",
        # A replica queues as many requests as it runs; the others wait in a front until a replica is free.
        max_ongoing_requests=2 * slots,
        max_queued_requests=queue,
        ray_actor_options={**ray_actor_options, "num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"slots": slots}),
        **count,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="front", num_replicas=fronts, max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(model.bind(bundle, threads, {**options, "queue": queue, "limits": limits}), limits.body_bytes)
