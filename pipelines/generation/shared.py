"""One scheduler for several callers, in one thread or in many."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import stand
from castiron.pipelines.generation.scheduler import Events, Scheduler
from castiron.pipelines.generation.sequence import Delta, Sequence


class SharedScheduler:
    """A scheduler whose turns are taken by whoever waits for one, and which tells each `Client` of its own sequences."""

    def __init__(self, scheduler: Scheduler):
        # None once it is closed.
        self._scheduler: Scheduler | None = scheduler
        self.arrived: deque[Sequence] = deque()
        self.cancelled: deque[Sequence] = deque()
        self.owners: dict[Sequence, Client] = {}
        # What waits for the thread that takes a turn, which does not hold this meanwhile.
        self._changed = threading.Condition()
        self._turning = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        return self._scheduler is None

    @property
    def scheduler(self) -> Scheduler:
        """PipelineError where nothing can be run any more."""
        if self._scheduler is None:
            raise PipelineError("this model is closed; load it again")
        if os.getpid() != self._process:
            raise PipelineError("this model was loaded before the process was forked; load it in the child")
        return self._scheduler

    def events(self, client: Client) -> Events:
        """What there is to tell `client`, once there is something; turns are taken until then."""
        with self._changed:
            while not client.told and client.live:
                scheduler = self.scheduler
                if self._turning:
                    self._changed.wait()
                else:
                    self._turn(scheduler)
            found, client.told = client.told, []
        return found

    def _turn(self, scheduler: Scheduler) -> None:
        """One turn, for all; entered and left with `_changed` held."""
        self._turning = True
        self._changed.release()
        events: Events = []
        try:
            while self.arrived:
                scheduler.submit(self.arrived.popleft())
            while self.cancelled:
                scheduler.cancel(self.cancelled.popleft())
            events = scheduler.turn()
        except BaseException as error:
            # It may have been interrupted anywhere: what the slots hold is not what the scheduler knows of.
            events = scheduler.give_up(error)
            for session in scheduler.batch.slots:
                stand(session, 0)
            raise
        finally:
            self._changed.acquire()
            self._turning = False
            for sequence, event in events:
                if client := self.owners.get(sequence):
                    client.told.append((sequence, event))
                    if not isinstance(event, Delta):
                        client.forget(sequence)
            self._changed.notify_all()

    @contextmanager
    def between_turns(self) -> Iterator[Scheduler]:
        """The program to oneself: what is asked of the scheduler waits until the end of this."""
        with self._changed:
            while self._turning:
                self._changed.wait()
            scheduler, self._turning = self.scheduler, True
        try:
            yield scheduler
        finally:
            with self._changed:
                self._turning = False
                self._changed.notify_all()

    def close(self) -> None:
        """Runs nothing more, once the turn that is being taken is over."""
        with self._changed:
            self._scheduler = None
            while self._turning:
                self._changed.wait()
            self._changed.notify_all()


class Client:
    """What one caller has submitted; used as a Scheduler that runs nothing else."""

    def __init__(self, shared: SharedScheduler):
        scheduler = shared.scheduler
        self.slots, self.context, self.manifest, self.bundle = (
            scheduler.slots, scheduler.context, scheduler.manifest, scheduler.bundle,
        )  # fmt: skip
        self._shared = shared
        self.told: Events = []
        self.live: set[Sequence] = set()

    @property
    def idle(self) -> bool:
        return not self.live and not self.told

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence; from any thread, at any time."""
        self.live.add(sequence)
        self._shared.owners[sequence] = self
        self._shared.arrived.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Lets go of a sequence with the next turn that anybody takes."""
        if sequence in self.live:
            self.forget(sequence)
            self._shared.cancelled.append(sequence)

    def turn(self) -> Events:
        """What there is to tell; waits until there is something."""
        return self._shared.events(self)

    def forget(self, sequence: Sequence) -> None:
        """It has nothing more to tell."""
        self.live.discard(sequence)
        self._shared.owners.pop(sequence, None)
