"""`castiron serve` in a separate process, with the openai package and curl as clients."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess

import numpy as np
import openai
import pytest

from tests.support.served import CONTEXT, MESSAGES, RENDERED, SLOTS, served

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


def test_completions_of_multiple_prompts_and_choices(client, reference):
    ids = reference.text.encode("abc")
    for prompt in (["one", "two two"], [ids, ids[:2]]):
        answer = complete(client, prompt, 12, n=2, echo=True)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice, one in zip(answer.choices, [prompt[0], prompt[0], prompt[1], prompt[1]]):
            text = one if isinstance(one, str) else reference.text.decode(one)
            assert choice.text == text + reference.generate(one, 12)
        # A prompt counts once for all its choices.
        assert answer.usage.prompt_tokens == len(prompt[0]) + len(prompt[1]) and answer.usage.completion_tokens == 48
    assert complete(client, ids, 5).choices[0].text == reference.generate(ids, 5)
    assert complete(client, "abc", openai.omit).usage.completion_tokens == 16


def test_streamed_choices_have_their_index(client, reference):
    texts = ["one: ", "two: "]
    found = ["", "", "", ""]
    for chunk in complete(client, texts, 20, n=2, stream=True, echo=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == [text + reference.generate(text, 20) for text in texts for _ in range(2)]


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
    assert texts(seed=-1) == texts(seed=-1)
    # The default temperature samples.
    assert len({texts()[0] for _ in range(4)}) == 4
    top = {"seed": 1, "temperature": 2, "extra_body": {"top_k": 1}}
    assert texts(**top) == texts(temperature=0)


def test_biases_and_penalties_change_the_choice(client, reference):
    token = reference.text.backend.token_to_id("x")
    assert chat(client, 6, logit_bias={str(token): 100}).choices[0].message.content == "x" * 6
    penalised = chat(client, 6, logit_bias={str(token): 60}, presence_penalty=2, frequency_penalty=2).choices[0].message.content
    assert penalised.startswith("x")
    frequent = chat(client, 60, frequency_penalty=2).choices[0].message.content
    assert frequent != chat(client, 60).choices[0].message.content
    repeat = past_eos(60)
    repeat["extra_body"]["repeat_penalty"] = 1.8
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **repeat).choices[0].message.content
    assert len(set(answer)) > len(set(reference.generate(RENDERED, 60)))


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


def test_a_shared_prefix_is_cached_and_changes_nothing(client, reference):
    system = "A system message that is shared by many chats, number 7. "
    cached = []
    for question in ("First?", "Second one?", "Third?"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, **past_eos(10))
        assert answer.choices[0].message.content == reference.generate(f"s:{system};u:{question};a:", 10)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    shared = len(f"s:{system};u:")
    assert cached[0] < shared <= cached[1] and shared <= cached[2]


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
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
             "prefix_cache_queries_total", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count")  # fmt: skip
    before = [metric(client, f"vllm:{name}") for name in names]
    chat(client, 7, n=2)
    after = [metric(client, f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after)] == [2 * len(RENDERED), 14, 2, 2 * len(RENDERED), 12, 2]
    assert metric(client, "vllm:num_requests_running") == metric(client, "vllm:num_requests_waiting") == 0
    assert metric(client, "castiron_slots") == SLOTS
    page = client.get("../metrics", cast_to=str)
    assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}' in page
    for line in page.splitlines():
        assert line.startswith("# ") or math.isfinite(float(line.rpartition(" ")[2])), line


def curl(*arguments: str) -> tuple[int, str]:
    """Return status and body."""
    command = ["curl", "-sS", "-N", "--max-time", "30", "-w", "\n%{http_code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


JSON = ("-H", "Content-Type: application/json")


def test_tokenize_and_detokenize_are_each_others_inverse(server, reference):
    text = "Hello, Wörld <s>"
    status, body = curl(f"{server.url}/tokenize", *JSON, "-d", json.dumps({"content": text}))
    tokens = json.loads(body)["tokens"]
    assert status == 200 and tokens == reference.text.encode(text) and json.loads(body)["count"] == len(tokens)
    status, body = curl(f"{server.url}/detokenize", *JSON, "-d", json.dumps({"tokens": tokens}))
    assert status == 200 and json.loads(body)["content"] == text
    status, body = curl(f"{server.url}/tokenize", *JSON, "-d", json.dumps({"messages": MESSAGES}))
    assert json.loads(body)["tokens"] == reference.text.encode(RENDERED)
    for wrong, message in (({"tokens": [5, 999]}, "999"), ({"tokens": ["a"]}, "tokens.0"), ({}, "you must provide tokens")):
        status, body = curl(f"{server.url}/detokenize", *JSON, "-d", json.dumps(wrong))
        assert status == 400 and message in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("/health",), 200, '"ok"'),
        (("/nothing",), 404, "no such path"),
        (("/v1/chat/completions",), 405, "does not support that method"),
        (("/v1/chat/completions", "-d", "{}"), 400, "you must provide messages"),
        (("/v1/chat/completions", "-H", "Origin: http://a.b", "-d", "{}"), 415, "Content-Type: application/json"),
        (("/v1/chat/completions", *JSON, "-d", "{"), 400, "not valid JSON"),
        (("/v1/chat/completions", *JSON, "-d", '{"messages": 5}'), 400, "messages"),
        (("/v1/completions", *JSON, "-d", '{"prompt": ""}'), 400, "no tokens"),
        (("/v1/chat/completions", *JSON, "-H", "Content-Length: 99999999", "-d", "{}"), 413, "4000000 bytes"),
        (("/v1/completions", *JSON, "-H", "Transfer-Encoding: chunked", "-d", " " * 5000), 400, "JSON"),
    ],
)
def test_every_status_has_openais_shape(server, arguments, status, message):
    found, body = curl(f"{server.url}{arguments[0]}", *arguments[1:])
    assert found == status and message in body
    assert found == 200 or set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
