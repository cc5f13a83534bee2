"""Progress of long work, on stderr: a bar at a terminal, a line now and then elsewhere, nothing when quiet."""

import sys
import time


class Progress:
    """Takes (stage, done 0..1) and shows it.

        with Progress() as progress:
            compile_model(..., progress=progress)

    A stage ends when it reaches 1 or when the next one begins. A bar needs rich and a terminal. Without either, a stage
    that took more than `patience` seconds is told when it ends, and one that takes longer than `interval` is told on the
    way, so that a log is neither empty nor full.
    """

    def __init__(self, quiet: bool = False, patience: float = 1.0, interval: float = 20.0):
        self.quiet, self.patience, self.interval = quiet, patience, interval
        self.stage: str | None = None
        self.started = self.told = 0.0
        self.bar = self.task = None

    def __enter__(self):
        if not self.quiet and sys.stderr.isatty():
            self.bar = _rich_bar()
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self._end()
        if self.bar:
            self.bar.stop()

    def __call__(self, stage: str, done: float) -> None:
        if self.quiet:
            return
        now = time.monotonic()
        if stage != self.stage:
            self._end()
            self.stage, self.started, self.told = stage, now, now
            if self.bar:
                self.task = self.bar.add_task(stage, total=1.0)
        done = min(max(done, 0.0), 1.0)
        if self.bar:
            self.bar.update(self.task, completed=done)
        elif done < 1 and now - self.told >= self.interval:
            self.told = now
            say(f"{stage}: {done:.0%} after {now - self.started:.0f} s")
        if done == 1:
            self._end()

    def _end(self) -> None:
        if self.stage is None:
            return
        if self.bar:
            self.bar.update(self.task, completed=1.0)
        elif (seconds := time.monotonic() - self.started) >= self.patience:
            say(f"{self.stage} ({seconds:.1f} s)")
        self.stage = None


def say(line: str) -> None:
    """One line on stderr."""
    print(f"castiron: {line}", file=sys.stderr, flush=True)


def _rich_bar():
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # rich would send what is printed meanwhile to its own console, which is right only if both are the same terminal.
    return Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty())
