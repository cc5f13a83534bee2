"""The rows of a job: reading them, and turning them into work for the engine.

An input is JSON lines, plain, gzipped or through a pipe, or a Parquet table.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import select
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn, Protocol

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.engine.request import Event, Request
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.manifest import LOG, Manifest
from castiron.vmfb.manifest import TEXT as MODULE_TEXT

# Kinds of files, each with the endings of its names; "-" is a pipe of JSON lines.
LINES, ZIPPED, TABLE = (".jsonl", ".ndjson"), (".jsonl.gz", ".ndjson.gz"), (".parquet",)
# Maximum bytes of one line, which is read into memory.
MAX_LINE = 64 << 20
# Files of a bundle that do not change answers.
IDLE_FILES = (LOG, MODULE_TEXT)
# Columns that may have a plain row's prompt, and its text for an embedding.
PROMPTS, TEXTS = ("messages", "prompt"), ("text", "prompt", "input")
# Columns of a row in OpenAI's format.
REQUEST = {"custom_id", "url", "body"}


@dataclass(frozen=True)
class Row:
    """A row of a job's input.

    Attributes:
        index: number of the row, from 0.
        fields: its columns; empty if the row cannot be read.
        own: its columns for the output: `fields`, or Arrow's bytes in base64 for a row of a table.
        source: the bytes it was read from, for its key.
        error: why the row cannot be read, or None.
        before: for a row with an error, the column names of the last row without one.
    """

    index: int
    fields: Mapping[str, Any]
    own: Mapping[str, Any] | str
    source: bytes
    error: str | None = None
    before: Collection[str] = ()

    @property
    def is_request(self) -> bool:
        """Whether the row is in OpenAI's format; one of its three columns may be missing."""
        names = self.fields if self.error is None else self.before
        found = len(REQUEST.intersection(names))
        return found == 3 or (found == 2 and not {*PROMPTS, *TEXTS}.intersection(names))


class Rows(Protocol):
    """An input that is read once; it yields None while the next row has not arrived.

    share: the part that was read, 0 to 1, None if unknown. fault: the error that ended it early.
    """

    fault: PipelineError | None

    @property
    def share(self) -> float | None: ...
    def __iter__(self) -> Iterator[Row | None]: ...


def kind_of(path: str) -> tuple[str, ...]:
    """Return the kind of file that a name's ending states; PipelineError for an unknown ending."""
    if path == "-":
        return LINES
    for kind in (ZIPPED, LINES, TABLE):
        if path.lower().endswith(kind):
            return kind
    raise PipelineError(f"{path}: unknown file ending; use one of {', '.join((*LINES, *ZIPPED, *TABLE))}, or - for a pipe")


class JsonLines:
    """An input with one JSON object per line; empty lines are skipped."""

    def __init__(self, file: IO[bytes], zipped: bool = False):
        self.file = file
        self.fault: PipelineError | None = None
        self.lines: Any = gzip.GzipFile(fileobj=file) if zipped else file
        self.bytes = self._size()

    def _size(self) -> int | None:
        """Return the size of the file in bytes; None for a pipe."""
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
        """Yield the lines of a file, of which long ones are cut."""
        try:
            while line := self.lines.readline(MAX_LINE + 1):
                rest = line
                while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                    rest = self.lines.readline(MAX_LINE + 1)
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.fault = PipelineError(f"the input is damaged gzip ({error}); the rows before it are done")

    def _arriving(self) -> Iterator[bytes | None]:
        """Yield the lines of a pipe, and None while no line has arrived."""
        line = bytearray()
        while True:
            if not select.select([self.file], [], [], 0)[0]:
                yield None
                continue
            data = os.read(self.file.fileno(), 1 << 16)
            first, *more = data.split(b"\n")
            line += first
            for rest in more:
                yield bytes(line[: MAX_LINE + 1])
                line[:] = rest
            del line[MAX_LINE + 1 :]
            if not data:
                if line:
                    yield bytes(line)
                return


