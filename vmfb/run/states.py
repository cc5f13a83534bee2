"""How each kind of state (`emitter.abi.KINDS`) is rewound, copied and saved.

- positional `[layers, context, ...]`, such as a KV cache: row p belongs to position p. A sequence
  can go back to any earlier position at no cost, because it never reads rows past its own position.
- window `[layers, n, ...]`, such as the KV cache of sliding-window attention: a ring buffer of n
  rows, where position p is in row p mod n. A token attends to itself and to the last `window - 1`
  positions. When a sequence has more than n tokens, it can go back by at most `n - window + 1`
  tokens without a snapshot.
- recurrent `[layers, ...]`: every token overwrites the state. Without a snapshot, a sequence can go
  back to position 0 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Rows of a state, and the position after the last one written.
Saved: TypeAlias = tuple[np.ndarray, int]


class Positional:
    """A state with one row for each position of a sequence, such as a KV cache.

    `now` is always the sequence's number of tokens. furthest: for a ring buffer, the largest
    position before a rewind, because later positions overwrite earlier rows; otherwise 0.
    """

    furthest = 0

    def __init__(self, array: np.ndarray, window: int):
        self.array, self.window = array, window

    def can_return(self, now: int, position: int) -> bool:
        """Return whether a sequence can go back from `now` to `position` without a snapshot."""
        return True

    def go_back(self, now: int, position: int) -> None:
        """Remove the tokens from `position` to `now` - 1; requires `can_return(now, position)`."""

    def load(self, rows: np.ndarray, position: int, furthest: int) -> None:
        """Set the state to another sequence's at `position`, which once was at `furthest`."""
        self.array[:, :position] = rows[:, :position]

    def save(self, now: int, ahead: int) -> Saved | None:
        """Copy what `restore` needs after up to `ahead` more tokens; None if it needs nothing."""
        return None if self.can_return(now + ahead, now) else (self.rows(now).copy(), self.furthest)

    def restore(self, now: int, position: int, saved: Saved | None) -> None:
        """Return from `now` to `position`, where `save` returned `saved`."""
        if saved is None:
            self.go_back(now, position)
        else:
            self.load(saved[0], position, saved[1])

    def copy(self, other: Positional, now: int, position: int, saved: Saved | None) -> None:
        """Set this state to `other` at `position`, where `other.save` returned `saved`."""
        rows, furthest = saved or (other.array, max(other.furthest, now))
        self.load(rows, position, furthest)

    def rows(self, position: int) -> np.ndarray:
        """Return a view of the rows that a sequence at `position` reads."""
        return self.array[:, :position]

    def settled(self, position: int) -> bool:
        """Return whether the state has no data of tokens that a rewind removed."""
        return True

    def begins(self, written: int, position: int) -> bool:
        """Return whether `rows(written)` has the data to continue at an earlier position.

        It has not if tokens after `position` have overwritten data that is needed there.
        """
        return True

    def take(self, rows: np.ndarray, position: int) -> None:
        """Load another sequence's `rows(written)`, which `begins` at `position`."""
        self.load(rows, position, position)


class Window(Positional):
    """A ring buffer with the rows of the last positions, for sliding-window attention."""

    def can_return(self, now: int, position: int) -> bool:
        forgotten = max(self.furthest, now) - self.array.shape[1]
        return position in (now, 0) or self._first_seen(position) >= forgotten

    def go_back(self, now: int, position: int) -> None:
        # The token at position 0 attends to no row.
        self.furthest = max(self.furthest, now) if position else 0

    def load(self, rows: np.ndarray, position: int, furthest: int) -> None:
        # A ring that has not wrapped uses only the rows before the position.
        super().load(rows, position, furthest)
        self.furthest = furthest

    def settled(self, position: int) -> bool:
        return self.furthest <= position

    def begins(self, written: int, position: int) -> bool:
        return self._first_seen(position) >= written - self.array.shape[1]

    def take(self, rows: np.ndarray, position: int) -> None:
        # The writer's position is unknown, so assume the furthest position that `begins` allows.
        self.load(rows, position, self._first_seen(position) + self.array.shape[1])

    def _first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1)


class Recurrent(Positional):
    """A state of fixed size, which every token overwrites completely."""

    def can_return(self, now: int, position: int) -> bool:
        return position in (now, 0)

    def go_back(self, now: int, position: int) -> None:
        if position == 0:
            self.array[:] = 0

    def load(self, rows: np.ndarray, position: int, furthest: int) -> None:
        self.array[:] = rows if position else 0

    def rows(self, position: int) -> np.ndarray:
        return self.array

    def begins(self, written: int, position: int) -> bool:
        return position == written


KINDS: dict[str, type[Positional]] = {"positional": Positional, "window": Window, "recurrent": Recurrent}


@dataclass(eq=False)
class Snapshot:
    """A position of a sequence, and what its states need to return to it.

    saved: None for a state that needs nothing. stale: whether the sequence was rewound to before
    `position`, and may have other tokens there.
    """

    position: int
    saved: tuple[Saved | None, ...]
    stale: bool = False

    @property
    def nbytes(self) -> int:
        return sum(saved[0].nbytes for saved in self.saved if saved)
