"""Many prompts over one bundle, as many at once as it has slots; results as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.grammar import Grammar
from castiron.pipelines.generation.request import Prompt, Request
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Delta, Failed, Sequence
from castiron.pipelines.generation.shared import Client
from castiron.pipelines.generation.text import Text, load_text
from castiron.vmfb.bundle import Bundle


@dataclass(frozen=True)
class Result:
    """What became of prompt number `index`, counted from 0.

    `finish_reason` is "stop", "length" or "context"; or "error", and `error` says why there is no more than this.
    `text` is None without a tokenizer.
    """

    index: int
    tokens: list[int]
    text: str | None
    finish_reason: str
    error: PipelineError | None = None

    def __str__(self) -> str:
        return self.text if self.text is not None else " ".join(map(str, self.tokens))


def generate_many(
    bundle: Bundle | Path | str | Scheduler,
    prompts: Iterable[Prompt],
    *,
    max_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] | None = None,
    stop_strings: str | Iterable[str] = (),
    template_args: Mapping[str, Any] = {},
    grammar: Grammar | None = None,
    text: Text | None = None,
    threads: int | None = None,
) -> Iterator[Result]:
    """A Result for each of `prompts`, texts, token ids or lists of messages, in the order in which they end.

    A prompt is taken when a slot is free for it, so that `prompts` may be without end; all that is kept is what runs.
    Nothing runs but between one result and the next, and closing the iterator lets go of what has not ended. Each gets
    the tokens that it gets alone: at most `max_tokens`, and as many as the context has room for. stop_tokens None are
    the bundle's own; `text` defaults to its tokenizer; `grammar`, which `text.grammar` makes, is what every text has to
    be. A Scheduler in place of a bundle keeps its caches for the next call, and runs nothing else meanwhile.
    PipelineError for options that no prompt can be run with; a prompt that cannot be run has a result that says why.
    """
    scheduler = bundle if isinstance(bundle, Scheduler) else Scheduler(bundle, threads)
    if text is None and scheduler.bundle and scheduler.bundle.tokenizer:
        text = load_text(scheduler.bundle)
    request = Request(
        scheduler.manifest, scheduler.context, text, max_tokens=max_tokens, sampling=sampling, stop_tokens=stop_tokens,
        stop_strings=stop_strings, template_args=template_args, grammar=grammar,
    )  # fmt: skip
    return results(scheduler, prompts, request)


def results(scheduler: Scheduler | Client, prompts: Iterable[Prompt], request: Request) -> Iterator[Result]:
    """The same, as `request` has it, over a scheduler that runs nothing else until the end."""
    waiting = enumerate(prompts)
    if not scheduler.idle:
        raise PipelineError("this scheduler is running other sequences; give these prompts one of their own")
    running: dict[Sequence, tuple[int, list[str]]] = {}
    try:
        while True:
            while len(running) < scheduler.slots and (taken := next(waiting, None)):
                index, prompt = taken
                try:
                    sequence = request.sequence(prompt)
                except PipelineError as error:
                    yield Result(index, [], None, "error", error)
                    continue
                running[sequence] = index, []
                scheduler.submit(sequence)
            if not running:
                return
            for sequence, event in scheduler.turn():
                index, said = running[sequence]
                if isinstance(event, Delta):
                    said.append(event.text)
                    continue
                del running[sequence]
                text = "".join(said) if sequence.text else None
                failure = event.error if isinstance(event, Failed) else None
                yield Result(index, sequence.tokens, text, sequence.finish_reason or "error", failure)
    finally:
        for sequence in running:
            scheduler.cancel(sequence)
