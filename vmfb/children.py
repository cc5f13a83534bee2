"""Processes that end with the one that started them, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

# Waits for the end of a pipe that only the parent can close, and ends its process group.
_GUARD = ("/bin/sh", "-c", "read end; kill -9 0")


@contextlib.contextmanager
def own_group() -> Iterator[int | None]:
    """A process group for children (Popen's `process_group`), all of which are killed when the block ends or this process
    does, even outright. None where there is no shell to watch over them: then they outlive a process that is killed outright.

    The kernel's own way (PR_SET_PDEATHSIG) has to be asked for in the child before it runs a program, where Python is not
    safe while other threads run.
    """
    try:
        guard = subprocess.Popen(
            _GUARD, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
    except OSError:
        yield None
        return
    try:
        yield guard.pid
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(guard.pid, signal.SIGKILL)
        # The pipe is closed too.
        guard.communicate()
