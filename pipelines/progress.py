"""Progress of long work, on stderr: a bar at a terminal, nothing elsewhere."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from castiron.pipelines.harmless import harmless

# Work that is over before this many seconds is never drawn.
PATIENCE = 0.4
# Seconds between two drawings: often enough for a second hand.
INTERVAL = 0.2
WIDTH = 24
# Seconds before what is left is told: at first every guess is bad.
LEFT_AFTER = 2.0


class Progress:
    """Takes (stage, done 0..1) and shows the stage that runs.

        with Progress() as progress:
            compile_model(..., progress=progress)

    A stage ends when it reaches 1 or when the next one begins; its bar is wiped away. One that says nothing about how
    far it is shows its seconds alone, others about how many are left. `note`: what else there is to tell of it now.
    """

    def __init__(self, quiet: bool = False):
        self.shown = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.stage: str | None = None
        self.note = ""
        # How far the stage is, and how far and when it began.
        self.done = self.begun = self.started = 0.0
        self._drawn = False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._thread:
            self._over.set()
            self._thread.join()
        with self._lock:
            self._wipe()

    def __call__(self, stage: str, done: float, note: str = "") -> None:
        if not self.shown:
            return
        with self._lock:
            if stage != self.stage:
                self._wipe()
                self.stage, self.begun, self.started = stage, done, time.monotonic()
            self.done, self.note = min(max(done, 0.0), 1.0), note
            if self.done == 1:
                self._wipe()
                self.stage = None
        if not self._thread:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def print(self, line: str) -> None:
        """A line on stdout, which may be the same terminal."""
        with self._lock:
            self._wipe()
            print(line, flush=True)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                if self.stage is not None and time.monotonic() - self.started >= PATIENCE:
                    self._draw()

    def _draw(self) -> None:
        full = round(self.done * WIDTH)
        bar = f"  [{'#' * full}{'.' * (WIDTH - full)}] {self.done:4.0%}" if self.done else ""
        seconds = time.monotonic() - self.started
        told = self.done > self.begun and seconds >= LEFT_AFTER
        left = f", about {seconds * (1 - self.done) / (self.done - self.begun):.0f} s left" if told else ""
        note = f"  {self.note}" if self.note else ""
        line = f"{self.stage}{bar}{note}  {seconds:.0f} s{left}"
        # A line that wraps cannot be wiped.
        self._write(f"\r\x1b[K{line[: _columns() - 1]}")
        self._drawn = True

    def _wipe(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@contextlib.contextmanager
def clock(told: Callable[[float], None], expected: Callable[[], float]) -> Iterator[None]:
    """While the block runs, tells the share done of work that cannot tell it itself, by the seconds it is expected to take.

    What takes longer than expected slows down before the end and never gets there: 90 % at the expected time.
    """
    over = threading.Event()

    def tick() -> None:
        start, seconds = time.monotonic(), max(expected(), 1e-3)
        while not over.wait(INTERVAL):
            told(share_of((time.monotonic() - start) / seconds))

    thread = threading.Thread(target=tick, name="clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def share_of(time_share: float) -> float:
    """The share to show when `time_share` of the expected time is over: as much up to 90 %, then ever slower."""
    return time_share * 0.9 if time_share <= 1 else 1 - 0.1 / time_share


def say(line: str) -> None:
    """One line on stderr."""
    print(f"castiron: {harmless(line)}", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
