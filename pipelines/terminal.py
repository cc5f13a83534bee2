"""Print messages and progress bars on stderr; format sizes and counts; sanitise text."""

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from typing import Any, TextIO

# Seconds that a stage runs before its bar is drawn.
PATIENCE = 0.4
# Seconds between two drawings of the bar.
INTERVAL = 0.2
WIDTH = 24
# Seconds before the remaining time is shown: early estimates are bad.
ESTIMATE_AFTER = 2.0
# Control characters except tab and line feed, and Unicode's marks of text direction (UAX 9).
_CONTROLS = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Escape sequences for dimmed and for plain text.
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_STYLES = re.compile(r"(\x1b\[[02]m)")


def sanitised(text: str) -> str:
    """Return `text` with control characters escaped, except tab and line feed."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))


class TerminalStream:
    """A text stream at a terminal that escapes control characters, except in DIM and PLAIN."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        parts = _STYLES.split(text)
        self.stream.write("".join(part if i % 2 else sanitised(part) for i, part in enumerate(parts)))
        return len(text)


def protect_terminal() -> None:
    """Replace stdout and stderr by a `TerminalStream` where they are a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, TerminalStream):
            setattr(sys, name, TerminalStream(stream))


def print_message(line: str) -> None:
    """Print one line on stderr, after the text `castiron: `."""
    print(f"castiron: {sanitised(line)}", file=sys.stderr, flush=True)


def megabytes(size: float) -> str:
    """Return a size in bytes as text: `98.4 MB`, `1.25 GB`."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def counted(number: int, noun: str) -> str:
    """Return a number and a noun as text, in the plural if necessary: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Progress:
    """A progress bar on stderr, if that is a terminal, for a `with` statement.

    Call it with the name of a stage and the fraction of it that is done, 0 to 1. The bar is erased
    when the fraction reaches 1 or the next stage begins.
    """

    def __init__(self, quiet: bool = False):
        self.shown = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.stage: str | None = None
        self.note = ""
        # Share of the stage that is done now and was done at its start, and the time of the start.
        self.done = self.start_done = self.start_time = 0.0
        self._drawn = False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        if self._thread:
            self._over.set()
            self._thread.join()
        with self._lock:
            self._erase()

    def __call__(self, stage: str, done: float, note: str = "") -> None:
        if not self.shown:
            return
        with self._lock:
            if stage != self.stage:
                self._erase()
                self.stage, self.start_done, self.start_time = stage, done, time.monotonic()
            self.done, self.note = min(max(done, 0.0), 1.0), note
            if self.done == 1:
                self._erase()
                self.stage = None
        if not self._thread:
            thread = threading.Thread(target=self._run, daemon=True)
            # Without memory for a thread, there is no bar.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def print(self, line: str) -> None:
        """Print a line on stdout. First erase the bar, because stdout may be the same terminal."""
        with self._lock:
            self._erase()
            print(line, flush=True)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                if self.stage is not None and time.monotonic() - self.start_time >= PATIENCE:
                    self._draw()

    def _draw(self) -> None:
        full = round(self.done * WIDTH)
        bar = f"  [{'#' * full}{'.' * (WIDTH - full)}] {self.done:4.0%}" if self.done else ""
        seconds, left = time.monotonic() - self.start_time, ""
        if self.done > self.start_done and seconds >= ESTIMATE_AFTER:
            left = f", about {seconds * (1 - self.done) / (self.done - self.start_done):.0f} s left"
        note = f"  {self.note}" if self.note else ""
        # A line that wraps cannot be erased.
        line = sanitised(f"{self.stage}{bar}{note}  {seconds:.0f} s{left}")
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        stream = sys.stderr.stream if isinstance(sys.stderr, TerminalStream) else sys.stderr
        stream.write(text)
        stream.flush()