def _row(index: int, number: int, line: bytes, before: Collection[str]) -> Row:
    """Parse line `number` as row `index`; `before` are the columns of the last valid row."""
    source = line.strip()
    invalid = lambda why: Row(index, {}, {}, source, f"line {number} {why}", before)
    if len(line) > MAX_LINE:
        return invalid(f"has more than {MAX_LINE} bytes")
    try:
        value = json.loads(source.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return invalid(f"is not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:
        return invalid(f"is not JSON: {error}")
    if not isinstance(value, dict):
        return invalid("is not a JSON object")
    return Row(index, value, value, source)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class Outcome:
    """The result of a row: the columns added to it, and its counts of tokens.

    Attributes:
        keeps: whether the output has the row's own columns too.
        prompt, generated: numbers of tokens.
        cached: prompt tokens found in the prefix cache.
    """

    added: Mapping[str, Any]
    failed: bool = False
    keeps: bool = True
    prompt: int = 0
    generated: int = 0
    cached: int = 0


@dataclass
class Work:
    """A row in progress: the requests that the engine runs for it, if any, and its outcome.

    `listen` gets their events; `outcome` is called once, after the last request has ended.
    """

    row: Row
    key: str
    outcome: Callable[[], Outcome]
    requests: Sequence[Request] = ()
    listen: Callable[[Request, Event], None] = lambda request, event: None


class Kind(Protocol):
    """A format of rows, and how its rows become work."""

    def draws(self, row: Row) -> bool:
        """Return whether a row's answer is sampled with a seed that the row does not state."""
        ...

    def work(self, row: Row, key: str, seed: int) -> Work:
        """Return the work for a row; raise PipelineError or ApiError if it cannot be answered."""
        ...

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        """Return the outcome of a row that cannot be answered."""
        ...


class Requests:
    """The conversion of plain rows and rows in OpenAI's format to work, and their keys."""

    def __init__(self, plain: Kind, openai: Callable[[], Kind], identity: bytes, seed: int):
        """Convert rows of both formats.

        openai: called at the first row in that format. identity: result of the function `identity`.
        """
        self.plain, self.openai, self.identity, self.seed = plain, openai, identity, seed
        self._openai: Kind | None = None

    def key(self, row: Row) -> str:
        """Return a hash of a row and all that its answer depends on: 32 hex digits.

        The index is part of it if the answer is sampled, so that equal rows differ, and if the row
        has an error, which names the line.
        """
        numbered = row.error is not None or self._kind(row).draws(row)
        return hashlib.sha256(self.identity + (b"%d " % row.index if numbered else b"") + row.source).hexdigest()[:32]

    def work(self, row: Row, key: str) -> Work:
        """Return the work for a row; its outcome is an error if the row cannot be answered."""
        kind = self._kind(row)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:8]) >> 1
        try:
            if row.error is not None:
                raise PipelineError(row.error)
            return kind.work(row, key, seed)
        except (PipelineError, ApiError) as error:
            failure = kind.failed(row, key, error)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # An unexpected error of one row must not end the job.
            failure = kind.failed(row, key, PipelineError(f"castiron failed on this row: {type(error).__name__}: {error}"))
        return Work(row, key, lambda: failure)

    def _kind(self, row: Row) -> Kind:
        if not row.is_request:
            return self.plain
        if self._openai is None:
            self._openai = self.openai()
        return self._openai


def identity(manifest: Manifest, options: Mapping[str, Any]) -> bytes:
    """Return a hash of all that an answer depends on besides the row."""
    files = {name: file.sha256 for name, file in manifest.files.items() if name not in IDLE_FILES}
    facts = [files, manifest.name, manifest.context, manifest.numerics, manifest.generation, repr(manifest.tokens),
             repr(manifest.encoder), manifest.tool_format, dict(options)]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).digest()
