"""Fairness of the scheduler among clients, prompts and running answers, over a model in NumPy."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.pipelines.engine.admission import PATIENCE
from castiron.pipelines.engine.scheduler import INTERLEAVED, Observer, Scheduler
from tests.engine.test_scheduler import PROMPTS, Asked, FakeBatch, run, single_past_eos


class Forced:
    """A constraint that forces `run` tokens after every fifth one."""

    done, eos, forced = False, (), ()

    def __init__(self, run: int):
        self.run, self.count = run, 0

    def best(self, argmax: int, logits) -> int:
        return argmax

    def accept(self, token: int) -> None:
        self.count += 1
        self.forced = self.forced[1:] if self.forced else (7,) * self.run if self.count % 5 == 0 else ()


class Watch(Observer):
    """Asserts that a slot goes to a client with no more slots than any waiting client."""

    def __init__(self):
        self.scheduler: Scheduler | None = None
        self.waited: list = []

    def started(self, sequence) -> None:
        s = self.scheduler
        stored = Counter(one.client for one in (*s.prefilling.values(), *s.decoding.values()) if one is not sequence)
        # Requests that wait for a prefix being read could not have had the slot.
        others = [one for one in s.waiting if one.priority == sequence.priority and one.prompt[0] == one.client_mark]
        assert all(stored[sequence.client] <= stored[one.client] for one in others)


ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 0, 2, 40])),
    min_size=1,
    max_size=14,
)


@given(st.integers(1, 4), ARRIVALS)
def test_no_request_waits_longer_than_a_chunk_or_starves(size, arrivals):
    """One chunk is read between two tokens, and a prompt is passed over PATIENCE times at most."""
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
        if scheduler.prefilling:
            oldest = min(scheduler.prefilling.values(), key=lambda s: s.timing.arrived)
            older = [s for s in scheduler.decoding.values() if s.timing.arrived < oldest.timing.arrived]
            assert oldest.passed_over <= PATIENCE + len(older)

    for prompt, max_tokens, client, turns, run_of in arrivals:
        # Prompts of different clients share no prefix.
        request = Asked([10 + client, *prompt], max_tokens)
        request.request.client, request.request.client_mark = f"client {client}", -1
        if run_of:
            request.request.chooser.constraint = Forced(run_of)
            bound.append(request)
        else:
            free.append(request)
        if all(int(s.prompt[0]) != 10 + client for s in (*scheduler.waiting, *scheduler.prefilling.values())):
            request.request.client_mark = 10 + client
        scheduler.submit(request.request)
        for _ in range(turns):
            turn()
    turns = 0
    while not scheduler.idle:
        turn()
        turns += 1
        assert turns < 60 * len(arrivals), "a sequence never ends"
    for request in free:
        request.check_as_single()
    for request in bound:
        tokens = request.request.tokens
        assert len(tokens) <= request.max_tokens and request.end
        assert set(tokens[5 : 5 + request.request.constraint.run]) <= {7}, "forced tokens are generated"
    for slot, session in enumerate(batch.slots):
        assert list(scheduler.cache.tokens[slot, : session.position]) == session.stored


def _ended(request: Asked) -> bool:
    return request.request.finish_reason is not None


def test_a_request_of_many_choices_leaves_slots_to_others():
    """The next free slot goes to the other client, until both have equal shares."""
    scheduler = Scheduler(FakeBatch(4))
    many = [Asked([3] * 8, 6 + 3 * (i % 4)) for i in range(40)]
    for request in many:
        request.request.client = "many"
        scheduler.submit(request.request)
    run(scheduler, 4)
    few = [Asked([4, 10 + i], 9) for i in range(8)]
    for request in few:
        request.request.client = "few"
        scheduler.submit(request.request)
    before = sum(map(_ended, many))
    while not all(map(_ended, few)):
        run(scheduler, 1)
        if sum(map(_ended, many)) > before + 3:
            stored = Counter(s.client for s in (*scheduler.prefilling.values(), *scheduler.decoding.values()))
            assert stored["many"] <= 2 or not any(s.client == "few" for s in scheduler.waiting)
    assert sum(map(_ended, many)) < 30
    run(scheduler)
    for request in (*many, *few):
        request.check_as_single()


def counts(scheduler: Scheduler) -> Counter[str]:
    return Counter(s.client for s in (*scheduler.prefilling.values(), *scheduler.decoding.values()))


def test_the_newest_answer_of_a_client_with_more_slots_is_paused():
    """Long answers of one client hold all slots; the other one's answer starts before any of them ends."""
    scheduler = Scheduler(FakeBatch(4))
    long = [Asked([3, 10 + i], 90, stop_tokens=[], client="long") for i in range(8)]
    for request in long:
        scheduler.submit(request.request)
    run(scheduler, 12)
    running = {slot: request for slot, request in scheduler.decoding.items()}
    newest = max(running.values(), key=lambda request: request.timing.arrived)
    short = Asked([4, 4], 5, stop_tokens=[], client="short")
    scheduler.submit(short.request)
    lengths = [len(request.tokens) for request in running.values()]
    turns = 0
    while not _ended(short):
        run(scheduler, 1)
        turns += 1
        assert newest.paused
    assert turns <= 7 and not any(map(_ended, long))
    grown = [len(request.tokens) - before for request, before in zip(running.values(), lengths)]
    assert sorted(grown) == [0, turns, turns, turns], "the other answers do not wait"
    run(scheduler, 1)
    assert newest.paused is None and newest in scheduler.decoding.values(), "it resumes when a slot is free"
    run(scheduler)
    assert all(request.request.tokens == single_past_eos(request.prompt, 90) for request in long)


