"""Choosing the next token: greedy by default, or drawn from the logits; and the probabilities it was chosen from."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from castiron.pipelines.errors import PipelineError

# How far back a repeated token is held against it, as llama.cpp's --repeat-last-n.
REPEAT_WINDOW = 64
# Weights that are summed up first, before one of them is drawn.
BLOCK = 256
# Functions of a bundle sum in different orders. A choice is in doubt between logits nearer than this share of the largest, and
# where a random number is nearer than this to another token's share of the probability.
NEAR, NEAR_DRAWN = 1e-4, 2e-5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty 1 leave the logits as they are. Equal seeds
    choose equal tokens; without a seed each generation differs. As in OpenAI's API frequency_penalty counts for every
    time that a token was generated before and presence_penalty once; logit_bias adds to the logits of token ids.
    PipelineError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self):
        ranges = (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repeat_penalty", 0.01 <= self.repeat_penalty <= 100, "between 0.01 and 100"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a finite number"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a finite number"),
            ("seed", self.seed is None or self.seed >= 0, "0 or more"),
        )
        for name, holds, wanted in ranges:
            if not holds:
                raise PipelineError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be {wanted}")

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """logit_bias as ids i64 [n] and what is added to their logits, f64 [n]."""
        return np.array([*self.logit_bias], np.int64), np.array([*self.logit_bias.values()], np.float64)

    @property
    def shifts_logits(self) -> bool:
        """Whether penalties or biases are added to the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    @property
    def needs_logits(self) -> bool:
        """False where the argmax that the graph computes is the choice."""
        return self.temperature > 0 or self.repeat_penalty != 1 or self.shifts_logits


class Sampler:
    """The state of one generation's choices: its random numbers, one for each token that is drawn."""

    def __init__(self, sampling: Sampling = Sampling()):
        self.sampling = sampling
        self.random = np.random.default_rng(sampling.seed) if sampling.temperature > 0 else None
        # Those that were looked at and are not used yet.
        self._numbers: deque[float] = deque()

    def choose(self, logits: np.ndarray, history: Sequence[int], counts: Mapping[int, int] | None = None) -> int:
        """The next token from logits f32 [vocab] and the tokens so far, prompt included; ties go to the lowest id.

        `counts`: how often each token was generated. OpenAI's penalties and biases come first, then in llama.cpp's
        order the repeat penalty, top-k, top-p, min-p and the temperature.
        """
        token, _ = self.pick(logits, history, counts, check=False)
        self.used()
        return token

    def pick(
        self,
        logits: np.ndarray,
        history: Sequence[int],
        counts: Mapping[int, int] | None = None,
        ahead: int = 0,
        check: bool = True,
    ) -> tuple[int, bool]:
        """What `choose` would choose after `ahead` more; with `check`, whether it is that in whatever order a function sums."""
        sampling = self.sampling
        if sampling.shifts_logits:
            logits = shifted(logits, sampling, counts or {})
        if sampling.repeat_penalty != 1:
            logits = penalise(logits.astype(np.float64), history[-REPEAT_WINDOW:], sampling.repeat_penalty)
        if self.random is None:
            return int(logits.argmax()), not check or lead(logits) >= NEAR
        number = self._number(ahead)
        if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
            # Nothing is cut, so nothing needs to be sorted.
            return _draw(weights(logits, sampling.temperature), number)
        order, probability = candidates(logits, sampling)
        # Only now does the temperature bend what the cuts have left.
        index, sure = _draw(weights(np.log(probability), sampling.temperature), number)
        return int(order[index]), sure

    def used(self) -> None:
        """The next random number belongs to a token that was taken."""
        if self.random is not None:
            self._number(0)
            self._numbers.popleft()

    def _number(self, ahead: int) -> float:
        while len(self._numbers) <= ahead:
            self._numbers.append(self.random.random())
        return self._numbers[ahead]


def _draw(weight: np.ndarray, number: float) -> tuple[int, bool]:
    """An index of `weight` f32 [n], with probability proportional to what stands there, where `number` is even in [0, 1); and
    whether its neighbours are farther than NEAR_DRAWN."""
    # Running sums of a whole vocabulary cost more than all else: first a block is drawn, then an index in it.
    sums = np.add.reduceat(weight, np.arange(0, len(weight), BLOCK)).cumsum(dtype=np.float64)
    goal = number * sums[-1]
    block = _drawn(sums, goal)
    before = sums[block - 1] if block else 0.0
    within = weight[block * BLOCK :][:BLOCK].cumsum(dtype=np.float64)
    index = _drawn(within, goal - before)
    low, high = before + (within[index - 1] if index else 0.0), before + within[index]
    near = NEAR_DRAWN * sums[-1]
    # Where probability begins and ends there is no neighbour.
    sure = (low <= 0 or goal - low >= near) and (high >= sums[-1] or high - goal >= near)
    return block * BLOCK + index, bool(sure)


