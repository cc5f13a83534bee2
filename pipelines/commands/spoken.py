"""An answer on stdout as it comes: at a terminal with the model's thoughts before it, dimmed; elsewhere without them."""

import os
import sys
from collections.abc import Callable
from typing import TextIO

from castiron.pipelines.generation.thoughts import Thought

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Spoken:
    """Takes the pieces of `Generation.stream` or `Chat.answer`; `wrap` is what happens to text on its way to `out`."""

    def __init__(self, out: TextIO | None = None, wrap: Callable[[str], str] = lambda text: text):
        self.out, self.wrap = out or sys.stdout, wrap
        self.shown = self.out.isatty()
        self.dims = self.shown and os.environ.get("TERM") != "dumb"
        # Whether thoughts were the last to come, and nothing of the answer yet.
        self.thinking = False

    def write(self, piece: str) -> None:
        before = after = ""
        if isinstance(piece, Thought):
            self.thinking = True
            if not self.shown:
                return
            before, after = (DIM, PLAIN) if self.dims else ("", "")
        elif self.thinking and piece:
            self.thinking = False
            piece = f"\n\n{piece}" if self.shown else piece
        self.out.write(before + self.wrap(str(piece)) + after)
        self.out.flush()
