"""A queue in front of a child process, and a cache of its results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from castiron.pipelines.child_process import ChildProcess


class Cache:
    """The newest values by key; several threads may use it."""

    def __init__(self, size: int):
        self._size, self._values, self._lock = size, OrderedDict[bytes, Any](), threading.Lock()

    def get(self, key: bytes) -> Any:
        """Return a value, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: bytes, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._size:
                self._values.popitem(last=False)


class Lane:
    """A child process, and a thread that calls it for one coroutine after another."""

    def __init__(self, child: ChildProcess):
        self.child, self._lock = child, threading.Lock()
        self._running: object = None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "lane")

    async def run(self, deadline: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread; raise TimeoutError at `deadline`; None for none."""
        job = object()
        queued = self._thread.submit(self._call, job, function, *arguments)
        work = asyncio.wrap_future(queued)
        # Read the exception, so that asyncio does not log the error of a cancelled request.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait([work], timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except asyncio.CancelledError:
            if not queued.cancel():
                self._stop(job)
                await asyncio.wait([work])
            raise
        if not work.done():
            # A process that is starting goes on, for the next call.
            queued.cancel()
            raise TimeoutError
        return work.result()

    def _call(self, job: object, function: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self._running = job
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self._running = None

    def _stop(self, job: object) -> None:
        # Under the lock, so that the call of the next coroutine is not stopped.
        with self._lock:
            if self._running is job:
                self.child.stop()
