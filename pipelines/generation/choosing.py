"""What chooses the tokens of one text: sampling, over what its constraint allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.generation.sampling import NEAR, REPEAT_WINDOW, Sampler, lead

if TYPE_CHECKING:
    from castiron.pipelines.generation.constraint import Constraint
    from castiron.pipelines.generation.least import AtLeast


class Chooser:
    """`pick` says which token comes next, `accept` takes one.

    `recent`: the last tokens, prompt included; `counts`: how often each was generated. Both are kept where the sampling looks
    at them.
    """

    def __init__(self, sampler: Sampler, constraint: Constraint | AtLeast | None = None, recent: Sequence[int] = ()):
        self.sampler, self.constraint = sampler, constraint
        self.recent, self.counts = list(recent[-REPEAT_WINDOW:]), Counter[int]()
        # Random numbers that a trial has looked at before those that it looks at next.
        self._trial, self._ahead = False, 0

    @property
    def done(self) -> bool:
        """Whether the text is whole and cannot go on."""
        return bool(self.constraint and self.constraint.done)

    @property
    def forced(self) -> bool:
        """Whether the next token is certain, whatever the logits are."""
        return bool(self.constraint and self.constraint.forced)

    def pick(self, argmax: int, logits: Callable[[], np.ndarray]) -> int:
        """The next token, where the model has found `argmax` and `logits()` gives f32 [vocab]."""
        constraint = self.constraint
        if constraint and constraint.forced:
            return constraint.forced[0]
        if self.sampler.sampling.needs_logits:
            return self._drawn(logits(), False)[0]
        return constraint.best(argmax, logits) if constraint else argmax

    def pick_surely(self, argmax: int, logits: Callable[[], np.ndarray]) -> int | None:
        """`pick`; None where a function that sums in another order might find another token."""
        constraint = self.constraint
        if constraint and constraint.forced:
            return constraint.forced[0]
        if self.sampler.sampling.needs_logits:
            token, sure = self._drawn(logits(), True)
            return token if sure else None
        if constraint and not constraint.allows(argmax):
            allowed = constraint.masked(logits())
            argmax, ahead = int(allowed.argmax()), lead(allowed)
        else:
            ahead = lead(logits())
        return argmax if ahead >= NEAR else None

    def accept(self, token: int) -> None:
        """The text goes on by `token`."""
        forced = self.forced
        if self.constraint:
            self.constraint.accept(token)
        if not self.sampler.sampling.needs_logits:
            return
        self.recent = [*self.recent[1 - REPEAT_WINDOW :], token]
        self.counts[token] += 1
        # Random numbers are not spent on what is certain.
        if self._trial:
            self._ahead += not forced
        elif not forced:
            self.sampler.used()

    def trial(self) -> Chooser:
        """Another that goes on from here by itself, with the random numbers that this one will use."""
        other = copy(self)
        other._trial = True
        other.constraint, other.counts = self.constraint and self.constraint.copy(), self.counts.copy()
        return other

    def _drawn(self, logits: np.ndarray, check: bool) -> tuple[int, bool]:
        allowed = self.constraint.masked(logits) if self.constraint else logits
        return self.sampler.pick(allowed, self.recent, self.counts, self._ahead, check)
