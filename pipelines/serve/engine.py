"""The one thread that runs the model, and the requests that come to it from the event loop."""

import asyncio
import contextlib
import threading
import traceback

from castiron.pipelines.generation.scheduler import Scheduler, Told
from castiron.pipelines.generation.sequence import Failed, Finished, Sequence
from castiron.pipelines.serve.errors import ApiError

STOPPING = ApiError(503, "the server is shutting down", code="shutting_down")


class Engine:
    """Runs a `Scheduler` in a thread of its own.

    `submit` is called on an event loop; what the sequences tell is delivered there. At most `queue` sequences wait
    beyond those that have a slot.
    """

    def __init__(self, scheduler: Scheduler, queue: int):
        self.scheduler, self.queue = scheduler, queue
        self.slots = scheduler.batch.size
        self._arrived: list[Sequence] = []
        self._live: set[Sequence] = set()
        self._wake = threading.Condition()
        self._draining = self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model")

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and the thread lives."""
        return self._thread.is_alive() and not self._draining

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._live)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to work; events are delivered on `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues the sequences of one request, all or none; ApiError if there is no room or if the engine is stopping."""
        with self._wake:
            if self._draining:
                raise STOPPING
            if len(self._live) + len(sequences) > self.slots + self.queue:
                waiting = max(0, len(self._live) - self.slots)
                raise ApiError(
                    503, f"the server is busy: {len(self._live) - waiting} sequences run and {waiting} wait, "
                    f"{len(sequences)} more do not fit in its queue of {self.queue}; try again later",
                    code="queue_full",
                )  # fmt: skip
            self._arrived += sequences
            self._live.update(sequences)
            self._wake.notify()

    def cancel(self, sequences: list[Sequence]) -> None:
        """Stops what is not finished of `sequences`; they tell nothing more."""
        with self._wake:
            for sequence in sequences:
                sequence.cancelled = True
                self._live.discard(sequence)
            self._wake.notify()

    def drain(self) -> None:
        """Takes no more requests; those that it has go on."""
        with self._wake:
            self._draining = True

    def abort(self) -> None:
        """Ends every sequence with an error; for after `drain`. Called on the loop."""
        live = list(self._live)
        self.cancel(live)
        for sequence in live:
            sequence.tell(Failed(STOPPING))

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
                while not (self._arrived or self._ended or not self.scheduler.idle):
                    self._wake.wait()
                if self._ended:
                    return
                arrived, self._arrived = self._arrived, []
            for sequence in arrived:
                self.scheduler.submit(sequence)
            try:
                told = self.scheduler.turn()
            except Exception:
                # The scheduler deals with what a sequence can cause; whatever this is, serving goes on.
                traceback.print_exc()
                told = self.scheduler.give_up()
            self._deliver(told)

    def _deliver(self, told: Told) -> None:
        # Once the loop is closed nobody listens any more.
        with contextlib.suppress(RuntimeError):
            if told:
                self._loop.call_soon_threadsafe(self._hand_over, told)

    def _hand_over(self, told: Told) -> None:
        for sequence, event in told:
            if isinstance(event, Finished | Failed):
                self._live.discard(sequence)
            if not sequence.cancelled:
                sequence.tell(event)
