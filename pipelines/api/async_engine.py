"""`AsyncEngine`, which runs the engine on its own thread and delivers events to an event loop."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable

from castiron.pipelines.engine.chooser import ConstraintError
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.engine.scheduler import Events
from castiron.pipelines.errors import PipelineError

Listener = Callable[[Request, Event], None]

# The limit for queued requests of all clients, as a multiple of the limit for one client.
QUEUES = 4


class QueueFull(PipelineError):
    """Raised if the queue has no space for a request."""


class Stopping(PipelineError):
    """Raised for a request that arrives or runs while the server shuts down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class AsyncEngine:
    """An `Engine` on its own thread.

    Listeners get the events of their requests on asyncio's event loop.
    """

    def __init__(self, engine: Engine, queue: int):
        """Prepare the thread, which `start` starts.

        `queue`: max requests of one client that wait for a slot. All clients together can have
        `QUEUES * queue` waiting requests.
        """
        self.engine, self.queue, self.slots = engine, queue, engine.slots
        self._stream = engine.stream()
        self._listeners: dict[Request, Listener] = {}
        self._wake = threading.Condition()
        self._draining = self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model")

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and accepts requests."""
        return self._thread.is_alive() and not self._draining

    @property
    def unfinished(self) -> int:
        """The number of requests that run or wait for a slot."""
        return len(self._listeners)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; listeners are called on the event loop `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, requests: list[Request], listener: Listener) -> None:
        """Queue `requests` of one client and pass their events to `listener`.

        Raises QueueFull if not all requests fit in the queue, and Stopping after `drain`. In both
        cases no request is queued.
        """
        with self._wake:
            if self._draining:
                raise Stopping
            own = sum(live.client == request.client for request in requests[:1] for live in self._listeners)
            for count, limit in ((own, self.queue), (len(self._listeners), QUEUES * self.queue)):
                if count + len(requests) > self.slots + limit:
                    waiting = max(0, count - self.slots)
                    raise QueueFull(
                        f"the queue of {limit} requests is full: {count - waiting} run and {waiting} wait, so "
                        f"{len(requests)} more do not fit; try again later"
                    )
            self._listeners.update(dict.fromkeys(requests, listener))
            for request in requests:
                self._stream.submit(request)
            self._wake.notify()

    def cancel(self, requests: list[Request]) -> None:
        """Cancel the unfinished ones of `requests`; their listeners are not called again."""
        with self._wake:
            for request in requests:
                self._listeners.pop(request, None)
                self._stream.cancel(request)
            self._wake.notify()

    def drain(self) -> None:
        """Reject new requests from now on, and let accepted requests finish."""
        with self._wake:
            self._draining = True

    def abort(self) -> None:
        """Fail every unfinished request with `Stopping`.

        Call this on the event loop, after `drain`.
        """
        live = dict(self._listeners)
        self.cancel(list(live))
        for request, listener in live.items():
            listener(request, Failed(Stopping()))

    def stop(self) -> None:
        """Cancel all requests and wait for the thread to end."""
        with self._wake:
            self._draining = self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._stream.idle and not self.engine.cancelled and not self._ended:
                    self._wake.wait()
                if self._ended:
                    return
            events = self._stream.read()
            for failure in {event.error for _, event in events if isinstance(event, Failed)}:
                if not isinstance(failure, ConstraintError):
                    traceback.print_exception(failure)
            # call_soon_threadsafe raises RuntimeError if the event loop is closed already.
            with contextlib.suppress(RuntimeError):
                if events and self._loop:
                    self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Events) -> None:
        for request, event in events:
            listener = self._listeners.get(request)
            if isinstance(event, Finished | Failed):
                self._listeners.pop(request, None)
            if listener:
                listener(request, event)