CROWDS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 12)), min_size=2, max_size=5)


@given(st.integers(1, 6), CROWDS, st.sampled_from([1 << 40, 150, 0]), st.sampled_from([None, 1]))
@settings(max_examples=15)
def test_slots_are_divided_equally_while_clients_wait(size, crowds, memory, scores):
    """Also without memory for copies of paused answers, and if clients ask for scores of their prompts."""
    scheduler = Scheduler(FakeBatch(size))
    scheduler.paused_bytes = memory
    requests = []
    for client, count, turns in crowds:
        for _ in range(count):
            prompt = [10 + client, 3 + len(requests), *[4] * (len(requests) % 3 * 20)]
            request = Asked(prompt, 18 - 2 * len(requests) % 7, stop_tokens=[], client=str(client), prompt_logprobs=scores)
            requests.append(request)
            scheduler.submit(request.request)
        for _ in range(turns):
            run(scheduler, 1)
            assert sum(s.paused.nbytes for s in scheduler.waiting if s.paused) <= memory
        # A turn preempts one request, and reads one chunk of its successor's prompt.
        left = 4 * size
        while not all(
            max(counts(scheduler).values()) <= counts(scheduler)[s.client] + 1 for s in scheduler.waiting if scheduler.decoding
        ):
            run(scheduler, 1)
            left -= 1
            assert left, "a client waits while another one has two slots more"
    run(scheduler)
    for request in requests:
        assert request.request.tokens == single_past_eos(request.prompt, request.max_tokens)
        assert len(request.request.scores) == (0 if scores is None else len(request.prompt) - 1)


def test_copies_of_paused_answers_take_bounded_memory():
    """Two answers and a prompt that is being scored are paused, and there is memory for one copy."""
    scheduler = Scheduler(FakeBatch(4))
    scheduler.paused_bytes = 8 * 50
    long = [Asked([3] * 9 + [10 + i] * 21, 50, stop_tokens=[], client="long") for i in range(3)]
    scored = Asked([3] * 90, 5, stop_tokens=[], client="long", prompt_logprobs=2)
    for request in (*long, scored):
        scheduler.submit(request.request)
        while request is not scored and request.request not in scheduler.decoding.values():
            run(scheduler, 1)
    run(scheduler, 7)
    assert 50 < len(scored.request.scores) < 89
    short = [Asked([20 + i, 5], 9, stop_tokens=[], client=str(i)) for i in range(3)]
    for request in short:
        scheduler.submit(request.request)
    while not all(request.events for request in short):
        run(scheduler, 1)
    paused = [r.request.paused for r in (*long[1:], scored)]
    assert all(paused) and [bool(one.rows) for one in paused].count(True) == 1 and not long[0].request.paused
    run(scheduler)
    for request in (*long, scored, *short):
        assert request.request.tokens == single_past_eos(request.prompt, request.max_tokens)
    scheduler = Scheduler(FakeBatch(1))
    single = Asked([3] * 90, 5, stop_tokens=[], prompt_logprobs=2)
    scheduler.submit(single.request)
    run(scheduler)
    assert scored.request.scores == single.request.scores and len(single.request.scores) == 89


