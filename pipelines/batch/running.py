"""Works over a scheduler: as many at once as it has slots, and what came of each as it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from castiron.pipelines.batch.requests import Outcome, Work
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Delta, Sequence


def run(scheduler: Scheduler | None, works: Iterable[Work]) -> Iterator[tuple[Work, Outcome]]:
    """Each work with its outcome, in the order in which they end.

    A work is taken when a slot is free for it. Nothing runs but between one outcome and the next, and closing the iterator
    lets go of what has not ended. `scheduler` None is for works without sequences.
    """
    waiting = iter(works)
    owners: dict[Sequence, Work] = {}
    left: dict[int, int] = {}
    try:
        while True:
            while (scheduler is None or len(owners) < scheduler.slots) and (work := next(waiting, None)):
                if not work.sequences:
                    yield work, work.outcome()
                    continue
                left[id(work)] = len(work.sequences)
                for sequence in work.sequences:
                    owners[sequence] = work
                    scheduler.submit(sequence)
            if not owners:
                return
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
