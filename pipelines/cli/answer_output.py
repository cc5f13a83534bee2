"""Print an answer on stdout as it streams.

At a terminal, control characters are escaped, reasoning is dimmed, and lines break between words.
"""

import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from castiron.pipelines.terminal import sanitised
from castiron.pipelines.text.reasoning import Reasoning

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
FENCE = "```"
# Below this width the terminal breaks lines.
MIN_COLUMNS = 20
TAB = 8


class AnswerOutput:
    """A writer of a streamed answer; a pipe gets the text unchanged, without reasoning."""

    def __init__(self, out: TextIO | None = None, wrap: Callable[[str], str] = str):
        """Write to `out`; wrap: breaks the lines of the visible text."""
        self.out, self.wrap = out or sys.stdout, wrap
        self.shown = self.out.isatty()
        self.dims = self.shown and os.environ.get("TERM") != "dumb"
        # Whether the last text was reasoning, and the answer has not begun.
        self.thinking = False

    def write(self, part: str) -> None:
        """Print a part of the answer; `Reasoning` is dimmed, or left out of a pipe."""
        text = sanitised(part) if self.shown else part
        if isinstance(part, Reasoning):
            self.thinking = True
            if not self.shown:
                return
            text = self.wrap(str(text))
            text = f"{DIM}{text}{PLAIN}" if self.dims else text
        else:
            starts = self.thinking and bool(part.strip())
            self.thinking = self.thinking and not starts
            text = self.wrap(f"\n\n{text}" if starts and self.shown else text)
        self.out.write(text)
        self.out.flush()


class Wrapper:
    """Break the lines of a stream: erase a word that does not fit, and write it on the next line.

    Code between fences is not changed, so that it can be copied.
    """

    def __init__(self) -> None:
        # Cells used in this line, and the incomplete word at its end.
        self.column = 0
        self.word = ""
        # The first characters of this line, to recognise code fences.
        self.start = ""
        self.code = False

    def wrap(self, text: str, columns: int) -> str:
        """Return what to write for the next `text`; columns: width of the terminal in cells."""
        if columns < MIN_COLUMNS:
            return text
        return "".join(self._character(character, columns) for character in text)

    def _character(self, character: str, columns: int) -> str:
        if character == "\n":
            self.column, self.word, self.start = 0, "", ""
            return character
        if len(self.start) < len(FENCE):
            self.start += character
            self.code ^= self.start == FENCE
        if self.code:
            return character
        width = TAB - self.column % TAB if character == "\t" else cells(character)
        # Terminals differ in how a cursor behind the last cell moves back.
        fits = self.column + width < columns
        if character in " \t":
            self.word = ""
            self.column = self.column + width if fits else 0
            return character if fits else "\n"
        before = ""
        if not fits:
            moved = sum(map(cells, self.word))
            if moved == self.column:
                # The word is longer than a line.
                moved, self.word = 0, ""
            before = (f"\x1b[{moved}D\x1b[K" if moved else "") + "\n" + self.word
            self.column = moved
        self.column += width
        # Lines may break before and after an ideograph.
        self.word = "" if width == 2 else self.word + character
        return before + character


def cells(character: str) -> int:
    """Return the number of terminal cells that a character takes: 0, 1 or 2."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def columns(stream: TextIO) -> int:
    """Return the width of the terminal in cells; 0 for a file, a pipe or a dumb terminal."""
    if os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
