"""Progress of long work, on stderr: a bar at a terminal, nothing elsewhere."""

import os
import sys
import threading
import time

# Work that is over before this many seconds is never drawn.
PATIENCE = 0.4
# Seconds between two drawings: often enough for a second hand.
INTERVAL = 0.2
WIDTH = 24


class Progress:
    """Takes (stage, done 0..1) and shows the stage that runs.

        with Progress() as progress:
            compile_model(..., progress=progress)

    A stage ends when it reaches 1 or when the next one begins; its bar is wiped away. One that says nothing about how
    far it is shows its seconds alone.
    """

    def __init__(self, quiet: bool = False):
        self.shown = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.stage: str | None = None
        self.done = self.started = 0.0
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

    def __call__(self, stage: str, done: float) -> None:
        if not self.shown:
            return
        with self._lock:
            if stage != self.stage:
                self._wipe()
                self.stage, self.started = stage, time.monotonic()
            self.done = min(max(done, 0.0), 1.0)
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
        line = f"{self.stage}{bar}  {time.monotonic() - self.started:.0f} s"
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


def say(line: str) -> None:
    """One line on stderr."""
    print(f"castiron: {line}", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
