"""The journal of a job: a file beside the output with a line for each finished row.

A line is a JSON object after its CRC-32 in hex. Incomplete and damaged lines are ignored, so their
rows run again. The journal stays when the output is complete, so that only changed rows run again
after the input has changed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.batch.rows import Outcome
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.disk import naming
from castiron.vmfb.staging import replace_file

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

ENDING = ".journal"
# The first line of a journal.
TITLE = b'{"castiron batch": 2}\n'
# Max seconds of work that are lost if the machine loses its power.
SYNC = 1.0
# The start of a line: its checksum, the key of its row, and whether the row failed.
HEAD = re.compile(rb'([0-9a-f]{8}) \{"key": "([0-9a-f]{32})", "failed": (true|false), ')
CHECKSUM_BYTES = 9
# NumPy's type of a key: 16 bytes, compared like a string.
KEY = "S16"
MAX_LINE = 1 << 28


@dataclass(frozen=True)
class Entry:
    """A finished row: its columns in the input (`own`, as in `Row.own`) and the `added` columns."""

    own: Mapping[str, Any] | str
    added: Mapping[str, Any]


class Journal:
    """The journal of an output, locked by this process."""

    def __init__(self, output: Path):
        """Open or create the journal of `output`.

        Raises PipelineError if another process has it open, or if the file is not a journal.
        """
        self.path = output.with_name(output.name + ENDING)
        self.output = output
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self._open()
        self.synced = time.monotonic()
        keys, offsets, failed, self.end = bytearray(), array("q"), bytearray(), self._write_title()
        for offset, length, key, failure in self._scan():
            keys += bytes.fromhex(key.decode())
            failed.append(failure == b"true")
            offsets.append(offset)
            self.end = offset + length
        os.truncate(self.file.fileno(), self.end)
        found = np.frombuffer(bytes(keys), KEY)
        # Sorted by key; of several lines with the same key the last one counts.
        order = np.argsort(found, kind="stable")
        self._keys, self._offsets = found[order], np.array(offsets, np.int64)[order]
        self._failed = np.array(failed, bool)[order]
        self.lines = len(found)

    def _write_title(self) -> int:
        """Write what is missing of the first line; return the offset of the second line."""
        with open(self.path, "rb") as file:
            begin = file.read(len(TITLE))
        if not TITLE.startswith(begin):
            raise PipelineError(f"{self.path} is not a journal of this version; move it, or choose another output")
        self._write(TITLE[len(begin) :])
        return len(TITLE)

    def _open(self) -> Any:
        """Open and lock the file; try again if another process has replaced it meanwhile."""
        while True:
            file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            if fcntl is None:
                return file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            except BlockingIOError:
                file.close()
                raise PipelineError(
                    f"another castiron batch is writing {self.output}; wait for it, or choose another output"
                ) from None
            except FileNotFoundError:
                pass
            except OSError:
                # The file system has no locks, so a second writer cannot be detected.
                return file
            file.close()

    def _scan(self) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Yield the offset, length, key and `failed` of each valid line."""
        offset = 0
        with open(self.path, "rb") as file:
            while line := file.readline(MAX_LINE):
                head = HEAD.match(line)
                if head and line.endswith(b"\n") and zlib.crc32(line[CHECKSUM_BYTES:]) == int(head[1], 16):
                    yield offset, len(line), head[2], head[3]
                offset += len(line)

    def find(self, key: str) -> tuple[int, bool] | None:
        """Return the offset of a row's line and whether the row failed; None if unfinished."""
        wanted = np.frombuffer(bytes.fromhex(key), KEY)
        index = np.searchsorted(self._keys, wanted, "right")[0] - 1
        if index < 0 or self._keys[index] != wanted[0]:
            return None
        return int(self._offsets[index]), bool(self._failed[index])

    def add(self, key: str, own: Mapping[str, Any] | str, outcome: Outcome) -> int:
        """Append the line of a finished row, and return the offset of the line."""
        line = dumps({"key": key, "failed": outcome.failed, "own": own, "added": outcome.added}) + b"\n"
        line = b"%08x " % zlib.crc32(line) + line
        offset = self.end
        self._write(line)
        self.end += len(line)
        self.lines += 1
        if time.monotonic() - self.synced > SYNC:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()
        return offset

    def _write(self, data: bytes) -> None:
        with naming(self.path):
            # On a full disk a part of the line may be written, which the next run ignores.
            if self.file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self, offsets: Sequence[int] | np.ndarray) -> Iterator[Entry]:
        """Yield the finished rows whose lines are at these offsets."""
        with open(self.path, "rb") as file:
            for offset in offsets:
                if file.tell() != offset:
                    file.seek(offset)
                value = json.loads(file.readline()[CHECKSUM_BYTES:])
                yield Entry(value["own"], value["added"])

    def keep_only(self, offsets: np.ndarray) -> None:
        """Remove the lines that are at none of these offsets; no row may be added afterwards."""
        wanted = np.unique(offsets)
        if len(wanted) == self.lines:
            return
        with open(self.path, "rb") as old, replace_file(self.path) as new:
            new.write(TITLE)
            for offset in wanted:
                old.seek(offset)
                new.write(old.readline())
            new.flush()
            os.fsync(new.fileno())

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def dumps(value: Any) -> bytes:
    """Return a value as JSON on one line."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape and UTF-8 cannot encode.
        return json.dumps(value).encode()
