"""What a request may cost before it is one: bodies, texts, biases, priorities, and what keys tell each other."""

from __future__ import annotations

import json
import time

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from castiron.pipelines.serve.app import open_app
from castiron.pipelines.serve.schemas import MAX_BIASES
from castiron.pipelines.serve.text_api import COUNTED, MOST_COUNTED, Limits
from tests.pipelines.served import bundle
from tests.pipelines.test_serve_fuzz import WHOLE

BODY = {"prompt": "Hello there, hello there", "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return bundle(tmp_path_factory.getbasetemp())


def cached(client: TestClient, key: str) -> int:
    answer = client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_costs_too_much_is_refused_before_it_costs(path):
    with TestClient(open_app(path, threads=1, limits=Limits(body_bytes=2_500_000))) as client:

        def refused(body: dict | bytes, place: str = "/v1/completions") -> str:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            start = time.process_time()
            response = client.post(place, headers={"Content-Type": "application/json"}, **given)
            assert response.status_code == 400 and time.process_time() - start < 1, response.text
            return response.json()["error"]["message"]

        long = "a" * (COUNTED + 1)
        assert "630 characters fit at most; the prompt has 100001" in refused({"prompt": long})
        assert "the messages have 100001" in refused({"messages": [{"role": "user", "content": long}]}, "/v1/chat/completions")
        assert "at most 1024 items" in refused({**BODY, "logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}})
        assert "content has 1000001 characters, and 1000000 at most" in refused(
            {"content": "a" * (MOST_COUNTED + 1)}, "/tokenize"
        )
        assert len(refused({"x" * 10**6: 1})) < 1100 > len(refused({**BODY, "stop": ["a"], "n": 10**6}))
        assert "messages.0" in refused(b'{"messages":[' + b"{}," * 800_000 + b"{}]}", "/v1/chat/completions")
        assert "prompt must be" in refused(b'{"prompt":[' + b"-1," * 800_000 + b"1]}")
        assert "the prompt has 600000 tokens" in refused({"prompt": [5] * 600_000, "echo": True, "logprobs": 1})
        callers = [{"type": "function", "name": "f", "allowed_callers": [5] * 600_000}]
        assert "tools.0.allowed_callers.0" in refused({"input": "x", "tools": callers}, "/v1/responses")
        assert "at most 16384 items" in refused({"input": [{"role": "system", "content": ""}] * 60_000}, "/v1/responses")
        assert "--scheduling-policy priority" in refused({**BODY, "priority": 1})
        assert "priority" in refused({**BODY, "priority": 2**60})
        assert client.post("/v1/completions", json={**BODY, "priority": 0}).status_code == 200


@pytest.mark.parametrize("kind", [kind for kind, _ in WHOLE.values()], ids=lambda kind: kind.__name__)
def test_of_a_list_that_is_wrong_throughout_few_errors_are_found(kind):
    """Each of a million would be made before the first is told; and of what is right only as much is read as has room."""
    places = [lambda bad, name=name: {name: bad} for name in kind.model_fields]
    places += [lambda bad, inside=inside: {"messages": [{"role": "user", inside: bad}], "input": [{"role": "user", inside: bad}]}
               for inside in ("content", "summary", "tool_calls")]  # fmt: skip
    for place in places:
        for bad in ([1.5] * 3000, [{}] * 3000, [None] * 3000, {"a": [1.5] * 3000}):
            try:
                kind.model_validate_json(json.dumps(place(bad)))
            except ValidationError as error:
                assert error.error_count() < 100, (error.errors()[0]["loc"], error.error_count())


def test_a_server_of_priorities_takes_them(path):
    with TestClient(open_app(path, threads=1, limits=Limits(priorities=True))) as client:
        assert client.post("/v1/completions", json={**BODY, "priority": -5}).status_code == 200


def test_keys_share_beginnings_only_where_that_is_asked(path):
    for shared in (False, True):
        with TestClient(open_app(path, threads=1, api_keys=["a", "b"], shared_prefixes=shared)) as client:
            assert cached(client, "a") == 0 < cached(client, "a")
            assert (cached(client, "b") > 0) == shared and cached(client, "b") > 0


def test_a_server_of_this_machine_is_not_asked_by_another_name(path):
    with TestClient(open_app(path, threads=1, local=True), base_url="http://localhost") as client:
        assert client.get("/v1/models").status_code == 200
        for place in ("/v1/models", "/", "/health"):
            refused = client.get(place, headers={"Host": "evil.example"})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "unknown_host"
