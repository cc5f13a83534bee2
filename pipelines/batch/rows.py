"""The rows of a job, read one after another: JSON lines, plain, gzipped or from a pipe, or a table in Parquet."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import select
import sys
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from castiron.pipelines.batch.row import Row as Row
from castiron.pipelines.errors import PipelineError

# How files end, and what they hold; "-" is lines through a pipe.
LINES, ZIPPED, TABLE = (".jsonl", ".ndjson"), (".jsonl.gz", ".ndjson.gz"), (".parquet",)
# Bytes of one line: what is longer is no request, and would be held whole.
LONGEST = 64 << 20


class Rows(Protocol):
    """What rows are read from, once: None where the next one is not there yet. `share`: how much of it was read, 0 to 1, None
    if that is not known. `fault`: why they ended before their end, None if they did not."""

    fault: PipelineError | None

    @property
    def share(self) -> float | None: ...
    def __iter__(self) -> Iterator[Row | None]: ...


def kind_of(place: str) -> tuple[str, ...]:
    """Which of the kinds of file a name means, by how it ends; PipelineError for another ending."""
    if place == "-":
        return LINES
    for kind in (ZIPPED, LINES, TABLE):
        if place.lower().endswith(kind):
            return kind
    raise PipelineError(f"{place} ends in none of {', '.join((*LINES, *ZIPPED, *TABLE))}, and - is a pipe of JSON lines")


def open_rows(place: str) -> Rows:
    """The rows of a file, or of stdin; PipelineError for a name that means neither, OSError for a file that is not there."""
    kind = kind_of(place)
    if kind is TABLE:
        from castiron.pipelines.batch.parquet import Table

        return Table(Path(place))
    return JsonLines(sys.stdin.buffer if place == "-" else open(place, "rb"), kind is ZIPPED)


class JsonLines:
    """A JSON object a line; empty lines are none."""

    def __init__(self, file: IO[bytes], zipped: bool = False):
        self.file = file
        self.fault: PipelineError | None = None
        self.lines: Any = gzip.GzipFile(fileobj=file) if zipped else file
        self.bytes = self._size()

    def _size(self) -> int | None:
        if not self.file.seekable():
            return None
        begin = self.file.tell()
        end = self.file.seek(0, 2)
        self.file.seek(begin)
        return end

    @property
    def share(self) -> float | None:
        return self.file.tell() / self.bytes if self.bytes else None

    def __iter__(self) -> Iterator[Row | None]:
        index = number = 0
        before: Collection[str] = ()
        for line in self._lines() if self.bytes is not None or self.lines is not self.file else self._arriving():
            if line is None:
                yield None
                continue
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                row = _row(index, number, line, before)
                yield row
                index, before = index + 1, before if row.error else tuple(row.fields)

    def _lines(self) -> Iterator[bytes]:
        """Of a line that is too long its beginning."""
        try:
            while line := self.lines.readline(LONGEST + 1):
                rest = line
                while len(rest) > LONGEST and not rest.endswith(b"\n"):
                    rest = self.lines.readline(LONGEST + 1)
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.fault = PipelineError(f"the input is not whole gzip: {error}; its rows so far are done")

    def _arriving(self) -> Iterator[bytes | None]:
        """The same of a pipe, without waiting for what has not come."""
        held = bytearray()
        while True:
            if not select.select([self.file], [], [], 0)[0]:
                yield None
                continue
            data = os.read(self.file.fileno(), 1 << 16)
            first, *more = data.split(b"\n")
            held += first
            for rest in more:
                yield bytes(held[: LONGEST + 1])
                held[:] = rest
            del held[LONGEST + 1 :]
            if not data:
                if held:
                    yield bytes(held)
                return


def _row(index: int, number: int, line: bytes, before: Collection[str]) -> Row:
    """The row in a line; `number` is the line's, for people, and `before` are the columns of the last that could be read."""
    source = line.strip()
    unread = lambda why: Row(index, {}, {}, source, f"line {number} {why}", before)
    if len(line) > LONGEST:
        return unread(f"has more than {LONGEST} bytes")
    try:
        value = json.loads(source.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return unread(f"is not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:
        return unread(f"is not JSON: {error}")
    if not isinstance(value, dict):
        return unread("is not a JSON object")
    return Row(index, value, value, source)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
