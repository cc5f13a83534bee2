"""Log-probabilities of a prompt's tokens equal those of single steps, in the API and over HTTP."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

import castiron
from castiron.pipelines.engine import scheduler as scheduling
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Finished, Request
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.run.session import Session
from tests.support import served, structured

path, model = structured.path, structured.model
# A verify function sums in another order than decode_step.
CLOSE = 2e-5
TEXTS = ["Hello there, you", "Hello there, we", "x" * 120, "H", "Hello there, you and I"]


@pytest.fixture(scope="module")
def expected(reference):
    """Return the log softmax f64 [tokens - 1, vocab] after each token id but the last."""

    def steps(tokens):
        session, found = Session(reference.bundle, 1), []
        for token in tokens[:-1]:
            session.step(token)
            logits = session.logits().astype(np.float64)
            found.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        return np.array(found).reshape(-1, session.vocab)

    return steps


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


def test_scores_equal_those_of_single_steps(model, reference, expected):
    """Texts share prefixes, and later calls ask for more and for fewer top tokens."""
    ids = [reference.text.encode(text) for text in TEXTS]
    rows = [expected(tokens) for tokens in ids]
    for top in (1, 5, 2, 0):
        for found, tokens, row in zip(model.score(TEXTS, top=top), ids, rows, strict=True):
            check(found, tokens, row, top)
    check(model.score(ids[0]), ids[0], rows[0])
    assert model.score(ids[3]).total == 0 and model.score([]) == []
    # An answer continues a scored text, and a score a generated one.
    generated = model.generate(TEXTS[0], max_tokens=9, stop_tokens=())
    assert generated.tokens == reference.tokens(TEXTS[0], 9)
    longer = ids[0] + generated.tokens
    check(model.score(longer), longer, expected(longer))
    for wrong, why in (
        ([], "no tokens"),
        ("x" * 127, "127 tokens"),
        ([999], "outside the vocabulary"),
        (None, "invalid prompt"),
    ):
        with pytest.raises(PipelineError, match=why):
            model.score([wrong])
    with pytest.raises(PipelineError, match="top is -1"):
        model.score("x", top=-1)
    assert model.generate("x", max_tokens=2).finish_reason


def run(scheduler, *requests):
    """Run requests to their ends; return their events."""
    for request in requests:
        scheduler.submit(request)
    return [event for _ in iter(lambda: scheduler.idle, True) for _, event in scheduler.turn()]


def test_scores_of_a_shared_prefix_are_cached(path, reference, expected, monkeypatch):
    """Requests share a prefix in the cache, and each gets all of its scores."""
    scheduler, read, logit_rows = Engine(path, 1).scheduler, [], scheduling.logit_rows
    monkeypatch.setattr(
        scheduling, "logit_rows", lambda *a: read.append((len(a[1]), len(scheduler.decoding))) or logit_rows(*a)
    )
    prompts = [reference.text.encode("A beginning that all of them have, " + end) for end in ("one", "two", "three")]
    scored = lambda prompt, top=1: Request(prompt, scheduler.context, max_tokens=0, prompt_logprobs=top)
    requests = [scored(prompt) for prompt in prompts]
    assert run(scheduler, *requests) == [Finished("length")] * 3
    for request, prompt in zip(requests, prompts):
        rows = expected(prompt)
        np.testing.assert_allclose([s.logprob for s in request.scores], rows[np.arange(len(rows)), prompt[1:]], atol=CLOSE)
    assert [request.cached for request in requests] == [0, 32, 32] and sum(count for count, _ in read) == 38 + 6 + 8
    # A run without the cache gives the same bits.
    fresh = scored(prompts[1])
    run(Engine(path, 1).scheduler, fresh)
    assert fresh.scores == requests[1].scores
    # Prefixes without scores, or with fewer top tokens, are not reused.
    for before, top, cached in ((Request([5] * 6, scheduler.context, max_tokens=1), 0, 0), (scored([6] * 6), 2, 0),
                                (scored([7] * 6, 2), 1, 4)):  # fmt: skip
        run(scheduler, before)
        again = scored(before.prompt.tolist(), top)
        run(scheduler, again)
        assert again.cached == cached and len(again.scores) == 5
    # A score belongs to the token after the position, which another prompt may not have.
    other = [11] * 8 + [13] * 8
    run(scheduler, scored([11] * 8 + [12] * 8))
    run(scheduler, Request(other, scheduler.context, max_tokens=1))
    again, fresh = scored(other), scored(other)
    run(scheduler, again)
    run(Engine(path, 1).scheduler, fresh)
    assert again.scores == fresh.scores and again.cached
    # A long scored prompt delays an answer by at most half a chunk.
    read.clear()
    answer = Request(prompts[0], scheduler.context, max_tokens=40, stop_tokens=())
    run(scheduler, answer, scored(reference.text.encode("y" * 120)))
    assert {count for count, running in read if running} == {16, 8} and len(answer.tokens) == 40
    assert answer.tokens == reference.tokens(prompts[0], 40)


def test_a_cancelled_request_leaves_a_valid_cache(path, reference, expected):
    scheduler = Engine(path, 1).scheduler
    prompt = reference.text.encode("z" * 100)
    first = Request(prompt, scheduler.context, max_tokens=0, prompt_logprobs=0)
    scheduler.submit(first)
    scheduler.turn()
    assert 0 < len(first.scores) < 99
    scheduler.cancel(first)
    assert scheduler.idle
    again = Request(prompt, scheduler.context, max_tokens=0, prompt_logprobs=0)
    run(scheduler, again)
    rows = expected(prompt)
    np.testing.assert_allclose([s.logprob for s in again.scores], rows[np.arange(99), prompt[1:]], atol=CLOSE)
    assert again.cached == len(first.scores) - 4


def test_scores_without_verify_functions_use_steps(tmp_path_factory, expected, reference):
    with castiron.load(served.bundle(tmp_path_factory.getbasetemp()), threads=1) as model:
        ids = reference.text.encode(TEXTS[0])
        check(model.score(ids, top=3), ids, expected(ids), 3)


def entries(logprobs, first=0):
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True)
    return list(rows)[first:]


@pytest.mark.parametrize("prompt", [TEXTS[0], [8, 9, 7, 2, 50, 60, 1, 9], ["Hello", "Help"], [[5, 6, 7], [5, 6, 8, 9]]])
def test_echo_reports_the_prompts_log_probabilities(client, reference, expected, prompt):
    """Every choice of every prompt has them in OpenAI's form, complete and streamed."""
    many = isinstance(prompt[0], list) or isinstance(prompt, list) and isinstance(prompt[0], str)
    prompts = prompt if many else [prompt]
    options = {"temperature": 0, "n": 2, "echo": True, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    ask = lambda **more: client.completions.create(model="tiny", prompt=prompt, **options | {"max_tokens": 3} | more)
    answer, streamed = ask(), {}
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            text, rows = streamed.setdefault(choice.index, ("", []))
            streamed[choice.index] = text + choice.text, rows + (entries(choice.logprobs) if choice.logprobs else [])
    # A prompt counts once for all its choices.
    assert answer.usage.prompt_tokens == sum(map(len, prompts)) and answer.usage.completion_tokens == 6 * len(prompts)
    for index, choice in enumerate(answer.choices):
        one = prompts[index // 2]
        ids = reference.text.encode(one) if isinstance(one, str) else one
        text = one if isinstance(one, str) else reference.text.decode(one)
        generated = reference.tokens(ids, 3)
        rows, names = expected([*ids, *generated]), [reference.text.backend.id_to_token(t) for t in (*ids, *generated)]
        assert choice.text == text + reference.text.decode(generated) and choice.logprobs.tokens == names
        first, *rest = entries(choice.logprobs)
        assert first == (names[0], None, None, 0)
        offsets = np.cumsum([0, *(len(reference.text.decode([token])) for token in (*ids, *generated))])
        for position, (name, logprob, top, offset) in enumerate(rest):
            row, token = rows[position], (*ids, *generated)[position + 1]
            assert logprob == pytest.approx(row[token], abs=CLOSE) and offset == offsets[position + 1]
            likeliest = {reference.text.backend.id_to_token(int(t)): row[t] for t in np.argsort(-row, kind="stable")[:2]}
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


def test_the_stop_token_has_a_log_probability(client, reference):
    bias = {str(reference.text.eos[0]): 100}
    ask = lambda **more: client.completions.create(model="tiny", prompt="Hello", logprobs=1, logit_bias=bias, **more)
    logprobs = ask(max_tokens=1, echo=True).choices[0].logprobs
    assert logprobs.tokens == [*"Hello", "</s>"] and logprobs.text_offset[-1] == 5
    assert ask(max_tokens=1).choices[0].logprobs.tokens == []


def test_offsets_of_tokens_are_those_of_their_characters():
    """Space belongs to the next word, and special tokens have no characters."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<s>"])}, []))
    words.add_special_tokens(["<s>"])
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    words.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])]
    )
    assert Tokenizer(words).offsets("a bé!") == [0, 0, 1, 2, 3, 3, 4]
    assert Tokenizer(words).offsets([]) == []


def test_without_tokens_only_the_prompt_is_read(client):
    """A later request finds the prompt in the cache."""
    prompt = "read this one before"
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("", "length", 0)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= len(prompt) - 1
