"""What can be done with a state: going back, copying a beginning, and taking a snapshot, by its kind.

A state is a buffer of one sequence, dimension 0 its layers. The kinds:

- positional `[layers, context, ...]`: row p is position p. Going back costs nothing, since what stands past a sequence's
  position is never read; any beginning can be copied.
- window `[layers, rows, ...]`: a ring, position p in row p mod rows, of which the next token sees `window - 1`. Until it has
  turned once it is as good as positional; after that it goes back as many positions as it has rows beyond those, and further
  from a snapshot alone: what a new position overwrote is gone.
- recurrent `[layers, ...]`: replaced at every token, zero before the first. Only a snapshot brings an earlier one back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

# Rows of a state, and how far it had been written.
Saved: TypeAlias = tuple[np.ndarray, int]


@dataclass(frozen=True)
class State:
    """One state as the manifest describes it: its shape for one sequence, element type, and kind (a key of `KINDS`).

    window: of a ring, how many positions a token sees, its own among them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    window: int = 0

    @property
    def elements(self) -> int:
        """Of one sequence."""
        return prod(self.shape)

    def type(self, sequences: int = 1) -> str:
        """The buffer of so many sequences, as MLIR spells its type: `60x8192x3x64xf32`."""
        return "x".join(map(str, (sequences * self.shape[0], *self.shape[1:]))) + f"x{self.dtype}"


class Positional:
    """One sequence's rows of every position. `now` is where the sequence stands."""

    def __init__(self, array: np.ndarray, window: int):
        self.array, self.window = array, window

    def returns(self, now: int, position: int) -> bool:
        """Whether a sequence at `now` can go back to `position` without a snapshot."""
        return True

    def go_back(self, now: int, position: int) -> None:
        """The sequence stands at `position` from here on."""

    def save(self, now: int, ahead: int) -> Saved | None:
        """What has to be kept to come back to this position after up to `ahead` more; None if that is nothing."""
        return None

    def restore(self, now: int, position: int, saved: Saved | None) -> None:
        """Back at `position`, where `save` kept this."""
        self.go_back(now, position)

    def copy(self, other: Any, now: int, position: int, saved: Saved | None) -> None:
        """Take over what `other`, which stands at `now`, had at `position`: as it is there, or as `save` kept it."""
        self.array[:, :position] = other.array[:, :position]

    def rows(self, position: int) -> np.ndarray:
        """What there is of a sequence that stands at `position`: a view, which `take` takes over elsewhere."""
        return self.array[:, :position]

    def settled(self, position: int) -> bool:
        """Whether nothing was written past a sequence that stands at `position`."""
        return True

    def begins(self, written: int, position: int) -> bool:
        """Whether the rows of `written` tokens, settled, are also those of the first `position` of them."""
        return True

    def take(self, rows: np.ndarray, position: int) -> None:
        """The sequence stands at `position`, where another had `rows`, or further on where `begins` allows it."""
        self.array[:, :position] = rows[:, :position]


class Window(Positional):
    """One sequence's last rows. `furthest` is the end of what has been written, where that is past the sequence."""

    furthest = 0

    def returns(self, now: int, position: int) -> bool:
        forgotten = max(self.furthest, now) - self.array.shape[1]
        return position in (now, 0) or self._seen(position) >= forgotten

    def go_back(self, now: int, position: int) -> None:
        # At the beginning nothing is seen of what was written.
        self.furthest = max(self.furthest, now) if position else 0

    def save(self, now: int, ahead: int) -> Saved | None:
        return None if self.returns(now + ahead, now) else (self.array[:, :now].copy(), self.furthest)

    def restore(self, now: int, position: int, saved: Saved | None) -> None:
        if saved is None:
            self.go_back(now, position)
        else:
            self._take(position, *saved)

    def copy(self, other: Any, now: int, position: int, saved: Saved | None) -> None:
        self._take(position, *(saved or (other.array, max(other.furthest, now))))

    def settled(self, position: int) -> bool:
        return self.furthest <= position

    def begins(self, written: int, position: int) -> bool:
        return self._seen(position) >= written - self.array.shape[1]

    def take(self, rows: np.ndarray, position: int) -> None:
        # How far it had been written nobody says: as far as is possible.
        self._take(position, rows, self._seen(position) + self.array.shape[1])

    def _seen(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return max(0, position - self.window + 1)

    def _take(self, position: int, rows: np.ndarray, furthest: int) -> None:
        """Before the ring has turned the rows from the position on are nobody's."""
        self.array[:, :position], self.furthest = rows[:, :position], furthest


class Recurrent(Positional):
    """One sequence's present."""

    def returns(self, now: int, position: int) -> bool:
        return position in (now, 0)

    def go_back(self, now: int, position: int) -> None:
        if position == 0:
            self.array[:] = 0

    def save(self, now: int, ahead: int) -> Saved | None:
        return self.array.copy(), now

    def restore(self, now: int, position: int, saved: Saved | None) -> None:
        if saved is not None:
            self.array[:] = saved[0]

    def copy(self, other: Any, now: int, position: int, saved: Saved | None) -> None:
        self.array[:] = other.array if saved is None else saved[0]
        self.go_back(now, position)

    def rows(self, position: int) -> np.ndarray:
        return self.array

    def begins(self, written: int, position: int) -> bool:
        return position == written

    def take(self, rows: np.ndarray, position: int) -> None:
        self.array[:] = rows


KINDS: dict[str, type[Positional]] = {"positional": Positional, "window": Window, "recurrent": Recurrent}


@dataclass(eq=False)
class Snapshot:
    """A place to come back to: the position and what each state needs for it. `stale` once the sequence has been before it,
    because other tokens may stand there now."""

    position: int
    saved: tuple[Saved | None, ...]
    stale: bool = False

    @property
    def nbytes(self) -> int:
        return sum(saved[0].nbytes for saved in self.saved if saved)
