"""Many prompts over one bundle: each gets what it gets alone, and no more of them is held than runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import castiron
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.many import generate_many
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.scheduler import ModelFailed, Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.vmfb.session import Session
from tests.pipelines import served, toy_text
from tests.pipelines.test_scheduler import CONTEXT, EOS, PROMPTS, TEXT, VOCAB, FakeBatch, alone


def many(scheduler, prompts, **options):
    return generate_many(scheduler, prompts, **{"max_tokens": 10, "text": TEXT, "stop_tokens": [EOS], **options})


@given(st.integers(1, 4), st.lists(PROMPTS, max_size=12))
def test_every_prompt_has_one_result_and_it_is_the_one_it_gets_alone(size, prompts):
    results = list(many(Scheduler(FakeBatch(size)), iter(prompts)))
    assert sorted(result.index for result in results) == list(range(len(prompts)))
    for result in results:
        expected = alone(prompts[result.index], 10)
        assert result.tokens == expected and result.text == TEXT.decode(expected) and result.error is None
        assert result.finish_reason == ("length" if len(expected) == 10 else "stop")


def test_prompts_without_end_are_taken_as_slots_become_free():
    taken = itertools.count()
    prompts = ([3, 4, 5 + next(taken) % 30] for _ in itertools.count())
    results = many(Scheduler(FakeBatch(3)), prompts, stop_tokens=[])
    for done, result in enumerate(itertools.islice(results, 200)):
        assert result.index < done + 3, "more prompts were taken than there are slots"


def test_closing_lets_go_of_what_runs_and_the_scheduler_can_be_used_again():
    scheduler = Scheduler(FakeBatch(2))
    results = many(scheduler, itertools.repeat([3, 4, 5]))
    next(results)
    with pytest.raises(PipelineError, match="running other sequences"):
        next(many(scheduler, [[6]]))
    results.close()
    assert scheduler.idle
    assert [result.tokens for result in many(scheduler, [[6]])] == [alone([6], 10)]


def test_a_prompt_that_cannot_be_run_says_why_and_the_others_go_on():
    batch = FakeBatch(2)
    batch.broken_prompt = 9
    bad = {1: [3] * (CONTEXT + 1), 2: [4, 9, 9], 3: [], 4: None, 5: [{"role": "user"}], 6: [VOCAB]}
    says = {
        1: "101 tokens",
        2: "the model failed",
        3: "no tokens",
        4: "neither text nor",
        5: "no chat template",
        6: "vocabulary",
    }
    prompts = [bad.get(index, [3, 4, index]) for index in range(9)]
    results = {result.index: result for result in many(Scheduler(batch), prompts)}
    for index, prompt in enumerate(prompts):
        result = results[index]
        if index in bad:
            assert result.finish_reason == "error" and says[index] in str(result.error) and result.tokens == []
        else:
            assert result.tokens == alone(prompt, 10)
    assert isinstance(results[2].error, ModelFailed) and "broken prompt" in str(results[2].error.__cause__)


def test_near_the_end_of_the_context_there_is_what_room_there_is():
    full, short = many(Scheduler(FakeBatch(1)), [[3] * (CONTEXT - 3), [4]], stop_tokens=[])
    assert (len(full.tokens), full.finish_reason) == (4, "context")
    assert (len(short.tokens), short.finish_reason) == (10, "length")


def test_equal_seeds_are_equal_in_any_company():
    def drawn(size: int, prompts: list) -> list[int]:
        results = many(Scheduler(FakeBatch(size)), prompts, sampling=Sampling(temperature=1.0, seed=3), stop_tokens=[])
        return next(result.tokens for result in results if result.index == 0)

    assert drawn(1, [[5, 6]]) == drawn(4, [[5, 6], [7], [8], [9]]) != alone([5, 6], 10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"stop_strings": [""]}, "--stop"),
        ({"stop_strings": ["a"], "text": None}, "tokenizer"),
    ],
)
def test_options_that_no_prompt_can_be_run_with_are_refused_at_once(options, says):
    with pytest.raises(PipelineError, match=says):
        many(Scheduler(FakeBatch(1)), itertools.repeat([3]), **options)


@given(PROMPTS, st.integers(1, 10), st.lists(st.text('!"#$%', min_size=1, max_size=2), max_size=2))
def test_pulled_from_a_session_and_pushed_by_a_batch_a_sequence_is_the_same(prompt, count, stops):
    options = {"max_tokens": count, "text": TEXT, "stop_tokens": [EOS], "stop_strings": stops}
    pulled = Generation(FakeBatch(1).slots[0], prompt, **options)
    words = "".join(pulled.stream())
    scheduler, pushed = Scheduler(FakeBatch(1)), Sequence(prompt, CONTEXT, **options)
    scheduler.submit(pushed)
    told = [event for _ in range(200) if not scheduler.idle for _, event in scheduler.turn()]
    assert words == "".join(event.text for event in told[:-1])
    assert (pulled.tokens, pulled.finish_reason) == (pushed.tokens, told[-1].reason)


@pytest.mark.parametrize("batched", [False, True])
def test_a_bundle_gives_the_tokens_of_one_at_a_time(tmp_path_factory, batched):
    """With batch functions and without."""
    path = served.bundle(tmp_path_factory.getbasetemp()) if batched else toy_text.write(tmp_path_factory.mktemp("many") / "toy")
    bundle = castiron.open(path)
    session, text = Session(bundle, 1), castiron.load_text(bundle)
    prompts = [("abcdefgh"[i % 5 :] * 3)[: 3 + 2 * i] for i in range(7)]
    results = {result.index: result for result in castiron.generate_many(bundle, prompts, max_tokens=6, threads=1)}
    assert len(results) == len(prompts)
    for index, prompt in enumerate(prompts):
        session.rewind(0)
        generation = Generation(session, text.encode(prompt), max_tokens=6, stop_tokens=text.eos)
        assert results[index].tokens == list(generation) and results[index].text == text.decode(generation.tokens)
        assert results[index].finish_reason == generation.finish_reason
