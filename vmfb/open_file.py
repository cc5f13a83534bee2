"""A file that is kept open: whatever takes its name meanwhile, it is the one that is read."""

from __future__ import annotations

import os
from pathlib import Path


class OpenFile:
    """The file at `path`, open for reading until this object goes; `number` is its descriptor."""

    number = -1
    # As Python ends, modules go before this does.
    _close = staticmethod(os.close)

    def __init__(self, path: Path, folder: int | None = None):
        """`folder`: the descriptor of the open folder in which the file is looked for by its name, whatever lies at its path.
        OSError if it cannot be opened; a pipe is not waited for."""
        self.path = path
        self.number = os.open(path if folder is None else path.name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)

    def stat(self) -> os.stat_result:
        return os.fstat(self.number)

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            self._close(number)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        # In another process there is a path alone.
        return type(None), ()
