"""Lines that break between words, as text streams to a terminal."""

import os
import unicodedata
from typing import TextIO

FENCE = "```"
# A narrower terminal breaks lines itself.
NARROWEST = 20
TAB = 8


class Wrapper:
    """Breaks lines between words; a word that has begun where it does not fit is taken back and begun anew.

    Code between fences stays as it is, so that it can be copied: the terminal breaks it.
    """

    def __init__(self) -> None:
        # Cells used in this line, and the word that is being written in it.
        self.column = 0
        self.word = ""
        # How this line of the text begins, as far as a fence would.
        self.start = ""
        self.code = False

    def wrap(self, text: str, columns: int) -> str:
        """What to write for the next `text`; all of it as it is where `columns` is too few to be a terminal's."""
        if columns < NARROWEST:
            return text
        return "".join(self._character(character, columns) for character in text)

    def _character(self, character: str, columns: int) -> str:
        if character == "\n":
            self.column, self.word, self.start = 0, "", ""
            return character
        if len(self.start) < len(FENCE):
            self.start += character
            if self.start == FENCE:
                self.code = not self.code
        if self.code:
            return character
        width = TAB - self.column % TAB if character == "\t" else cells(character)
        # A cursor behind the last cell moves back differently on every terminal.
        fits = self.column + width < columns
        if character in " \t":
            self.word = ""
            self.column = self.column + width if fits else 0
            return character if fits else "\n"
        before = ""
        if not fits:
            taken = sum(map(cells, self.word))
            if taken == self.column:
                # The word is longer than a line.
                taken, self.word = 0, ""
            before = (f"\x1b[{taken}D\x1b[K" if taken else "") + "\n" + self.word
            self.column = taken
        self.column += width
        # Lines may break before and after an ideograph.
        self.word = "" if width == 2 else self.word + character
        return before + character


def cells(character: str) -> int:
    """How many cells of a terminal a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def columns(stream: TextIO) -> int:
    """The width of the terminal that `stream` is, in cells; 0 if it is none or one without a cursor to move."""
    if os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
