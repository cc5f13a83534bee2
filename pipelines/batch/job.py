"""Run a batch job: answer the records that earlier runs have not answered, and write the output."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.pipelines.batch.journal import Entry, Journal, dumps
from castiron.pipelines.batch.records import Conversion, JsonLines, Outcome, Record, Records, Work, is_table
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Failed, Finished, Request
from castiron.vmfb.atomic_write import replace_file

# A window is a group of records that are sorted together. Max requests of a window, and max tokens of its prompts.
MAX_REQUESTS, MAX_TOKENS = 512, 1 << 20
# Seconds that an incomplete window waits for more records before it runs, and seconds between polls for records.
WAIT, POLL = 0.25, 0.02
Answered = tuple[Record, Outcome]
# A function that answers records, in any order. Its input yields None while no record is available.
Answer = Callable[[Iterator[Record | None]], Iterable[Answered]]


@dataclass
class Summary:
    """Counts of a batch job, which several runs may have continued.

    records, failed: of all runs. before: of earlier runs. duplicates: records with the custom_id of
    an earlier record. Tokens and seconds are those of this run.
    """

    records: int = 0
    before: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    duplicates: int = 0

    @property
    def tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.generated_tokens) / self.seconds if self.seconds else 0.0

    def count(self, outcome: Outcome) -> None:
        self.records += 1
        self.failed += outcome.failed
        self.prompt_tokens += outcome.prompt
        self.generated_tokens += outcome.generated
        self.cached_tokens += outcome.cached


def run_job(
    records: Records, key: Callable[[Record], str], answer: Answer, output: Path | None,
    report: Callable[[Summary, float | None], None] = lambda summary, share: None,
) -> Summary:  # fmt: skip
    """Answer the records of a batch job, write the output, and return counts.

    key: returns the hash by which a record that an earlier run has answered is skipped.
    output: None for stdout.
    report: called with (counts so far, finished fraction of the input, or None if it is unknown).

    Raises PipelineError if another process writes the output. If the input is damaged, the error is
    raised after the records before the damage are answered.
    """
    start, summary, custom_ids, offsets = time.monotonic(), Summary(), array("q"), array("q")
    journal = Journal(output) if output else None

    def unfinished() -> Iterator[Record | None]:
        for record in records:
            if record is None:
                yield None
                continue
            if record.is_openai and isinstance(custom_id := record.fields.get("custom_id"), str):
                custom_ids.append(hash(custom_id))
            record = replace(record, key=key(record))
            found = journal.find(record.key) if journal else None
            offsets.append(found[0] if found else -1)
            if found:
                summary.records += 1
                summary.before += 1
                summary.failed += found[1]
            else:
                yield record

    with contextlib.closing(journal) if journal else contextlib.nullcontext():
        for record, outcome in answer(unfinished()):
            entry = Entry({} if record.is_openai else record.own, outcome.added)
            if journal:
                offsets[record.index] = journal.add(record.key, entry, outcome.failed)
            else:
                sys.stdout.buffer.write(line_of(entry))
                sys.stdout.buffer.flush()
            summary.count(outcome)
            summary.seconds = time.monotonic() - start
            share = records.share
            report(summary, None if share is None else share * summary.records / len(offsets))
        if records.fault:
            raise records.fault
        summary.duplicates = len(custom_ids) - len(np.unique(np.array(custom_ids, np.int64)))
        if journal and output:
            write_output(output, lambda: journal.entries(offsets))
    return summary


def answering(engine: Engine | None, conversion: Conversion, window: int = MAX_REQUESTS) -> Answer:
    """Return a function that answers records; engine: None for an embedding model.

    window: how many requests are sorted at a time, so that prompts with a common prefix are next to
    each other.
    """

    works = lambda records: (record and conversion.work(record) for record in records)
    return lambda records: run(engine, in_windows(works(records), window))


def run(engine: Engine | None, works: Iterator[Work | None]) -> Iterator[Answered]:
    """Answer records; yield (record, outcome) as soon as all requests of a record have ended.

    The next record is taken when the engine can run one more request. Closing the iterator cancels
    the requests that are running.
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
                    yield work.record, work.outcome()
                for request in work.requests:
                    owners[request] = work
                    stream.submit(request)  # type: ignore[union-attr]
            for request, event in stream.read() if stream and owners else ():
                work = owners[request]
                work.listen(request, event)
                if isinstance(event, Finished | Failed):
                    del owners[request]
                    if not any(other is work for other in owners.values()):
                        yield work.record, work.outcome()
    finally:
        if stream:
            stream.close()


def in_windows(works: Iterable[Work | None], max_requests: int = MAX_REQUESTS) -> Iterator[Work | None]:
    """Yield records in groups of consecutive records (windows), each sorted by prompt.

    A window ends at `max_requests` requests or MAX_TOKENS prompt tokens, or if no record (None)
    comes for WAIT seconds.
    """
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


def arranged(works: Iterable[Work]) -> list[Work]:
    """Return records sorted by prompts, so that those with a common prefix are adjacent."""
    # Big-endian bytes compare like the lists of token ids that they encode.
    prompt = lambda work: work.requests[0].prompt.astype(">u4").tobytes() if work.requests else b""
    return sorted(works, key=lambda work: (prompt(work), work.record.index))


def open_records(path: str) -> Records:
    """Return the records of a file, or of stdin for "-"."""
    if is_table(path):
        from castiron.pipelines.batch.parquet import Table

        return Table(Path(path))
    return JsonLines(sys.stdin.buffer if path == "-" else open(path, "rb"))


def write_output(output: Path, entries: Callable[[], Iterable[Entry]]) -> None:
    """Write finished records atomically; entries: returns a new iterator at each call."""
    with replace_file(output) as file:
        if is_table(output.name):
            from castiron.pipelines.batch.parquet import write

            write(file, entries)
        else:
            file.writelines(map(line_of, entries()))
        file.flush()
        os.fsync(file.fileno())


def line_of(entry: Entry) -> bytes:
    own = entry.own
    if isinstance(own, str):
        from castiron.pipelines.batch.parquet import plain, unpack

        own = plain(unpack(own))
    return dumps({**own, **entry.added}) + b"\n"
