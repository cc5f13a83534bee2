"""Limit the number of reasoning tokens: force the end mark once the budget is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy

import numpy as np

from castiron.pipelines.engine.chooser import Constraint, ConstraintError
from castiron.pipelines.text.reasoning import Marks, ReasoningSplitter
from castiron.pipelines.text.tokenizer import Tokenizer

# The marks of reasoning in the harmony format (gpt-oss), and the text that ends it and starts the answer.
HARMONY: Marks = (("<|channel|>analysis<|message|>", "<|end|>"),)
HARMONY_CLOSE = "<|end|><|start|>assistant<|channel|>final<|message|>"


class ReasoningBudget:
    """A constraint that forces the end mark of reasoning after a number of reasoning tokens.

    Before the budget is used up, and after the end mark, only `inner` (if given) limits the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Collection[int], budget: int, inner: Constraint | None = None):
        """Limit the reasoning in the text after `prompt` to `budget` tokens."""
        is_harmony = tokenizer.tool_format.style == "harmony"
        marks = HARMONY if is_harmony else tokenizer.marks
        # Tokens may end inside a character, so the splitter gets bytes, one character for each byte.
        self._splitter = ReasoningSplitter(
            tuple((as_latin(start.encode()), as_latin(end.encode())) for start, end in marks),
            as_latin(tokenizer.end_of(prompt).encode()),
        )
        self._bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._encode = lambda end: tokenizer.encode(HARMONY_CLOSE if is_harmony else end, add_special_tokens=False)
        self.left, self.inner = budget, inner
        # Tokens of the end mark that are not generated yet; None before the budget is used.
        self._closing: list[int] | None = None
        self._close_if_used()

    def copy(self) -> ReasoningBudget:
        other = copy(self)
        other._splitter, other.inner = copy(self._splitter), self.inner and self.inner.copy()
        return other

    @property
    def forced(self) -> Sequence[int]:
        return self._closing or (self.inner.forced if self.inner else ())

    @property
    def done(self) -> bool:
        return bool(self.inner and not self._closing and self.inner.done)

    @property
    def eos(self) -> Sequence[int]:
        return self.inner.eos if self.inner else ()

    def allows(self, token: int) -> bool:
        if self._closing:
            return token == self._closing[0]
        return self.inner is None or self.inner.allows(token)

    def masked(self, logits: np.ndarray) -> np.ndarray:
        if not self._closing:
            return self.inner.masked(logits) if self.inner else logits
        found = np.full_like(logits, -np.inf)
        found[self._closing[0]] = logits[self._closing[0]]
        return found

    def accept(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError("the reasoning has used its budget of tokens and must end")
        if self.inner:
            self.inner.accept(token)
        if self._splitter.done:
            return
        if self._closing:
            # A new list, because copies share this one.
            self._closing = self._closing[1:]
        was_reasoning = self._splitter.reasoning
        self._splitter.add(as_latin(self._bytes(token)))
        self.left -= was_reasoning
        self._close_if_used()

    def _close_if_used(self) -> None:
        if self._splitter.reasoning and self.left <= 0 and self._closing is None:
            # The only end mark of the reasoning in progress.
            self._closing = self._encode(self._splitter.end.encode("latin-1").decode())


def as_latin(data: bytes) -> str:
    """Return a text with one character for each byte."""
    return data.decode("latin-1")
