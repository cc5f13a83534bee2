"""Many prompts over one engine: each has the result of a run by itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.scheduler import ModelFailed
from castiron.pipelines.errors import PipelineError
from tests.engine.test_scheduler import CONTEXT, EOS, PROMPTS, TEXT, VOCAB, FakeBatch, by_itself
from tests.support.generating import generate_many


def many(engine, prompts, **options):
    return generate_many(engine, prompts, **{"max_tokens": 10, "text": TEXT, "stop_tokens": [EOS], **options})


@given(st.integers(1, 4), st.lists(PROMPTS, max_size=12))
def test_every_prompt_gets_the_same_result_as_by_itself(size, prompts):
    results = list(many(Engine(FakeBatch(size)), iter(prompts)))
    assert sorted(result.index for result in results) == list(range(len(prompts)))
    for result in results:
        expected = by_itself(prompts[result.index], 10)
        assert result.tokens == expected and result.text == TEXT.decode(expected) and result.error is None
        assert result.finish_reason == ("length" if len(expected) == 10 else "stop")


def test_takes_a_prompt_when_a_slot_is_free():
    taken = itertools.count()
    prompts = ([3, 4, 5 + next(taken) % 30] for _ in itertools.count())
    results = many(Engine(FakeBatch(3)), prompts, stop_tokens=[])
    for done, result in enumerate(itertools.islice(results, 200)):
        assert result.index < done + 3, "more prompts were taken than there are slots"


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
    bad = {1: [3] * (CONTEXT + 1), 2: [4, 9, 9], 3: [], 4: None, 5: [{"role": "user"}], 6: [VOCAB]}
    message = {
        1: "101 tokens",
        2: "the model failed",
        3: "no tokens",
        4: "invalid prompt of type NoneType",
        5: "no chat template",
        6: "vocabulary",
    }
    prompts = [bad.get(index, [3, 4, index]) for index in range(9)]
    results = {result.index: result for result in many(Engine(batch), prompts)}
    for index, prompt in enumerate(prompts):
        result = results[index]
        if index in bad:
            assert result.finish_reason == "error" and message[index] in str(result.error) and result.tokens == []
        else:
            assert result.tokens == by_itself(prompt, 10)
    assert isinstance(results[2].error, ModelFailed) and "broken prompt" in str(results[2].error.__cause__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"stop_strings": [""]}, "--stop"),
        ({"stop_strings": ["a"], "text": None}, "tokenizer"),
    ],
)
def test_rejects_invalid_options_before_the_first_prompt(options, message):
    with pytest.raises(PipelineError, match=message):
        many(Engine(FakeBatch(1)), itertools.repeat([3]), **options)
