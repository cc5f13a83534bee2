"""Who waits for whom, over the model in NumPy of test_scheduler: clients, prompts and running answers."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.scheduler import INTERLEAVED, PATIENCE, Observer, Scheduler
from tests.pipelines.test_scheduler import CONTEXT, FakeBatch, Request, alone_past_eos, run

PROMPTS = st.lists(st.integers(3, 5), min_size=1, max_size=CONTEXT - 10)


class Forced:
    """A grammar that says every `run`-th token and those after it, up to a choice: `run` of them are certain at once."""

    done, eos, forced = False, (), ()

    def __init__(self, run: int):
        self.run, self.count = run, 0

    def best(self, argmax: int, logits) -> int:
        return argmax

    def accept(self, token: int) -> None:
        self.count += 1
        self.forced = self.forced[1:] if self.forced else (7,) * self.run if self.count % 5 == 0 else ()


class Watch(Observer):
    """Asserts that whoever is given a slot had fewer than its share, if somebody who waited had."""

    def __init__(self):
        self.scheduler: Scheduler | None = None
        self.waited: list = []

    def began(self, sequence) -> None:
        s = self.scheduler
        held = Counter(one.client for one in (*s.reading.values(), *s.decoding.values()) if one is not sequence)
        clients = {*held, *(one.client for one in (*s.waiting, sequence))}
        share = ceil(s.slots / len(clients))
        # Only those whose beginning nobody is reading could have had it.
        others = [one for one in s.waiting if one.priority == sequence.priority and one.prompt[0] == one.client_mark]
        assert held[sequence.client] < share or all(held[one.client] >= share for one in others)


ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 0, 2, 40])),
    min_size=1,
    max_size=14,
)


@given(st.integers(1, 4), ARRIVALS)
def test_nobody_waits_longer_than_a_chunk_or_for_ever(size, arrivals):
    """Whatever arrives when: between two tokens of an answer at most one chunk is read, the oldest prompt is passed over
    only as often as patience says, no client is given more than its share while another one waits with less, and every
    sequence ends with the tokens that it has alone."""
    batch, watch = FakeBatch(size), Watch()
    watch.scheduler = scheduler = Scheduler(batch, observer=watch)
    free, bound = [], []

    def turn() -> None:
        running = {s: (len(s.tokens), batch.slots[slot].position) for slot, s in scheduler.decoding.items()}
        batch.work.clear()
        run(scheduler, 1)
        if running:
            assert sum(work[2] for work in batch.work if work[0] == "prefill") <= INTERLEAVED
        for slot, s in scheduler.decoding.items():
            if s in running:
                assert (len(s.tokens), batch.slots[slot].position) > running[s] and batch.slots[slot].position > running[s][1]
        if scheduler.reading:
            oldest = min(scheduler.reading.values(), key=lambda s: s.arrived)
            older = [s for s in scheduler.decoding.values() if s.arrived < oldest.arrived]
            assert oldest.passed_over <= PATIENCE + len(older)

    for prompt, max_tokens, client, turns, run_of in arrivals:
        # Those of different clients share nothing.
        request = Request([10 + client, *prompt], max_tokens)
        request.sequence.client, request.sequence.client_mark = f"client {client}", -1
        if run_of:
            request.sequence.chooser.constraint = Forced(run_of)
            bound.append(request)
        else:
            free.append(request)
        if all(int(s.prompt[0]) != 10 + client for s in (*scheduler.waiting, *scheduler.reading.values())):
            request.sequence.client_mark = 10 + client
        scheduler.submit(request.sequence)
        for _ in range(turns):
            turn()
    turns = 0
    while not scheduler.idle:
        turn()
        turns += 1
        assert turns < 60 * len(arrivals), "a sequence never ends"
    for request in free:
        request.check_as_alone()
    for request in bound:
        tokens = request.sequence.tokens
        assert len(tokens) <= request.max_tokens and request.end
        assert set(tokens[5 : 5 + request.sequence.constraint.run]) <= {7}, "what is forced is said"
    for slot, session in enumerate(batch.slots):
        assert list(scheduler.cache.tokens[slot, : session.position]) == session.held


def test_a_long_prompt_is_read_behind_any_number_of_clients_with_short_ones():
    """Five clients that each ask again as soon as they are answered: a chunk of the long prompt comes every few turns."""
    scheduler = Scheduler(FakeBatch(6))
    long = Request([5] * 96, 1, stop_tokens=[])
    long.sequence.client = "long"
    live: dict[int, Request] = {}
    asked = 0

    def shorts() -> None:
        nonlocal asked
        for client in range(5):
            if client not in live or _ended(live[client]):
                live[client] = Request([10 + client, 3 + asked % 30, 4], 2, stop_tokens=[])
                live[client].sequence.client = f"short {client}"
                scheduler.submit(live[client].sequence)
                asked += 1

    shorts()
    run(scheduler, 8)
    scheduler.submit(long.sequence)
    turns = 0
    while not _ended(long):
        shorts()
        run(scheduler, 1)
        turns += 1
        assert turns <= (96 // INTERLEAVED + 2) * (PATIENCE + 2), "short prompts starve a long one"
    assert asked > 10


def _ended(request: Request) -> bool:
    return request.sequence.finish_reason is not None


def test_a_request_of_many_choices_leaves_slots_to_others():
    """The next slot that is free is another client's, and then both have their share."""
    scheduler = Scheduler(FakeBatch(4))
    many = [Request([3] * 8, 6 + 3 * (i % 4)) for i in range(40)]
    for request in many:
        request.sequence.client = "many"
        scheduler.submit(request.sequence)
    run(scheduler, 4)
    few = [Request([4, 10 + i], 9) for i in range(8)]
    for request in few:
        request.sequence.client = "few"
        scheduler.submit(request.sequence)
    before = sum(map(_ended, many))
    while not all(map(_ended, few)):
        run(scheduler, 1)
        if sum(map(_ended, many)) > before + 3:
            held = Counter(s.client for s in (*scheduler.reading.values(), *scheduler.decoding.values()))
            assert held["many"] <= 2 or not any(s.client == "few" for s in scheduler.waiting)
    assert sum(map(_ended, many)) < 30
    run(scheduler)
    for request in (*many, *few):
        request.check_as_alone()


