"""Child processes that end with their parent, even if the parent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

# A shell that kills its process group when the parent's end of its stdin is closed.
_GUARD = ("/bin/sh", "-c", "read end; kill -9 0")


@contextlib.contextmanager
def own_group() -> Iterator[int | None]:
    """Yield the id of a process group that is killed when the `with` block or this process ends.

    Pass it as `Popen(process_group=...)`. It is None on systems without /bin/sh, whose process
    kills the group when its pipe to this process is closed. Linux's PR_SET_PDEATHSIG needs Python
    code in the forked child, which is not safe if this process has several threads.
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
        # Also closes the pipe.
        guard.communicate()
