"""Memory that concurrent requests reserve, and the work of long conversations."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from castiron.pipelines.api import byte_limit
from castiron.pipelines.api.openai.records import ChatRequest
from castiron.pipelines.api.openai.replies import ChatReply
from castiron.pipelines.engine.request import Finished
from castiron.pipelines.engine.sampling import log_probabilities
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text.text_output import Delta, TextToken
from tests.support.served import CONTEXT

BODY = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("top", [0, 5, 20])
def test_reserved_bytes_bound_the_memory_of_log_probabilities(top):
    """The reserved bytes are at least the bytes used, and at most twice as many."""
    count, logits = 300, np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    reply = ChatReply("name", lambda token: b"%8d" % token, ChatRequest(messages=BODY["messages"], logprobs=True))
    tracemalloc.start()
    tokens = [TextToken(i % 200, *log_probabilities(logits + np.float32(i), i % 200, top), offset=i) for i in range(count)]
    choice = reply.choice(0, Delta.joined([Delta("x", (token,)) for token in tokens]), Finished("length"))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    # JSON exists as text, as bytes and in the send buffer.
    used += 3 * len(json.dumps(choice))
    assert used <= count * (byte_limit.TOKEN_BYTES + byte_limit.TOP_BYTES * top) <= 2 * used


def test_answers_reserve_memory_or_are_rejected(path, monkeypatch):
    """A request that can never fit gets 400, one that does not fit now 429."""
    one = byte_limit.TOKEN_BYTES + 20 * byte_limit.TOP_BYTES
    monkeypatch.setattr(byte_limit, "total_bytes", lambda: byte_limit.PART * 80 * one)
    with TestClient(open_app(path, threads=1)) as client:
        api = client.app.api

        def ask(**more):
            response = client.post("/v1/chat/completions", json={**BODY, **more})
            assert api.retained.used == 0 and not api.retained.clients
            return response

        full = {"logprobs": True, "top_logprobs": 20}
        assert ask(**full, max_tokens=40).status_code == 200
        assert ask(max_tokens=CONTEXT - 20).status_code == 200, "a plain answer reserves nothing"
        for more in ({"max_tokens": 41}, {"max_tokens": 20, "n": 3}, {}):
            response = ask(**full, **more)
            assert response.status_code == 400 and response.json()["error"]["code"] == "too_many_bytes"
            assert "max_tokens, n, top_logprobs" in response.json()["error"]["message"]
        body = {"prompt": "a" * 60, "echo": True, "logprobs": 5, "max_tokens": 0}
        assert client.post("/v1/completions", json={**body, "n": 1}).status_code == 200
        assert client.post("/v1/completions", json={**body, "prompt": ["a" * 60] * 9}).status_code == 400
        assert api.retained.used == 0
        share = api.retained.share("testclient")
        share.take(25 * one)
        response = client.post("/v1/chat/completions", json={**BODY, **full, "max_tokens": 20})
        assert response.status_code == 429 and response.headers["Retry-After"] and "this client" in response.text
        assert client.post("/v1/chat/completions", json={**BODY, **full, "max_tokens": 15}).status_code == 200
        share.release()
        share.release()
        assert api.retained.used == 0 and not api.retained.clients
        # A request that a full queue rejects releases its memory too.
        response = ask(**full, max_tokens=1, n=39, stream=True)
        assert response.status_code == 200
        assert 'reason="too_many_bytes"' in client.get("/metrics").text


def test_reserved_bytes_bound_the_memory_of_grammars(path, monkeypatch):
    """A grammar's bytes grow with its schema, and each answer reserves them."""
    monkeypatch.setattr(byte_limit, "total_bytes", lambda: byte_limit.PART * 10_000_000)
    with TestClient(open_app(path, threads=1)) as client:
        api = client.app.api
        small, large = ({"enum": [f"{i} {'x' * 40}" for i in range(count)]} for count in (2, 3000))
        grammar = api.tokenizer.grammar(json_schema=large)
        assert 1.2e6 < grammar.nbytes < 1.4e6 and api.tokenizer.grammar(json_schema=small).nbytes < 1.01e6
        before = resident()
        used = [grammar.constraint() for _ in range(200)]
        assert resident() - before < len(used) * grammar.nbytes
        for schema, limit in ((small, 4), (large, 3)):
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            for count, status in ((limit, 200), (limit + 1, 400)):
                response = client.post(
                    "/v1/chat/completions", json={**BODY, "response_format": form, "n": count, "max_tokens": 3}
                )
                assert response.status_code == status and api.retained.used == 0, response.text


def resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(path, monkeypatch):
    with TestClient(open_app(path, threads=1)) as client:
        api, rendered = client.app.api, []
        monkeypatch.setattr(api.tokenizer, "encode_chat", lambda *_, **__: rendered.append(1) or [1])
        for count, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
            given = [{"role": "user", "content": ""}] * count
            response = client.post("/v1/messages/count_tokens", json={"messages": given})
            assert response.status_code == status and (status == 200 or f"there are {count} messages" in response.text)
        assert len(rendered) == 1
