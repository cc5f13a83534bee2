"""Limits before a request is queued: its size, its client's share, and the Host header."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.byte_limit import ByteLimit
from castiron.pipelines.api.model_api import COUNTED, Limits
from castiron.pipelines.api.openai.chat import MAX_TOKENIZE_CHARACTERS
from castiron.pipelines.api.openai.records import MAX_BIASES
from castiron.pipelines.server.app import Access, open_app
from castiron.pipelines.server.http_server import listen
from castiron.pipelines.text.tokenizer import LONG, encode_text
from tests.api.test_fuzz_requests import REQUESTS
from tests.support.served import LETTERS, SPECIAL, tokenizer

BODY = {"prompt": "Hello there, hello there", "max_tokens": 1, "temperature": 0}


def test_rejects_expensive_requests_before_their_cost(path):
    with TestClient(open_app(path, threads=1, limits=Limits(body_bytes=2_500_000))) as client:

        def refused(body: dict | bytes, url: str = "/v1/completions") -> str:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            start = time.process_time()
            response = client.post(url, headers={"Content-Type": "application/json"}, **given)
            assert response.status_code == 400 and time.process_time() - start < 1, response.text
            return response.json()["error"]["message"]

        long = "a" * (COUNTED + 1)
        assert "the prompt has 100001 characters; shorten to 630 or fewer" in refused({"prompt": long})
        assert "the messages have 100001" in refused({"messages": [{"role": "user", "content": long}]}, "/v1/chat/completions")
        assert "at most 1024 items" in refused({**BODY, "logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}})
        assert "has 1000001 characters; the limit is 1000000" in refused(
            {"content": "a" * (MAX_TOKENIZE_CHARACTERS + 1)}, "/tokenize"
        )
        assert len(refused({"x" * 10**6: 1})) < 1100 > len(refused({**BODY, "stop": ["a"], "n": 10**6}))
        assert "messages.0" in refused(b'{"messages":[' + b"{}," * 60_000 + b"{}]}", "/v1/chat/completions")
        assert "prompt must be" in refused(b'{"prompt":[' + b"-1," * 800_000 + b"1]}")
        assert "the prompt has 600000 tokens" in refused({"prompt": [5] * 600_000, "echo": True, "logprobs": 1})
        callers = [{"type": "function", "name": "f", "allowed_callers": [5] * 600_000}]
        assert "tools.0.allowed_callers.0" in refused({"input": "x", "tools": callers}, "/v1/responses")
        assert "--scheduling-policy priority" in refused({**BODY, "priority": 1})
        assert "priority" in refused({**BODY, "priority": 2**60})
        assert client.post("/v1/completions", json={**BODY, "priority": 0}).status_code == 200


HI = [{"role": "user", "content": "hi"}]
KEYS = {f"k{i}": 1 for i in range(250_000)}
# Bodies of up to 4 MB that take between 0.4 and 5 seconds of the event loop without limits.
HOSTILE = {
    "unknown keys": {"messages": HI, **KEYS},
    "unknown keys of an option": {"messages": HI, "stream_options": KEYS},
    "unknown keys of a message": {"messages": [{"role": "user", "content": "hi", **KEYS}]},
    "biases": {"messages": HI, "logit_bias": {str(i): 1 for i in range(250_000)}},
    "nested prompts": {"prompt": [[[1]]] * 500_000},
    "tool properties": {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": KEYS}}]},
    "as many unknown keys as are parsed": {"messages": HI, **{f"k{i}": 1 for i in range(65_000)}},
    "prompts of ids": {"prompt": [[1] * 15_000] * 128},
}


@pytest.fixture(scope="module")
def front(path):
    return open_app(path, threads=1)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_takes_little_time_and_none_of_the_event_loop(front, body):
    """Measures CPU seconds of the event loop's thread and of all threads."""
    parts = [json.dumps(body, separators=(",", ":")).encode()]
    assert len(parts[0]) < 4_000_000
    answered = []

    async def receive() -> dict:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await asyncio.Event().wait()

    async def send(message) -> None:
        answered.append(message)

    async def ask() -> tuple[float, float]:
        url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": url, "raw_path": b"", "query_string": b"", "headers": []}
        start = time.thread_time(), time.process_time()
        await front(scope, receive, send)
        return time.thread_time() - start[0], time.process_time() - start[1]

    of_loop, of_all = asyncio.run(ask())
    assert answered[0]["status"] == 400
    assert of_loop < 0.05 and of_all < 0.4, (of_loop, of_all)


