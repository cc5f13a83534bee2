"""A repetition loop ends an answer; a few repeated lines do not."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine import request as requests
from castiron.pipelines.engine.request import MAX_PERIOD, MIN_REPEATS, MIN_TOKENS, RepetitionDetector, Request
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text import text_output
from tests.support import toy_text

bundle = toy_text.bundle

TOKEN = st.integers(0, 9)


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=40), st.lists(TOKEN, min_size=1, max_size=MAX_PERIOD + 2), st.integers(1, 200))
def test_detects_loops_by_their_definition(before, period, repeats):
    def is_loop(end: int) -> bool:
        for period in range(1, MAX_PERIOD + 1):
            size = max(MIN_TOKENS, MIN_REPEATS * period)
            if end >= size and all(tokens[i] == tokens[i - period] for i in range(end - size + period, end)):
                return True
        return False

    tokens, detector = (before + period * repeats)[:1200], RepetitionDetector()
    detected = next((count for count, token in enumerate(tokens, 1) if detector.add(token)), None)
    assert detected == next((end for end in range(1, len(tokens) + 1) if is_loop(end)), None)


@pytest.fixture
def soon(monkeypatch):
    """Detect a loop after six tokens: the toy's context is 24."""
    monkeypatch.setattr(requests, "MIN_TOKENS", 6)
    monkeypatch.setattr(requests, "MIN_REPEATS", 3)


def test_a_field_of_the_request_ends_loops(soon, bundle):
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 15}
    # Biases exceed the toy's large logits.
    body["logit_bias"] = {str(token): 100 if token == 3 else -100 for token in range(32)}
    with TestClient(open_app(bundle, threads=1)) as client:
        for more, ends, reason in (({}, False, "length"), ({"repetition_stop": True}, True, "stop")):
            answer = client.post("/v1/completions", json={**body, **more}).json()
            (choice,) = answer["choices"]
            assert (answer["usage"]["completion_tokens"] < 15) == ends and choice["finish_reason"] == reason
            assert choice.get("stop_reason") == ("repetition" if more else None)
            streamed = client.post("/v1/completions", json={**body, **more, "stream": True}).text
            last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))["choices"][0]
            assert last["finish_reason"] == reason and last.get("stop_reason") == choice.get("stop_reason")


def test_chat_ends_loops_by_default_and_run_does_not(bundle, monkeypatch):
    asked = []

    class Asked(Request):
        def __init__(self, *arguments, **options):
            asked.append(options["repetition_stop"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(text_output, "Request", Asked)
    for argv in (["chat", bundle], ["chat", bundle, "--no-repetition-stop"], ["run", bundle, "ab"],
                 ["run", bundle, "ab", "--repetition-stop"]):  # fmt: skip
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\n")))
        assert cli.main([*argv, "-n", "1"]) == 0
    assert asked == [True, False, False, True]
