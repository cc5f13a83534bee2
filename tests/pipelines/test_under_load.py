"""What requests at once take from each other: turns, memory, and work that grows with all of it."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from castiron.pipelines.generation.sampling import log_probabilities
from castiron.pipelines.generation.scheduler import ModelFailed
from castiron.pipelines.generation.sequence import Delta, Finished, Token
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.serve import kept
from castiron.pipelines.serve.api import Api
from castiron.pipelines.serve.app import open_app
from castiron.pipelines.serve.clients import ASKER, Asker
from castiron.pipelines.serve.embeddings import EmbeddingsEngine
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.replies import ChatReply
from castiron.pipelines.serve.schemas import Message
from castiron.pipelines.serve.text_api import Limits
from castiron.pipelines.serve.turns import Turns
from castiron.vmfb.program import FileChanged
from tests.pipelines.served import CONTEXT, TEMPLATE, bundle, tokenizer

BODY = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return bundle(tmp_path_factory.getbasetemp())


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=25))
def test_clients_take_turns_and_who_leaves_takes_none(asked):
    """Between two turns of a client that waits every other one that waits has one; one is taken at a time, and none is lost."""
    order: list[int] = []

    async def one(turns: Turns, client: int) -> None:
        async with turns.of(str(client)):
            assert not turns.inside
            turns.inside = True
            await asyncio.sleep(0)
            turns.inside = False
            order.append(client)

    async def run() -> list[int]:
        turns = Turns()
        turns.inside = False
        tasks = [asyncio.create_task(one(turns, client)) for client, _ in asked]
        await asyncio.sleep(0)
        for task, (_, leaves) in list(zip(tasks, asked))[1:]:
            if leaves:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One more finds it free.
        async with asyncio.timeout(1):
            await one(turns, 9)
        return [client for task, (client, _) in zip(tasks, asked) if not task.cancelled()]

    stayed = asyncio.run(run())
    assert sorted(order[:-1]) == sorted(stayed) and order[-1] == 9
    left = {client: stayed.count(client) for client in stayed}
    # The first one had its turn before anybody waited.
    for i, client in enumerate(order[:-1]):
        left[client] -= 1
        if i:
            others = {other for other, count in left.items() if count and other != client}
            following = order[i + 1 : i + 1 + len(others)]
            assert set(following) == others


def test_one_who_is_given_a_turn_while_leaving_passes_it_on():
    async def run() -> None:
        turns, done = Turns(), []

        async def one(name: str) -> None:
            async with turns.of(name):
                done.append(name)

        holding = turns.of("a")
        await holding.__aenter__()
        tasks = [asyncio.create_task(one(name)) for name in "bc"]
        await asyncio.sleep(0)
        await holding.__aexit__(None, None, None)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == ["c"] and turns._holder is None and not turns._waiting

    asyncio.run(run())


def test_texts_of_one_client_do_not_keep_another_waiting():
    """Of 40 requests of four texts each and then one of another client's, that one's texts are every other."""
    order: list[str] = []

    def vector(text, dimensions):
        order.append(text.name)
        return np.zeros(1)

    async def ask(engine: EmbeddingsEngine, client: str, count: int) -> None:
        ASKER.set(Asker(client))
        texts = [SimpleNamespace(ids=[1], name=client) for _ in range(count)]
        assert len(await engine.vectors(texts, None)) == count

    async def run() -> None:
        counting = SimpleNamespace(embedded=lambda tokens: None)
        engine = EmbeddingsEngine(SimpleNamespace(vector=vector), 64, counting)
        many = [asyncio.create_task(ask(engine, "many", 4)) for _ in range(40)]
        await asyncio.sleep(0)
        begun = len(order)
        await ask(engine, "few", 4)
        assert order[begun:].count("many") <= 5 and engine.unfinished == 40
        await asyncio.gather(*many)
        assert engine.unfinished == 0 and not engine._under_way
        engine.stop()

    asyncio.run(run())


def test_weights_that_were_written_into_end_an_encoder_in_one_sentence():
    def vector(text, dimensions):
        raise FileChanged("weights.irpa was written into while it was in use")

    async def run() -> None:
        engine = EmbeddingsEngine(SimpleNamespace(vector=vector), 64, SimpleNamespace(embedded=lambda tokens: None))
        with pytest.raises(ModelFailed, match="was written into while it was in use"):
            await engine.vectors([SimpleNamespace(ids=[1])], None)
        assert isinstance(engine.lost, FileChanged) and not engine.healthy and not engine.unfinished
        engine.stop()

    asyncio.run(run())


def test_a_whole_answer_is_put_together_once():
    """However many pieces it comes in: their tokens are not copied for every piece."""

    class Counted(tuple):
        added = 0

        def __add__(self, other):
            Counted.added += 1
            return Counted(tuple.__add__(self, other))

        def __radd__(self, other):
            return self.__add__(other)

    pieces = [Delta(letter, Counted([Token(i, i)])) for i, letter in enumerate("What is said, in pieces")]
    joined = Delta.joined(pieces)
    assert joined.text == "What is said, in pieces" and [token.id for token in joined.tokens] == [*range(len(pieces))]
    api, sequence = Api.__new__(Api), SimpleNamespace(prompt=[1], tokens=[*joined.tokens], cached=0, thought_tokens=0)
    events = asyncio.Queue()
    for event in (*pieces, Finished("length")):
        events.put_nowait((sequence, event))
    reply = ChatReply("name", TokenBytes(tokenizer()), False)
    job = SimpleNamespace(reply=reply, sequences=[sequence], prompts=[0], ended=[], events=events)
    answer = asyncio.run(api.whole(job))
    assert answer["choices"][0]["message"]["content"] == joined.text and Counted.added == 0


@pytest.mark.parametrize("top", [0, 5, 20])
def test_what_is_counted_for_log_probabilities_is_what_they_take(top):
    """From the model's logits to the bytes of the answer; and not many times as much."""
    count, logits = 300, np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    reply = ChatReply("name", lambda token: b"%8d" % token, True)
    tracemalloc.start()
    tokens = [Token(i % 200, i, *log_probabilities(logits + np.float32(i), i % 200, top)) for i in range(count)]
    choice = reply.choice(0, Delta.joined([Delta("x", (token,)) for token in tokens]), Finished("length"))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    # As text, as bytes, and where they are sent from.
    held += 3 * len(json.dumps(choice))
    assert held <= count * (kept.TOKEN + kept.LIKELY * top) <= 2 * held


