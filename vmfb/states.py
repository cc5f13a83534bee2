"""What can be done with a state: going back, copying a beginning, and taking a snapshot, by its kind.

A state is a buffer of one sequence, dimension 0 its layers. The kinds:

- positional `[layers, context, ...]`: row p is position p. Going back costs nothing, since what stands past a sequence's
  position is never read; any beginning can be copied.
- window `[layers, W, ...]`: a ring of the last W positions. Until it has turned once it is as good as positional; after
  that what a new position overwrote is gone, and only a snapshot brings it back.
- recurrent `[layers, ...]`: replaced at every token, zero before the first. Only a snapshot brings an earlier one back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class State:
    """One state as the manifest describes it: its shape for one sequence, element type, and kind (a key of `KINDS`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def elements(self) -> int:
        """Of one sequence."""
        return prod(self.shape)

    def type(self, sequences: int = 1) -> str:
        """The buffer of so many sequences, as MLIR spells its type: `60x8192x3x64xf32`."""
        return "x".join(map(str, (sequences * self.shape[0], *self.shape[1:]))) + f"x{self.dtype}"


class Positional:
    """One sequence's rows of every position."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def returns(self, now: int, position: int) -> bool:
        """Whether a sequence at `now` can go back to `position` without a snapshot."""
        return True

    def go_back(self, position: int) -> None:
        """The sequence stands at `position` from here on."""

    def save(self) -> np.ndarray | None:
        """What has to be kept to come back to this position; None if that is nothing."""
        return None

    def restore(self, saved: np.ndarray | None) -> None:
        """What `save` kept, put back."""

    def copy(self, other: Positional, position: int, saved: np.ndarray | None) -> None:
        """Take over what `other` had at `position`: as it is there, or as `save` kept it."""
        self.array[:, :position] = other.array[:, :position]

    def rows(self, position: int) -> np.ndarray:
        """What there is of a sequence that stands at `position`: a view, which `take` takes over elsewhere."""
        return self.array[:, :position]

    def take(self, rows: np.ndarray, position: int) -> None:
        """The sequence stands at `position`, where another had `rows`, or further on."""
        self.array[:, :position] = rows[:, :position]


class Window(Positional):
    """One sequence's last rows."""

    def returns(self, now: int, position: int) -> bool:
        return position in (now, 0) or now <= self.array.shape[1]

    def save(self) -> np.ndarray | None:
        return self.array.copy()

    def restore(self, saved: np.ndarray | None) -> None:
        self.array[:] = saved

    def copy(self, other: Positional, position: int, saved: np.ndarray | None) -> None:
        self.array[:] = other.array if saved is None else saved


class Recurrent(Window):
    """One sequence's present."""

    def returns(self, now: int, position: int) -> bool:
        return position in (now, 0)

    def go_back(self, position: int) -> None:
        if position == 0:
            self.array[:] = 0

    def copy(self, other: Positional, position: int, saved: np.ndarray | None) -> None:
        super().copy(other, position, saved)
        self.go_back(position)

    def rows(self, position: int) -> np.ndarray:
        return self.array

    def take(self, rows: np.ndarray, position: int) -> None:
        self.array[:] = rows


KINDS: dict[str, type[Positional]] = {"positional": Positional, "window": Window, "recurrent": Recurrent}


@dataclass(eq=False)
class Snapshot:
    """A place to come back to: the position and what each state needs for it. `stale` once the sequence has been before it,
    because other tokens may stand there now."""

    position: int
    saved: tuple[np.ndarray | None, ...]
    stale: bool = False
