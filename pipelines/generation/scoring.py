"""How likely a model finds a text that is given: of each token its log-probability after those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.generation.sampling import log_probabilities
from castiron.pipelines.generation.sequence import Failed, Finished
from castiron.pipelines.generation.sequence import Sequence as Generated

if TYPE_CHECKING:
    from castiron.pipelines.generation.request import Prompt, Request
    from castiron.pipelines.generation.shared import Client
    from castiron.vmfb.session import Session


@dataclass(frozen=True)
class Score:
    """Of a token: the logarithm of its probability after those before it, and the likeliest tokens there with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scored:
    """A text as its `tokens`, with `logprobs` f64 [tokens], of which the first, before which nothing stands, is NaN. `top`: of
    each token but the first the likeliest in its place, as (id, logarithm)."""

    tokens: list[int]
    logprobs: np.ndarray
    top: list[tuple[tuple[int, float], ...]]

    @property
    def total(self) -> float:
        """The logarithm of the probability of all tokens after the first."""
        return float(self.logprobs[1:].sum())

    @classmethod
    def of(cls, sequence: Generated) -> Scored:
        """Of a sequence whose prompt has been scored."""
        logprobs = np.array([np.nan, *(score.logprob for score in sequence.scores)])
        return cls(sequence.prompt.tolist(), logprobs, [score.top[: sequence.prompt_logprobs] for score in sequence.scores])


def width_of(widths: Sequence[int], most: int) -> int:
    """How many tokens a call of verify functions of these `widths` scores: the widest of at most so many; 1, a step, without
    them."""
    return max((width for width in widths if width <= most), default=min(widths, default=1))


def rows(session: Session, tokens: Sequence[int], width: int) -> Iterator[np.ndarray]:
    """Appends `tokens` and gives the logits after each, f32 [vocab]: by calls of `width` tokens (`width_of`), or where the rest
    is no whole call and cannot be a part of one, by steps."""
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        if len(part) == width > 1:
            session.verify(part)
        elif width == 1 or not session.verify_fewer(part, width):
            for token in part:
                session.step(token)
                yield session.logits()
            continue
        yield from session.verified_rows()


def score_chunk(session: Session, sequence: Generated, count: int, width: int) -> int:
    """Appends the next `count` tokens of the sequence's prompt at most, adds the scores of the tokens after each to its own and
    returns the most probable token after them."""
    prompt, start, best = sequence.prompt, session.position, 0
    for place, logits in enumerate(rows(session, prompt[start : start + count].tolist(), width), start + 1):
        if place < len(prompt):
            found = log_probabilities(logits, int(prompt[place]), sequence.prompt_logprobs or 0)
            sequence.scores.append(Score(*found))
        else:
            best = int(logits.argmax())
    return best


def scored(client: Client, prompts: Iterable[Prompt], request: Request, top: int) -> Iterator[Scored]:
    """The scores of each of `prompts` in their order, as many at once as there are slots, encoded as `request` has it.
    PipelineError for the first that cannot be scored."""
    waiting, ahead, ended = iter(prompts), deque[Generated](), set[Generated]()
    try:
        while True:
            for prompt in islice(waiting, client.slots - len(ahead)):
                ahead.append(request.scoring(prompt, top))
                client.submit(ahead[-1])
            if not ahead:
                return
            while ahead[0] not in ended:
                for sequence, event in client.turn():
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Finished):
                        ended.add(sequence)
            first = ahead.popleft()
            ended.remove(first)
            yield Scored.of(first)
    finally:
        for sequence in ahead:
            client.cancel(sequence)
