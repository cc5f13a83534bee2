"""`castiron serve` in a separate process, with the openai package and curl as clients."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from tests.support.served import CONTEXT, MESSAGES, RENDERED, SLOTS, ask, served

MODEL = "tiny"


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    with served(path, tmp_path_factory.mktemp("serve") / "log") as found:
        yield found
    assert "Traceback" not in found.errors, found.errors


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def past_eos(count: int, **more) -> dict:
    """Return the options of a greedy request for exactly `count` tokens."""
    return {"temperature": 0, "max_tokens": count, "extra_body": {"ignore_eos": True}, **more}


def chat(client, count: int, **more):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **past_eos(count, **more))


def complete(client, prompt, count: int, **more):
    return client.completions.create(model=MODEL, prompt=prompt, **past_eos(count, **more))


def test_a_chat_equals_the_librarys_text(client, reference):
    answer = chat(client, 40)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == reference.generate(RENDERED, 40)
    assert answer.choices[0].finish_reason == "length"
    assert complete(client, "abc", openai.omit).usage.completion_tokens == 16, "the default of completions"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(RENDERED), 40, len(RENDERED) + 40)


def test_a_stream_joins_to_the_complete_answer(client, reference):
    chunks = list(chat(client, 30, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    *generated, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in generated)
    assert generated[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in generated) == reference.generate(RENDERED, 30)
    assert [c.choices[0].finish_reason for c in generated if c.choices[0].finish_reason] == ["length"]
    # Usage is only sent on request.
    assert all(chunk.choices for chunk in chat(client, 2, stream=True))


def test_a_stream_comes_while_it_is_made(path, tmp_path):
    """The first event arrives while the model is paused after its first step."""
    (pause := tmp_path / "held").touch()
    with served(path, tmp_path / "log", pause=pause) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            stream = chat(client, 100, stream=True)
            next(stream)
            assert metric(client, "vllm:num_requests_running") == 1
            pause.unlink()
            assert len(list(stream)) > 60


def test_log_probabilities_of_a_chat_are_the_models(client, reference):
    answer = chat(client, 8, logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    logits = reference.logits(RENDERED).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    likeliest = np.argsort(-expected, kind="stable")[:5]
    assert [entry.logprob for entry in content[0].top_logprobs] == pytest.approx(list(expected[likeliest]), abs=1e-4)
    assert [entry.token for entry in content[0].top_logprobs] == [reference.text.decode([t]) for t in likeliest]
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    streamed = [
        c.choices[0].logprobs for c in chat(client, 8, logprobs=True, top_logprobs=5, stream=True) if c.choices[0].logprobs
    ]
    assert [e.token for l in streamed for e in l.content] == [e.token for e in content]
    assert chat(client, 2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_the_end_of_text_token_ends_the_text(client, reference):
    (end,) = reference.text.eos
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, logit_bias={str(end): 100}, logprobs=True
    )
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 0 and answer.choices[0].logprobs.content == []
    assert chat(client, 3, logit_bias={str(end): 100}).usage.completion_tokens == 3, "ignore_eos goes on"


def test_seeds_repeat_and_choices_differ(client):
    def texts(**more) -> list[str]:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, **more)
        return [choice.message.content for choice in answer.choices]

    assert texts(seed=5, n=3) == texts(seed=5, n=3) and len(set(texts(seed=5, n=3))) == 3
    assert texts(seed=5) == texts(seed=5) != texts(seed=6)
    assert texts(seed=-1) != texts(seed=-1)
    # The default temperature samples.
    assert len({texts()[0] for _ in range(4)}) == 4


def test_concurrent_requests_get_the_text_of_a_single_one(server, reference):
    """There are more requests than slots, of many lengths, and some clients disconnect."""
    prompts = [("word " * (1 + 3 * i) + str(i))[: CONTEXT - 60] for i in range(3 * SLOTS)]

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(model=MODEL, prompt=prompts[i], stream=True, **past_eos(20 + 2 * i))
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].text
                    if i % 4 == 3 and len(text) > 5:
                        await stream.close()
                        break
                return text

            return await asyncio.gather(*map(one, range(len(prompts))))

    for i, text in enumerate(asyncio.run(all_of_them())):
        expected = reference.generate(prompts[i], 20 + 2 * i)
        assert expected.startswith(text) if i % 4 == 3 else text == expected


@pytest.mark.parametrize(
    ("count", "tokens", "message"),
    [(CONTEXT + 5, openai.omit, f"{CONTEXT + 5} tokens"), (100, 94, f"at most {CONTEXT - 99}"), (CONTEXT, 2, "at most 1")],
)
def test_past_the_context_is_a_400_with_the_numbers(client, count, tokens, message):
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, "x" * count, tokens)
    assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"
    assert message in error.value.message and str(CONTEXT) in error.value.message
    assert complete(client, "x" * CONTEXT, 1).usage.completion_tokens == 1


def metric(client: openai.OpenAI, name: str) -> float:
    """Return the value of one of the model's metrics."""
    text = client.get("../metrics", cast_to=str)
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{model_name="))


def test_metrics_count_what_was_done(client):
    before = metric(client, "vllm:generation_tokens_total")
    chat(client, 7, n=2)
    assert metric(client, "vllm:generation_tokens_total") - before == 14
    page = client.get("../metrics", cast_to=str)
    assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}' in page


def test_tokenize_and_detokenize_are_each_others_inverse(server, reference):
    text = "Hello, Wörld <s>"
    status, _, answer = ask(server.url, "/tokenize", {"content": text})
    tokens = answer["tokens"]
    assert status == 200 and tokens == reference.text.encode(text) and answer["count"] == len(tokens)
    status, _, answer = ask(server.url, "/detokenize", {"tokens": tokens})
    assert status == 200 and answer["content"] == text
    assert ask(server.url, "/tokenize", {"messages": MESSAGES})[2]["tokens"] == reference.text.encode(RENDERED)
    for wrong, message in (({"tokens": [5, 999]}, "999"), ({"tokens": ["a"]}, "tokens.0"), ({}, "you must provide tokens")):
        status, _, answer = ask(server.url, "/detokenize", wrong)
        assert status == 400 and message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("location", "body", "headers", "status", "message"),
    [
        ("/v1/chat/completions", None, {}, 405, "does not support that method"),
        ("/v1/chat/completions", b"{", {}, 400, "not valid JSON"),
        ("/v1/completions", {"prompt": ""}, {}, 400, "no tokens"),
        ("/v1/chat/completions", {}, {"Content-Length": "99999999"}, 413, "4000000 bytes"),
        ("/v1/completions", b" " * 5000, {"Transfer-Encoding": "chunked"}, 400, "JSON"),
    ],
)
def test_every_status_has_openais_shape(server, location, body, headers, status, message):
    found, _, answer = ask(server.url, location, body, headers=headers)
    assert found == status and message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
