"""Separate a model's reasoning (between marks such as <think> and </think>) from its answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

# End marks in chat templates and tokenizers: </think>, [/THINK], </seed:think>, <|END_THINKING|>.
# The start mark has no slash, or START instead of END.
_END = re.compile(r"(?i)[<\[◁]/[\w:|]*(?:think|thought|reason)[\w:|]*[>\]▷]|<\|END_(?:THINKING|THOUGHT|REASONING)\|>")

Marks = tuple[tuple[str, str], ...]


class Reasoning(str):
    """A piece of the model's reasoning, which is not part of its answer."""


def marks_of(template: str, tokens: Iterable[str]) -> Marks:
    """Return pairs of texts that enclose a model's reasoning, such as ("<think>", "</think>")."""
    ends = dict.fromkeys([*_END.findall(template), *(token for token in tokens if _END.fullmatch(token))])
    return tuple((_start_of(end), end) for end in ends)


def _start_of(end: str) -> str:
    return end.replace("/", "", 1) if "/" in end else end.replace("END_", "START_").replace("end_", "start_")


class ReasoningSplitter:
    """Splits streamed text into reasoning at its start (`Reasoning`) and the answer after it (str).

    What may be the start of a mark, or white space before one, is held back.
    """

    def __init__(self, marks: Marks, prompt: str = ""):
        """Start a new text."""
        self.marks = marks
        # End marks of the reasoning in progress. A start mark is recognised only before the first word.
        self._ends = tuple(end for start, end in marks if prompt.rstrip().endswith(start))
        self.reasoning, self.done = bool(self._ends), False
        self._pending = ""
        # Whether to drop white space, because the reasoning, or the answer after it, has no word yet.
        self._blank = True

    @property
    def end(self) -> str:
        """The text that will end the reasoning, such as "</think>"; "" outside reasoning."""
        return next(iter(self._ends), "") if self.reasoning else ""

    def add(self, more: str) -> list[str]:
        """Append `more` to the text; return the pieces (`Reasoning` or str) that are now final."""
        self._pending += more
        pieces: list[str] = []
        if not (self.reasoning or self.done):
            self._start()
        if self.reasoning:
            text = self._pending.lstrip() if self._blank else self._pending
            certain, end, rest = split_at_mark(text, self._ends)
            # Hold back space, because the end mark may follow it.
            words = certain.rstrip()
            if words:
                pieces.append(Reasoning(words))
                self._blank = False
            self._pending = rest if end else text[len(words) :]
            if end:
                self.reasoning, self.done, self._blank = False, True, True
        if self.done:
            text, self._pending = self._pending.lstrip() if self._blank else self._pending, ""
            if text:
                pieces.append(text)
                self._blank = False
        return pieces

    def finish(self) -> list[str]:
        """End the text; return its last pieces (`Reasoning` or str), which were held back."""
        text, self._pending = self._pending, ""
        if self.reasoning:
            text = Reasoning(text.strip() if self._blank else text.rstrip())
        return [text] if text else []

    def _start(self) -> None:
        text = self._pending.lstrip()
        for start, end in self.marks:
            if text.startswith(start):
                self._ends, self.reasoning, self._pending = (end,), True, text[len(start) :]
                return
        if not any(start.startswith(text) for start, _ in self.marks):
            self.done, self._blank = True, False


def split_at_mark(text: str, marks: Collection[str], final: bool = False) -> tuple[str, str, str]:
    """Split `text` at the first of `marks`: (text before the mark, the mark, text after it).

    Without one, the third part is the end of `text` that may start a mark, unless `final`: "a<thi"
    is ("a", "", "<thi") for the mark "<think>".
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    start, mark = min(found, key=lambda one: one[0], default=(len(text), ""))
    # A mark that starts before the one found may still be completed.
    certain = min((_prefix_start(text, mark) for mark in marks if not final), default=len(text))
    if certain < start:
        return text[:certain], "", text[certain:]
    return text[:start], mark, text[start + len(mark) :]


def _prefix_start(text: str, mark: str) -> int:
    """Return the index at which `text` ends in the start of `mark`; len(text) if it does not."""
    starts = range(max(0, len(text) - len(mark) + 1), len(text))
    return next((start for start in starts if mark.startswith(text[start:])), len(text))
