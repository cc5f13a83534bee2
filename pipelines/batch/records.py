"""Records of a batch job: parse them from JSON lines, and convert them to engine requests."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import select
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, NoReturn, Protocol

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.engine.request import Event, Request
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.manifest import LOG, Manifest
from castiron.vmfb.bundle.manifest import TEXT as MODULE_TEXT

# File name extensions of JSON lines; the path "-" is stdin with JSON lines.
LINES = (".jsonl", ".ndjson")
TABLE = ".parquet"
# Max bytes of a line, because each line is read into memory.
MAX_LINE = 64 << 20
# Files of a bundle that do not affect answers; `identity` does not hash them.
IDLE_FILES = (LOG, MODULE_TEXT)
# Columns that may contain the prompt of a plain record, and columns that may contain its text to embed.
PROMPTS, TEXTS = ("messages", "prompt"), ("text", "prompt", "input")
# Columns of a record in OpenAI's format.
OPENAI = {"custom_id", "url", "body"}


@dataclass(frozen=True)
class Record:
    """A record of the input of a batch job.

    fields: the columns; empty if the record cannot be parsed, which `error` explains.
    own: the columns to copy to the output; for Parquet, a row as an Arrow stream in base64, which
        preserves the types of columns.
    source: the record before it is parsed: a line of JSON, or the bytes of an Arrow stream.
    is_openai: for a record that cannot be parsed, the format of the record before it.
    key: hash by which later runs of the job find the record's answer, 32 hex digits.
    """

    index: int
    fields: Mapping[str, Any]
    own: Mapping[str, Any] | str
    source: bytes
    is_openai: bool = False
    error: str | None = None
    key: str = ""


def has_openai_columns(names: Collection[str]) -> bool:
    """Return whether a record has OpenAI's three columns, or two and none of a plain record."""
    found = len(OPENAI.intersection(names))
    return found == 3 or (found == 2 and not {*PROMPTS, *TEXTS}.intersection(names))


class Records(Protocol):
    """An iterable over the records of a file or pipe; it yields None if none is available yet.

    fault: the error that stopped reading early. share: fraction that has been read, or None.
    """

    fault: PipelineError | None

    @property
    def share(self) -> float | None: ...
    def __iter__(self) -> Iterator[Record | None]: ...


def is_table(path: str) -> bool:
    """Return whether a file is Parquet and not JSON lines, by its extension, else PipelineError."""
    if path == "-" or path.lower().endswith(LINES):
        return False
    if path.lower().endswith(TABLE):
        return True
    raise PipelineError(f"{path}: unknown file name extension; use one of {', '.join((*LINES, TABLE))}, or - for a pipe")


class JsonLines:
    """An iterable over the records in a file or pipe of JSON lines; empty lines are skipped."""

    fault = None

    def __init__(self, file: IO[bytes]):
        self.file = file
        # Size of the file; None for a pipe.
        self.bytes: int | None = None
        if file.seekable():
            self.bytes = file.seek(0, os.SEEK_END)
            file.seek(0)

    @property
    def share(self) -> float | None:
        return self.file.tell() / self.bytes if self.bytes else None

    def __iter__(self) -> Iterator[Record | None]:
        index = number = 0
        is_openai = False
        for line in self._arriving() if self.bytes is None else self._lines():
            if line is None:
                yield None
                continue
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                record = _record(index, number, line, is_openai)
                yield record
                index, is_openai = index + 1, record.is_openai

    def _lines(self) -> Iterator[bytes]:
        while line := self.file.readline(MAX_LINE + 1):
            rest = line
            while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                rest = self.file.readline(MAX_LINE + 1)
            yield line

    def _arriving(self) -> Iterator[bytes | None]:
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


def _record(index: int, number: int, line: bytes, was_openai: bool) -> Record:
    source = line.strip()
    invalid = lambda why: Record(index, {}, {}, source, was_openai, f"line {number} {why}")
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
    return Record(index, value, value, source, has_openai_columns(value))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has the constant {name}; use null or a number")


@dataclass(frozen=True)
class Outcome:
    """The answer to a record: the columns that it adds, and token counts."""

    added: Mapping[str, Any]
    failed: bool = False
    prompt: int = 0
    generated: int = 0
    cached: int = 0


@dataclass
class Work:
    """A record, the engine requests that must run to answer it, and a function for the answer.

    outcome: called once, after all requests have ended. listen: called for each event of them.
    """

    record: Record
    outcome: Callable[[], Outcome]
    requests: Sequence[Request] = ()
    listen: Callable[[Request, Event], None] = lambda request, event: None


class Format(Protocol):
    """Converts records in one format, such as OpenAI's, to engine requests, and builds answers."""

    def samples(self, record: Record) -> bool:
        """Return whether the answer depends on the `seed` that is passed to `work`."""
        ...

    def work(self, record: Record, seed: int) -> Work:
        """Return the requests that answer a record; seed: used if the record does not set one.

        Raises PipelineError or ApiError if the record is invalid.
        """
        ...

    def failed(self, record: Record, error: Exception) -> Outcome: ...


class Conversion:
    """Converts records of a batch job, in OpenAI's or the plain format, to engine requests."""

    def __init__(self, plain: Format, openai: Callable[[], Format], identity: bytes, seed: int):
        self.plain, self.openai, self.identity, self.seed = plain, cache(openai), identity, seed

    def key(self, record: Record) -> str:
        """Return a hash of the record, the model and the options, as 32 hex digits.

        It includes the index if the answer is sampled, so that equal records get different answers,
        and for an invalid record, whose error message contains the line number.
        """
        numbered = record.error is not None or self._format(record).samples(record)
        return hashlib.sha256(self.identity + (b"%d " % record.index if numbered else b"") + record.source).hexdigest()[:32]

    def work(self, record: Record) -> Work:
        """Return the requests of a record; an invalid one has none, and an error as answer."""
        format_ = self._format(record)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {record.key}".encode()).digest()[:8]) >> 1
        try:
            if record.error is not None:
                raise PipelineError(record.error)
            return format_.work(record, seed)
        except (PipelineError, ApiError) as error:
            failure = format_.failed(record, error)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # A bug that one record triggers must not end the job.
            failure = format_.failed(
                record, PipelineError(f"castiron has a bug: {type(error).__name__}: {error}; report it with this record")
            )
        return Work(record, lambda: failure)

    def _format(self, record: Record) -> Format:
        return self.openai() if record.is_openai else self.plain


def identity(manifest: Manifest, options: Mapping[str, Any]) -> bytes:
    """Return a hash of all that affects the answers of a job, besides its records."""
    files = {name: file.sha256 for name, file in manifest.files.items() if name not in IDLE_FILES}
    facts = [files, manifest.name, manifest.context, manifest.numerics, manifest.generation, repr(manifest.tokens),
             repr(manifest.encoder), manifest.tool_format, dict(options)]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).digest()