def test_the_lower_priority_goes_first():
    scheduler = Scheduler(FakeBatch(1))
    order = []
    requests = {p: Request([3, 10 + i], 3, stop_tokens=[]) for i, p in enumerate((5, 0, -3, 7))}
    for priority, request in requests.items():
        request.sequence.priority = priority
        scheduler.submit(request.sequence)
    while not scheduler.idle:
        run(scheduler, 1)
        order += [p for p, request in requests.items() if _ended(request) and p not in order]
    assert order == [-3, 0, 5, 7]
    # Also of two prompts that are being read, though the other one is shorter.
    scheduler = Scheduler(FakeBatch(2))
    low, high = Request([4] * 70, 1, stop_tokens=[]), Request([5] * 90, 1, stop_tokens=[])
    low.sequence.priority = 1
    scheduler.submit(low.sequence)
    run(scheduler, 1)
    scheduler.submit(high.sequence)
    run(scheduler, 2)
    assert _ended(high) and not _ended(low)


PRIORITISED = st.lists(
    st.tuples(PROMPTS, st.integers(1, 15), st.integers(-2, 2), st.integers(0, 5), st.sampled_from([0, 0, 0, 2, 40]), st.booleans()),
    min_size=2, max_size=12,
)  # fmt: skip


@given(st.integers(1, 3), PRIORITISED, st.booleans())
def test_who_gives_its_slot_to_a_lower_priority_says_the_same(size, arrivals, fills):
    """Wherever it is interrupted, reading, decoding or under a grammar."""
    batch = FakeBatch(size)
    scheduler = Scheduler(batch)
    scheduler.fills = fills
    requests, bound, gone = [], [], []

    def turn() -> None:
        run(scheduler, 1)
        assert sum(s.paused is not None for s in scheduler.waiting) <= size
        running = [*scheduler.reading.values(), *scheduler.decoding.values()]
        assert len(running) <= size and not any(s.paused for s in running)

    for i, (prompt, max_tokens, priority, turns, run_of, leaves) in enumerate(arrivals):
        request = Request([6 + i, *prompt], max_tokens)
        request.sequence.priority = priority
        if run_of:
            request.sequence.chooser.constraint = Forced(run_of)
        (gone if leaves and i % 3 == 0 else bound if run_of else requests).append(request)
        scheduler.submit(request.sequence)
        for _ in range(turns):
            turn()
        for one in gone:
            scheduler.cancel(one.sequence)
            assert one.sequence.paused is None
    while not scheduler.idle:
        turn()
    for request in requests:
        request.check_as_alone()
    assert all(len(request.sequence.tokens) <= request.max_tokens and request.end for request in bound)