def test_a_lower_priority_number_runs_first():
    scheduler = Scheduler(FakeBatch(1))
    order = []
    requests = {p: Asked([3, 10 + i], 3, stop_tokens=[]) for i, p in enumerate((5, 0, -3, 7))}
    for priority, request in requests.items():
        request.request.priority = priority
        scheduler.submit(request.request)
    while not scheduler.idle:
        run(scheduler, 1)
        order += [p for p, request in requests.items() if _ended(request) and p not in order]
    assert order == [-3, 0, 5, 7]
    # Of two prompts being read, the higher priority goes first even if it is longer.
    scheduler = Scheduler(FakeBatch(2))
    low, high = Asked([4] * 70, 1, stop_tokens=[]), Asked([5] * 90, 1, stop_tokens=[])
    low.request.priority = 1
    scheduler.submit(low.request)
    run(scheduler, 1)
    scheduler.submit(high.request)
    run(scheduler, 2)
    assert _ended(high) and not _ended(low)


PRIORITISED = st.lists(
    st.tuples(PROMPTS, st.integers(1, 15), st.integers(-2, 2), st.integers(0, 5), st.sampled_from([0, 0, 0, 2, 40]), st.booleans()),
    min_size=2, max_size=12,
)  # fmt: skip


@given(st.integers(1, 3), PRIORITISED, st.booleans(), st.sampled_from([1 << 40, 300, 0]))
def test_a_preempted_request_generates_the_same_tokens(size, arrivals, fills, memory):
    """It may be preempted while it reads its prompt, decodes, or reads forced tokens, with or without a copy."""
    batch = FakeBatch(size)
    scheduler = Scheduler(batch)
    scheduler.fill_slots, scheduler.paused_bytes = fills, memory
    requests, bound, gone = [], [], []

    def turn() -> None:
        run(scheduler, 1)
        running = [*scheduler.prefilling.values(), *scheduler.decoding.values()]
        assert len(running) <= size and not any(s.paused for s in running)

    for i, (prompt, max_tokens, priority, turns, run_of, leaves) in enumerate(arrivals):
        request = Asked([6 + i, *prompt], max_tokens)
        request.request.priority = priority
        if run_of:
            request.request.chooser.constraint = Forced(run_of)
        (gone if leaves and i % 3 == 0 else bound if run_of else requests).append(request)
        scheduler.submit(request.request)
        for _ in range(turns):
            turn()
        for one in gone:
            scheduler.cancel(one.request)
            assert one.request.paused is None
    while not scheduler.idle:
        turn()
    for request in requests:
        request.check_as_single()
    assert all(len(request.request.tokens) <= request.max_tokens and request.end for request in bound)


def test_a_preempting_request_starts_at_once_and_the_other_resumes():
    batch, observer, reported = FakeBatch(2), Observer(), []
    observer.preempted = reported.append
    scheduler = Scheduler(batch, observer=observer)
    slow = [Asked([3 + i] * 40, 30, stop_tokens=[]) for i in range(2)]
    for i, request in enumerate(slow):
        request.request.priority = 5 + i
        scheduler.submit(request.request)
    run(scheduler, 12)
    read = sum(work[2] for work in batch.work if work[0] == "prefill")
    before = [len(request.request.tokens) for request in slow]
    urgent = Asked([9, 9], 4, stop_tokens=[])
    scheduler.submit(urgent.request)
    turns = 0
    while not _ended(urgent):
        run(scheduler, 1)
        turns += 1
    assert turns <= 4 and reported == [slow[1].request]
    assert len(slow[0].request.tokens) > before[0] and len(slow[1].request.tokens) == before[1]
    run(scheduler)
    for request in (*slow, urgent):
        assert request.request.tokens == single_past_eos(request.prompt, request.max_tokens)
    # Nothing is read twice.
    assert sum(work[2] for work in batch.work if work[0] == "prefill") == read + 2