def lead(logits: np.ndarray) -> float:
    """How far the largest of `logits` [n] is ahead of the second, as a share of the largest finite magnitude."""
    best = int(logits.argmax())
    largest, least = logits[best], logits.min()
    if np.isinf(least):
        least = logits[np.isfinite(logits)].min()
    scale = max(abs(largest), abs(least))
    others = max(logits[:best].max(initial=-np.inf), logits[best + 1 :].max(initial=-np.inf))
    return float((largest - others) / scale) if scale else 0.0


def _drawn(sums: np.ndarray, goal: float) -> int:
    """The first index whose running sum is above `goal`; rounding never leads behind the last that adds something."""
    return int(min(sums.searchsorted(goal, side="right"), sums.searchsorted(sums[-1])))


def weights(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """exp(logits / temperature) as f32 [n], scaled so that the largest is 1; NumPy's f32 exp is many times as fast as
    f64's."""
    weight = (logits - logits.max()).astype(np.float32, copy=False)
    # Beyond these all is one token or all are equal, as far as f32 can tell.
    if temperature != 1:
        weight /= np.float32(min(max(temperature, 1e-5), 1e9))
    return np.exp(weight, out=weight)


def shifted(logits: np.ndarray, sampling: Sampling, counts: Mapping[int, int]) -> np.ndarray:
    """Logits [vocab] as f64, by OpenAI's formula: mu[j] - c[j] * frequency_penalty - (c[j] > 0) * presence_penalty, plus
    the bias; c[j] is how often token j was generated."""
    logits = logits.astype(np.float64)
    for token, count in counts.items():
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    ids, biases = sampling.biases
    logits[ids] += biases
    return logits


def penalise(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Logits f64 [vocab] with those of `recent` tokens divided by the penalty, or multiplied where below zero (CTRL,
    arXiv 1909.05858, section 4.1, in the form that HF and llama.cpp use)."""
    seen = np.unique(np.asarray(recent, np.int64))
    logits = logits.copy()
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What top-k, top-p and min-p leave of logits [vocab]: ids and probabilities f64, likeliest first, never none."""
    weight = weights(logits)
    # Sorting a whole vocabulary costs more than a decode step, and nearly all of it would be cut.
    possible = np.flatnonzero(_possible(logits, weight, sampling))
    order = possible[np.argsort(-logits[possible], kind="stable")]
    total = weight.sum(dtype=np.float64)
    exact = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    if 0 < sampling.top_k < len(logits):
        order, exact = order[: sampling.top_k], exact[: sampling.top_k]
        total = exact.sum()
    probability = exact / total
    # Underflown tails would be log(0) below.
    keep = int(np.count_nonzero(probability))
    if sampling.top_p < 1:
        keep = min(keep, int(probability.cumsum().searchsorted(sampling.top_p)) + 1)
    if sampling.min_p > 0:
        keep = min(keep, int(np.count_nonzero(probability >= sampling.min_p * probability[0])))
    return order[:keep], probability[:keep]


def _possible(logits: np.ndarray, weight: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which of `logits` [vocab], with `weight` f32 where the likeliest has 1, can outlast the cuts; bool."""
    if 0 < sampling.top_k < len(logits):
        return logits >= np.partition(logits, -sampling.top_k)[-sampling.top_k]
    # All tokens below the mean of what top-p cuts weigh less than that together.
    outside = (1 - sampling.top_p) * weight.sum(dtype=np.float64) / len(weight)
    # Rounding must not decide before the cuts themselves do.
    return weight >= 0.999 * max(sampling.min_p, outside)


@dataclass(frozen=True)
class Score:
    """Of a token: the logarithm of its probability after those before it, and the likeliest tokens there with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def log_probabilities(logits: np.ndarray, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log softmax of logits f32 [vocab] at `token`, and the `count` likeliest as (id, logarithm), lowest id first of
    equals."""
    top = logits.max()
    total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    count = min(count, len(logits))
    if count < 2:
        # Nothing needs to be sorted.
        return float(logits[token]) - total, ((int(logits.argmax()), float(top) - total),) * count
    least = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= least)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return float(logits[token]) - total, tuple((int(index), float(logits[index]) - total) for index in ids)