def test_answers_have_room_for_what_they_keep_or_are_refused(path):
    """What can never be is 400 and says what to ask for, what cannot be now 429; nothing stays behind."""
    one = kept.TOKEN + 20 * kept.LIKELY
    with TestClient(open_app(path, threads=1, limits=Limits(kept_bytes=80 * one))) as client:
        api = client.app.api

        def ask(**more):
            response = client.post("/v1/chat/completions", json={**BODY, **more})
            assert api.kept.total == 0 and not api.kept.held
            return response

        full = {"logprobs": True, "top_logprobs": 20}
        assert ask(**full, max_tokens=40).status_code == 200
        assert ask(max_tokens=CONTEXT - 20).status_code == 200, "a plain answer keeps nothing"
        for more in ({"max_tokens": 41}, {"max_tokens": 20, "n": 3}, {}):
            response = ask(**full, **more)
            assert response.status_code == 400 and response.json()["error"]["code"] == "too_many_bytes"
            assert "max_tokens, n, top_logprobs" in response.json()["error"]["message"]
        body = {"prompt": "a" * 60, "echo": True, "logprobs": 5, "max_tokens": 0}
        assert client.post("/v1/completions", json={**body, "n": 1}).status_code == 200
        assert client.post("/v1/completions", json={**body, "prompt": ["a" * 60] * 9}).status_code == 400
        assert api.kept.total == 0
        share = api.kept.of("testclient")
        share.take(25 * one)
        response = client.post("/v1/chat/completions", json={**BODY, **full, "max_tokens": 20})
        assert response.status_code == 429 and response.headers["Retry-After"] and "this client's" in response.text
        assert client.post("/v1/chat/completions", json={**BODY, **full, "max_tokens": 15}).status_code == 200
        share.give_back()
        share.give_back()
        assert api.kept.total == 0 and not api.kept.held
        # A full queue gives back too.
        response = ask(**full, max_tokens=1, n=39, stream=True)
        assert response.status_code == 200
        assert 'reason="too_many_bytes"' in client.get("/metrics").text


