"""Thoughts of a reasoning model, told from its answer as the text comes: what stands between <think> and </think>."""

from __future__ import annotations

import re
from collections.abc import Iterable

from castiron.pipelines.generation.stops import beginning_in

# The end of thoughts as chat templates and tokenizers write it: </think>, [/THINK], </seed:think>, <|END_THINKING|>. Its
# beginning is the same without the slash, or with START for END.
_END = re.compile(r"(?i)[<\[◁]/[\w:|]*(?:think|thought|reason)[\w:|]*[>\]▷]|<\|END_(?:THINKING|THOUGHT|REASONING)\|>")

Marks = tuple[tuple[str, str], ...]


class Thought(str):
    """A piece of text that the model thought and did not say."""


def marks_of(template: str, tokens: Iterable[str]) -> Marks:
    """Pairs of what begins thoughts and what ends them, of all that `template` or one of the vocabulary's added `tokens`
    names; the template's first, each once."""
    ends = dict.fromkeys([*_END.findall(template), *(token for token in tokens if _END.fullmatch(token))])
    return tuple((_beginning(end), end) for end in ends)


def _beginning(end: str) -> str:
    return end.replace("/", "", 1) if "/" in end else end.replace("END_", "START_").replace("end_", "start_")


class Thoughts:
    """Tells the thoughts at the beginning of a text from the answer behind them.

    Pieces go in, and come out as `Thought` and str as soon as they are certain: only what may be a mark, or is space beside
    one, is held back. Marks further on are part of the answer, which may be about them.
    """

    def __init__(self, marks: Marks, prompt: str = ""):
        """`prompt`: what the text follows, whose end may have begun the thoughts."""
        self.marks = marks
        # The ends to look for while thinking; before the first word there may be any beginning, and behind it no more.
        self._ends = tuple(end for begin, end in marks if prompt.rstrip().endswith(begin))
        self._begun = bool(self._ends)
        self._held = ""
        # Whether nothing but space has come of what is told now.
        self._blank = True
        self.thinking = self._begun
        self.done = False

    def add(self, more: str) -> list[str]:
        """The pieces that are certain once `more` has come."""
        self._held += more
        told: list[str] = []
        while self._step(told):
            pass
        return told

    def finish(self) -> list[str]:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        if self.thinking:
            text = text.strip() if self._blank else text.rstrip()
            return [Thought(text)] if text else []
        return [text] if text else []

    def _step(self, told: list[str]) -> bool:
        """Tells what is certain of what is held; whether there is another state to go on with."""
        if self.thinking:
            return self._think(told)
        if self.done:
            # Behind thoughts an answer begins with its first word.
            text = self._held.lstrip() if self._blank and self._begun else self._held
            self._blank = self._blank and not text
            self._held = ""
            if text:
                told.append(text)
            return False
        text = self._held.lstrip()
        for begin, end in self.marks:
            if text.startswith(begin):
                self._ends, self.thinking, self._begun = (end,), True, True
                self._held = text[len(begin) :]
                return True
        if not any(begin.startswith(text) for begin, _ in self.marks):
            self.done = True
            return True
        return False

    def _think(self, told: list[str]) -> bool:
        text = self._held.lstrip() if self._blank else self._held
        found = min((at for end in self._ends if (at := text.find(end)) >= 0), default=-1)
        certain = found if found >= 0 else min(beginning_in(text, end) for end in self._ends)
        # Space may stand before the mark.
        words = text[:certain].rstrip()
        if words:
            told.append(Thought(words))
            self._blank = False
        self._held = text[len(words) :]
        if found < 0:
            return False
        end = next(end for end in self._ends if text.startswith(end, found))
        self.thinking, self.done, self._blank = False, True, True
        self._held = text[found + len(end) :]
        return True
