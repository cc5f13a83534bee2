"""The log-probabilities of a prompt's own tokens: those of a model that takes one token after another, however they are asked for."""

from __future__ import annotations

import threading

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

import castiron
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation import scheduler as scheduling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Finished, Sequence
from castiron.pipelines.serve.app import open_app
from castiron.vmfb.session import Session
from tests.pipelines import served

# A verify function sums in another order than decode_step.
CLOSE = 2e-5
TEXTS = ["Hello there, you", "Hello there, we", "x" * 120, "H", "Hello there, you and I"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp() / "structured", (4,))


@pytest.fixture(scope="module")
def alone(path):
    return served.Alone(path)


@pytest.fixture(scope="module")
def expected(alone):
    """Of token ids the logarithms f64 [tokens - 1, vocab] of what may follow each but the last."""

    def steps(tokens):
        session, found = Session(alone.bundle, 1), []
        for token in tokens[:-1]:
            session.step(token)
            logits = session.logits().astype(np.float64)
            found.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        return np.array(found).reshape(-1, session.vocab)

    return steps


@pytest.fixture(scope="module")
def model(path):
    with castiron.load(path, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def client(path):
    with TestClient(open_app(path, threads=1)) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=http)


def check(scored, tokens, rows, top=0):
    assert scored.tokens == tokens and np.isnan(scored.logprobs[0])
    np.testing.assert_allclose(scored.logprobs[1:], rows[np.arange(len(rows)), tokens[1:]], atol=CLOSE)
    assert scored.total == pytest.approx(scored.logprobs[1:].sum())
    for found, row in zip(scored.top, rows, strict=True):
        likeliest = np.argsort(-row, kind="stable")[:top]
        np.testing.assert_allclose([logprob for _, logprob in found], row[likeliest], atol=CLOSE)
        assert sorted(token for token, _ in found) == sorted(likeliest)


def test_scores_are_those_of_one_token_after_another(model, alone, expected):
    """Of several texts at once, which begin alike, with more and with fewer likeliest tokens than before."""
    ids = [alone.text.encode(text) for text in TEXTS]
    rows = [expected(tokens) for tokens in ids]
    for top in (1, 5, 2, 0):
        for found, tokens, row in zip(model.score(TEXTS, top=top), ids, rows, strict=True):
            check(found, tokens, row, top)
    check(model.score(ids[0]), ids[0], rows[0])
    assert model.score(ids[3]).total == 0 and model.score([]) == []
    # An answer goes on from what was scored, and a score from what was said.
    said = model.generate(TEXTS[0], max_tokens=9, stop_tokens=())
    assert said.tokens == alone.tokens(TEXTS[0], 9)
    longer = ids[0] + said.tokens
    check(model.score(longer), longer, expected(longer))
    for wrong, why in (([], "no tokens"), ("x" * 127, "127 tokens"), ([999], "outside the vocabulary"), (None, "neither text")):
        with pytest.raises(PipelineError, match=why):
            model.score([wrong])
    with pytest.raises(PipelineError, match="top is -1"):
        model.score("x", top=-1)
    assert model.generate("x", max_tokens=2).finish_reason


def run(scheduler, *sequences):
    """Whatever there is to tell until all have ended."""
    for sequence in sequences:
        scheduler.submit(sequence)
    return [event for _ in iter(lambda: scheduler.idle, True) for _, event in scheduler.turn()]


