"""Continuous batching over a model in NumPy whose next token depends on every token before it: whatever else runs, a
sequence gets what it gets alone, and nobody waits longer than a chunk."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.scheduler import INTERLEAVED, PATIENCE, ModelFailed, Scheduler
from castiron.pipelines.generation.sequence import Delta, Failed, Sequence
from castiron.pipelines.generation.text import Text
from castiron.vmfb.session import SessionError
from tests.pipelines.served import tokenizer

VOCAB, CONTEXT, EOS = 40, 100, 2
WIDTHS = (8, 16, 64)
TEXT = Text(tokenizer())


def logits_after(tokens) -> np.ndarray:
    return np.random.default_rng([int(t) for t in tokens]).standard_normal(VOCAB).astype(np.float32)


def alone(prompt: list[int], count: int) -> list[int]:
    """Greedy, to the end of text at most."""
    found: list[int] = []
    while len(found) < count:
        token = int(logits_after(prompt + found).argmax())
        if token == EOS:
            break
        found.append(token)
    return found


def alone_past_eos(prompt: list[int], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found.append(int(logits_after(prompt + found).argmax()))
    return found


class Slot:
    """A session whose cache is the list of tokens that it was fed."""

    def __init__(self, batch: FakeBatch):
        self.batch, self.held, self.ready = batch, [], False
        tokens = SimpleNamespace(eos=(EOS,))
        self.context, self.manifest = (
            CONTEXT,
            SimpleNamespace(prefill_widths=WIDTHS, vocab=VOCAB, tokens=tokens, widths=lambda role: ()),
        )

    @property
    def position(self) -> int:
        return len(self.held)

    def prefill(self, tokens, progress=None) -> int:
        self.batch.work.append(("prefill", self.batch.slots.index(self), len(tokens)))
        self.batch.fail_on(tokens)
        return self._append(tokens)

    def step(self, token: int) -> int:
        return self._append([token])

    def _append(self, tokens) -> int:
        assert len(tokens) and self.position + len(tokens) <= CONTEXT
        self.held += [int(t) for t in tokens]
        self.ready = True
        return int(self.logits().argmax())

    def logits(self) -> np.ndarray:
        if not self.ready:
            raise SessionError("there are no logits yet")
        return logits_after(self.held)

    def rewind(self, position: int) -> None:
        assert 0 <= position <= self.position
        self.ready &= position == self.position
        del self.held[position:]

    def reachable(self, position: int) -> int:
        return position

    def keep(self) -> None:
        pass

    def copy_from(self, other: Slot, positions: int) -> None:
        assert other is not self and positions <= other.position
        self.batch.copied += positions
        self.held, self.ready = other.held[:positions], False

    whole = 0

    def rows(self, position: int) -> list[np.ndarray]:
        assert position == self.position
        return [np.array(self.held)]

    def take(self, rows: list[np.ndarray], position: int, whole: int) -> None:
        self.held, self.ready = rows[0].tolist(), False
        assert self.position == position


class FakeBatch:
    """Slots as `castiron.vmfb.batch.Batch` has them, and a record of what was run."""

    def __init__(self, size: int):
        self.work: list[tuple] = []
        self.copied = 0
        self.broken_prompt: int | None = None
        self.break_next_step = False
        self.size = size
        self.slots = [Slot(self) for _ in range(size)]

    def fail_on(self, tokens) -> None:
        if self.broken_prompt is not None and self.broken_prompt in tokens:
            raise RuntimeError("broken prompt")

    def step(self, tokens: dict[int, int]) -> dict[int, int]:
        assert tokens
        self.work.append(("step", *sorted(tokens)))
        if self.break_next_step:
            self.break_next_step = False
            raise RuntimeError("broken step")
        return {slot: self.slots[slot]._append([token]) for slot, token in tokens.items()}


REQUESTS: weakref.WeakKeyDictionary[Sequence, Request] = weakref.WeakKeyDictionary()


class Request:
    """A sequence, and all that it was told."""

    def __init__(self, prompt: list[int], max_tokens: int, **options):
        self.prompt, self.max_tokens, self.events = prompt, max_tokens, []
        self.sequence = Sequence(prompt, CONTEXT, text=TEXT, max_tokens=max_tokens, **options)
        REQUESTS[self.sequence] = self

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    @property
    def end(self):
        ends = [e for e in self.events if not isinstance(e, Delta)]
        assert len(ends) == 1 and self.events[-1] is ends[0], "one end, and nothing after it"
        return ends[0]

    def check_as_alone(self) -> None:
        expected = alone(self.prompt, self.max_tokens)
        assert self.sequence.tokens == expected
        assert self.text == TEXT.decode(expected)
        reason = "length" if len(expected) == self.max_tokens else "stop"
        assert self.end.reason == self.sequence.finish_reason == reason


def tell(sequence: Sequence, event) -> None:
    REQUESTS[sequence].events.append(event)


def run(scheduler: Scheduler, turns: int | None = None) -> None:
    """`turns` turns, or until all is done."""
    limit = 5000 if turns is None else turns
    while limit and not scheduler.idle:
        for sequence, event in scheduler.turn():
            tell(sequence, event)
        limit -= 1
    assert turns is not None or scheduler.idle


# Few letters, so that prompts share beginnings.
PROMPTS = st.lists(st.integers(3, 5), min_size=1, max_size=CONTEXT - 10)
ARRIVALS = st.lists(st.tuples(PROMPTS, st.integers(1, 10), st.integers(0, 6), st.booleans()), min_size=1, max_size=12)


@given(st.integers(1, 4), ARRIVALS)
def test_every_sequence_gets_what_it_gets_alone(size, arrivals):
    """However they come, leave early, share slots and share beginnings."""
    scheduler = Scheduler(FakeBatch(size))
    requests, left, told = [], [], {}
    for prompt, max_tokens, turns, leaves in arrivals:
        request = Request(prompt, max_tokens)
        scheduler.submit(request.sequence)
        (left if leaves else requests).append(request)
        run(scheduler, turns)
        for gone in left:
            scheduler.cancel(gone.sequence)
            told.setdefault(gone, len(gone.events))
    run(scheduler)
    for request in requests:
        request.check_as_alone()
    assert all(len(gone.events) == told[gone] for gone in left), "one that was cancelled told more"
    for slot, session in enumerate(scheduler.batch.slots):
        assert list(scheduler.cache.tokens[slot, : session.position]) == session.held


@given(st.lists(st.tuples(PROMPTS, PROMPTS), min_size=2, max_size=8), st.integers(1, 4))
def test_what_is_cached_is_not_computed_again(pairs, size):
    """Of a request that comes alone, prefill reads what no slot holds at that moment, and no more."""
    batch = FakeBatch(size)
    scheduler = Scheduler(batch)
    for first, rest in pairs:
        prompt = (first + rest)[: CONTEXT - 10]
        held = [slot.held.copy() for slot in batch.slots]
        known = max(next((i for i, (a, b) in enumerate(zip(h, prompt)) if a != b), min(len(h), len(prompt))) for h in held)
        known = min(known, len(prompt) - 1)
        batch.work.clear()
        request = Request(prompt, 3)
        scheduler.submit(request.sequence)
        run(scheduler)
        request.check_as_alone()
        assert request.sequence.cached == known
        assert sum(work[2] for work in batch.work if work[0] == "prefill") == len(prompt) - known


def test_a_shared_beginning_does_not_cost_the_slot_that_holds_it():
    """Chats behind one system prompt keep their own slots, and each goes on where it stood."""
    system, batch = [3] * 40, FakeBatch(3)
    scheduler = Scheduler(batch)
    chats = [system + [4 + i] * 20 for i in range(3)]
    for _ in range(2):
        batch.work.clear()
        for i, chat in enumerate(chats):
            request = Request(chat, 4, stop_tokens=[])
            scheduler.submit(request.sequence)
            run(scheduler)
            chats[i] = chat + request.sequence.tokens + [6]
    assert batch.copied == 2 * len(system)
    # In the last turn each reads its last answer's last token, which was never fed, and the new one.
    assert [work[2] for work in batch.work if work[0] == "prefill"] == [2, 2, 2]


def test_prompts_of_one_request_are_read_once():
    """Even where so many chunks are needed that a sequence would lose patience."""
    batch = FakeBatch(4)
    scheduler = Scheduler(batch)
    scheduler.submit(Request([4], 90, stop_tokens=[]).sequence)
    run(scheduler, 1)
    batch.work.clear()
    prompt = [3] * 90
    requests = [Request(prompt, 5) for _ in range(6)]
    for request in requests:
        scheduler.submit(request.sequence)
    run(scheduler)
    assert sum(work[2] for work in batch.work if work[0] == "prefill") == 90 + 5
    for request in requests:
        request.check_as_alone()


def test_where_nobody_waits_for_a_token_no_step_is_for_fewer_than_it_might_be():
    batch = FakeBatch(3)
    scheduler = Scheduler(batch)
    scheduler.fills = True
    # One beginning for all, which is taken from the cache by all but one, and more to read than a chunk has.
    requests = [Request([3] * 40 + [i + 4] * 30, 5, stop_tokens=[]) for i in range(9)]
    for request in requests:
        scheduler.submit(request.sequence)
    run(scheduler)
    assert [len(work) - 1 for work in batch.work if work[0] == "step"] == [3] * 3 * 4
    for request in requests:
        assert len(request.sequence.tokens) == 5 and request.sequence.cached == (0 if request is requests[0] else 40)


def test_a_long_prompt_delays_the_others_by_a_chunk_at_most():
    batch = FakeBatch(2)
    scheduler = Scheduler(batch)
    talking = Request([3, 4], 60, stop_tokens=[])
    scheduler.submit(talking.sequence)
    run(scheduler, 1)
    long = Request([5] * 90, 3)
    scheduler.submit(long.sequence)
    run(scheduler)
    steps = [i for i, work in enumerate(batch.work) if work[0] == "step" and 0 in work[1:]]
    for before, after in zip(steps, steps[1:]):
        assert sum(work[2] for work in batch.work[before:after] if work[0] == "prefill") <= INTERLEAVED < 64
    assert long.sequence.first < talking.sequence.last
    long.check_as_alone()


def test_a_short_prompt_overtakes_a_long_one_but_not_for_ever():
    batch = FakeBatch(3)
    scheduler = Scheduler(batch)
    talking = Request([3, 4], 90, stop_tokens=[])
    scheduler.submit(talking.sequence)
    run(scheduler, 1)
    long = Request([5] * 90, 1, stop_tokens=[])
    scheduler.submit(long.sequence)
    run(scheduler, 1)
    overtook = 0
    while not long.events:
        short = Request([6 + overtook % 30, 5], 1, stop_tokens=[])
        scheduler.submit(short.sequence)
        run(scheduler, 1)
        overtook += bool(short.events)
        assert overtook <= 3 * PATIENCE, "a stream of short prompts starves a long one"
    assert overtook >= PATIENCE, "short prompts wait for a long one"


def test_equal_seeds_are_equal_in_any_company():
    def choices(company: int) -> list[int]:
        scheduler = Scheduler(FakeBatch(4))
        for i in range(company):
            scheduler.submit(Request([7 + i], 20, stop_tokens=[]).sequence)
        request = Request([3, 4, 5], 15, stop_tokens=[], sampler=Sampler(Sampling(temperature=1.0, seed=9)))
        scheduler.submit(request.sequence)
        run(scheduler)
        return request.sequence.tokens

    assert choices(0) == choices(1) == choices(6) != alone([3, 4, 5], 15)


def test_a_stop_string_ends_its_own_sequence_alone():
    """Of three that say the same, one at a time or together."""
    said = TEXT.decode(alone([7, 3], 12))
    cuts = [said[4], said[6:8], None]
    scheduler = Scheduler(FakeBatch(3))
    requests = [Request([7, 3], 12, stop_strings=cut or ()) for cut in cuts]
    for request in requests:
        scheduler.submit(request.sequence)
    run(scheduler)
    assert len(said) == 12
    assert [request.text for request in requests] == [said[: said.find(cut)] if cut else said for cut in cuts]
    assert [request.end.stop_string for request in requests] == cuts


def test_a_prompt_that_breaks_the_model_ends_alone():
    batch = FakeBatch(2)
    batch.broken_prompt = 9
    scheduler = Scheduler(batch)
    good, bad, later = Request([3] * 5, 9), Request([4, 9, 9], 9), Request([5, 5], 9)
    for request in (good, bad, later):
        scheduler.submit(request.sequence)
    run(scheduler)
    assert isinstance(bad.end, Failed) and isinstance(bad.end.error, ModelFailed)
    assert "broken prompt" in str(bad.end.error.__cause__)
    good.check_as_alone()
    later.check_as_alone()


def test_a_step_that_breaks_ends_those_in_it_and_leaves_nothing_behind():
    batch = FakeBatch(2)
    scheduler = Scheduler(batch)
    hit = [Request([3, 4, i + 5], 50, stop_tokens=[]) for i in range(2)]
    waiting = Request([3, 4, 7], 9)
    for request in (*hit, waiting):
        scheduler.submit(request.sequence)
    run(scheduler, 3)
    batch.break_next_step = True
    run(scheduler)
    assert all("broken step" in str(request.end.error.__cause__) for request in hit)
    waiting.check_as_alone()
    assert waiting.sequence.cached == 0, "a slot that failed is not trusted again"


def test_a_choice_that_breaks_ends_alone():
    scheduler = Scheduler(FakeBatch(2))
    bad = Request([3], 9, sampler=Sampler(Sampling(logit_bias={VOCAB + 5: 1.0})))
    good = Request([4], 9)
    for request in (bad, good):
        scheduler.submit(request.sequence)
    run(scheduler)
    assert isinstance(bad.end, Failed)
    good.check_as_alone()


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3)), min_size=1, max_size=10))
def test_a_slot_in_use_is_never_given_away(takes):
    batch = FakeBatch(4)
    cache = PrefixCache(batch.slots)
    for prompt, busy in takes:
        before = {slot: batch.slots[slot].held.copy() for slot in range(busy)}
        slot, known = cache.take(np.array(prompt, np.int32), range(busy, 4))
        assert slot >= busy and batch.slots[slot].held == prompt[:known]
        assert all(batch.slots[s].held == held for s, held in before.items())
        batch.slots[slot].prefill(prompt[known:])
        cache.fed(slot, prompt[known:])
