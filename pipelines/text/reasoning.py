"""The reasoning of a model, between marks such as <think> and </think>, separated from its answer
as the text comes."""

from __future__ import annotations

import re
from collections.abc import Iterable

# End marks of chat templates and tokenizers: </think>, [/THINK], </seed:think>, <|END_THINKING|>.
# The start mark is the same without the slash, or with START for END.
_END = re.compile(r"(?i)[<\[◁]/[\w:|]*(?:think|thought|reason)[\w:|]*[>\]▷]|<\|END_(?:THINKING|THOUGHT|REASONING)\|>")

Marks = tuple[tuple[str, str], ...]


class Reasoning(str):
    """A piece of the model's reasoning, which is not part of its answer."""


def marks_of(template: str, tokens: Iterable[str]) -> Marks:
    """Return pairs of start and end marks: of `template` first, then of the vocabulary's added
    `tokens`, without duplicates."""
    ends = dict.fromkeys([*_END.findall(template), *(token for token in tokens if _END.fullmatch(token))])
    return tuple((_start_of(end), end) for end in ends)


def _start_of(end: str) -> str:
    return end.replace("/", "", 1) if "/" in end else end.replace("END_", "START_").replace("end_", "start_")


class ReasoningSplitter:
    """Separates the reasoning at the start of a text from the answer after it.

    Pieces go in, and come out as `Reasoning` and str as soon as they are final: only a possible
    mark, and space next to one, is held back. Later marks are part of the answer, which may be
    about them.
    """

    def __init__(self, marks: Marks, prompt: str = ""):
        """`prompt`: what the text follows; it may end in a start mark."""
        self.marks = marks
        # End marks to look for in reasoning. A start mark counts only before the first word.
        self._ends = tuple(end for start, end in marks if prompt.rstrip().endswith(start))
        self._started = bool(self._ends)
        self._pending = ""
        # Whether the current part is only space so far.
        self._blank = True
        self.reasoning = self._started
        self.done = False

    def add(self, more: str) -> list[str]:
        """Return the pieces that are final with `more`."""
        self._pending += more
        pieces: list[str] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[str]:
        """Return what was held back, at the end of the text."""
        text, self._pending = self._pending, ""
        if self.reasoning:
            text = text.strip() if self._blank else text.rstrip()
            return [Reasoning(text)] if text else []
        return [text] if text else []

    def _step(self, pieces: list[str]) -> bool:
        """Append final text to `pieces`; return whether the caller must call this again."""
        if self.reasoning:
            return self._step_reasoning(pieces)
        if self.done:
            # After reasoning an answer starts with its first word.
            text = self._pending.lstrip() if self._blank and self._started else self._pending
            self._blank = self._blank and not text
            self._pending = ""
            if text:
                pieces.append(text)
            return False
        text = self._pending.lstrip()
        for start, end in self.marks:
            if text.startswith(start):
                self._ends, self.reasoning, self._started = (end,), True, True
                self._pending = text[len(start) :]
                return True
        if not any(start.startswith(text) for start, _ in self.marks):
            self.done = True
            return True
        return False

    def _step_reasoning(self, pieces: list[str]) -> bool:
        text = self._pending.lstrip() if self._blank else self._pending
        found = min((at for end in self._ends if (at := text.find(end)) >= 0), default=-1)
        certain = found if found >= 0 else min(prefix_start(text, end) for end in self._ends)
        # Space may stand before the mark.
        words = text[:certain].rstrip()
        if words:
            pieces.append(Reasoning(words))
            self._blank = False
        self._pending = text[len(words) :]
        if found < 0:
            return False
        end = next(end for end in self._ends if text.startswith(end, found))
        self.reasoning, self.done, self._blank = False, True, True
        self._pending = text[found + len(end) :]
        return True


def prefix_start(text: str, string: str) -> int:
    """Return where the longest proper prefix of `string` starts that `text` ends in; the length of
    `text` if there is none."""
    starts = range(max(0, len(text) - len(string) + 1), len(text))
    return next((start for start in starts if string.startswith(text[start:])), len(text))
