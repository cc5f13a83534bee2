"""Speculation proposes what the text has said, keeps what the model says, and never costs more than it may."""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.ngrams import LONGEST, SHORTEST, Ngrams
from castiron.pipelines.generation.sampling import NEAR, lead
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.speculate import Speculator
from castiron.reference import tiny
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session, SessionError

CONTEXT = 96
SMALL = st.lists(st.integers(0, 3), max_size=60)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculate")
    checkpoint = tiny.tiny_model("llama", folder / "llama")
    return open_bundle(
        compile_model(checkpoint, folder / "bundle", Options(context=CONTEXT, speculate=(4, 8), batch=())).bundle
    )


class Parrot:
    """A session whose model says one given text, whatever it is fed, and whose calls take time on a clock of its own."""

    COSTS = {1: 1.0, 4: 2.5, 8: 4.0}

    def __init__(self, text, doubtful=(), context=10**6):
        self.text, self.doubtful, self.context = text, set(doubtful), context
        self.position, self.now, self.calls = 0, 0.0, []
        self.manifest = self

    def widths(self, role):
        assert role == "verify"
        return (4, 8)

    def clock(self):
        return self.now

    def prefill(self, tokens, progress=None):
        self.position += len(tokens)
        return self.text[self.position]

    def step(self, token):
        assert token == self.text[self.position], "fed a token that is not the text's"
        self._call(1)
        return self.text[self.position]

    def verify(self, tokens):
        assert tokens[0] == self.text[self.position]
        right = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self.text[self.position :]))
        known = self.position + len(list(right))
        self._call(len(tokens))
        places = range(self.position - len(tokens) + 1, self.position + 1)
        # Where the sums are doubtful a verify function says something else than a step.
        self.checked = list(places)
        says = [self.text[i] if i < len(self.text) else 0 for i in places]
        # What comes after a wrong proposal may be no numbers.
        return [-1 if i > known else say + (i in self.doubtful) for say, i in zip(says, places)]

    def verified_logits(self, token):
        return np.array([1.0, 1 - NEAR / 2 if self.checked[token] in self.doubtful else 0.0])

    def logits(self):
        raise AssertionError("nobody asked for logits")

    def rewind(self, position):
        assert position <= self.position
        self.position = position

    def reachable(self, position):
        return position

    def keep(self):
        pass

    def snapshot(self, ahead):
        return SimpleNamespace(position=self.position)

    def restore(self, snapshot):
        self.rewind(snapshot.position)

    def _call(self, width):
        assert self.position + width <= self.context
        self.calls.append(width)
        self.position += width
        self.now += self.COSTS[width]


def parrot_tokens(session, prompt, n, draft=None):
    text = Sequence(session.text[:prompt], session.context, max_tokens=n, stop_tokens=())
    speculator = Speculator(session, text, draft=draft, clock=session.clock)
    text.advance(session.prefill(session.text[:prompt]))
    while text.finish_reason is None:
        if not speculator.ready:
            speculator.feed(text.tokens[-1:])
        speculator.advance()
        if not speculator.ready:
            assert session.position == prompt + len(text.tokens) - 1
    return text.tokens


@settings(max_examples=50)
@given(SMALL)
def test_a_match_is_the_longest_run_that_stood_before(tokens):
    ngrams = Ngrams(tokens[:5])
    for token in tokens[5:]:
        ngrams.add(token)
    ends = range(SHORTEST, len(tokens))
    run = {e: next((n for n in range(min(e, LONGEST)) if tokens[e - 1 - n] != tokens[-1 - n]), min(e, LONGEST)) for e in ends}
    longest = max(run.values(), default=0)
    # Only the latest places of a pair are compared, so that a longer one may be missed.
    assert ngrams.length <= longest and (ngrams.length >= SHORTEST) == (longest >= SHORTEST)
    if ngrams.length:
        assert run[ngrams.end] >= ngrams.length
        assert ngrams.propose(1) == [tokens[ngrams.end]]


def test_a_period_is_proposed_on_and_on():
    assert Ngrams([9, 1, 2, 3, 1, 2, 3, 1, 2]).propose(8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert Ngrams([1, 2, 3]).propose(4) == []


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.sets(st.integers(0, 79)), st.sets(st.integers(10, 79)))
def test_tokens_are_those_of_the_model_whatever_is_proposed(passage, changed, doubtful):
    text = [(passage * 30)[i] + 10 * (i in changed) for i in range(80)]
    session = Parrot(text, doubtful, context=len(text) + 3)
    # Checking is cheap here, so that it is always tried.
    session.COSTS = {1: 1.0, 4: 0.1, 8: 0.1}
    assert parrot_tokens(session, 10, 70) == text[10:]


