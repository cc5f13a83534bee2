"""Many prompts over one bundle, as many at once as it has slots; results as they come."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import at_most, room
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Delta, Failed, Sequence
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


def generate_many(
    bundle: Bundle | Scheduler,
    prompts: Iterable[str | Collection[int]],
    *,
    max_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] | None = None,
    stop_strings: Iterable[str] = (),
    text: Text | None = None,
    threads: int | None = None,
) -> Iterator[Result]:
    """A Result for each of `prompts`, texts or token ids, in the order in which they end.

    A prompt is taken when a slot is free for it, so that `prompts` may be without end; all that is kept is what runs.
    Nothing runs but between one result and the next, and closing the iterator lets go of what has not ended. Each gets
    the tokens that it gets alone: at most `max_tokens`, and as many as the context has room for. stop_tokens None are
    the bundle's own; `text` defaults to its tokenizer. A Scheduler in place of a bundle keeps its caches for the next
    call, and runs nothing else meanwhile. PipelineError for options that no prompt can be run with; a prompt that cannot
    be run has a result that says why.
    """
    scheduler = bundle if isinstance(bundle, Scheduler) else Scheduler(bundle, threads)
    if text is None and scheduler.bundle and scheduler.bundle.tokenizer:
        text = load_text(scheduler.bundle)
    stop_strings = tuple(stop_strings)
    if stop_tokens is None:
        stop_tokens = scheduler.manifest.tokens.eos

    def begin(prompt: str | Collection[int]) -> Sequence:
        if isinstance(prompt, str) and text is not None:
            prompt = text.encode(prompt)
        if not isinstance(prompt, Collection) or not all(isinstance(token, Integral) for token in prompt):
            raise PipelineError(f"this prompt is neither {'text nor ' if text else ''}a list of token ids")
        vocab = scheduler.manifest.vocab
        if outside := [token for token in prompt if not 0 <= token < vocab]:
            raise PipelineError(f"token {outside[0]} is outside the vocabulary of {vocab} tokens")
        limit = at_most(max_tokens, room(scheduler.context, 0, len(prompt)))
        return Sequence(
            prompt, scheduler.context, max_tokens=limit, text=text, sampler=Sampler(sampling),
            stop_tokens=stop_tokens, stop_strings=stop_strings,
        )  # fmt: skip

    # What no prompt can be run with is refused at once.
    begin([0])
    return _results(scheduler, enumerate(prompts), begin)


def _results(scheduler: Scheduler, prompts: Iterator, begin: Callable[[Any], Sequence]) -> Iterator[Result]:
    if not scheduler.idle:
        raise PipelineError("this scheduler is running other sequences; give these prompts one of their own")
    running: dict[Sequence, tuple[int, list[str]]] = {}
    try:
        while True:
            while len(running) < scheduler.slots and (taken := next(prompts, None)):
                index, prompt = taken
                try:
                    sequence = begin(prompt)
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
