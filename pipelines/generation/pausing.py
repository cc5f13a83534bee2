"""Sequences that give their slot to another and go on later as if they had not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from castiron.pipelines.generation.sequence import Sequence
    from castiron.vmfb.session import Session


@dataclass(frozen=True)
class Paused:
    """What the session of a sequence held at `position`, to the bit; `reading`: its prompt was not read to the end."""

    rows: list[np.ndarray]
    position: int
    whole: int
    reading: bool

    @classmethod
    def of(cls, session: Session, reading: bool) -> Paused:
        position = session.position
        return cls([rows.copy() for rows in session.rows(position)], position, session.whole, reading)

    def resume(self, session: Session) -> None:
        """The session stands where that one stood."""
        session.take(self.rows, self.position, self.whole)


def yielding(running: Mapping[int, Sequence], priority: int) -> int | None:
    """The slot of the sequence, of those that run, that gives way to one of this priority: of the largest number the one that
    came last; None if there is none of a larger one that can pause."""
    # The scores of a prompt are its slot's as well.
    found = [
        (s.priority, s.arrived, slot) for slot, s in running.items() if s.priority > priority and s.prompt_logprobs is None
    ]
    return max(found)[2] if found else None
