"""Works over a scheduler: as many at once as it has slots, and what came of each as it ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from castiron.pipelines.batch.requests import Outcome, Work
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Delta, Sequence

# Seconds after which is seen whether there is work, where there was none.
LOOK = 0.02
END: Any = object()


def run(scheduler: Scheduler | None, works: Iterable[Work | None]) -> Iterator[tuple[Work, Outcome]]:
    """Each work with its outcome, in the order in which they end.

    A work is taken when a slot is free for it; None says that the next is not there yet. Nothing runs but between one outcome
    and the next, and closing the iterator lets go of what has not ended. `scheduler` None is for works without sequences.
    """
    waiting, ended = iter(works), False
    owners: dict[Sequence, Work] = {}
    left: dict[int, int] = {}
    try:
        while True:
            while not ended and (scheduler is None or len(owners) < scheduler.slots):
                work = next(waiting, END)
                if work is END:
                    ended = True
                    break
                if work is None:
                    if not owners:
                        time.sleep(LOOK)
                    break
                if not work.sequences:
                    yield work, work.outcome()
                    continue
                left[id(work)] = len(work.sequences)
                for sequence in work.sequences:
                    owners[sequence] = work
                    scheduler.submit(sequence)
            if not owners:
                if ended:
                    return
                continue
            for sequence, event in scheduler.turn():
                work = owners[sequence]
                work.tell(sequence, event)
                if isinstance(event, Delta):
                    continue
                del owners[sequence]
                left[id(work)] -= 1
                if not left[id(work)]:
                    del left[id(work)]
                    yield work, work.outcome()
    finally:
        for sequence in owners:
            scheduler.cancel(sequence)