def test_a_lower_priority_has_a_slot_at_once_and_the_other_goes_on():
    batch, told = FakeBatch(2), []
    scheduler = Scheduler(batch, observer=Pauses(told))
    slow = [Request([3 + i] * 40, 30, stop_tokens=[]) for i in range(2)]
    for i, request in enumerate(slow):
        request.sequence.priority = 5 + i
        scheduler.submit(request.sequence)
    run(scheduler, 12)
    read = sum(work[2] for work in batch.work if work[0] == "prefill")
    before = [len(request.sequence.tokens) for request in slow]
    urgent = Request([9, 9], 4, stop_tokens=[])
    scheduler.submit(urgent.sequence)
    turns = 0
    while not _ended(urgent):
        run(scheduler, 1)
        turns += 1
    assert turns <= 4 and told == [slow[1].sequence]
    assert len(slow[0].sequence.tokens) > before[0] and len(slow[1].sequence.tokens) == before[1]
    run(scheduler)
    for request in (*slow, urgent):
        assert request.sequence.tokens == alone_past_eos(request.prompt, request.max_tokens)
    # Nothing is read twice.
    assert sum(work[2] for work in batch.work if work[0] == "prefill") == read + 2


def test_few_states_are_kept_aside():
    scheduler, most = Scheduler(FakeBatch(2)), 0
    requests = [Request([3 + i, 4], 12, stop_tokens=[]) for i in range(8)]
    for i, request in enumerate(requests):
        request.sequence.priority = -i
        scheduler.submit(request.sequence)
        run(scheduler, 1)
        most = max(most, sum(s.paused is not None for s in scheduler.waiting))
    run(scheduler)
    assert most == 2
    for request in requests:
        assert request.sequence.tokens == alone_past_eos(request.prompt, request.max_tokens)


class Pauses(Observer):
    def __init__(self, told: list):
        self.told = told

    def paused(self, sequence) -> None:
        self.told.append(sequence)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 1)), min_size=2, max_size=8), st.integers(1, 3))
def test_what_one_owner_asked_is_not_in_the_cache_of_another(asked, size):
    batch = FakeBatch(size)
    scheduler, cache = Scheduler(batch), PrefixCache(batch.slots)
    assert cache.owners == [""] * size
    held: dict[int, list[list[int]]] = {0: [], 1: []}
    for prompt, owner in asked:
        request = Request(prompt, 2, stop_tokens=[])
        request.sequence.owner = f"key {owner}"
        scheduler.submit(request.sequence)
        run(scheduler)
        most = max((_shared(prompt, other) for other in held[owner]), default=0)
        assert request.sequence.cached <= most
        held[owner].append(prompt + request.sequence.tokens)
        request.max_tokens = len(request.sequence.tokens)


def _shared(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    differs = np.array(a[:n]) != np.array(b[:n])
    return int(differs.argmax()) if differs.any() else n
