"""An answer on stdout as it comes: at a terminal with the model's thoughts before it, dimmed; elsewhere without them."""

import os
import sys
from collections.abc import Callable
from typing import TextIO

from castiron.pipelines.generation.thoughts import Thought
from castiron.pipelines.harmless import harmless

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Spoken:
    """Takes the pieces of `Generation.stream` or `Chat.answer`; `wrap` is what happens to text on its way to `out`."""

    def __init__(self, out: TextIO | None = None, wrap: Callable[[str], str] = str):
        """`wrap` breaks lines; it sees what is shown, without the marks that dim it."""
        self.out, self.wrap = out or sys.stdout, wrap
        self.shown = self.out.isatty()
        self.dims = self.shown and os.environ.get("TERM") != "dumb"
        # Whether thoughts were the last to come, and nothing of the answer yet.
        self.thinking = False

    def write(self, piece: str) -> None:
        """At a terminal, which obeys nothing that stands in it."""
        said = harmless(piece) if self.shown else piece
        if isinstance(piece, Thought):
            self.thinking = True
            if not self.shown:
                return
            words = self.wrap(str(said))
            words = f"{DIM}{words}{PLAIN}" if self.dims else words
        else:
            ends = self.thinking and bool(piece.strip())
            self.thinking = self.thinking and not ends
            words = self.wrap(f"\n\n{said}" if ends and self.shown else said)
        self.out.write(words)
        self.out.flush()
