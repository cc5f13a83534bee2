"""What goes wrong with files, in words that name the file and say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

_ELSEWHERE = "choose another place, or change its permissions"
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "allow larger files (ulimit -f), or choose another place",
    errno.EROFS: "choose another place",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
}


def reason(error: OSError) -> str:
    """What the system says, and what to do about it."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{said}; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else said


def write_text(path: Path | str, text: str) -> None:
    """Writes a file in UTF-8; an OSError names it."""
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")


def files_below(place: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The file at a place, or those in the folder there and below it, but for what comes and goes meanwhile."""
    below = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    for path in chain((place,), below):
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path, path.stat()


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Gives an OSError that names no file, as that of a full disk, the name of what is being written."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
