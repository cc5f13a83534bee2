"""`Engine`, which runs requests on a model, and `EventStream`, with which their events are read."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from castiron.pipelines.engine.constraint import ConstraintError
from castiron.pipelines.engine.draft import Draft
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.engine.scheduler import Events, Observer, Scheduler
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.run.session import Batch, Session
from castiron.vmfb.run.state_file import StateError, identity, read_head, read_rows, write_state


class Engine:
    """Runs several requests on a model at the same time."""

    def __init__(
        self, model: Bundle | Path | str | Session | Batch, threads: int | None = None, *, single: bool = False,
        observer: Observer | None = None, store: PrefixStore | None = None, draft: Draft | None = None, ngrams: bool = False,
        fill_slots: bool = False,
    ):  # fmt: skip
        """Open the bundle `model`, or use a session or batch that nothing else uses.

        threads: None for one per physical core.
        single: run one request at a time, even if the bundle can decode a batch.
        ngrams: speculate that the text repeats earlier text (prompt lookup).
        fill_slots: maximise throughput instead of the time between a request's tokens.
        """
        if isinstance(model, Session):
            model.rewind(0)
        batch = Batch(model, threads, single) if isinstance(model, Bundle | Path | str | Session) else model
        self._scheduler: Scheduler | None = Scheduler(
            batch, observer=observer, store=store, draft=draft, ngrams=ngrams, fill_slots=fill_slots
        )
        self.slots, self.context, self.manifest = batch.size, self._scheduler.context, self._scheduler.manifest
        # The unfinished requests, and changes for the scheduler, which are applied between turns.
        self._streams: dict[Request, EventStream] = {}
        self._changes: deque[tuple[Callable[[Scheduler, Request], None], Request]] = deque()
        # Notified when a turn has ended, and when a thread of the engine has work.
        self._wake = threading.Condition()
        self._in_turn = False
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        return self._scheduler is None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; PipelineError if the engine is closed, or opened before a fork."""
        if self._scheduler is None:
            raise PipelineError("this model is closed; load it again")
        if os.getpid() != self._process:
            raise PipelineError("this model was loaded before the process was forked; load it in the child")
        return self._scheduler

    @property
    def threads(self) -> int:
        return self.scheduler.batch.slots[0].threads

    @property
    def unfinished(self) -> list[Request]:
        return list(self._streams)

    @property
    def is_running(self) -> bool:
        """Whether the engine has a thread that runs the model."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, *requests: Request) -> EventStream:
        """Queue requests; return the stream of their events."""
        stream = self.stream()
        for request in requests:
            stream.submit(request)
        return stream

    def stream(self) -> EventStream:
        """Return a new stream, to which requests can be submitted."""
        return EventStream(self)

    def queue(self, request: Request, stream: EventStream) -> None:
        """Queue a request whose events `stream` gets."""
        self._streams[request] = stream
        self._change(Scheduler.submit, request)

    def cancel(self, request: Request) -> None:
        """Cancel a request: it has no more events."""
        if self._streams.pop(request, None):
            self._change(Scheduler.cancel, request)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Run the model on a thread of the engine; `loop` can then await events.

        The thread may start before there is a loop. RuntimeError if there is no memory for it.
        """
        self._loop = loop
        if not self.is_running:
            thread = threading.Thread(target=self._run, name="model")
            thread.start()
            self._thread = thread

    def _change(self, change: Callable[[Scheduler, Request], None], request: Request) -> None:
        self._changes.append((change, request))
        if self.is_running:
            with self._wake:
                self._wake.notify_all()

    def wait_for(self, stream: EventStream) -> None:
        """Run turns, or wait for those of other threads, until `stream` can be read."""
        with self._wake:
            while not stream.is_readable:
                if self._in_turn:
                    self._wake.wait()
                else:
                    self._turn(self.scheduler)

    def _turn(self, scheduler: Scheduler) -> Events:
        # The caller holds the lock, which is free during the turn so that other threads can wait.
        self._in_turn = True
        self._wake.release()
        events: Events = []
        try:
            self._apply_changes(scheduler)
            events = scheduler.turn()
        except BaseException as error:
            # The scheduler handles errors of requests. After any other error, end all requests, so
            # that the engine can still serve later ones.
            events = scheduler.fail_all(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._wake.acquire()
            self._in_turn = False
            self._deliver(events)
            self._wake.notify_all()
        return events

    def _apply_changes(self, scheduler: Scheduler) -> None:
        while self._changes:
            change, request = self._changes.popleft()
            change(scheduler, request)

    def _deliver(self, events: Events) -> None:
        streams = []
        for request, event in events:
            if stream := self._streams.get(request):
                if isinstance(event, Finished | Failed):
                    self._streams.pop(request, None)
                stream.add(request, event)
                streams.append(stream)
        if streams and self._loop:
            # RuntimeError: the event loop is closed already.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: [stream.arrived.set() for stream in streams])

    def _run(self) -> None:
        with self._wake:
            while self._scheduler:
                if self._in_turn or not (self._changes or self._streams):
                    self._wake.wait()
                    continue
                events = self._turn(self._scheduler)
                for failure in {event.error for _, event in events if isinstance(event, Failed)}:
                    if not isinstance(failure, ConstraintError):
                        traceback.print_exception(failure)

    def fail(self, error: PipelineError) -> None:
        """End every unfinished request with `error`."""
        with self._wake:
            for request in self.unfinished:
                self._change(Scheduler.cancel, request)
                self._deliver([(request, Failed(error))])

    @contextmanager
    def exclusive(self) -> Iterator[Scheduler]:
        """Yield the scheduler; no other thread runs it until the `with` block ends."""
        with self._wake:
            while self._in_turn:
                self._wake.wait()
            scheduler, self._in_turn = self.scheduler, True
        try:
            self._apply_changes(scheduler)
            yield scheduler
        finally:
            with self._wake:
                self._in_turn = False
                self._wake.notify_all()

    @property
    def position(self) -> int:
        """The number of tokens in the slot that was used last."""
        with self.exclusive() as scheduler:
            return scheduler.batch.slots[scheduler.cache.latest()].position

    def save_state(self, path: Path) -> None:
        """Write the last used slot to the file `path`; if it is empty, remove the file."""
        with self.exclusive() as scheduler:
            slot = scheduler.cache.latest()
            session = scheduler.batch.slots[slot]
            if position := session.position:
                bundle = identity(self.manifest, is_long=session.is_long)
                write_state(path, bundle, scheduler.cache.tokens[slot, :position], session.rows(position))
            else:
                path.unlink(missing_ok=True)

    def load_state(self, path: Path) -> None:
        """Read a file of `save_state` into the prefix cache; StateError for another bundle's."""
        state = read_head(path)
        identities = [identity(self.manifest, is_long=is_long) for is_long in (False, True)]
        if state.bundle not in identities:
            raise StateError(f"{path} is a state of another bundle; load it with that bundle")
        with self.exclusive() as scheduler:
            rows = read_rows(state, scheduler.batch.slots[0].rows(len(state.tokens)))
            scheduler.cache.load(rows, state.tokens, bool(identities.index(state.bundle)))

    def close(self) -> None:
        """Close the engine after its current turn; later reads of events raise PipelineError.

        Waits for its thread, and until all files of the prefix store are written.
        """
        with self._wake:
            scheduler, self._scheduler = self._scheduler, None
            while self._in_turn:
                self._wake.wait()
            self._wake.notify_all()
        if self._thread:
            self._thread.join()
        if scheduler and scheduler.cache.store:
            scheduler.cache.store.finish()


class EventStream:
    """The (request, event) pairs of the requests that were submitted to it, for one reader."""

    def __init__(self, engine: Engine | None, requests: Iterable[Request] = ()):
        """Create a stream; without an engine, the caller adds the events of `requests`."""
        self._engine, self._live, self._events = engine, set(requests), deque[tuple[Request, Event]]()
        # Set on the event loop after events were added.
        self.arrived = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and all their events have been read."""
        return not self._live and not self._events

    @property
    def is_readable(self) -> bool:
        """Whether `read` returns at once."""
        return bool(self._events) or not self._live

    def submit(self, request: Request) -> None:
        """Queue a request; any thread may call this."""
        assert self._engine
        self._live.add(request)
        self._engine.queue(request, self)

    def cancel(self, request: Request) -> None:
        """Cancel a request: no further events of it are added. Any thread may call this."""
        if self._engine and request in self._live:
            self._engine.cancel(request)
            self._live.discard(request)

    def add(self, request: Request, event: Event) -> None:
        """Add an event of a request."""
        self._events.append((request, event))
        if isinstance(event, Finished | Failed):
            self._live.discard(request)

    def read(self) -> Events:
        """Wait for the next events and return them; [] if all requests have ended."""
        if self._engine:
            self._engine.wait_for(self)
        return [self._events.popleft() for _ in range(len(self._events))]

    def __iter__(self) -> Iterator[tuple[Request, Event]]:
        while not self.idle:
            yield from self.read()

    async def __aiter__(self) -> AsyncIterator[tuple[Request, Event]]:
        while True:
            # Cleared first: what arrives while the reader handles an event must wake it up.
            self.arrived.clear()
            # Looked up before the events, because the last one is added before its request ends.
            has_ended = not self._live
            while self._events:
                yield self._events.popleft()
            if has_ended:
                return
            await self.arrived.wait()

    def close(self) -> None:
        """Cancel the requests that have not ended, and drop the events that were not read."""
        for request in list(self._live):
            self.cancel(request)
        self._events.clear()
