"""A job: the rows that are not done yet are answered, and what came of them is kept, until the output can be written."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.batch.journal import Journal
from castiron.pipelines.batch.requests import Outcome, Requests
from castiron.pipelines.batch.results import Pipe, line_of, write_output
from castiron.pipelines.batch.row import Row
from castiron.pipelines.batch.rows import Rows
from castiron.pipelines.batch.running import run
from castiron.pipelines.batch.window import ROWS, in_windows
from castiron.pipelines.generation.scheduler import Scheduler

# A row with its key, and with what came of it.
Keyed = tuple[Row, str]
Answered = tuple[Row, str, Outcome]
# What answers rows, in any order: `answering` in this process. None among them says that the next one is not there yet.
Answer = Callable[[Iterator[Keyed | None]], Iterable[Answered]]


def answering(scheduler: Scheduler | None, requests: Requests, window: int = ROWS) -> Answer:
    """Answers rows in this process; `scheduler` None is for a model that encodes."""

    def answer(rows: Iterator[Keyed | None]) -> Iterator[Answered]:
        works = in_windows((keyed and requests.work(*keyed) for keyed in rows), window)
        return ((work.row, work.key, outcome) for work, outcome in run(scheduler, works))

    return answer


@dataclass
class Summary:
    """What a job has done: rows in all, of them those `before` it in an earlier run; the tokens and seconds are its own.
    `alike`: rows whose custom_id another row had before them."""

    rows: int = 0
    before: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    alike: int = 0

    @property
    def done(self) -> int:
        return self.rows - self.before

    @property
    def tokens_per_second(self) -> float:
        """Of prompts and answers together."""
        return (self.prompt_tokens + self.generated_tokens) / self.seconds if self.seconds else 0.0

    def count(self, outcome: Outcome) -> None:
        self.rows += 1
        self.failed += outcome.failed
        self.prompt_tokens += outcome.prompt
        self.generated_tokens += outcome.generated
        self.cached_tokens += outcome.cached


class Names:
    """Which names rows of OpenAI's format have: 8 bytes of each."""

    def __init__(self) -> None:
        self.seen = array("q")

    def of(self, rows: Iterable[Row | None]) -> Iterator[Row | None]:
        """The rows, as they come."""
        for row in rows:
            if row and row.is_request and isinstance(name := row.fields.get("custom_id"), str):
                self.seen.append(hash(name))
            yield row

    @property
    def alike(self) -> int:
        seen = np.sort(np.array(self.seen, np.int64))
        return int((seen[1:] == seen[:-1]).sum())


def run_job(
    rows: Rows, key: Callable[[Row], str], answer: Answer, output: Path | None, *, ordered: bool = False,
    told: Callable[[Summary, float | None], None] = lambda summary, share: None,
) -> Summary:  # fmt: skip
    """Answers all rows that no earlier run of the same job has answered, and writes `output`; None is stdout, where nothing
    is kept. `ordered`: in the order of the input, else in that of arrival. `told` gets the counts so far and which share of
    the input is done, None where that cannot be known. PipelineError while another process writes that output, and
    once the rows of an input are done that is not whole."""
    if output is None:
        return _piped(rows, key, answer, ordered, told)
    journal = Journal(output)
    try:
        summary, places = _journalled(rows, key, answer, journal, told)
        if rows.fault:
            raise rows.fault
        at = places if ordered else np.sort(places)
        write_output(output, lambda: journal.entries(at), getattr(rows, "schema", None))
        journal.keep(places)
    finally:
        journal.close()
    return summary


def _journalled(rows: Rows, key: Any, answer: Answer, journal: Journal, told: Any) -> tuple[Summary, np.ndarray]:
    """All rows in the journal; and where, i64 [rows]."""
    start, places, summary, names = time.monotonic(), array("q"), Summary(), Names()

    def undone() -> Iterator[Keyed | None]:
        for row in names.of(rows):
            if row is None:
                yield None
                continue
            name = key(row)
            found = journal.find(name)
            places.append(found[0] if found else -1)
            if found:
                summary.rows += 1
                summary.before += 1
                summary.failed += found[1]
            else:
                yield row, name

    for row, name, outcome in answer(undone()):
        places[row.index] = journal.add(name, row.kept if outcome.keeps else {}, outcome)
        _count(summary, outcome, start, told, rows, len(places))
    summary.alike = names.alike
    return summary, np.array(places, np.int64)


def _piped(rows: Rows, key: Any, answer: Answer, ordered: bool, told: Any) -> Summary:
    start, read, summary, pipe, names = time.monotonic(), 0, Summary(), Pipe(ordered), Names()

    def keyed() -> Iterator[Keyed | None]:
        nonlocal read
        for row in names.of(rows):
            read += row is not None
            yield row and (row, key(row))

    for row, _, outcome in answer(keyed()):
        pipe.add(row.index, line_of(row.kept if outcome.keeps else {}, outcome.added, getattr(rows, "schema", None)))
        _count(summary, outcome, start, told, rows, read)
    if rows.fault:
        raise rows.fault
    summary.alike = names.alike
    return summary


def _count(summary: Summary, outcome: Outcome, start: float, told: Any, rows: Rows, read: int) -> None:
    summary.count(outcome)
    summary.seconds = time.monotonic() - start
    share = rows.share
    told(summary, None if share is None else share * summary.rows / read)
