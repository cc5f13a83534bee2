"""Choosing a sequence's next token as OpenAI's API words it: penalties and biases before the sampler, log-probabilities
beside it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from castiron.pipelines.generation.sampling import REPEAT_WINDOW, Sampler, Sampling


@dataclass(frozen=True)
class Choosing:
    """How one sequence's tokens are chosen.

    frequency_penalty counts for every time that a token was generated before, presence_penalty once; logit_bias adds
    to the logits of token ids. top_logprobs None tells nothing, N >= 0 the chosen token and the N likeliest.
    """

    sampling: Sampling = Sampling()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    @property
    def needs_logits(self) -> bool:
        """False where the argmax that the graph computes is all there is to know."""
        return self.sampling.needs_logits or self.changes_logits or self.top_logprobs is not None


@dataclass(frozen=True)
class Chosen:
    """A token, the natural logarithm of its probability in the model's own distribution, and the likeliest others as
    (id, logarithm), likeliest first; both None unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


class Chooser:
    """The state of one sequence's choices: its random numbers and what it has said."""

    def __init__(self, choosing: Choosing, prompt: list[int]):
        self.choosing = choosing
        self.sampler = Sampler(choosing.sampling)
        self.counts: Counter[int] = Counter()
        self.recent = prompt[-REPEAT_WINDOW:]

    def choose(self, argmax: int, logits: Callable[[], np.ndarray]) -> Chosen:
        """The next token, where the graph has found `argmax` and `logits()` gives f32 [vocab]."""
        if not self.choosing.needs_logits:
            return Chosen(argmax)
        raw = logits()
        token = self._token(argmax, raw)
        self.counts[token] += 1
        self.recent = [*self.recent[1 - REPEAT_WINDOW :], token]
        count = self.choosing.top_logprobs
        return Chosen(token) if count is None else Chosen(token, *log_probabilities(raw, token, count))

    def _token(self, argmax: int, raw: np.ndarray) -> int:
        if not (self.choosing.changes_logits or self.choosing.sampling.needs_logits):
            return argmax
        return self.sampler.choose(self._changed(raw), self.recent)

    def _changed(self, raw: np.ndarray) -> np.ndarray:
        """OpenAI: mu[j] - c[j] * frequency_penalty - (c[j] > 0) * presence_penalty, plus the bias."""
        choosing = self.choosing
        if not choosing.changes_logits:
            return raw
        logits = raw.astype(np.float64)
        for token, count in self.counts.items():
            logits[token] -= count * choosing.frequency_penalty + choosing.presence_penalty
        for token, bias in choosing.logit_bias.items():
            logits[token] += bias
        return logits


def log_probabilities(logits: np.ndarray, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log softmax of logits f32 [vocab] at `token`, and the `count` likeliest as (id, logarithm), lowest id first of
    equals."""
    top = logits.max()
    total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    count = min(count, len(logits))
    if not count:
        return float(logits[token]) - total, ()
    least = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= least)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return float(logits[token]) - total, tuple((int(index), float(logits[index]) - total) for index in ids)
