"""The journal of a batch job: a file next to the output with a line for each finished record.

A line is a CRC-32 in hex, a space and a JSON object. Incomplete and damaged lines are ignored, and
their records are answered again. The journal is not deleted when the job ends, so that a later run,
for example with more records in the input, need not answer the finished records again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.file_errors import naming

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

ENDING = ".journal"
# The first line of a journal.
TITLE = b'{"castiron batch": 2}\n'
# Seconds between fsyncs: the work that a power failure can lose.
SYNC = 1.0
# Matches the start of a line: the checksum, the key of the record, and whether the record failed.
HEAD = re.compile(rb'([0-9a-f]{8}) \{"key": "([0-9a-f]{32})", "failed": (true|false), ')
CHECKSUM_BYTES = 9
MAX_LINE = 1 << 28


@dataclass(frozen=True)
class Entry:
    """A finished record of a batch job.

    own: input columns to copy to the output; for Parquet, a row as an Arrow stream in base64.
    added: columns of the answer.
    """

    own: Mapping[str, Any] | str
    added: Mapping[str, Any]


class Journal:
    """The journal of a batch job; a lock keeps other processes from writing to it."""

    def __init__(self, output: Path):
        """Open or create an output's journal; PipelineError if another process uses it."""
        self.path = output.with_name(output.name + ENDING)
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            self._lock()
        self.synced = time.monotonic()
        # File offset of each finished record's line, by key; the last line of a key counts.
        self.finished: dict[bytes, int] = {}
        self.failed: set[bytes] = set()
        self.end = self._write_title()
        for offset, length, key, failed in self._scan():
            self.finished[key] = offset
            (self.failed.add if failed else self.failed.discard)(key)
            self.end = offset + length
        os.truncate(self.file.fileno(), self.end)

    def _write_title(self) -> int:
        with open(self.path, "rb") as file:
            begin = file.read(len(TITLE))
        if not TITLE.startswith(begin):
            raise PipelineError(
                f"{self.path} is not a journal that this version of castiron can read; move it, or choose another output"
            )
        self._write(TITLE[len(begin) :])
        return len(TITLE)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise PipelineError(
                f"another castiron batch is writing {self.path}; wait for it, or choose another output"
            ) from None
        except OSError:
            # The file system has no locks, so a second writer cannot be detected.
            pass

    def _scan(self) -> Iterator[tuple[int, int, bytes, bool]]:
        """Yield (file offset, size in bytes, key of 16 bytes, failed) of valid lines."""
        offset = 0
        with open(self.path, "rb") as file:
            while line := file.readline(MAX_LINE):
                head = HEAD.match(line)
                if head and line.endswith(b"\n") and zlib.crc32(line[CHECKSUM_BYTES:]) == int(head[1], 16):
                    yield offset, len(line), bytes.fromhex(head[2].decode()), head[3] == b"true"
                offset += len(line)

    def find(self, key: str) -> tuple[int, bool] | None:
        """Return (offset of a finished record's line, whether it failed), or None."""
        offset = self.finished.get(bytes.fromhex(key))
        return None if offset is None else (offset, bytes.fromhex(key) in self.failed)

    def add(self, key: str, entry: Entry, failed: bool) -> int:
        """Append a finished record; return the file offset of its line."""
        line = dumps({"key": key, "failed": failed, "own": entry.own, "added": entry.added}) + b"\n"
        line = b"%08x " % zlib.crc32(line) + line
        offset = self.end
        self._write(line)
        self.end += len(line)
        if time.monotonic() - self.synced > SYNC:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()
        return offset

    def _write(self, data: bytes) -> None:
        with naming(self.path):
            # A full disk may store a part of the line; the next run ignores it.
            if self.file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self, offsets: Iterable[int]) -> Iterator[Entry]:
        """Yield the finished records whose lines are at the given file offsets of the journal."""
        with open(self.path, "rb") as file:
            for offset in offsets:
                if file.tell() != offset:
                    file.seek(offset)
                value = json.loads(file.readline()[CHECKSUM_BYTES:])
                yield Entry(value["own"], value["added"])

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def dumps(value: Any) -> bytes:
    """Return a value as JSON in one line, without the line feed."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape and UTF-8 cannot encode.
        return json.dumps(value).encode()
