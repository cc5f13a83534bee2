"""Verdicts on hostile files: each must be accepted, or rejected with a one-line error."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from castiron.pipelines.errors import user_errors

# Maximum characters of an error without the path.
LONGEST = 300
ACCEPTED, REJECTED = "accepted", "rejected"


def fine(message: str) -> bool:
    """Return whether a verdict is that the file was accepted or rejected."""
    return message.startswith((ACCEPTED, REJECTED))


def verdict(path: Path, use: Callable[[Path], object]) -> str:
    """Return ACCEPTED, REJECTED and the line of the sources, or what is wrong with `use(path)`."""
    try:
        use(path)
    except user_errors() as error:
        message = str(error).replace(str(path), "PATH")
        is_good = len(message) < LONGEST and message.isprintable()
        return f"{REJECTED} at {line_of(error)}" if is_good else f"bad message at {line_of(error)}: {message[:160]!r}"
    except Exception as error:
        return f"traceback {type(error).__name__} at {line_of(error)}: {str(error)[:80]!r}"
    return ACCEPTED


def line_of(error: BaseException) -> str:
    """Return castiron's innermost source line in the error's traceback."""
    foreign = ("hostile.py", "site-packages", "/lib/python")
    own = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in foreign)]
    return f"{'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno}" if own else "?"


def limited(path: Path, use: Callable[[Path], object], seconds: int, memory: int) -> str:
    """Return `verdict` of a forked child with these limits, or the signal that ended it."""
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(there)
            _limit(seconds, memory)
            os.write(here, verdict(path, use).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(here)
    with open(there, "rb") as file:
        message = file.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"ended by {signal.Signals(status & 127).name}" if status & 127 else message


def _limit(seconds: int, memory: int) -> None:
    """Limit this process, which has the memory of the tests already; a waiting one ends too."""
    signal.alarm(3 * seconds)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, used + memory)):
        resource.setrlimit(kind, (limit, limit))
    sys.stderr = open(os.devnull, "w")
