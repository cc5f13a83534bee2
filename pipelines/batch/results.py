"""Where results go: a file that appears whole when all are there, or a pipe that has each as it comes."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from castiron.pipelines.batch.journal import Entry, dumps
from castiron.pipelines.batch.rows import TABLE, ZIPPED, kind_of
from castiron.vmfb.aside import replacing


def write_output(output: Path, entries: Callable[[], Iterable[Entry]], schema: Any = None) -> None:
    """Writes a file in the kind that its name says, which is there when it is whole; `schema` is that of a table which the
    rows came from. `entries` may be asked for twice."""
    kind = kind_of(output.name)
    with replacing(output) as file:
        if kind is TABLE:
            from castiron.pipelines.batch.parquet import write

            write(file, lambda: ((entry.kept, entry.added) for entry in entries()), schema)
        else:
            # No time and no name, so that equal results are equal bytes.
            with gzip.GzipFile("", "wb", 6, file, 0) if kind is ZIPPED else contextlib.nullcontext(file) as lines:
                for entry in entries():
                    lines.write(line_of(entry.kept, entry.added, schema))
        file.flush()
        os.fsync(file.fileno())


def line_of(kept: Mapping[str, Any] | str, added: Mapping[str, Any], schema: Any = None) -> bytes:
    """A result as a line of JSON: what the row kept, and what was added to it."""
    if isinstance(kept, str):
        from castiron.pipelines.batch.parquet import plain, unpack

        kept = plain(unpack(kept, schema))
    return dumps({**kept, **added}) + b"\n"


class Pipe:
    """Stdout, in the order of arrival, or held back until it is that of the input."""

    def __init__(self, ordered: bool):
        self.ordered, self.held, self.next = ordered, dict[int, bytes](), 0

    def add(self, index: int, line: bytes) -> None:
        if not self.ordered:
            self._write(line)
            return
        self.held[index] = line
        while (ready := self.held.pop(self.next, None)) is not None:
            self._write(ready)
            self.next += 1

    def _write(self, line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
