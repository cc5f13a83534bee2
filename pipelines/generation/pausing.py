"""Sequences that give their slot to another and go on later as if they had not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
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
