"""What a job has done so far: a file beside its output, a line for each row, which outlives the process at any moment.

A line is whole or it counts for nothing: the next run cuts off what a killed one left of its last. Lines stay until the
output has been written, and after it, so that a row that was changed is all that another run does again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.batch.requests import Outcome
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.aside import replacing
from castiron.vmfb.disk import naming

ENDING = ".journal"
# The first line.
TITLE = b'{"castiron batch": 1}\n'
# Seconds of work that a machine that loses its power may do again.
SYNC = 1.0
# How a line begins: with its row's key in hex, and whether that failed.
HEAD = re.compile(rb'\{"key": "([0-9a-f]{32})", "failed": (true|false), ')


@dataclass(frozen=True)
class Entry:
    """A line: what the row keeps, and what was added to it."""

    kept: Mapping[str, Any] | str
    added: Mapping[str, Any]


class Journal:
    """The journal of an output, held by one process."""

    def __init__(self, output: Path):
        """Makes it, or goes on with one that is there. PipelineError while another process holds it, and for a file of its name
        that is no journal."""
        self.path = output.with_name(output.name + ENDING)
        self.output = output
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self._open()
        self.synced = time.monotonic()
        keys, places, failed, self.end = bytearray(), array("q"), bytearray(), self._title()
        for place, length, key, ended in self._scan():
            keys += bytes.fromhex(key.decode())
            failed.append(ended == b"true")
            places.append(place)
            self.end = place + length
        os.truncate(self.file.fileno(), self.end)
        found = np.frombuffer(bytes(keys), ">u8").astype(np.uint64).reshape(-1, 2)
        # Of lines with one key the last counts.
        order = np.lexsort((np.arange(len(found)), found[:, 1], found[:, 0]))
        self._high, self._low = found[order, 0], found[order, 1]
        self._places, self._failed = np.array(places, np.int64)[order], np.array(failed, bool)[order]
        self.lines = len(found)

    def _title(self) -> int:
        """Where the first row's line begins; writes what comes before it, if that is not there."""
        with open(self.path, "rb") as file:
            begun = file.read(len(TITLE))
        if not TITLE.startswith(begun):
            raise PipelineError(f"{self.path} is no journal of castiron batch: name another output, or move it away")
        self._write(TITLE[len(begun) :])
        return len(TITLE)

    def _open(self) -> Any:
        """The file, locked; once it is, it must still be the one of that name."""
        while True:
            file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            except BlockingIOError:
                file.close()
                raise PipelineError(
                    f"another castiron batch is writing {self.output}; wait for it, or name another output"
                ) from None
            except FileNotFoundError:
                pass
            except OSError:
                # A file system without locks, where nobody can be kept from naming one output twice.
                return file
            file.close()

    def _scan(self) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Of each whole line where it begins, how many bytes it has, its key, and whether it failed."""
        place = 0
        with open(self.path, "rb") as file:
            for line in file:
                # Where a machine lost its power there may be zeros in the place of what was not written.
                if (head := HEAD.match(line)) and line.endswith(b"}\n") and b"\0" not in line:
                    yield place, len(line), head[1], head[2]
                place += len(line)

    def find(self, key: str) -> tuple[int, bool] | None:
        """Where the line of a row is that an earlier run has done, and whether it failed; None if there is none."""
        high, low = np.frombuffer(bytes.fromhex(key), ">u8").astype(np.uint64)
        first, last = np.searchsorted(self._high, high), np.searchsorted(self._high, high, "right")
        if not (equal := first + np.flatnonzero(self._low[first:last] == low)).size:
            return None
        return int(self._places[equal[-1]]), bool(self._failed[equal[-1]])

    def add(self, key: str, kept: Mapping[str, Any] | str, outcome: Outcome) -> int:
        """Writes the line of a row that is done; returns where. It outlives this process at once, and the machine soon."""
        line = dumps({"key": key, "failed": outcome.failed, "kept": kept, "added": outcome.added}) + b"\n"
        place = self.end
        self._write(line)
        self.end += len(line)
        self.lines += 1
        if time.monotonic() - self.synced > SYNC:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()
        return place

    def _write(self, data: bytes) -> None:
        with naming(self.path):
            # A full disk takes part of it; the next run cuts that off.
            if self.file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self, places: Sequence[int] | np.ndarray) -> Iterator[Entry]:
        """The lines at these places."""
        with open(self.path, "rb") as file:
            for place in places:
                if file.tell() != place:
                    file.seek(place)
                value = json.loads(file.readline())
                yield Entry(value["kept"], value["added"])

    def keep(self, places: np.ndarray) -> None:
        """Forgets all lines but those at these places; the last that is done with a journal."""
        wanted = np.unique(places)
        if len(wanted) == self.lines:
            return
        with open(self.path, "rb") as old, replacing(self.path) as new:
            new.write(TITLE)
            for place in wanted:
                old.seek(place)
                new.write(old.readline())
            new.flush()
            os.fsync(new.fileno())

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


def dumps(value: Any) -> bytes:
    """JSON of one line."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        return json.dumps(value).encode()
