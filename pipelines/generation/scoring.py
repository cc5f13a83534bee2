"""How likely a model finds a text that is given: of each token its log-probability after those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.generation.sequence import Failed, Finished
from castiron.pipelines.generation.sequence import Sequence as Generated

if TYPE_CHECKING:
    from castiron.pipelines.generation.request import Prompt, Request
    from castiron.pipelines.generation.shared import Client


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
