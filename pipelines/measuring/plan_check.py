"""A plan put to the test: requests at random times through the scheduler, as many as come in some seconds."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Failed, Finished, Sequence
from castiron.pipelines.measuring.plan import Times, arriving, most, played, settled
from castiron.vmfb.bundle import Bundle

# Fewer say nothing.
LEAST = 16


def checked(bundle: Bundle, times: Times, prompt: int, rate: float, seconds: float, threads: int | None) -> dict[str, float]:
    """What requests of `prompt` tokens met in about so many seconds, beside what is expected of the very same arrivals: all at
    once, for what a machine answers at most, and then at `rate` a second. Times in ms."""
    scheduler = Scheduler(bundle, threads)
    several = max(LEAST, scheduler.slots * 2, round(most(times, scheduler.slots) * seconds / 2))
    ended = _run(scheduler, [0.0] * several, prompt, times.generated)
    busy = max(s.last for s in ended) - min(s.began for s in ended)
    requests = max(LEAST, round(rate * seconds / 2))
    found = {"most_per_s": several / busy, "expected_most_per_s": played(times, scheduler.slots, 1e9, several).rate}
    ended = _run(scheduler, arriving(rate, requests), prompt, times.generated)
    expected = played(times, scheduler.slots, rate, requests)
    found |= {
        "first_ms": settled([s.first - s.arrived for s in ended]) * 1e3,
        "expected_first_ms": expected.first * 1e3,
        "token_ms": settled([(s.last - s.first) / max(1, times.generated - 1) for s in ended]) * 1e3,
        "expected_token_ms": expected.token * 1e3,
    }
    return {name: round(value, 4) for name, value in found.items()}


def _run(scheduler: Scheduler, arrivals: list[float], prompt: int, gen: int) -> list[Sequence]:
    """The requests in the order in which they end, the first error if one fails; prompts share no beginning."""
    rng, waiting, ended = np.random.default_rng(), deque(arrivals), list[Sequence]()
    start, vocab = time.monotonic(), scheduler.manifest.vocab
    while waiting or not scheduler.idle:
        while waiting and start + waiting[0] <= time.monotonic():
            sequence = Sequence(rng.integers(0, vocab, prompt), scheduler.context, max_tokens=gen, stop_tokens=())
            # It may have come during a turn.
            sequence.arrived = start + waiting.popleft()
            scheduler.submit(sequence)
        if scheduler.idle:
            time.sleep(max(0.0, start + waiting[0] - time.monotonic()))
            continue
        for sequence, event in scheduler.turn():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                ended.append(sequence)
    return ended