def test_what_was_scored_is_not_computed_again(path, alone, expected, monkeypatch):
    """Choices behind one beginning, each of which has all of its scores; a copy of the beginning has them too."""
    scheduler, read, score_chunk = Scheduler(path, 1), [], scheduling.score_chunk
    monkeypatch.setattr(scheduling, "score_chunk", lambda *a: read.append((a[2], len(scheduler.decoding))) or score_chunk(*a))
    prompts = [alone.text.encode("A beginning that all of them have, " + end) for end in ("one", "two", "three")]
    scored = lambda prompt, top=1: Sequence(prompt, scheduler.context, max_tokens=0, prompt_logprobs=top)
    sequences = [scored(prompt) for prompt in prompts]
    assert run(scheduler, *sequences) == [Finished("length")] * 3
    for sequence, prompt in zip(sequences, prompts):
        rows = expected(prompt)
        np.testing.assert_allclose([s.logprob for s in sequence.scores], rows[np.arange(len(rows)), prompt[1:]], atol=CLOSE)
    assert [sequence.cached for sequence in sequences] == [0, 32, 32] and sum(count for count, _ in read) == 38 + 6 + 8
    # The same to the last bit, had it been alone.
    fresh = scored(prompts[1])
    run(Scheduler(path, 1), fresh)
    assert fresh.scores == sequences[1].scores
    # Neither what was only read nor what has fewer of the likeliest will do.
    for before, top, cached in ((Sequence([5] * 6, scheduler.context, max_tokens=1), 0, 0), (scored([6] * 6), 2, 0),
                                (scored([7] * 6, 2), 1, 4)):  # fmt: skip
        run(scheduler, before)
        again = scored(before.prompt.tolist(), top)
        run(scheduler, again)
        assert again.cached == cached and len(again.scores) == 5
    # The score of a token that followed once is not that of another one.
    other = [11] * 8 + [13] * 8
    run(scheduler, scored([11] * 8 + [12] * 8))
    run(scheduler, Sequence(other, scheduler.context, max_tokens=1))
    again, fresh = scored(other), scored(other)
    run(scheduler, again)
    run(Scheduler(path, 1), fresh)
    assert again.scores == fresh.scores and again.cached
    # A long one holds up an answer for half a chunk at most.
    read.clear()
    answer = Sequence(prompts[0], scheduler.context, max_tokens=40, stop_tokens=())
    run(scheduler, answer, scored(alone.text.encode("y" * 120)))
    assert {count for count, running in read if running} == {16, 8} and len(answer.tokens) == 40
    assert answer.tokens == alone.tokens(prompts[0], 40)


def test_a_request_that_is_cancelled_leaves_nothing_wrong_behind(path, alone, expected):
    scheduler = Scheduler(path, 1)
    prompt = alone.text.encode("z" * 100)
    first = Sequence(prompt, scheduler.context, max_tokens=0, prompt_logprobs=0)
    scheduler.submit(first)
    scheduler.turn()
    assert 0 < len(first.scores) < 99
    scheduler.cancel(first)
    assert scheduler.idle
    again = Sequence(prompt, scheduler.context, max_tokens=0, prompt_logprobs=0)
    run(scheduler, again)
    rows = expected(prompt)
    np.testing.assert_allclose([s.logprob for s in again.scores], rows[np.arange(99), prompt[1:]], atol=CLOSE)
    assert again.cached == len(first.scores) - 4


def test_without_verify_functions_there_are_steps(tmp_path_factory, expected, alone):
    with castiron.load(served.bundle(tmp_path_factory.getbasetemp()), threads=1) as model:
        ids = alone.text.encode(TEXTS[0])
        check(model.score(ids, top=3), ids, expected(ids), 3)


def entries(logprobs, first=0):
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True)
    return list(rows)[first:]


