"""An answer that goes round in a circle ends, and one that merely repeats itself does not."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from castiron.pipelines import cli
from castiron.pipelines.generation import generate, repetition
from castiron.pipelines.generation.repetition import LEAST, LONGEST, TIMES, Repetition
from castiron.pipelines.generation.sequence import Finished, Sequence
from castiron.pipelines.serve.app import open_app
from tests.pipelines import toy_text

TOKEN = st.integers(0, 9)


def ends_after(tokens) -> int | None:
    """How many of `tokens` come before the end; None if none is one."""
    seen = Repetition()
    return next((count for count, token in enumerate(tokens, 1) if seen.add(token)), None)


def cycle_tokens(cycle):
    while True:
        yield from cycle


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=40), st.lists(TOKEN, min_size=1, max_size=LONGEST))
def test_a_cycle_without_end_ends_and_not_at_once(before, cycle):
    found = ends_after([*before, *islice(cycle_tokens(cycle), TIMES * LONGEST + LEAST)])
    assert found is not None and LEAST <= found <= len(before) + max(LEAST, TIMES * len(cycle))


@settings(deadline=None)
@given(st.data())
def test_tables_and_code_that_repeat_lines_a_few_times_never_end(data):
    """Rows that come again, alone or in blocks, up to seven times in a row, however long they are; a number tells the
    blocks apart."""
    rows = st.lists(TOKEN, min_size=1, max_size=60)
    blocks = data.draw(st.lists(st.tuples(rows, st.integers(1, TIMES - 1)), min_size=1, max_size=12))
    text = [token for number, (row, times) in enumerate(blocks) for token in [100 + number, *(row * times)]]
    short = [token for token in text if token < 100][: LEAST - 1]
    assert ends_after(short) is None
    # A row may itself be a cycle; what counts is that it does not fill the page.
    if all(len(row) * times < LEAST or len(set(row)) == len(row) for row, times in blocks):
        assert ends_after(text) is None


@settings(deadline=None)
@given(st.lists(TOKEN, max_size=600))
def test_it_is_what_the_definition_says(tokens):
    def circles(end: int) -> bool:
        for period in range(1, LONGEST + 1):
            size = max(LEAST, TIMES * period)
            if end >= size and all(tokens[i] == tokens[i - period] for i in range(end - size + period, end)):
                return True
        return False

    tokens = [token % 2 for token in tokens[:3]] * 100 if tokens and tokens[0] > 7 else tokens
    assert ends_after(tokens) == next((end for end in range(1, len(tokens) + 1) if circles(end)), None)


def run_to_end(**options) -> tuple[Sequence, Finished]:
    sequence = Sequence([1], 1000, **options)
    tokens = cycle_tokens([5, 6, 7])
    while True:
        for event in sequence.advance(next(tokens), lambda: np.zeros(10, np.float32)):
            if isinstance(event, Finished):
                return sequence, event


def test_a_sequence_ends_so_only_where_it_is_asked_for():
    sequence, end = run_to_end(repetition_stop=True)
    assert end == Finished("stop", repeated=True) and sequence.repeated and len(sequence.tokens) == LEAST
    sequence, end = run_to_end()
    assert end == Finished("context") and not sequence.repeated and len(sequence.tokens) == 1000


@pytest.fixture
def soon(monkeypatch):
    """A circle is one after six tokens: the toy's context has 24."""
    monkeypatch.setattr(repetition, "LEAST", 6)
    monkeypatch.setattr(repetition, "TIMES", 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("bundle") / "toy")


def test_a_request_asks_for_it_by_a_field(soon, bundle):
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 15}
    # Of the toy's logits some are large.
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


def test_a_chat_has_it_unless_it_is_turned_off_and_run_has_not(bundle, monkeypatch):
    """What the commands say to those who generate."""
    asked = []

    class Asked(Sequence):
        def __init__(self, *arguments, **options):
            asked.append(options["repetition_stop"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(generate, "Sequence", Asked)
    monkeypatch.setattr("sys.stdin", type("Pipe", (), {"isatty": lambda _: False, "buffer": iter_lines(b"ab\n", b"ab\n")})())
    for argv in (["chat", str(bundle)], ["chat", str(bundle), "--no-repetition-stop"], ["run", str(bundle), "ab"],
                 ["run", str(bundle), "ab", "--repetition-stop"]):  # fmt: skip
        assert cli.main([*argv, "-n", "1"]) == 0
    assert asked == [True, False, False, True]


def iter_lines(*lines: bytes):
    """A stdin that ends after each line once."""
    left = [part for line in lines for part in (line, b"")]
    return type("Buffer", (), {"readline": lambda _: left.pop(0)})()
