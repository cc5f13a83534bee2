"""A batch job: answer the rows that no earlier run has answered, and write the output."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.batch.journal import Entry, Journal, dumps
from castiron.pipelines.batch.rows import TABLE, ZIPPED, JsonLines, Outcome, Requests, Row, Rows, Work, kind_of
from castiron.pipelines.engine.context import common_prefix
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Failed, Finished, Request
from castiron.vmfb.staging import replace_file

# A window is a group of rows that are put in order together. Its max requests, and max tokens of their prompts.
MAX_REQUESTS, MAX_TOKENS = 512, 1 << 20
# Seconds that a window waits for more rows after its first row, and seconds between two polls for rows.
WAIT, POLL = 0.25, 0.02
# Rows form a branch of the prefix tree if they share at least this many more tokens than the rows around them.
MIN_PREFIX = 32
# Prompt tokens that are read in the time of one decode step.
PREFILL_RATE = 16
# A row with its key, and the same with its outcome.
Keyed = tuple[Row, str]
Answered = tuple[Row, str, Outcome]
# A function that answers rows, in any order. Its input yields None while the next row has not arrived.
Answer = Callable[[Iterator[Keyed | None]], Iterable[Answered]]


@dataclass
class Summary:
    """The counts of a job; tokens and seconds are of this run.

    rows: all rows. before: rows that an earlier run finished. duplicates: rows with the custom_id
    of an earlier row.
    """

    rows: int = 0
    before: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    duplicates: int = 0

    @property
    def done(self) -> int:
        """The number of rows that this run finished."""
        return self.rows - self.before

    @property
    def tokens_per_second(self) -> float:
        """The prompt and generated tokens per second."""
        return (self.prompt_tokens + self.generated_tokens) / self.seconds if self.seconds else 0.0

    def count(self, outcome: Outcome) -> None:
        """Add a finished row."""
        self.rows += 1
        self.failed += outcome.failed
        self.prompt_tokens += outcome.prompt
        self.generated_tokens += outcome.generated
        self.cached_tokens += outcome.cached


def run_job(
    rows: Rows, key: Callable[[Row], str], answer: Answer, output: Path | None, *, ordered: bool = False,
    report: Callable[[Summary, float | None], None] = lambda summary, share: None,
) -> Summary:  # fmt: skip
    """Answer all rows that no earlier run of this job has finished, and write `output`.

    Args:
        key: returns the key of a row in the journal.
        output: a path, or None for stdout, which has no journal.
        ordered: write rows in the order of the input instead of the order in which they finish.
        report: called with the counts and the share of the input that is done, None if unknown.

    Raises:
        PipelineError: another process writes the output, or, after all readable rows have been
            answered, the input is damaged.
    """
    start, summary, custom_ids, offsets = time.monotonic(), Summary(), array("q"), array("q")
    journal, pipe, schema = Journal(output) if output else None, Pipe(ordered), getattr(rows, "schema", None)

    def unfinished() -> Iterator[Keyed | None]:
        for row in rows:
            if row is None:
                yield None
                continue
            if row.is_request and isinstance(custom_id := row.fields.get("custom_id"), str):
                custom_ids.append(hash(custom_id))
            name = key(row)
            found = journal.find(name) if journal else None
            offsets.append(found[0] if found else -1)
            if found:
                summary.rows += 1
                summary.before += 1
                summary.failed += found[1]
            else:
                yield row, name

    with contextlib.closing(journal) if journal else contextlib.nullcontext():
        for row, name, outcome in answer(unfinished()):
            own = row.own if outcome.keeps else {}
            if journal:
                offsets[row.index] = journal.add(name, own, outcome)
            else:
                pipe.add(row.index, line_of(Entry(own, outcome.added), schema))
            summary.count(outcome)
            summary.seconds = time.monotonic() - start
            share = rows.share
            report(summary, None if share is None else share * summary.rows / len(offsets))
        if rows.fault:
            raise rows.fault
        summary.duplicates = len(custom_ids) - len(np.unique(np.array(custom_ids, np.int64)))
        if journal and output:
            lines = np.array(offsets, np.int64)
            write_output(output, lambda: journal.entries(lines if ordered else np.sort(lines)), schema)
            journal.keep_only(lines)
    return summary


def answering(engine: Engine | None, requests: Requests, window: int = MAX_REQUESTS) -> Answer:
    """Return an `Answer` that runs rows in this process.

    `engine`: None for an embedding model. `window`: max requests of a window.
    """

    def answer(rows: Iterator[Keyed | None]) -> Iterator[Answered]:
        works = in_windows((keyed and requests.work(*keyed) for keyed in rows), window)
        return ((work.row, work.key, outcome) for work, outcome in run(engine, works))

    return answer


def run(engine: Engine | None, works: Iterator[Work | None]) -> Iterator[tuple[Work, Outcome]]:
    """Run each `Work` (a row in progress), and yield it with its outcome when it finishes.

    The function reads `works` when a slot is free; `works` yields None while the next row has not
    arrived. Closing the iterator cancels unfinished rows. `engine`: None if no row has requests.
    """
    stream, owners, ended = engine.stream() if engine else None, dict[Request, Work](), False
    try:
        while not ended or owners:
            while not ended and (engine is None or len(owners) < engine.slots):
                try:
                    work = next(works)
                except StopIteration:
                    ended = True
                    break
                if work is None:
                    if not owners:
                        time.sleep(POLL)
                    break
                if not work.requests:
                    yield work, work.outcome()
                for request in work.requests:
                    owners[request] = work
                    stream.submit(request)  # type: ignore[union-attr]
            for request, event in stream.read() if stream and owners else ():
                work = owners[request]
                work.listen(request, event)
                if isinstance(event, Finished | Failed):
                    del owners[request]
                    if not any(other is work for other in owners.values()):
                        yield work, work.outcome()
    finally:
        if stream:
            stream.close()


def in_windows(works: Iterable[Work | None], max_requests: int = MAX_REQUESTS) -> Iterator[Work | None]:
    """Yield the works of each window in the order of `arranged`; None while no work has arrived."""
    window, size, tokens, began = list[Work](), 0, 0, 0.0
    for work in works:
        if work is not None:
            began = began if window else time.monotonic()
            window.append(work)
            size += max(1, len(work.requests))
            tokens += sum(len(request.prompt) for request in work.requests)
            if size < max_requests and tokens < MAX_TOKENS:
                continue
        elif not window or time.monotonic() - began < WAIT:
            yield None
            continue
        yield from arranged(window)
        window, size, tokens = [], 0, 0
    yield from arranged(window)


def arranged(works: Sequence[Work]) -> list[Work]:
    """Order works: first those without requests, then by shared prefixes, the longest works first.

    With short works last, all slots are busy almost until the end.
    """
    done = [work for work in works if not work.requests]
    rest = [work for work in works if work.requests]
    prompt = lambda work: work.requests[0].prompt
    # As big-endian bytes, prompts sort like lists of tokens.
    rest.sort(key=lambda work: (prompt(work).astype(">u4").tobytes(), work.row.index))
    common = [0, *(common_prefix(prompt(a), prompt(b)) for a, b in zip(rest, rest[1:]))]
    # The max time of each work, in decode steps.
    costs = [sum(request.limit + len(request.prompt) / PREFILL_RATE for request in work.requests) for work in rest]
    return done + [rest[i] for i in _longest_first(costs, common)]


def _longest_first(costs: Sequence[float], common: Sequence[int]) -> list[int]:
    """Return the indices of rows in depth-first order of their prefix tree, longest branches first.

    The rows are sorted by prompt. `costs`: max time of each row, in decode steps. `common`: prompt
    tokens that each row shares with the one before it.
    """
    found, stack = list[int](), [(0, len(costs))]
    while stack:
        first, last = stack.pop()
        if last - first == 1:
            found.append(first)
        if last - first <= 1:
            continue
        threshold = min(common[first + 1 : last]) + MIN_PREFIX
        cuts = [first, *(i for i in range(first + 1, last) if common[i] < threshold), last]
        branches = list(zip(cuts, cuts[1:]))
        # The branch with the longest work is on top of the stack; of equal branches, the first.
        stack += sorted(reversed(branches), key=lambda branch: max(costs[slice(*branch)]))
    return found


def open_rows(path: str) -> Rows:
    """Open a file of rows, or stdin for `-`; raise PipelineError for an unknown kind."""
    kind = kind_of(path)
    if kind is TABLE:
        from castiron.pipelines.batch.parquet import Table

        return Table(Path(path))
    return JsonLines(sys.stdin.buffer if path == "-" else open(path, "rb"), kind is ZIPPED)


def write_output(output: Path, entries: Callable[[], Iterable[Entry]], schema: Any = None) -> None:
    """Write the output file completely or not at all, in the format of its file ending.

    `entries` may be called twice. `schema`: schema of the input table, None for other inputs.
    """
    kind = kind_of(output.name)
    with replace_file(output) as file:
        if kind is TABLE:
            from castiron.pipelines.batch.parquet import write

            write(file, entries, schema)
        else:
            # The header has neither time nor name, so that equal results are equal bytes.
            with gzip.GzipFile("", "wb", 6, file, 0) if kind is ZIPPED else contextlib.nullcontext(file) as lines:
                for entry in entries():
                    lines.write(line_of(entry, schema))
        file.flush()
        os.fsync(file.fileno())


def line_of(entry: Entry, schema: Any = None) -> bytes:
    """Return a finished row as a line of JSON."""
    own = entry.own
    if isinstance(own, str):
        from castiron.pipelines.batch.parquet import plain, unpack

        own = plain(unpack(own, schema))
    return dumps({**own, **entry.added}) + b"\n"


class Pipe:
    """A writer of rows to stdout, in the order in which they finish or in that of the input."""

    def __init__(self, ordered: bool):
        self.ordered, self.waiting, self.next = ordered, dict[int, bytes](), 0

    def add(self, index: int, line: bytes) -> None:
        self.waiting[index if self.ordered else self.next] = line
        while (ready := self.waiting.pop(self.next, None)) is not None:
            sys.stdout.buffer.write(ready)
            sys.stdout.buffer.flush()
            self.next += 1