@pytest.mark.parametrize("prompt", [TEXTS[0], [8, 9, 7, 2, 50, 60, 1, 9], ["Hello", "Help"], [[5, 6, 7], [5, 6, 8, 9]]])
def test_echo_shows_the_prompts_own(client, alone, expected, prompt):
    """In OpenAI's shape, for every choice of every prompt, whole and streamed."""
    several = isinstance(prompt[0], list) or isinstance(prompt, list) and isinstance(prompt[0], str)
    prompts = prompt if several else [prompt]
    options = {"temperature": 0, "n": 2, "echo": True, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    ask = lambda **more: client.completions.create(model="tiny", prompt=prompt, **options | {"max_tokens": 3} | more)
    answer, streamed = ask(), {}
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            text, rows = streamed.setdefault(choice.index, ("", []))
            streamed[choice.index] = text + choice.text, rows + (entries(choice.logprobs) if choice.logprobs else [])
    for index, choice in enumerate(answer.choices):
        one = prompts[index // 2]
        ids = alone.text.encode(one) if isinstance(one, str) else one
        text = one if isinstance(one, str) else alone.text.decode(one)
        said = alone.tokens(ids, 3)
        rows, names = expected([*ids, *said]), [alone.text.tokenizer.id_to_token(t) for t in (*ids, *said)]
        assert choice.text == text + alone.text.decode(said) and choice.logprobs.tokens == names
        first, *rest = entries(choice.logprobs)
        assert first == (names[0], None, None, 0)
        offsets = np.cumsum([0, *(len(alone.text.decode([token])) for token in (*ids, *said))])
        for place, (name, logprob, top, offset) in enumerate(rest):
            row, token = rows[place], (*ids, *said)[place + 1]
            assert logprob == pytest.approx(row[token], abs=CLOSE) and offset == offsets[place + 1]
            likeliest = {alone.text.tokenizer.id_to_token(int(t)): row[t] for t in np.argsort(-row, kind="stable")[:2]}
            assert top == pytest.approx(likeliest | {name: row[token]}, abs=CLOSE)
        assert streamed[index] == (choice.text, entries(choice.logprobs))
    nothing = ask(max_tokens=0, logprobs=0)
    for index, choice in enumerate(nothing.choices):
        assert choice.finish_reason == "length" and choice.text == answer.choices[index].text[: len(choice.text)]
        count = len(choice.logprobs.tokens)
        assert choice.logprobs.token_logprobs == answer.choices[index].logprobs.token_logprobs[:count]
        assert all(len(top) == 1 for top in choice.logprobs.top_logprobs[1:])
    assert nothing.usage.completion_tokens == 0 and nothing.usage.prompt_tokens == answer.usage.prompt_tokens
    bare = ask(max_tokens=0, logprobs=openai.omit)
    assert [c.text for c in bare.choices] == [c.text for c in nothing.choices] and bare.choices[0].logprobs is None


def test_the_token_that_ends_the_text_has_a_place_of_its_own(client, alone):
    """Whoever cuts off the one token that was generated cuts off none of the prompt's."""
    bias = {str(alone.text.eos[0]): 100}
    ask = lambda **more: client.completions.create(model="tiny", prompt="Hello", logprobs=1, logit_bias=bias, **more)
    logprobs = ask(max_tokens=1, echo=True).choices[0].logprobs
    assert logprobs.tokens == [*"Hello", "</s>"] and logprobs.text_offset[-1] == 5
    assert ask(max_tokens=1).choices[0].logprobs.tokens == []


def test_places_of_tokens_are_those_of_their_characters(client, alone):
    """White space is its word's, a special token has no place of its own, a character of several tokens one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from castiron.pipelines.generation.text import Text

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<s>"])}, []))
    words.add_special_tokens(["<s>"])
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    words.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])]
    )
    assert Text(words).offsets("a bé!") == [0, 0, 1, 2, 3, 3, 4]
    assert Text(words).offsets([]) == []


def test_what_cannot_be_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens 0 leaves nothing to answer without echo") as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=0)
    assert error.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="127 tokens"):
        client.completions.create(model="tiny", prompt="x" * 127, max_tokens=0, echo=True, logprobs=1)


def test_several_threads_score_and_answer_at_once(model, alone, expected):
    ids, found = alone.text.encode(TEXTS[2]), []
    thread = threading.Thread(target=lambda: found.append(model.score(ids)))
    thread.start()
    assert model.generate(TEXTS[0], max_tokens=30, stop_tokens=()).tokens == alone.tokens(TEXTS[0], 30)
    thread.join()
    check(found[0], ids, expected(ids))
