"""Speculation proposes tokens of the text, keeps the model's choices, and costs little time."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine import speculation
from castiron.pipelines.engine.draft import MAX_MATCH, MIN_MATCH, Ngrams
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.sampling import NEAR, lead
from castiron.pipelines.engine.speculation import Speculator
from castiron.pipelines.text.text_output import Stream
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session, SessionError
from tests.support.fake_session import FakeSession
from tests.support.generating import Generation

CONTEXT = 96
SMALL = st.lists(st.integers(0, 3), max_size=60)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculate")
    checkpoint = tiny.tiny_model("llama", folder / "llama")
    return open_bundle(
        compile_model(checkpoint, folder / "bundle", Options(context=CONTEXT, verify_widths=(4, 8), batch=())).bundle
    )


class Parrot(FakeSession):
    """A session that generates one given text and has a clock of its own."""

    COSTS = {1: 1.0, 4: 2.5, 8: 4.0}
    position = 0

    def __init__(self, text, doubtful=(), context=10**6):
        super().__init__(context, verify=(4, 8))
        self.text, self.doubtful = text, set(doubtful)
        self.now, self.calls = 0.0, []

    def clock(self):
        return self.now

    def prefill(self, tokens, progress=None, total=0):
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
        positions = range(self.position - len(tokens) + 1, self.position + 1)
        # A verify function may choose another token than a step where the logits are close.
        self.checked = list(positions)
        argmaxes = [self.text[i] if i < len(self.text) else 0 for i in positions]
        # Logits after a wrong proposal may be NaN.
        return [-1 if i > known else token + (i in self.doubtful) for token, i in zip(argmaxes, positions)]

    def verified_logits(self, token):
        return np.array([1.0, 1 - NEAR / 2 if self.checked[token] in self.doubtful else 0.0])

    def rewind(self, position):
        assert position <= self.position
        self.position = position

    def restore(self, snapshot):
        self.rewind(snapshot.position)

    def _call(self, width):
        assert self.position + width <= self.context
        self.calls.append(width)
        self.position += width
        self.now += self.COSTS[width]


def parrot_tokens(session, prompt, n, draft=None):
    text = Request(session.text[:prompt], session.context, max_tokens=n, stop_tokens=())
    speculator = Speculator(session, text, draft=draft, clock=session.clock)
    text.advance(session.prefill(session.text[:prompt]), session.logits)
    while text.finish_reason is None:
        list(speculator.run(text.tokens[-1:]))
        assert session.position == prompt + len(text.tokens) - 1
    return text.tokens


@settings(max_examples=50)
@given(SMALL)
def test_a_match_is_the_longest_earlier_run(tokens):
    ngrams = Ngrams(tokens[:5])
    for token in tokens[5:]:
        ngrams.add(token)
    ends = range(MIN_MATCH, len(tokens))
    run = {
        e: next((n for n in range(min(e, MAX_MATCH)) if tokens[e - 1 - n] != tokens[-1 - n]), min(e, MAX_MATCH)) for e in ends
    }
    longest = max(run.values(), default=0)
    # Only the latest occurrences of a pair are compared, so a longer match may be missed.
    assert ngrams.length <= longest and (ngrams.length >= MIN_MATCH) == (longest >= MIN_MATCH)
    if ngrams.length:
        assert run[ngrams.end] >= ngrams.length
        assert ngrams.propose(1) == [tokens[ngrams.end]]


def test_a_period_is_proposed_repeatedly():
    assert Ngrams([9, 1, 2, 3, 1, 2, 3, 1, 2]).propose(8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert Ngrams([1, 2, 3]).propose(4) == []


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.sets(st.integers(0, 79)), st.sets(st.integers(10, 79)))
def test_proposals_do_not_change_the_tokens(passage, changed, doubtful):
    text = [(passage * 30)[i] + 10 * (i in changed) for i in range(80)]
    session = Parrot(text, doubtful, context=len(text) + 3)
    # Verify calls are cheap here, so that they are always tried.
    session.COSTS = {1: 1.0, 4: 0.1, 8: 0.1}
    assert parrot_tokens(session, 10, 70) == text[10:]


def test_a_proposal_that_leads_to_nan_fails_the_request():
    session = Parrot(list(range(10)) * 8)
    check = session.verify
    session.verify = lambda tokens: [-1 for _ in check(tokens)]
    with pytest.raises(SessionError, match="logits are NaN"):
        parrot_tokens(session, 40, 30)


def test_repeating_text_takes_fewer_passes_and_less_time():
    passage = list(range(100))
    session = Parrot(passage * 4)
    parrot_tokens(session, 100, 250)
    assert session.now < 249 / 1.6
    assert max(session.calls) == 8


@pytest.mark.parametrize("alphabet", [2, 5, 40, 4000])
def test_text_without_repetition_loses_up_to_five_per_cent(alphabet):
    for seed in range(3):
        text = np.random.default_rng(seed).integers(0, alphabet, 700).tolist()
        session = Parrot(text)
        parrot_tokens(session, 300, 256)
        assert session.now < 1.05 * 255


class Timed(Session):
    """A session whose clock counts calls, independent of the machine's load."""

    now = 0.0

    def step(self, token):
        self.now += 1.0
        return super().step(token)

    def verify(self, tokens):
        self.now += 1.2
        return super().verify(tokens)


