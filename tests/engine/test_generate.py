"""Generation over a session in NumPy: its tokens, where it ends, and what is rejected."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from castiron.pipelines.engine import sampling
from castiron.pipelines.engine.sampling import REPEAT_WINDOW, SAMPLERS, Sampler, Sampling, _draw, candidates, penalise
from castiron.pipelines.errors import PipelineError
from tests.engine.test_scheduler import VOCAB, logits_after
from tests.engine.test_scheduler import single_past_eos as greedy
from tests.support.fake_session import FakeSession
from tests.support.generating import Generation, choose

CONTEXT = 30
LOGITS = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(lambda v: np.array(v, np.float32) / 4)


class CountingSession(FakeSession):
    """A session whose logits depend on every token that it has read."""

    def __init__(self, context: int = CONTEXT, eos: tuple[int, ...] = ()):
        super().__init__(context, eos, (CONTEXT,))

    def logits(self) -> np.ndarray:
        return logits_after(self.fed)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT), st.data())
def test_tokens_are_the_greedy_ones_and_the_last_is_not_fed(prompt, data):
    space = CONTEXT - len(prompt) + 1
    n = data.draw(st.integers(1, space))
    session = CountingSession()
    generation = Generation(session, prompt, max_tokens=n)
    assert list(generation) == generation.tokens == greedy(prompt, n)
    assert generation.finish_reason == "length"
    assert session.fed == prompt + generation.tokens[:-1]
    assert generation.steps == n - 1


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT))
def test_without_a_limit_the_context_is_used_to_its_last_position(prompt):
    session = CountingSession()
    generation = Generation(session, prompt)
    assert list(generation) == greedy(prompt, CONTEXT - len(prompt) + 1)
    assert generation.finish_reason == "context" and session.position == CONTEXT


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10), st.integers(0, 15))
def test_a_stop_token_ends_the_text_and_is_not_part_of_it(prompt, index):
    expected = greedy(prompt, 16)
    stop = expected[index]
    generation = Generation(CountingSession(), prompt, max_tokens=16, stop_tokens=[stop])
    assert list(generation) == expected[: expected.index(stop)]
    # By default the model's own end token stops the text; with stop_tokens=() nothing does.
    assert list(Generation(CountingSession(eos=(stop,)), prompt, max_tokens=16)) == generation.tokens
    assert list(Generation(CountingSession(eos=(stop,)), prompt, max_tokens=16, stop_tokens=())) == expected
    assert generation.finish_reason == "stop"
    assert next(generation, None) is None


def test_equal_seeds_give_equal_tokens_and_others_do_not():
    def text(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return list(Generation(CountingSession(), [5], sampling=sampler, max_tokens=20))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_schedule_changes_the_temperature_over_the_first_tokens():
    for shape, middle in (("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)):
        sampling = Sampling(temperature=1.0, temperature_schedule=f"{shape}:0.2:100")
        last = 1.0 if shape == "constant" else 0.2
        assert [sampling.temperature_at(n) for n in (0, 50, 100, 999)] == pytest.approx([1.0, middle, last, last])
    assert sampling.temperature_at(25) == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    # A schedule that ends at 0 ends in greedy choices.
    logits, sampler = (
        np.array([1.0, 1.1], np.float32),
        Sampler(Sampling(temperature=9.0, temperature_schedule="linear:0:5", seed=0)),
    )
    picked = []
    for position in range(200):
        picked.append(sampler.pick(logits, [], {0: position})[0])
        sampler.used()
    assert set(picked[5:]) == {1}
    early = [sampler.pick(logits, [], {})[0] for _ in range(40) if not sampler.used()]
    assert set(early) == {0, 1}


@given(LOGITS, st.lists(st.integers(0, VOCAB - 1), max_size=100))
def test_greedy_takes_the_lowest_of_equals(logits, history):
    assert choose(Sampler(), logits, history) == int(np.flatnonzero(logits == logits.max())[0])
    assert choose(Sampler(Sampling(temperature=1.0, top_k=1, seed=0)), logits, history) == int(logits.argmax())


@given(LOGITS, st.integers(0, VOCAB + 5), st.floats(0.01, 1), st.floats(0, 1))
@example(np.zeros(VOCAB, np.float32), 3, 1.0, 0.0)
@example(np.repeat(np.array([0, 0.25, 0.75], np.float32), [VOCAB - 2, 1, 1]), VOCAB, 0.5, 0.5)
def test_cuts_keep_the_most_probable_tokens(logits, top_k, top_p, min_p):
    ids, _ = candidates(logits.astype(np.float64), Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    assert list(ids) == order[: len(ids)] and len(ids) <= (top_k or VOCAB)
    cached = order[: top_k or VOCAB]
    p = np.exp(logits[cached].astype(np.float64))
    p /= p.sum()
    nucleus = next(n for n in range(1, len(cached) + 1) if n == len(cached) or p[:n].sum() >= top_p - 1e-12)
    likely = int((p >= min_p * p[0] - 1e-12).sum())
    # Rounding may put a probability at a limit on either side of it.
    border = abs(p[: len(ids)].sum() - top_p) < 1e-9 or np.isclose(p, min_p * p[0]).any()
    assert border or len(ids) == min(nucleus, likely)


def shares(logits: np.ndarray, **sampling) -> np.ndarray:
    """Return the share of each token in 4000 draws."""
    sampler = Sampler(Sampling(**sampling))
    return np.bincount([choose(sampler, logits) for _ in range(4000)], minlength=len(logits)) / 4000


def test_tokens_are_drawn_in_proportion_to_their_probability():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        assert np.abs(shares(logits, temperature=temperature, seed=3) - expected).max() < 0.03


def test_the_temperature_applies_after_the_cuts():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert np.abs(shares(logits, temperature=0.5, top_k=2, seed=3) - [0.64, 0.36, 0, 0]).max() < 0.03


ORDERS = [order for n in range(5) for order in itertools.permutations(SAMPLERS, n) if "temperature" in order]


@given(LOGITS, st.sampled_from(ORDERS), st.integers(0, VOCAB + 5), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 5))
@example(np.arange(VOCAB, dtype=np.float32), ("top_p", "temperature"), 0, 0.0, 0.0, 1.0)
@example(np.arange(VOCAB, dtype=np.float32) / 9, ("top_k", "top_p", "min_p", "temperature"), VOCAB, 0.7, 0.5, 1.0)
def test_samplers_apply_in_their_order(logits, order, top_k, top_p, min_p, temperature):
    """Equal to the definition: each sampler sees what the ones before it have left."""
    expected, border = logits.astype(np.float64), False
    for name in order:
        ids = np.argsort(-expected, kind="stable")[: np.isfinite(expected).sum()]
        p = np.exp(expected[ids] - expected[ids[0]])
        sums = (p / p.sum()).cumsum()
        if name == "temperature":
            expected = expected / temperature
            continue
        keep = {"top_k": top_k or VOCAB, "top_p": int((sums < top_p).sum()) + 1, "min_p": int((p >= min_p).sum())}[name]
        border |= bool(np.isclose(sums, top_p).any() or np.isclose(p, min_p).any())
        expected[ids[keep:]] = -np.inf
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_draw", lambda weight, number: (seen.append(weight), (0, True))[1])
        chosen = Sampling(temperature, top_k, top_p, min_p, seed=0, samplers=order)
        first, _ = Sampler(chosen).pick(logits, [])
    left = np.sort(np.exp(expected - expected.max()))[::-1]
    left = left[left > np.finfo(np.float32).smallest_subnormal]
    weight = np.sort(seen[0])[::-1]
    weight = weight[weight > np.finfo(np.float32).smallest_subnormal]
    assert border or len(weight) == len(left) and np.abs(weight - left).max() < 1e-4
    assert first == int(logits.argmax()) if any(chosen.cuts) else True


def test_never_draws_a_token_without_probability():
    weight = np.zeros(600, np.float32)
    weight[300:302] = 1
    assert [_draw(weight, number)[0] for number in (0.0, 0.49, 0.5, 1 - 2**-53)] == [300, 300, 301, 301]


def test_a_large_vocabulary_is_drawn_from_end_to_end():
    """The ids are first and last in their blocks of running sums."""
    ids, expected = [0, 255, 256, 400, 999], np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    logits = np.full(1000, -1e4, np.float32)
    logits[ids] = np.log(expected) + 30
    found = shares(logits, temperature=1.0, seed=5)
    assert found[ids].sum() == pytest.approx(1) and np.abs(found[ids] - expected).max() < 0.03


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e3, 1e300])
def test_any_temperature_draws_without_a_warning(temperature):
    logits = np.linspace(-40, 40, 600, dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        token = choose(Sampler(Sampling(temperature=temperature, seed=1)), logits, ())
    assert token == 599 if temperature < 1 else 0 <= token < 600


@given(LOGITS, st.lists(st.integers(0, VOCAB - 1), max_size=200), st.floats(1.01, 2))
def test_the_repeat_penalty_pushes_recent_tokens_down_and_nothing_else(logits, history, penalty):
    recent = history[-REPEAT_WINDOW:]
    changed = penalise(logits.astype(np.float64), recent, penalty)
    for token in range(VOCAB):
        if token in recent and logits[token] != 0:
            assert changed[token] < logits[token]
        else:
            assert changed[token] == logits[token]
    chosen = choose(Sampler(Sampling(repeat_penalty=penalty)), logits, history)
    assert chosen == int(changed.argmax())


def test_the_repeat_penalty_counts_the_last_tokens_of_prompt_and_answer():
    seen = []

    class Spy(Sampler):
        def pick(self, logits, history, *more):
            seen.append(list(history))
            return super().pick(logits, history, *more)

    tokens = list(Generation(CountingSession(), [7, 8], sampling=Spy(Sampling(repeat_penalty=1.5)), max_tokens=3))
    assert seen == [[7, 8], [7, 8, *tokens[:1]], [7, 8, *tokens[:2]]]
    del seen[:]
    prompt = [i % VOCAB for i in range(REPEAT_WINDOW + 3)]
    tokens = list(Generation(CountingSession(200), prompt, sampling=Spy(Sampling(repeat_penalty=1.5)), max_tokens=70))
    assert [history[-REPEAT_WINDOW:] for history in seen] == [[*prompt, *tokens[:i]][-REPEAT_WINDOW:] for i in range(70)]
    # Token 1 is likelier than 0 unless it is penalised; token 2 never matters.
    logits, sampler = np.array([1.0, 1.5, -9.0], np.float32), Sampler(Sampling(repeat_penalty=2.0))
    assert choose(sampler, logits, [2, 1] + [2] * (REPEAT_WINDOW - 1)) == 0
    assert choose(sampler, logits, [1] + [2] * REPEAT_WINDOW) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": -0.1}, {"top_p": 1.5}, {"samplers": ("mirostat",)}, {"min_p": -0.1},
     {"min_p": 2}, {"repeat_penalty": 0}, {"seed": -1}, {"temperature_schedule": "linear:1"}, {"temperature_schedule": "cosine:-1:5"}],
)  # fmt: skip
def test_rejects_a_value_out_of_range(wrong):
    with pytest.raises(PipelineError, match=next(iter(wrong)).replace("_", "-")):
        Sampling(**wrong)