def test_what_holds_texts_to_a_grammar_is_counted(path):
    """About what it takes, which grows with the schema; each answer has its own."""
    with TestClient(open_app(path, threads=1, limits=Limits(kept_bytes=10_000_000))) as client:
        api = client.app.api
        small, large = ({"enum": [f"{i} {'x' * 40}" for i in range(count)]} for count in (2, 3000))
        grammar = api.text.grammar(json_schema=large)
        assert 1.2e6 < grammar.nbytes < 1.4e6 and api.text.grammar(json_schema=small).nbytes < 1.01e6
        before = resident()
        held = [grammar.constraint() for _ in range(200)]
        assert resident() - before < len(held) * grammar.nbytes
        for schema, most in ((small, 4), (large, 3)):
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            for count, status in ((most, 200), (most + 1, 400)):
                response = client.post(
                    "/v1/chat/completions", json={**BODY, "response_format": form, "n": count, "max_tokens": 3}
                )
                assert response.status_code == status and api.kept.total == 0, response.text


def resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(path, monkeypatch):
    with TestClient(open_app(path, threads=1)) as client:
        api, rendered = client.app.api, []
        monkeypatch.setattr(api.text, "encode_chat", lambda *_, **__: rendered.append(1) or [1])
        for count, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
            given = [{"role": "user", "content": ""}] * count
            assert client.post("/v1/messages/count_tokens", json={"messages": given}).status_code == status, TEMPLATE
        assert len(rendered) == 1
        with pytest.raises(ApiError, match=f"{CONTEXT} tokens, and there are {CONTEXT + 1} messages"):
            api.check_count(CONTEXT + 1)


def test_who_keeps_the_renderer_busy_waits_for_the_others(path, monkeypatch):
    """One process renders templates: of one client's requests, which it is slow with, one at a time goes before another's."""
    with TestClient(open_app(path, threads=1)) as client:
        api, order = client.app.api, []

        async def ask(name: str) -> None:
            ASKER.set(Asker(name))
            await api.render([Message(role="user", content=name)])

        def slowly(messages):
            order.append(messages[0]["content"])
            time.sleep(0.01)
            return [1]

        async def run() -> None:
            many = [asyncio.create_task(ask("many")) for _ in range(20)]
            while not order:
                await asyncio.sleep(0)
            await ask("few")
            await asyncio.gather(*many)

        monkeypatch.setattr(api.text, "encode_chat", slowly)
        asyncio.run(run())
        assert order.count("many") == 20 and order.index("few") <= 2


def test_who_waits_for_the_renderer_may_leave_and_has_as_much_time_as_others(path, monkeypatch):
    """Who left is not rendered any more, nor is who had no time left; what is being rendered keeps its turn to its end."""
    front, rendered, inside = open_app(path, threads=1, limits=Limits(seconds=1)), [], []

    def slowly(messages, **_):
        rendered.append(messages[0]["content"])
        inside.append(len(inside))
        time.sleep(0.3 if rendered == ["at it"] else 0.1)
        assert inside.pop() == 0, "two at once"
        return [1]

    async def ask(words: str, stays: float) -> int:
        parts, statuses = [json.dumps({"messages": [{"role": "user", "content": words}]}).encode()], []

        async def receive() -> dict:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await asyncio.sleep(stays)
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            statuses.append(message.get("status"))

        place = "/v1/messages/count_tokens"
        scope = {"type": "http", "method": "POST", "path": place, "raw_path": b"", "query_string": b"", "headers": []}
        await front(scope, receive, send)
        return statuses[0]

    async def run() -> list[int]:
        return await asyncio.gather(ask("at it", 0.05), ask("behind", 0.05), *(ask(str(i), 9) for i in range(9)))

    monkeypatch.setattr(front.api.text, "encode_chat", slowly)
    at_it, behind, first, *_, last = asyncio.run(run())
    assert (at_it, behind, first, last) == (499, 499, 200, 504)
    assert rendered[:2] == ["at it", "0"] and "behind" not in rendered and "8" not in rendered
