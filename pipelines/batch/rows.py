"""The rows of a job: read them from JSON lines, and convert them to work for the engine."""

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

# Kinds of files, each with its file endings; the path "-" is a pipe of JSON lines.
LINES, ZIPPED, TABLE = (".jsonl", ".ndjson"), (".jsonl.gz", ".ndjson.gz"), (".parquet",)
# Max bytes of a line, which is read into memory.
MAX_LINE = 64 << 20
# Files of a bundle that have no effect on answers, so that they are left out of `identity`.
IDLE_FILES = (LOG, MODULE_TEXT)
# Columns for the prompt of a plain row, and for its text to embed.
PROMPTS, TEXTS = ("messages", "prompt"), ("text", "prompt", "input")
# Columns of a row in OpenAI's format.
REQUEST = {"custom_id", "url", "body"}


@dataclass(frozen=True)
class Row:
    """A row of a job's input.

    index: number of the row, from 0. fields: its columns, empty if the row cannot be read. own: its
    columns for the output, which are `fields`, or for a row of a table its Arrow bytes in base64.
    source: the row's bytes in the input, for its key. error: why the row cannot be read, or None.
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
    """The rows of an input, which is read only once; None while the next row has not arrived.

    share: part of the input that has been read, 0 to 1, None if unknown. fault: error that ended
    the input early.
    """

    fault: PipelineError | None

    @property
    def share(self) -> float | None: ...
    def __iter__(self) -> Iterator[Row | None]: ...


def kind_of(path: str) -> tuple[str, ...]:
    """Return the kind of a file by its file ending; raise PipelineError for an unknown one."""
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
        """Yield the lines of a file; long lines are cut."""
        try:
            while line := self.lines.readline(MAX_LINE + 1):
                rest = line
                while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                    rest = self.lines.readline(MAX_LINE + 1)
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.fault = PipelineError(f"the input is damaged gzip ({error}); the rows before it are done")

    def _arriving(self) -> Iterator[bytes | None]:
        """Yield the lines of a pipe, and None while the next line has not arrived."""
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
    """Parse line `number` as row `index`; `before`: columns of the last row without an error."""
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
    """The result of a row: the columns to add, and counts of tokens.

    keeps: whether the output has the row's own columns too. cached: prompt tokens that were found
    in the prefix cache.
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

    `listen` is called with their events, and `outcome` once after the last request has ended.
    """

    row: Row
    key: str
    outcome: Callable[[], Outcome]
    requests: Sequence[Request] = ()
    listen: Callable[[Request, Event], None] = lambda request, event: None


class Kind(Protocol):
    """A format of rows, with the conversion of its rows to work."""

    def draws(self, row: Row) -> bool:
        """Return whether a row's answer is sampled, and the row does not set the seed."""
        ...

    def work(self, row: Row, key: str, seed: int) -> Work:
        """Return the work for a row; raise PipelineError or ApiError if it cannot be answered."""
        ...

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        """Return the outcome of a row that cannot be answered."""
        ...


class Requests:
    """The conversion of rows of both formats to work, and their keys."""

    def __init__(self, plain: Kind, openai: Callable[[], Kind], identity: bytes, seed: int):
        """Convert plain rows with `plain`, and rows in OpenAI's format with `openai()`."""
        self.plain, self.openai, self.identity, self.seed = plain, openai, identity, seed
        self._openai: Kind | None = None

    def key(self, row: Row) -> str:
        """Return a hash of a row and of everything that its answer depends on: 32 hex digits.

        The hash includes the index if the answer is sampled, so that the answers of equal rows
        differ, and if the row has an error, which names the line.
        """
        numbered = row.error is not None or self._kind(row).draws(row)
        return hashlib.sha256(self.identity + (b"%d " % row.index if numbered else b"") + row.source).hexdigest()[:32]

    def work(self, row: Row, key: str) -> Work:
        """Return the work for a row; if the row cannot be answered, its outcome is an error."""
        kind = self._kind(row)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:8]) >> 1
        try:
            if row.error is not None:
                raise PipelineError(row.error)
            return kind.work(row, key, seed)
        except (PipelineError, ApiError) as error:
            failure = kind.failed(row, key, error)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # A bug that one row triggers must not end the job.
            failure = kind.failed(row, key, PipelineError(f"castiron failed on this row: {type(error).__name__}: {error}"))
        return Work(row, key, lambda: failure)

    def _kind(self, row: Row) -> Kind:
        if not row.is_request:
            return self.plain
        if self._openai is None:
            self._openai = self.openai()
        return self._openai


def identity(manifest: Manifest, options: Mapping[str, Any]) -> bytes:
    """Return a hash of everything besides the row that an answer depends on."""
    files = {name: file.sha256 for name, file in manifest.files.items() if name not in IDLE_FILES}
    facts = [files, manifest.name, manifest.context, manifest.numerics, manifest.generation, repr(manifest.tokens),
             repr(manifest.encoder), manifest.tool_format, dict(options)]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).digest()
