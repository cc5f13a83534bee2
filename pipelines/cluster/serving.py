"""A bundle behind Ray Serve: fronts that take requests, replicas that answer them, as many as the queue asks for."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from castiron.pipelines.cluster.front import Call, Front
from castiron.pipelines.cluster.places import Place, bundle_at
from castiron.pipelines.cluster.prefix_router import PrefixRouter
from castiron.pipelines.cluster.rows import cpus_of_actor
from castiron.pipelines.serve.app import QUEUE, open_app
from castiron.pipelines.serve.text_api import Limits


class Replica:
    """The application of `castiron.open_app` in an actor, called by message in place of by socket."""

    async def __init__(self, bundle: Place, threads: int | None, options: Mapping[str, Any]):
        self.app = open_app(bundle_at(bundle), threads=threads or cpus_of_actor(), **options)
        self.app.api.engine.start(asyncio.get_running_loop())
        self.name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        """The messages of ASGI with which the application answers, as many together as there are."""
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(call, said))
        try:
            while True:
                messages = [await said.get()]
                while not said.empty():
                    messages.append(said.get_nowait())
                if found := [message for message in messages if message]:
                    yield found
                if messages[-1] is None:
                    return
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def whole(self, call: Call) -> tuple[str, tuple[int, bytes]]:
        """The replica's name, and status and body of its answer."""
        messages = [message async for found in self.answer(call) for message in found]
        return self.name, (messages[0]["status"], b"".join(message.get("body", b"") for message in messages))

    async def _run(self, call: Call, said: asyncio.Queue) -> None:
        waiting = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            # A caller that leaves cancels this task.
            return await asyncio.get_running_loop().create_future()

        try:
            await self.app({"type": "http", "asgi": {"version": "3.0"}, **call.scope}, receive, said.put)
        except Exception:
            # It has said so already, with a status of its own.
            traceback.print_exc()
        finally:
            said.put_nowait(None)

    def check_health(self) -> None:
        if not self.app.api.engine.healthy:
            raise RuntimeError("the thread that runs the model has ended")

    def __del__(self) -> None:
        if hasattr(self, "app"):
            self.app.api.engine.stop()


class Ingress:
    """What Serve's proxies hand requests to."""

    def __init__(self, replicas: DeploymentHandle, body_bytes: int):
        self.front = Front(replicas, body_bytes)

    def __serve_build_asgi_app__(self):
        return self.front.application()


def deployment(
    bundle: Place,
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
    """A bundle with the endpoints of `castiron serve`, for `ray.serve.run`.

    `bundle`: its path on every node, a URL of fsspec's, or what `castiron.ray.store` made. `replicas`: how many, or fewest and
    most, between which Serve chooses by how many requests there are for each of a replica's `slots`, which are those of
    the bundle's widest batch. A replica has `cpus` and runs as many `threads`; `ray_actor_options` are what else it needs.
    `fronts` read requests and route them, to a replica that has read the same beginning before where there is one;
    `queue` requests may wait in each. `options` are those of `castiron.open_app`.
    """
    count: dict[str, Any] = {"num_replicas": replicas}
    if not isinstance(replicas, int):
        least, most = replicas
        scaling = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=slots)
        count = {"autoscaling_config": scaling}
    answering = serve.deployment(Replica).options(
        name="model",
        # Beyond its slots a replica has the next requests at hand; what is more waits where any replica may have it.
        max_ongoing_requests=2 * slots,
        max_queued_requests=queue,
        ray_actor_options={**ray_actor_options, "num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"slots": slots}),
        **count,
    )
    front = serve.deployment(serve.ingress()(Ingress)).options(
        name="front", num_replicas=fronts, max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(answering.bind(bundle, threads, {**options, "queue": queue, "limits": limits}), limits.body_bytes)
