"""How many requests a machine answers, from the times of its calls: continuous batching in arithmetic.

A turn of the scheduler reads one chunk of one prompt, if one waits, and decodes one token of every other sequence. Of a
request with G tokens to generate and n chunks to read, on a machine with S slots whose chunk takes c and whose step of b
sequences t(b): with all slots taken, a request is in one for G turns of decoding and n of reading, so that b = S G / (G + n)
sequences decode in a turn, or G / n where reading is all that holds the machine back, and one machine answers
1 / (n c + G t(b) / b) requests a second. How long requests take at less than that is found by playing the turns through, with
arrivals at random (Poisson).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from castiron.pipelines.errors import PipelineError

# Requests that are played through.
REQUESTS = 1000
# More machines are a mistake in the numbers.
MACHINES = 10**9


@dataclass(frozen=True)
class Times:
    """Seconds: `steps` of a decode step by how many sequences decode, `alone` of a whole prompt where nobody else is, `chunk`
    of one of the `chunks` in which it is read between decode steps. `generated`: tokens of an answer."""

    steps: Mapping[int, float]
    alone: float
    chunk: float
    chunks: int
    generated: int

    def step(self, active: float) -> float:
        """Of a step that so many sequences take on average: between two that are known by the share of either."""
        known = sorted(self.steps)
        below = max((n for n in known if n <= active), default=known[0])
        above = min((n for n in known if n >= active), default=known[-1])
        share = (active - below) / (above - below) if above > below else 0.0
        return self.steps[below] * (1 - share) + self.steps[above] * share


@dataclass(frozen=True)
class Load:
    """One machine at a rate: the share of what it can answer, sequences that decode, and of requests the mean seconds to the
    first token and between two others; infinite past what it can answer."""

    busy: float
    active: float
    first: float
    token: float


def most(times: Times, slots: int) -> float:
    """Requests a second that one machine answers with every slot taken."""
    # Where fewer than one decodes, some turns have no step.
    active = max(1.0, full(times, slots))
    reading = times.chunks * times.chunk if slots > 1 else times.alone
    return 1 / (reading + times.generated * times.step(active) / active)


def full(times: Times, slots: int) -> float:
    """Sequences that decode in a turn with every slot taken."""
    return min(slots * times.generated / (times.generated + times.chunks), times.generated / times.chunks)


def batch_rate(times: Times, slots: int) -> float:
    """Rows a second of a batch job, which reads prompts in one piece and keeps every slot full."""
    return 1 / (times.alone + times.generated * times.step(slots) / slots)


def load(times: Times, slots: int, rate: float) -> Load:
    """One machine that gets `rate` requests a second."""
    busy = rate / most(times, slots)
    if busy >= 1:
        return Load(busy, full(times, slots), math.inf, math.inf)
    found = played(times, slots, rate)
    return Load(busy, found.active, found.first, found.token)


@dataclass(frozen=True)
class Played:
    """Requests that were answered in a second, sequences that decoded, and the mean seconds as in a Load."""

    rate: float
    active: float
    first: float
    token: float


def played(times: Times, slots: int, rate: float, requests: int = REQUESTS) -> Played:
    """So many requests that come at random, `rate` a second, turn by turn."""
    arrivals, now, decoded = deque(arriving(rate, requests)), 0.0, 0.0
    # When the one that is read arrived, with the chunks left; of those that decode when they began, with the tokens left.
    reading: list[float] = []
    decoding: list[list[float]] = []
    firsts, gaps = list[float](), list[float]()
    while arrivals or reading or decoding:
        if not (reading or decoding):
            now = max(now, arrivals[0])
        if not reading and arrivals and arrivals[0] <= now and len(decoding) < slots:
            reading = [arrivals.popleft(), times.chunks]
        begun = None
        turns = 1
        if reading:
            now += times.chunk if decoding else times.alone / times.chunks
            reading[1] -= 1
            if not reading[1]:
                firsts.append(now - reading[0])
                begun, reading = [now, times.generated - 1], []
        elif decoding:
            # Nothing changes before one ends or the next arrives.
            step = times.step(len(decoding))
            turns = int(min(left for _, left in decoding))
            if arrivals and len(decoding) < slots:
                turns = max(1, min(turns, math.ceil((arrivals[0] - now) / step - 1e-9)))
        if decoding:
            spent = turns * times.step(len(decoding))
            now += spent
            decoded += turns * len(decoding)
            for one in decoding:
                one[1] -= turns
            gaps += [(now - one[0]) / max(1, times.generated - 1) for one in decoding if one[1] <= 0]
            decoding = [one for one in decoding if one[1] > 0]
        if begun and begun[1]:
            decoding.append(begun)
    token = settled(gaps)
    # Tokens a second, each of which takes so long.
    return Played(requests / now, decoded / now * token, settled(firsts), token)


def settled(values: Sequence[float]) -> float:
    """The mean without the first tenth, which finds the machine emptier than the others do."""
    later = values[len(values) // 10 :]
    return sum(later) / len(later) if later else 0.0


def arriving(rate: float, requests: int) -> list[float]:
    """When so many requests arrive, in seconds: at random, and the same each time."""
    rng, at = random.Random(0), 0.0
    return [at := at + rng.expovariate(rate) for _ in range(requests)]


def machines(times: Times, slots: int, rate: float, busiest: float) -> int:
    """The fewest of which none is busier than `busiest`, a share of what it can answer; PipelineError for more than a
    thousand million."""
    one = busiest * most(times, slots)
    if not (one and rate / one < MACHINES):
        raise PipelineError(f"{rate:g} requests a second need more than {MACHINES:,} such machines; look at the numbers again")
    return max(1, math.ceil(rate / one - 1e-9))
