"""A text that may not end before it has so many tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy

import numpy as np


class AtLeast:
    """Forbids the tokens that end a text until `count` others have come; a `Constraint` that forces nothing."""

    done = False
    forced: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    def __init__(self, count: int, ends: Collection[int]):
        self.left, self.ends = count, sorted(ends)

    def copy(self) -> AtLeast:
        """Another that goes on from here by itself."""
        return copy(self)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        return not self.left or token not in self.ends

    def best(self, argmax: int, logits: Callable[[], np.ndarray]) -> int:
        """The likeliest token of those allowed, as `Constraint.best`."""
        return argmax if self.allows(argmax) else int(self.masked(logits()).argmax())

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """`logits` [vocab] with minus infinity for what may not come next."""
        if self.left:
            logits = logits.copy()
            logits[self.ends] = -np.inf
        return logits

    def accept(self, token: int) -> None:
        """The text goes on by `token`."""
        self.left = max(0, self.left - 1)