@pytest.mark.parametrize("kind", [kind for kind, _ in REQUESTS.values()], ids=lambda kind: kind.__name__)
def test_a_list_of_invalid_values_has_few_errors(kind):
    """Validation stops early, because a million errors would take seconds."""
    bodies = [lambda invalid, name=name: {name: invalid} for name in kind.model_fields]
    bodies += [lambda invalid, inside=inside: {"messages": [{"role": "user", inside: invalid}], "input": [{"role": "user", inside: invalid}]}
               for inside in ("content", "summary", "tool_calls")]  # fmt: skip
    for url in bodies:
        for invalid in ([1.5] * 3000, [{}] * 3000, [None] * 3000, {"a": [1.5] * 3000}):
            try:
                kind.model_validate_json(json.dumps(url(invalid)))
            except ValidationError as error:
                assert error.error_count() < 100, (error.errors()[0]["loc"], error.error_count())


def test_a_priority_server_accepts_priorities(path):
    with TestClient(open_app(path, threads=1, limits=Limits(priorities=True))) as client:
        assert client.post("/v1/completions", json={**BODY, "priority": -5}).status_code == 200


def test_a_local_server_rejects_unknown_host_names(path):
    with TestClient(open_app(path, threads=1, local=True), base_url="http://localhost") as client:
        assert client.get("/v1/models").status_code == 200
        for url in ("/v1/models", "/", "/health"):
            refused = client.get(url, headers={"Host": "evil.example"})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "unknown_host"


def test_connections_have_no_delay():
    """With Nagle's algorithm, data after the headers would wait 40 ms for an acknowledgement."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_encoding_a_long_text_releases_the_interpreter():
    """Another thread encodes the text, and this thread runs meanwhile."""
    text = "".join(LETTERS[i * i % 90 + 1] for i in range(10 * LONG))
    made, known = tokenizer(), {letter: i + len(SPECIAL) for i, letter in enumerate(LETTERS)}
    with ThreadPoolExecutor(1) as pool:
        found, turns = pool.submit(encode_text, made, text, None, False), 0
        while not found.done():
            time.sleep(0.001)
            turns += 1
    assert found.result().ids == [known[letter] for letter in text]
    assert turns > 5


def test_a_client_is_its_key_or_else_its_network():
    def client(address: str, key: str = "") -> str:
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        return Access(("a", "b")).client({"headers": headers, "client": (address, 1)})

    assert client("192.0.2.1", "b") == "key 1" == client("192.0.2.2", "b")
    assert client("192.0.2.1", "c") == client("192.0.2.1") == "192.0.2.1" != client("192.0.2.2")
    assert client("2001:db8::1") == client("2001:db8::ffff:1") != client("2001:db8:0:1::1")
    assert Access(("a",)).key({"headers": [(b"authorization", b"bearer a")]}) == 0


def test_a_local_server_rejects_hosts_that_a_site_could_have():
    def may(host: str | None, keys=(), origins=(), local=True) -> bool:
        headers = [] if host is None else [(b"host", host.encode())]
        return Access(keys, origins, local=local).is_host_allowed({"headers": headers})

    for host in (None, "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "llm.localhost", "castiron", "192.168.1.5"):
        assert may(host), host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "a.b."):
        assert not may(host), host
        assert may(host, keys=("k",)) and may(host, origins=("*",)) and may(host, local=False)
    assert may("llm.example.org", origins=("https://llm.example.org",))


def test_bodies_in_flight_are_limited_for_all_and_for_one_client():
    bodies = ByteLimit("bodies", 100, 60)
    first, second, third = bodies.share("a"), bodies.share("a"), bodies.share("b")
    first.take(40)
    second.take(20)
    for body, count, message in ((second, 1, "60 bytes for this client"), (third, 41, "100 bytes for all clients")):
        with pytest.raises(ApiError, match=message):
            body.take(count)
    third.take(40)
    for body in (first, second, third):
        body.release()
        body.release()
    assert bodies.used == 0 and not bodies.clients


def test_a_request_without_memory_for_a_thread_gets_503(path, monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    with TestClient(open_app(path, threads=1)) as client:
        monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", fail)
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory" and answer.headers["Retry-After"]
        monkeypatch.undo()
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
