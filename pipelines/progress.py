"""Progress of long work, on stderr: a bar at a terminal, one line a stage elsewhere, nothing when quiet."""

import sys
import time


class Progress:
    """Takes (stage, done 0..1) and shows it.

        with Progress() as progress:
            compile_model(..., progress=progress)

    A stage ends when it reaches 1 or when the next one begins. A bar needs rich and a terminal; without either, a stage
    that took longer than `patience` seconds is told when it ends, so that a log is not empty and not full.
    """

    def __init__(self, quiet: bool = False, patience: float = 1.0):
        self.quiet = quiet
        self.patience = patience
        self.stage: str | None = None
        self.started = 0.0
        self.bar = self.task = None

    def __enter__(self):
        if not self.quiet and sys.stderr.isatty():
            self.bar = _rich_bar()
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_):
        if self.bar:
            self.bar.stop()
        elif self.stage and _[0] is None:
            self._end()

    def __call__(self, stage: str, done: float) -> None:
        if self.quiet:
            return
        if stage != self.stage:
            self._begin(stage)
        if self.bar:
            self.bar.update(self.task, completed=min(max(done, 0.0), 1.0))
        if done >= 1:
            self._end()

    def _begin(self, stage: str) -> None:
        self._end()
        self.stage, self.started = stage, time.monotonic()
        if self.bar:
            self.task = self.bar.add_task(stage, total=1.0)

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
    return Progress(*columns, console=Console(stderr=True))