def test_a_right_proposal_that_leads_to_no_numbers_ends_the_text():
    session = Parrot(list(range(10)) * 8)
    check = session.verify
    session.verify = lambda tokens: [-1 for _ in check(tokens)]
    with pytest.raises(SessionError, match="logits are not numbers"):
        parrot_tokens(session, 40, 30)


def test_repeating_text_takes_fewer_passes_and_less_time():
    passage = list(range(100))
    session = Parrot(passage * 4)
    parrot_tokens(session, 100, 250)
    assert session.now < 249 / 1.6
    assert max(session.calls) == 8


@pytest.mark.parametrize("alphabet", [2, 5, 40, 4000])
def test_text_without_repetition_loses_at_most_five_per_cent(alphabet):
    for seed in range(3):
        text = np.random.default_rng(seed).integers(0, alphabet, 700).tolist()
        session = Parrot(text)
        parrot_tokens(session, 300, 256)
        assert session.now < 1.05 * 255


class Timed(Session):
    """Every pass takes as long on its clock, whatever else the machine does."""

    now = 0.0

    def step(self, token):
        self.now += 1.0
        return super().step(token)

    def verify(self, tokens):
        self.now += 1.2
        return super().verify(tokens)


def test_a_bundle_gives_the_tokens_of_one_at_a_time(bundle):
    session, accepted, proposed = Timed(bundle, 1), 0, 0
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(3, 211, 15).tolist()
        n = CONTEXT - len(prompt) + 1
        session.rewind(0)
        plain = list(Generation(session, prompt, max_tokens=n))
        # What was said elsewhere, with a word changed now and then.
        said = [9 if i % 17 == 16 else token for i, token in enumerate(plain)]
        session.rewind(0)
        generation = Generation(session, prompt, speculate=True, history=prompt + said)
        generation.speculator.clock = lambda: session.now
        for width in (4, 8):
            generation.speculator.costs.learn(width, 1e-9)
        assert list(generation) == plain and generation.finish_reason == "context"
        assert session.position == CONTEXT and generation.steps == n - 1
        accepted += generation.speculator.accepted
        proposed += generation.speculator.proposed
    assert proposed > accepted > 50, "too little was proposed, or all of it was right"


def test_who_leaves_off_early_finds_the_session_before_the_last_token(bundle):
    for n in range(1, 24, 3):
        session = Session(bundle, 1)
        generation = Generation(session, [5, 6, 7, 8] * 4, speculate=True)
        generation.speculator.costs.learn(8, 1e-9)
        tokens = [next(generation) for _ in range(n)]
        generation.settle()
        assert session.position == 16 + n - 1
        alone = Session(bundle, 1)
        alone.prefill([5, 6, 7, 8] * 4 + tokens[:-1])
        assert session.step(tokens[-1]) == alone.step(tokens[-1])


def test_the_lead_is_that_of_the_largest_over_the_second():
    random = np.random.default_rng(0)
    for logits in (random.normal(size=50), -random.random(9), np.array([3.0, -np.inf, -4.0])):
        first, second = np.sort(logits)[:-3:-1]
        assert lead(logits) == pytest.approx((first - second) / np.abs(logits[np.isfinite(logits)]).max())
    assert lead(np.array([-np.inf, 1.0])) == np.inf and lead(np.zeros(3)) == 0


def test_the_logits_of_verified_tokens_are_those_of_each_by_itself(bundle):
    session, alone = Session(bundle, 1), Session(bundle, 1)
    session.prefill([3, 4, 5])
    with pytest.raises(SessionError, match="verify first"):
        session.verified_logits()
    session.verify([6, 7, 8, 9])
    found = session.verified_logits()
    assert (session.verified_logits(2) == found[2]).all()
    alone.prefill([3, 4, 5])
    for row, token in zip(found, [6, 7, 8, 9], strict=True):
        alone.step(token)
        np.testing.assert_allclose(row, alone.logits(), atol=1e-4)
    # A copy: the next call leaves it alone.
    before = found.copy()
    session.verify([9, 8, 7, 6])
    assert (found == before).all()
