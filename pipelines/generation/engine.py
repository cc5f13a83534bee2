"""The one thread that runs the model, and the sequences that come to it from an event loop."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.constraint import CannotFollow
from castiron.pipelines.generation.scheduler import Events, Scheduler
from castiron.pipelines.generation.sequence import Event, Failed, Finished, Sequence
from castiron.vmfb.program import FileChanged

Tell = Callable[[Sequence, Event], None]


# Clients that may each fill a queue before the next one is refused.
QUEUES = 4


class QueueFull(PipelineError):
    """There is no room for so many more sequences; there may be later."""


class Stopping(PipelineError):
    """No sequence is taken any more, or goes on."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Engine:
    """Runs a `Scheduler` in a thread of its own.

    Sequences come from an event loop, and their events are delivered there. Of one client at most `queue` sequences wait
    beyond the slots that there are, and of all clients `QUEUES` times as many, so that none can take the room of all. `lost`
    says why none can be run any more.
    """

    def __init__(self, scheduler: Scheduler, queue: int):
        self.scheduler, self.queue, self.slots = scheduler, queue, scheduler.slots
        # Of the loop, with who listens; and what the thread has not taken notice of yet.
        self._live: dict[Sequence, Tell] = {}
        self._arrived: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._wake = threading.Condition()
        self._draining = self._ended = False
        self.lost: FileChanged | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model")

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and the thread lives."""
        return self._thread.is_alive() and not self._draining and not self.lost

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._live)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to work; events are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, sequences: list[Sequence], tell: Tell) -> None:
        """Queues sequences, all or none, and calls `tell` with each of their events; QueueFull or Stopping."""
        with self._wake:
            if self._draining:
                raise Stopping
            mine = sum(live.client == sequence.client for sequence in sequences[:1] for live in self._live)
            for those, most in ((mine, self.queue), (len(self._live), QUEUES * self.queue)):
                if those + len(sequences) > self.slots + most:
                    waiting = max(0, those - self.slots)
                    raise QueueFull(
                        f"the server is busy: {those - waiting} sequences run and {waiting} wait, "
                        f"{len(sequences)} more do not fit in its queue of {most}; try again later"
                    )
            self._arrived += sequences
            self._live.update(dict.fromkeys(sequences, tell))
            self._wake.notify()

    def cancel(self, sequences: list[Sequence]) -> None:
        """Stops what is not finished of `sequences`; they tell nothing more."""
        with self._wake:
            for sequence in sequences:
                self._live.pop(sequence, None)
            self._cancelled += sequences
            self._wake.notify()

    def drain(self) -> None:
        """Takes no more requests; those that it has go on."""
        with self._wake:
            self._draining = True

    def abort(self) -> None:
        """Ends every sequence with an error; for after `drain`. Called on the loop."""
        live = dict(self._live)
        self.cancel(list(live))
        for sequence, tell in live.items():
            tell(sequence, Failed(Stopping()))

    def stop(self) -> None:
        """Cancels everything and waits for the thread."""
        with self._wake:
            self._draining = self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._arrived or self._cancelled or self._ended or not self.scheduler.idle):
                    self._wake.wait()
                if self._ended:
                    return
                arrived, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, []
            for sequence in arrived:
                self.scheduler.submit(sequence)
            try:
                for sequence in cancelled:
                    self.scheduler.cancel(sequence)
                events = self.scheduler.turn()
            except Exception as error:
                # The scheduler deals with what a sequence can cause; whatever this is, the others to come are served.
                events = self.scheduler.give_up(error)
            for failure in {event.error for _, event in events if isinstance(event, Failed)}:
                if isinstance(failure.__cause__, FileChanged):
                    self.lost = failure.__cause__
                elif not isinstance(failure, CannotFollow):
                    traceback.print_exception(failure)
            # Once the loop is closed nobody listens any more.
            with contextlib.suppress(RuntimeError):
                if events:
                    self._loop.call_soon_threadsafe(self._hand_over, events)

    def _hand_over(self, events: Events) -> None:
        for sequence, event in events:
            tell = self._live.get(sequence)
            if isinstance(event, Finished | Failed):
                self._live.pop(sequence, None)
            if tell:
                tell(sequence, event)
