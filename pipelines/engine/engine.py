"""`Engine`, which takes requests, runs the model and returns the events of the requests."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from castiron.pipelines.engine.draft import Draft
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.engine.scheduler import Events, Observer, Scheduler
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.device.program import NanLogitsError
from castiron.vmfb.run.batch import Batch
from castiron.vmfb.run.session import Session
from castiron.vmfb.run.state_file import StateError, identity, read_head, read_rows, write_state


class SingleSlot:
    """An adapter that gives a session, which runs one sequence, the interface of `Batch`."""

    size = 1

    def __init__(self, session: Session):
        self.slots = [session]

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Run a decode step; return {0: most probable next token}, where -1 means NaN logits.

        tokens: {0: token to read}. The key is the index of the only sequence.
        """
        try:
            return {0: self.slots[0].step(tokens[0])}
        except NanLogitsError:
            return {0: -1}


class Engine:
    """An engine that runs several requests on a model at the same time.

        engine = Engine("build/model")
        for request, event in engine.submit(Request(prompt, engine.context, max_tokens=64)):
            ...

    Each running request has a slot, which is the KV cache of one sequence. The engine has no thread
    of its own: a thread that waits for events runs the model for all requests. If another thread is
    already doing this, the waiting thread waits for it.
    """

    def __init__(
        self,
        model: Bundle | Path | str | Session | Any,
        threads: int | None = None,
        *,
        single: bool = False,
        observer: Observer | None = None,
        store: PrefixStore | None = None,
        draft: Draft | None = None,
        ngrams: bool = False,
        fill_slots: bool = False,
    ):
        """Open the bundle `model`, or use a session or batch that is already open.

        Args:
            model: a bundle (compiled model) or its path, or a `Session` or `Batch` that nothing
                else uses.
            threads: CPU threads, by default one per physical core.
            single: whether to run one request at a time, even if the bundle can decode a batch.
            observer: its methods are called when requests start, generate tokens and end.
            store: cache on disk for the KV caches of prompt prefixes.
            draft: draft model for speculative decoding.
            ngrams: whether to speculate that the text repeats earlier text (prompt lookup).
            fill_slots: whether to maximise throughput; by default, the time between two tokens of a
                request is kept short.
        """
        if isinstance(model, Bundle | Path | str):
            model = Session(model, threads) if single else Batch(model, threads)
        if isinstance(model, Session):
            model.rewind(0)
        batch = SingleSlot(model) if isinstance(model, Session) else model
        self._scheduler: Scheduler | None = Scheduler(
            batch, observer=observer, store=store, draft=draft, ngrams=ngrams, fill_slots=fill_slots
        )
        self.slots, self.context, self.manifest = batch.size, self._scheduler.context, self._scheduler.manifest
        self.submitted: deque[Request] = deque()
        self.cancelled: deque[Request] = deque()
        self.streams: dict[Request, EventStream] = {}
        # Notified when a turn has ended.
        self._turn_ended = threading.Condition()
        self._in_turn = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        return self._scheduler is None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which runs the requests.

        Raises PipelineError if the engine is closed, or if this process is a fork of the one that
        opened the engine.
        """
        if self._scheduler is None:
            raise PipelineError("this model is closed; load it again")
        if os.getpid() != self._process:
            raise PipelineError("this model was loaded before the process was forked; load it in the child")
        return self._scheduler

    @property
    def threads(self) -> int:
        return self.scheduler.batch.slots[0].threads

    def submit(self, request: Request) -> EventStream:
        """Queue a request; return the stream of its events."""
        stream = self.stream()
        stream.submit(request)
        return stream

    def stream(self) -> EventStream:
        """Return a new stream, to which several requests can be submitted."""
        return EventStream(self)

    def read(self, stream: EventStream) -> Events:
        """Return the next events of a stream; [] if all its requests have ended.

        Until there are events, the calling thread runs the scheduler, or waits while another thread
        runs it.
        """
        with self._turn_ended:
            while not stream.events and (stream.live or self.cancelled):
                if self._in_turn:
                    self._turn_ended.wait()
                else:
                    self._turn(self.scheduler)
            found, stream.events = stream.events, []
        return found

    def _turn(self, scheduler: Scheduler) -> None:
        """Run one turn of the scheduler, and add the new events to the streams of their requests.

        The caller holds the lock `self._turn_ended`. This method releases the lock while the turn
        runs, so that other threads can wait for the turn's end, and then acquires it again.
        """
        self._in_turn = True
        self._turn_ended.release()
        events: Events = []
        try:
            self._take_in(scheduler)
            events = scheduler.turn()
        except BaseException as error:
            # The scheduler handles errors of requests. After any other error, end all requests, so
            # that the engine can still serve later ones.
            events = scheduler.fail_all(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._turn_ended.acquire()
            self._in_turn = False
            for request, event in events:
                if stream := self.streams.get(request):
                    stream.add(request, event)
            self._turn_ended.notify_all()

    def _take_in(self, scheduler: Scheduler) -> None:
        while self.submitted:
            scheduler.submit(self.submitted.popleft())
        while self.cancelled:
            scheduler.cancel(self.cancelled.popleft())

    @contextmanager
    def exclusive(self) -> Iterator[Scheduler]:
        """Yield the scheduler; no other thread runs it until the `with` block ends."""
        with self._turn_ended:
            while self._in_turn:
                self._turn_ended.wait()
            scheduler, self._in_turn = self.scheduler, True
        try:
            self._take_in(scheduler)
            yield scheduler
        finally:
            with self._turn_ended:
                self._in_turn = False
                self._turn_ended.notify_all()

    @property
    def position(self) -> int:
        """The number of tokens in the KV cache of the slot (sequence) that was used last."""
        with self.exclusive() as scheduler:
            return scheduler.batch.slots[scheduler.cache.latest()].position

    def save_state(self, path: Path) -> None:
        """Write the tokens and KV cache of the last used slot (sequence) to the file `path`.

        If the slot has no tokens, the file is removed.
        """
        with self.exclusive() as scheduler:
            slot = scheduler.cache.latest()
            session = scheduler.batch.slots[slot]
            if position := session.position:
                tokens = scheduler.cache.tokens[slot, :position]
                write_state(path, identity(self.manifest), tokens, session.rows(position))
            else:
                path.unlink(missing_ok=True)

    def load_state(self, path: Path) -> None:
        """Read a file that `save_state` wrote, and put its KV cache into the prefix cache.

        Raises StateError if the file belongs to another bundle.
        """
        state = read_head(path)
        if state.bundle != identity(self.manifest):
            raise StateError(f"{path} is a state of another bundle; load it with that bundle")
        with self.exclusive() as scheduler:
            scheduler.cache.load(read_rows(state, scheduler.batch.slots[0].rows(len(state.tokens))), state.tokens)

    def close(self) -> None:
        """Close the engine; later reads of events raise PipelineError, also for running requests.

        Waits until the scheduler has ended its current turn, and until all files of the prefix
        store are written.
        """
        with self._turn_ended:
            scheduler, self._scheduler = self._scheduler, None
            while self._in_turn:
                self._turn_ended.wait()
            self._turn_ended.notify_all()
        if scheduler and scheduler.cache.store:
            scheduler.cache.store.finish()


class EventStream:
    """An iterator over the (request, event) pairs of the requests submitted to this stream.

    It ends when these requests have ended. While a thread waits for the next pair, it runs the
    engine, which has no thread of its own.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.events: Events = []
        self.live: set[Request] = set()

    @property
    def idle(self) -> bool:
        """Whether all requests have ended and all their events have been read."""
        return not self.live and not self.events

    def submit(self, request: Request) -> None:
        """Queue a request; any thread may call this."""
        self.live.add(request)
        self.engine.streams[request] = self
        self.engine.submitted.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request: no further events of it are added. Any thread may call this."""
        if request in self.live:
            self._forget(request)
            self.engine.cancelled.append(request)

    def read(self) -> Events:
        """Wait for the next events and return them; [] if all requests have ended."""
        return self.engine.read(self)

    def add(self, request: Request, event: Event) -> None:
        """Add an event of a request; only the engine calls this."""
        self.events.append((request, event))
        if isinstance(event, Finished | Failed):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.live.discard(request)
        self.engine.streams.pop(request, None)

    def __iter__(self) -> Iterator[tuple[Request, Event]]:
        while not self.idle:
            yield from self.read()

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        for request in list(self.live):
            self.cancel(request)