def test_a_bundle_generates_the_tokens_of_single_steps(bundle, monkeypatch):
    session, accepted, proposed = Timed(bundle, 1), 0, 0
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(3, 211, 15).tolist()
        n = CONTEXT - len(prompt) + 1
        plain = list(Generation(session, prompt, max_tokens=n))
        # An earlier copy of the answer, with every 17th token changed.
        generated = [9 if i % 17 == 16 else token for i, token in enumerate(plain)]
        with monkeypatch.context() as patch:
            patch.setattr(speculation, "Ngrams", lambda tokens: Ngrams([*prompt, *generated, *tokens]))
            patch.setattr(speculation, "Speculator", lambda *parts: eager(Speculator(*parts, clock=lambda: session.now)))
            generation = Generation(session, prompt, speculate=True)
            assert list(generation) == plain and generation.finish_reason == "context"
        assert session.position == CONTEXT and generation.steps == n - 1
        accepted += generation.speculator.accepted
        proposed += generation.speculator.proposed
    assert proposed > accepted > 50, "too little was proposed, or all of it was right"


def eager(speculator: Speculator) -> Speculator:
    for width in (4, 8):
        speculator.costs.learn(width, 1e-9)
    return speculator


def test_an_answer_closed_early_leaves_a_valid_cache(bundle, monkeypatch):
    monkeypatch.setattr(speculation, "Speculator", lambda *parts: eager(Speculator(*parts)))
    prompt = [5, 6, 7, 8] * 4
    for n in range(1, 24, 3):
        engine = Engine(Session(bundle, 1), ngrams=True)
        stream = Stream(engine, Request(prompt, CONTEXT, max_tokens=40))
        while len(stream.tokens) < n:
            stream.read()
        stream.close()
        again = [*prompt, *stream.tokens]
        expected = Generation(Session(bundle, 1), again, max_tokens=3).run().tokens
        goes_on = Request(again, CONTEXT, max_tokens=3)
        assert Stream(engine, goes_on).run().tokens == expected and goes_on.cached == len(again) - 1


def test_the_lead_is_that_of_the_largest_over_the_second():
    random = np.random.default_rng(0)
    for logits in (random.normal(size=50), -random.random(9), np.array([3.0, -np.inf, -4.0])):
        first, second = np.sort(logits)[:-3:-1]
        assert lead(logits) == pytest.approx((first - second) / np.abs(logits[np.isfinite(logits)]).max())
    assert lead(np.array([-np.inf, 1.0])) == np.inf and lead(np.zeros(3)) == 0


def test_the_logits_of_verified_tokens_stay(bundle):
    session = Session(bundle, 1)
    session.prefill([3, 4, 5])
    with pytest.raises(SessionError, match="verify first"):
        session.verified_logits()
    session.verify([6, 7, 8, 9])
    found = session.verified_logits()
    before = found.copy()
    assert (session.verified_logits(2) == found[2]).all()
    session.verify([9, 8, 7, 6])
    assert (found == before).all()
