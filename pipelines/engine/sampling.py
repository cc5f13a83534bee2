"""Sampling: the choice of the next token from the logits. Also log-probabilities of tokens."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.json_record import short
from castiron.vmfb.device.program import NanLogitsError
from castiron.vmfb.run.session import Session

# Default number of last tokens to which the repeat penalty applies, as in llama.cpp and Ollama.
REPEAT_WINDOW = 64
# Size of the blocks in which weights are summed to draw a token.
BLOCK = 256
# Functions of a bundle add numbers in different orders, so their logits differ by rounding. That
# could change the chosen token in two cases: if the two largest logits differ by less than NEAR
# times the largest magnitude, or if the random number is closer than NEAR_DRAWN to another token's
# interval.
NEAR, NEAR_DRAWN = 1e-4, 2e-5
# Sampling fields of a generation_config.json, which are also fields of `Sampling`.
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_PENALTY = ("repeat_penalty", "repeat_last_n")
# llama.cpp's order of the samplers.
SAMPLERS = ("top_k", "top_p", "min_p", "temperature")
# A temperature_schedule: its shape, the temperature at its end, and its length in tokens.
SCHEDULE = r"(constant|linear|cosine):([0-9]+|[0-9]*[.][0-9]+):([1-9][0-9]{0,8})"
# By type of a field: the class that values must have, and what to call it in an error message.
KINDS: dict[str, tuple[Any, str]] = {
    "float": (Real, "a number"), "int": (Integral, "an integer"), "int | None": (Integral | None, "an integer or None"),
    "str | None": (str | None, "text"), "Mapping[int, float]": (Mapping, "numbers by token id"),
    "tuple[str, ...]": (tuple, "names"),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """The sampling options of a generation; a value outside its range raises PipelineError."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    temperature_schedule: str | None = None
    repeat_last_n: int = REPEAT_WINDOW
    samplers: tuple[str, ...] = SAMPLERS

    def __post_init__(self):
        for each in fields(self):
            kind, words = KINDS[str(each.type)]
            if not isinstance(value := getattr(self, each.name), kind):
                raise PipelineError(f"{each.name.replace('_', '-')} is {short(repr(value))}; it must be {words}")
        for name, is_valid, valid in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repeat_penalty", 0.01 <= self.repeat_penalty <= 100, "between 0.01 and 100"),
            ("repeat_last_n", self.repeat_last_n >= -1, "-1 or more"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a finite number"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a finite number"),
            (
                "logit_bias",
                all(isinstance(key, Integral) and isinstance(value, Real) for key, value in self.logit_bias.items()),
                "numbers by token id",
            ),
            ("seed", self.seed is None or self.seed >= 0, "0 or more"),
            ("temperature_schedule", not self.temperature_schedule or bool(self.schedule), "SHAPE:T:N, as linear:0.2:100"),
            (
                "samplers",
                self.samplers.count("temperature") == 1 and {*self.samplers} <= {*SAMPLERS},
                "one temperature, and any of top_k, top_p and min_p",
            ),
        ):
            if not is_valid:
                raise PipelineError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be {valid}")

    def with_options(self, **options: Any) -> Sampling:
        """Return a copy with other options; repeat_penalty resets repeat_last_n to its default."""
        if "repeat_penalty" in options:
            options.setdefault("repeat_last_n", REPEAT_WINDOW)
        return replace(self, **options)

    @cached_property
    def schedule(self) -> tuple[str, float, int] | None:
        """The temperature schedule as (shape, last temperature, number of tokens), or None."""
        found = re.fullmatch(SCHEDULE, self.temperature_schedule or "")
        return (found[1], float(found[2]), int(found[3])) if found else None

    def temperature_at(self, position: int) -> float:
        """Return the temperature for the answer's token at index `position`, counted from 0."""
        if not self.schedule or self.schedule[0] == "constant":
            return self.temperature
        shape, last, tokens = self.schedule
        share = min(position / tokens, 1.0)
        if shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.temperature + (last - self.temperature) * share

    def penalised(self, history: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a text that the repeat penalty counts; if all, each once."""
        if self.repeat_penalty == 1 or not self.repeat_last_n:
            return []
        return [*dict.fromkeys(history)] if self.repeat_last_n < 0 else history[-self.repeat_last_n :]

    @cached_property
    def cuts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The samplers that remove tokens, before and after the temperature, in their order."""
        usual, middle = Sampling(), self.samplers.index("temperature")
        active = lambda names: tuple(name for name in names if getattr(self, name) != getattr(usual, name))
        return active(self.samplers[:middle]), active(self.samplers[middle + 1 :])

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of logit_bias, i64 [n], and the biases, f64 [n]."""
        return np.array([*self.logit_bias], np.int64), np.array([*self.logit_bias.values()], np.float64)

    @property
    def is_random(self) -> bool:
        return self.temperature > 0 or bool(self.schedule)

    @property
    def shifts_logits(self) -> bool:
        """Whether the frequency penalty, presence penalty or logit_bias change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    @property
    def needs_logits(self) -> bool:
        """Whether choosing a token needs all logits, and not only the index of the largest one."""
        return self.is_random or self.repeat_penalty != 1 or self.shifts_logits

    @property
    def settings(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in (*SAMPLED, *_PENALTY)}

    def __str__(self) -> str:
        """Return the settings that differ from the defaults, as "temperature 0.6, top-k 20"."""
        usual = Sampling().settings
        parts = [] if self.temperature else ["greedy"]
        for name, value in self.settings.items():
            has_effect = self.repeat_penalty != 1 if name in _PENALTY else self.temperature
            if value != usual[name] and has_effect:
                parts.append(f"{name.replace('_', '-')} {value:g}")
        return ", ".join(parts)


def model_sampling(generation: Mapping[str, Any]) -> Sampling | None:
    """Return the sampling options of a generation_config.json, or None; PipelineError if invalid.

    As in HF's `generate`, do_sample false means greedy, and the repetition penalty counts all
    tokens, unless `repeat_last_n` (of GGUF files) limits them. Unlike there, temperature, top_k,
    top_p and min_p have an effect without do_sample, and a missing top_k is 0 (no limit).
    """
    stated: dict[str, Any] = {name: value for name in SAMPLED if (value := _number(generation, name)) is not None}
    samples, penalty = generation.get("do_sample"), _number(generation, "repetition_penalty")
    if not stated and penalty is None and samples is None:
        return None
    if samples is False or not (samples or stated):
        stated = {}
    else:
        stated.setdefault("temperature", 1.0)
    if "top_k" in stated:
        # Some files have -1 for no limit.
        stated["top_k"] = max(0, int(stated["top_k"]))
    if penalty is not None and penalty != 1:
        last = _number(generation, "repeat_last_n")
        stated |= {"repeat_penalty": penalty, "repeat_last_n": -1 if last is None else int(last)}
    try:
        return Sampling(**stated)
    except PipelineError as error:
        raise _invalid(error) from None


def _number(generation: Mapping[str, Any], name: str) -> float | None:
    value = generation.get(name)
    # An integer may exceed 64 bits.
    if value is None or isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    raise _invalid(f"{name} is {short(repr(value))}, which is not a number")


def _invalid(reason: object) -> PipelineError:
    return PipelineError(f"invalid generation_config.json of the model: {reason}; correct it, and compile the model again")


class Sampler:
    """The sampler of one generation, with a sequence of random numbers, one for each token."""

    def __init__(self, sampling: Sampling = Sampling()):
        self.sampling = sampling
        self.random = np.random.default_rng(sampling.seed)
        self.number = self.random.random()

    def copy(self) -> Sampler:
        """Return an independent sampler that will draw the same random numbers."""
        other = copy(self)
        other.random = deepcopy(self.random)
        return other

    def pick(
        self, logits: np.ndarray, history: Sequence[int], counts: Mapping[int, int] = {}, check: bool = False
    ) -> tuple[int, bool]:
        """Choose the next token; return (token, whether it is safe from rounding errors).

        In this order: OpenAI's penalties and biases, then, as in llama.cpp, the repeat penalty and
        `Sampling.samplers`. Of tokens with equal logits, the lowest id is chosen.

        logits: f32 [vocab]. history: tokens so far, as many as the penalty counts. counts: how
        often each was generated. check: whether the caller needs the second result.
        """
        sampling = self.sampling
        if sampling.shifts_logits:
            logits = shifted(logits, sampling, counts)
        if sampling.repeat_penalty != 1:
            logits = penalise(logits.astype(np.float64), sampling.penalised(history), sampling.repeat_penalty)
        temperature = sampling.temperature_at(sum(counts.values())) if sampling.schedule else sampling.temperature
        if not temperature:
            return int(logits.argmax()), not check or lead(logits) >= NEAR
        order: np.ndarray | None = None
        before, after = sampling.cuts
        if before:
            order, probability = candidates(logits, sampling, before)
            logits = np.log(probability)
        if after:
            left, probability = candidates(logits / _bounded(temperature), sampling, after)
            order, logits, temperature = left if order is None else order[left], np.log(probability), 1.0
        index, certain = _draw(weights(logits, temperature), self.number)
        return index if order is None else int(order[index]), certain

    def used(self) -> None:
        """Draw the random number for the next token; call this after a token has been chosen."""
        self.number = self.random.random()


def _draw(weight: np.ndarray, number: float) -> tuple[int, bool]:
    """Draw an index with `weight` by `number` in [0, 1); return (index, is certain).

    It is certain if `number` is NEAR_DRAWN away from other indices, so that rounding cannot matter.
    """
    # Running sums over a complete vocabulary are slow, so a block is drawn first, then an index in
    # the block.
    sums = np.add.reduceat(weight, np.arange(0, len(weight), BLOCK)).cumsum(dtype=np.float64)
    goal = number * sums[-1]
    block = _drawn(sums, goal)
    before = sums[block - 1] if block else 0.0
    within = weight[block * BLOCK :][:BLOCK].cumsum(dtype=np.float64)
    index = _drawn(within, goal - before)
    low, high = before + (within[index - 1] if index else 0.0), before + within[index]
    near = NEAR_DRAWN * sums[-1]
    # The first and the last token have one neighbour.
    certain = (low <= 0 or goal - low >= near) and (high >= sums[-1] or high - goal >= near)
    return block * BLOCK + index, bool(certain)


def lead(logits: np.ndarray) -> float:
    """Return (largest logit - second largest) / largest |logit|; small if rounding matters."""
    best = int(logits.argmax())
    largest, smallest = logits[best], logits.min()
    if np.isinf(smallest):
        smallest = logits[np.isfinite(logits)].min()
    scale = max(abs(largest), abs(smallest))
    others = max(logits[:best].max(initial=-np.inf), logits[best + 1 :].max(initial=-np.inf))
    return float((largest - others) / scale) if scale else 0.0


def _drawn(sums: np.ndarray, goal: float) -> int:
    return int(min(sums.searchsorted(goal, side="right"), sums.searchsorted(sums[-1])))


def weights(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return exp(logits / temperature), f32 [n], scaled so that the largest value is 1."""
    # NumPy computes exp of f32 many times as fast as of f64.
    weight = (logits - logits.max()).astype(np.float32, copy=False)
    if temperature != 1:
        weight /= np.float32(_bounded(temperature))
    return np.exp(weight, out=weight)


def _bounded(temperature: float) -> float:
    # Beyond these limits, the f32 weights of all tokens but one are zero, or all weights are equal.
    return min(max(temperature, 1e-5), 1e9)


def shifted(logits: np.ndarray, sampling: Sampling, counts: Mapping[int, int]) -> np.ndarray:
    """Return logits, f64 [vocab], after OpenAI's penalties and biases."""
    logits = logits.astype(np.float64)
    for token, count in counts.items():
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    ids, biases = sampling.biases
    logits[ids] += biases
    return logits


def penalise(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Return logits, f64 [vocab], after the repeat penalty of the tokens in `recent`.

    CTRL, arXiv 1909.05858, section 4.1, as in HF and llama.cpp.
    """
    seen = np.unique(np.asarray(recent, np.int64))
    logits = logits.copy()
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def candidates(logits: np.ndarray, sampling: Sampling, cuts: Sequence[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and f64 probabilities of the tokens that cuts such as "top_k" leave, best first.

    cuts: by default those before the temperature.
    """
    cuts = sampling.cuts[0] if cuts is None else cuts
    cuts = [name for name in cuts if name != "top_k" or sampling.top_k < len(logits)]
    weight = weights(logits)
    # Sorting a complete vocabulary takes longer than a decode step, so first remove the tokens that
    # the first cut is certain to remove.
    if cuts[:1] == ["top_k"]:
        possible = logits >= np.partition(logits, -sampling.top_k)[-sampling.top_k]
    else:
        # Top-p removes all tokens with a weight below `outside`: a full vocabulary of such tokens
        # would have less probability than top-p removes. The factor 0.999 keeps tokens near the
        # limit, for which the exact computation below decides.
        outside = (1 - sampling.top_p) * weight.sum(dtype=np.float64) / len(weight) if cuts[:1] == ["top_p"] else 0.0
        possible = weight >= 0.999 * max(sampling.min_p if "min_p" in cuts else 0.0, outside)
    ids = np.flatnonzero(possible)
    order = ids[np.argsort(-logits[ids], kind="stable")]
    total = weight.sum(dtype=np.float64)
    exact = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    for name in cuts:
        if name == "top_k":
            keep = sampling.top_k
        elif name == "top_p":
            keep = int((exact / total).cumsum().searchsorted(sampling.top_p)) + 1
        else:
            keep = int(np.count_nonzero(exact >= sampling.min_p * exact[0]))
        exact = exact[:keep]
        total = exact.sum()
    probability = exact / total
    # Leave out probabilities that underflowed to 0, because the sampler takes the logarithm.
    keep = int(np.count_nonzero(probability))
    return order[:keep], probability[:keep]


class Score(NamedTuple):
    """The log-probability of a token; `top`: (id, log-probability) of the most probable ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Score:
    top = logits.max()
    total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    count = min(count, len(logits))
    if count < 2:
        # For at most one token, the logits need not be sorted.
        return Score(float(logits[token]) - total, ((int(logits.argmax()), float(top) - total),) * count)
    ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return Score(float(logits[token]) - total, tuple((int(index), float(logits[index]) - total) for index in ids))


def score_width(widths: Sequence[int], max_width: int) -> int:
    """Return how many tokens a call should read if the logits after every token are needed.

    It is the largest of the verify functions' `widths` up to `max_width`, or else the smallest
    one; 1 (a decode step) without widths.
    """
    return max((width for width in widths if width <= max_width), default=min(widths, default=1))


def logit_rows(session: Session, tokens: Sequence[int], width: int, total: int = 0) -> Iterator[np.ndarray]:
    """Read `tokens` in calls of `width` tokens; yield the logits after each, f32 [vocab].

    Decode steps replace the last call if the session cannot undo its padding.
    total: see `Session`.
    """
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        if len(part) == width > 1:
            session.verify(part, total)
        elif width == 1 or not session.verify_fewer(part, width, total):
            for token in part:
                session.prefill([token], total=total)
                yield session.logits()
            continue
        for row in session.verified_rows():
            if np.isnan(row.max()):
                raise NanLogitsError
            yield row
