"""Continuous batching over a NumPy model: requests get the tokens of single runs."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines.engine.admission import PATIENCE
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.prefix_cache import PrefixCache
from castiron.pipelines.engine.request import Failed, Request
from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.engine.scheduler import ModelFailed, Scheduler
from castiron.pipelines.text.text_output import Delta, text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.run.session import SessionError
from tests.support.fake_session import FakeSession
from tests.support.generating import generate_many
from tests.support.served import tokenizer

VOCAB, CONTEXT, EOS = 40, 100, 2
WIDTHS = (8, 16, 64)
TEXT = Tokenizer(tokenizer())


def logits_after(tokens) -> np.ndarray:
    return np.random.default_rng([int(t) for t in tokens]).standard_normal(VOCAB).astype(np.float32)


def by_itself(prompt: list[int], count: int) -> list[int]:
    """Return up to `count` greedy tokens, which end before an end token."""
    found: list[int] = []
    while len(found) < count:
        token = int(logits_after(prompt + found).argmax())
        if token == EOS:
            break
        found.append(token)
    return found


def single_past_eos(prompt: list[int], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found.append(int(logits_after(prompt + found).argmax()))
    return found


class Slot(FakeSession):
    """A session whose cache is the list of tokens that it was fed."""

    def __init__(self, batch: FakeBatch):
        super().__init__(CONTEXT, (EOS,), WIDTHS)
        self.manifest.vocab = VOCAB
        self.batch, self.stored, self.ready = batch, [], False

    @property
    def position(self) -> int:
        return len(self.stored)

    def prefill(self, tokens, progress=None, total=0) -> int:
        self.batch.work.append(("prefill", self.batch.slots.index(self), len(tokens)))
        self.batch.fail_on(tokens)
        return self._append(tokens)

    def _append(self, tokens) -> int:
        assert len(tokens) and self.position + len(tokens) <= CONTEXT
        self.stored += [int(t) for t in tokens]
        self.ready = True
        return int(self.logits().argmax())

    def logits(self) -> np.ndarray:
        if not self.ready:
            raise SessionError("there are no logits yet")
        return logits_after(self.stored)

    def rewind(self, position: int) -> None:
        assert 0 <= position <= self.position
        self.ready &= position == self.position
        del self.stored[position:]

    def copy_from(self, other: Slot, positions: int) -> None:
        assert other is not self and positions <= other.position
        self.batch.copied += positions
        self.stored, self.ready = other.stored[:positions], False

    chunked_tokens = 0

    def rows(self, position: int) -> list[np.ndarray]:
        assert position == self.position
        return [np.array(self.stored)]

    is_long = False

    def take(self, rows: list[np.ndarray], tokens: np.ndarray, chunked_tokens: int, is_long: bool) -> None:
        self.stored, self.ready = rows[0].tolist(), False
        assert self.stored == tokens.tolist()


class FakeBatch:
    """Slots as `castiron.vmfb.run.session.Batch` has them, and a record of what was run."""

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


REQUESTS: weakref.WeakKeyDictionary[Request, Asked] = weakref.WeakKeyDictionary()


class Asked:
    """A request and its events."""

    def __init__(self, prompt: list[int], max_tokens: int, **options):
        self.prompt, self.max_tokens, self.events = prompt, max_tokens, []
        self.request = text_request(prompt, CONTEXT, TEXT, max_tokens=max_tokens, **options)
        REQUESTS[self.request] = self

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    @property
    def end(self):
        ends = [e for e in self.events if not isinstance(e, Delta)]
        assert len(ends) == 1 and self.events[-1] is ends[0], "one end, and nothing after it"
        return ends[0]

    def check_as_single(self) -> None:
        expected = by_itself(self.prompt, self.max_tokens)
        assert self.request.tokens == expected
        assert self.text == TEXT.decode(expected)
        reason = "length" if len(expected) == self.max_tokens else "stop"
        assert self.end.reason == self.request.finish_reason == reason


def report(request: Request, event) -> None:
    REQUESTS[request].events.append(event)


def run(scheduler: Scheduler, turns: int | None = None) -> None:
    """Take `turns` turns; by default until every request has ended."""
    limit = 5000 if turns is None else turns
    while limit and not scheduler.idle:
        for request, event in scheduler.turn():
            report(request, event)
        limit -= 1
    assert turns is not None or scheduler.idle


# Few different tokens, so that prompts share prefixes.
PROMPTS = st.lists(st.integers(3, 5), min_size=1, max_size=CONTEXT - 10)
ARRIVALS = st.lists(st.tuples(PROMPTS, st.integers(1, 10), st.integers(0, 6), st.booleans()), min_size=1, max_size=12)


@given(st.integers(1, 4), ARRIVALS)
def test_every_sequence_gets_the_same_tokens_as_by_itself(size, arrivals):
    scheduler = Scheduler(FakeBatch(size))
    requests, left, reported = [], [], {}
    for prompt, max_tokens, turns, leaves in arrivals:
        request = Asked(prompt, max_tokens)
        scheduler.submit(request.request)
        (left if leaves else requests).append(request)
        run(scheduler, turns)
        for gone in left:
            scheduler.cancel(gone.request)
            reported.setdefault(gone, len(gone.events))
    run(scheduler)
    for request in requests:
        request.check_as_single()
    assert all(len(gone.events) == reported[gone] for gone in left), "a cancelled request has further events"
    for slot, session in enumerate(scheduler.batch.slots):
        assert list(scheduler.cache.tokens[slot, : session.position]) == session.stored


SALTED = st.lists(st.tuples(PROMPTS, PROMPTS, st.sampled_from(["", "a", "b"])), min_size=2, max_size=8)


@given(SALTED, st.integers(1, 4))
def test_what_is_cached_for_a_salt_is_not_computed_again(pairs, size):
    """A request that comes alone reads only the tokens that no slot holds for its salt."""
    batch = FakeBatch(size)
    scheduler = Scheduler(batch)
    owners = [""] * size
    for first, rest, salt in pairs:
        prompt = (first + rest)[: CONTEXT - 10]
        stored = [slot.stored.copy() if owner == salt else [] for slot, owner in zip(batch.slots, owners)]
        known = max(next((i for i, (a, b) in enumerate(zip(h, prompt)) if a != b), min(len(h), len(prompt))) for h in stored)
        known = min(known, len(prompt) - 1)
        batch.work.clear()
        request = Asked(prompt, 3, cache_salt=salt)
        scheduler.submit(request.request)
        run(scheduler)
        request.check_as_single()
        assert request.request.cached == known
        owners[batch.work[0][1]] = salt
        assert sum(work[2] for work in batch.work if work[0] == "prefill") == len(prompt) - known


def test_a_shared_prefix_is_copied_from_its_slot():
    """Chats with one system prompt keep a slot each and continue in it."""
    system, batch = [3] * 40, FakeBatch(3)
    scheduler = Scheduler(batch)
    chats = [system + [4 + i] * 20 for i in range(3)]
    for _ in range(2):
        batch.work.clear()
        for i, chat in enumerate(chats):
            request = Asked(chat, 4, stop_tokens=[])
            scheduler.submit(request.request)
            run(scheduler)
            chats[i] = chat + request.request.tokens + [6]
    assert batch.copied == 2 * len(system)
    # In the last turn each chat reads its answer's last token, which was never fed, and the new one.
    assert [work[2] for work in batch.work if work[0] == "prefill"] == [2, 2, 2]


def test_choices_of_one_request_share_their_prompt():
    """The prompt needs more chunks than `PATIENCE`."""
    batch = FakeBatch(4)
    scheduler = Scheduler(batch)
    scheduler.submit(Asked([4], 90, stop_tokens=[]).request)
    run(scheduler, 1)
    batch.work.clear()
    prompt = [3] * 90
    requests = [Asked(prompt, 5) for _ in range(6)]
    for request in requests:
        scheduler.submit(request.request)
    run(scheduler)
    assert sum(work[2] for work in batch.work if work[0] == "prefill") == 90 + 5
    for request in requests:
        request.check_as_single()


def test_a_request_does_not_wait_for_prefixes_of_other_salts():
    scheduler = Scheduler(FakeBatch(3))
    talking, long, short = Asked([4], 90, stop_tokens=[]), *(Asked([3] * n, 1, cache_salt=str(n)) for n in (90, 40))
    for request in (talking, long, short):
        scheduler.submit(request.request)
        run(scheduler, 1)
    while not short.events:
        run(scheduler, 1)
    assert not long.events and short.request.cached == 0, "the shorter prompt waits for the states of the longer one"


def test_fill_slots_prefers_full_batches():
    batch = FakeBatch(3)
    scheduler = Scheduler(batch)
    scheduler.fill_slots = True
    # All but the first request find 40 tokens in the cache; the rest is longer than a chunk.
    requests = [Asked([3] * 40 + [i + 4] * 30, 5, stop_tokens=[]) for i in range(9)]
    for request in requests:
        scheduler.submit(request.request)
    run(scheduler)
    assert [len(work) - 1 for work in batch.work if work[0] == "step"] == [3] * 3 * 4
    for request in requests:
        assert len(request.request.tokens) == 5 and request.request.cached == (0 if request is requests[0] else 40)


def test_a_short_prompt_overtakes_a_long_one_but_not_for_ever():
    batch = FakeBatch(3)
    scheduler = Scheduler(batch)
    talking = Asked([3, 4], 90, stop_tokens=[])
    scheduler.submit(talking.request)
    run(scheduler, 1)
    long = Asked([5] * 90, 1, stop_tokens=[])
    scheduler.submit(long.request)
    run(scheduler, 1)
    overtook = 0
    while not long.events:
        short = Asked([6 + overtook % 30, 5], 1, stop_tokens=[])
        scheduler.submit(short.request)
        run(scheduler, 1)
        overtook += bool(short.events)
        assert overtook <= 3 * PATIENCE, "a stream of short prompts starves a long one"
    assert overtook >= PATIENCE, "short prompts wait for a long one"


def test_equal_seeds_give_equal_tokens_in_any_batch():
    def choices(company: int) -> list[int]:
        scheduler = Scheduler(FakeBatch(4))
        for i in range(company):
            scheduler.submit(Asked([7 + i], 20, stop_tokens=[]).request)
        request = Asked([3, 4, 5], 15, stop_tokens=[], sampling=Sampler(Sampling(temperature=1.0, seed=9)))
        scheduler.submit(request.request)
        run(scheduler)
        return request.request.tokens

    assert choices(0) == choices(1) == choices(6) != by_itself([3, 4, 5], 15)


def test_a_stop_string_ends_its_own_sequence_only():
    generated = TEXT.decode(by_itself([7, 3], 12))
    cuts = [generated[4], generated[6:8], None]
    scheduler = Scheduler(FakeBatch(3))
    requests = [Asked([7, 3], 12, stop_strings=cut or ()) for cut in cuts]
    for request in requests:
        scheduler.submit(request.request)
    run(scheduler)
    assert len(generated) == 12
    assert [request.text for request in requests] == [generated[: generated.find(cut)] if cut else generated for cut in cuts]
    assert [request.end.stop_string for request in requests] == cuts


def test_a_failing_step_ends_its_requests_and_clears_their_slots():
    batch = FakeBatch(2)
    scheduler = Scheduler(batch)
    hit = [Asked([3, 4, i + 5], 50, stop_tokens=[]) for i in range(2)]
    waiting = Asked([3, 4, 7], 9)
    for request in (*hit, waiting):
        scheduler.submit(request.request)
    run(scheduler, 3)
    batch.break_next_step = True
    run(scheduler)
    assert all("broken step" in str(request.end.error.__cause__) for request in hit)
    waiting.check_as_single()
    assert waiting.request.cached == 0, "the states of a failed slot are not reused"


def test_a_failing_choice_ends_by_itself():
    scheduler = Scheduler(FakeBatch(2))
    bad = Asked([3], 9, sampling=Sampler(Sampling(logit_bias={VOCAB + 5: 1.0})))
    good = Asked([4], 9)
    for request in (bad, good):
        scheduler.submit(request.request)
    run(scheduler)
    assert isinstance(bad.end, Failed)
    good.check_as_single()


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3)), min_size=1, max_size=10))
def test_a_slot_in_use_is_never_given_away(takes):
    batch = FakeBatch(4)
    cache = PrefixCache(batch.slots)
    for prompt, busy in takes:
        before = {slot: batch.slots[slot].stored.copy() for slot in range(busy)}
        slot, known = cache.take(np.array(prompt, np.int32), range(busy, 4))
        assert slot >= busy and batch.slots[slot].stored == prompt[:known]
        assert all(batch.slots[s].stored == stored for s, stored in before.items())
        batch.slots[slot].prefill(prompt[known:])
        cache.appended(slot, prompt[known:])


def many(engine, prompts, **options):
    return generate_many(engine, prompts, **{"max_tokens": 10, "text": TEXT, "stop_tokens": [EOS], **options})


def test_closing_cancels_requests_and_leaves_the_engine_usable():
    engine = Engine(FakeBatch(2))
    results = many(engine, itertools.repeat([3, 4, 5]))
    next(results)
    results.close()
    assert [result.tokens for result in many(engine, [[6]])] == [by_itself([6], 10)]
    assert engine.scheduler.idle


def test_an_invalid_prompt_fails_by_itself():
    batch = FakeBatch(2)
    batch.broken_prompt = 9
    messages = {"101 tokens": [3] * (CONTEXT + 1), "the model failed": [4, 9, 9], "no tokens": [], "invalid prompt": None,
                "no chat template": [{"role": "user"}], "vocabulary": [VOCAB]}  # fmt: skip
    results = many(Engine(batch), [[3, 4, 5], *messages.values(), [3, 4, 6]])
    first, *failed, last = sorted(results, key=lambda result: result.index)
    assert (first.tokens, last.tokens) == (by_itself([3, 4, 5], 10), by_itself([3, 4, 6], 10))
    for message, result in zip(messages, failed, strict=True):
        assert result.finish_reason == "error" and message in str(result.error) and result.tokens == []
    assert isinstance(failed[1].error, ModelFailed) and "broken prompt" in str(failed[1].error.__cause__)
