"""File errors that name the file and a remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

_ELSEWHERE = "choose another path, or change its permissions"
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files (ulimit -f), or choose another path",
    errno.EROFS: "choose another path",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
}


def reason(error: OSError) -> str:
    """Return the system's error message, followed by a remedy if one is known."""
    message = error.strerror or str(error) or type(error).__name__
    return f"{message}; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else message


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the file name `path` to an OSError of the `with` body that has no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write a file in UTF-8; an OSError names the file."""
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")


def files_below(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file at or below `path` with its `stat` result, except files removed meanwhile."""
    below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in chain((path,), below):
        with contextlib.suppress(OSError):
            if file.is_file():
                yield file, file.stat()
