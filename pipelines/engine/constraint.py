"""Constraints, which limit the next token of a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

import numpy as np

from castiron.pipelines.errors import PipelineError


class ConstraintError(PipelineError):
    """Raised if a constraint forbids all tokens of the vocabulary, or a token that is appended."""


class Constraint(Protocol):
    """What limits the next token of a text, such as a grammar.

    forced: the tokens that must come next, in order. done: whether the text is complete and cannot
    continue. eos: the end tokens that may follow a complete text.
    """

    @property
    def done(self) -> bool: ...
    @property
    def forced(self) -> Sequence[int]: ...
    @property
    def eos(self) -> Sequence[int]: ...
    def copy(self) -> Constraint:
        """Return an independent constraint in the same state."""
        ...

    def allows(self, token: int) -> bool: ...

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """Return `logits` with -inf for forbidden tokens; ConstraintError if all are."""
        ...

    def accept(self, token: int) -> None:
        """Append `token` to the text; raise ConstraintError if it is not allowed."""
        ...


class TokenFilter:
    """A constraint that forbids given tokens and token sequences, and stop tokens at the start."""

    done = False
    forced: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()

    def __init__(
        self, min_tokens: int = 0, stop_tokens: Collection[int] = (), allowed: Collection[int] | None = None,
        forbidden: Collection[Sequence[int]] = (),
    ):  # fmt: skip
        """Create a filter for one text.

        min_tokens: number of tokens before the first of `stop_tokens`. allowed: None for all.
        forbidden: sequences of tokens that the text must not contain.
        """
        self.left, self.stop_tokens = min_tokens, frozenset(stop_tokens)
        self.allowed = None if allowed is None else frozenset(allowed)
        self._allowed_ids = [*(self.allowed or ())]  # as an index, made once
        self.forbidden = [(tuple(tokens[:-1]), tokens[-1]) for tokens in forbidden]
        self._memory = max((len(before) for before, _ in self.forbidden), default=0)
        # The last tokens of the text, as many as `forbidden` needs.
        self._last: tuple[int, ...] = ()

    def copy(self) -> TokenFilter:
        return copy(self)

    def _excluded(self) -> set[int]:
        found = {token for before, token in self.forbidden if self._last[len(self._last) - len(before) :] == before}
        return found | self.stop_tokens if self.left else found

    def allows(self, token: int) -> bool:
        return (self.allowed is None or token in self.allowed) and token not in self._excluded()

    def masked(self, logits: np.ndarray) -> np.ndarray:
        found = logits.copy()
        if self.allowed is not None:
            found[:] = -np.inf
            found[self._allowed_ids] = logits[self._allowed_ids]
        found[list(self._excluded())] = -np.inf
        if found.max() == -np.inf:
            raise ConstraintError("no token is allowed: allowed_token_ids, bad_words and min_tokens exclude all; change them")
        return found

    def accept(self, token: int) -> None:
        self.left = max(0, self.left - 1)
        self._last = (*self._last, token)[-self._memory :] if self._memory else ()
