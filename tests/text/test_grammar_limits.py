"""Hostile grammars: their client gets an error that names the limit; other requests do not wait."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import threading
import time

import pytest

from castiron.pipelines.child_process import ChildProcess, LimitExceeded
from castiron.pipelines.cli import main as cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.grammar import GrammarError
from castiron.pipelines.text.tokenizer import Tokenizer
from tests.support import hostile_grammars, schemas, served
from tests.support.hostile_grammars import HONOURED, HOSTILE, fail

LIMITS = "takes longer than 1 s|too deep|deeper than|the limit is 1000000"


@pytest.fixture(scope="module")
def text():
    return Tokenizer(schemas.tokenizer(), eos=(0,))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return served.bundle(tmp_path_factory.getbasetemp() / "limits", (4,))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_an_error_or_is_followed(text, name):
    if name in HONOURED:
        constraint = text.grammar(**HOSTILE[name]).constraint()
        for _ in range(50):
            if not constraint.done:
                constraint.accept(int(constraint.mask(300).argmax()))
    else:
        with pytest.raises(GrammarError, match=LIMITS):
            text.grammar(**HOSTILE[name])
    assert schemas.generate_text(text, text.grammar(regex="ab|cd"), 1)[1] == "stop"


def test_rejects_deep_terminals_before_a_step_takes_seconds(text):
    with pytest.raises(GrammarError, match="grammar: terminals nest deeper than 200 levels"):
        text.grammar(**hostile_grammars.lark_terminals(201))
    grammar = text.grammar(**hostile_grammars.lark_terminals(150))
    start = time.thread_time()
    schemas.generate_text(text, grammar, 1, 20)
    assert time.thread_time() - start < 1
    # Names in literals and comments are not references.
    assert text.grammar(grammar='start: A\nA: "B" | /B/ // B\nB: "A" A')


def test_a_compilation_that_is_cancelled_ends():
    text = Tokenizer(schemas.tokenizer(), eos=(0,))

    async def leave():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await text.grammars.compile_async(**HOSTILE["patternProperties"])
        return await text.grammars.compile_async(regex="a")

    async def leave_the_queue():
        """A queued compilation ends without stopping the one that runs."""
        other = asyncio.create_task(text.grammars.compile_async(**HOSTILE["GBNF white space"]))
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await text.grammars.compile_async(regex="b")
        with pytest.raises(GrammarError, match="takes longer than 1 s"):
            await other

    asyncio.run(leave_the_queue())
    start = time.monotonic()
    assert asyncio.run(leave()).nbytes and time.monotonic() - start < 10


def test_a_function_in_a_child_process():
    child = ChildProcess(0.5, 1 << 30)
    for how, message in (
        ("time", "longer than 0.5 s"),
        ("memory", "too much memory"),
        ("abort", r"ends the process \(status -6\)"),
        ("stack", "too deep for a stack of 32 MB"),
        ("", "another error"),
    ):
        with pytest.raises(LimitExceeded, match=message):
            child.call(fail, how)
        assert child.call(fail, "value") == {"a": [1, None]}
    with pytest.raises(PipelineError, match="^no such thing$"):
        child.call(fail, "pipeline error")
    child.stop()
    assert child.call(fail, "value")


def test_a_batch_row_with_a_hostile_schema_is_an_error_and_the_job_goes_on(path, tmp_path):
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "tiny", "messages": served.MESSAGES, "max_tokens": 3, **more}}
        for i, more in enumerate([{}, HOSTILE["Lark terminals"], HOSTILE["required"], {"regex": "ab"}])
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli.main(["batch", str(path), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--threads", "1"])
    found = {row["custom_id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "deeper than 200" in json.dumps(found["1"]) and "longer than 1 s" in json.dumps(found["2"])
    assert found["3"]["response"]["body"]["choices"][0]["message"]["content"] == "ab"


def seconds_of(server, path: str, body: dict | None = None) -> float:
    start = time.monotonic()
    assert served.ask(server.url, path, body)[0] == 200
    return time.monotonic() - start


def test_hostile_grammars_do_not_delay_other_requests(path, tmp_path):
    chat = {"model": "tiny", "messages": served.MESSAGES, "max_tokens": 50, "ignore_eos": True, "temperature": 0}
    # Each takes the time up to its limit.
    names = ["patternProperties", "patterns", "required", "GBNF white space"] * 2
    hostile = [{**chat, **HOSTILE[name]} for name in names]
    # Slow steps, because the machine may be busy.
    with served.served(path, tmp_path / "log", "--grace", "5", slow=0.01) as server:
        idle = statistics.median(seconds_of(server, "/v1/chat/completions", chat) for _ in range(9))
        status, _, error = served.ask(server.url, "/v1/chat/completions", {**chat, **HOSTILE["patternProperties"]})
        assert (
            status == 400
            and "json schema: the definition is too complex: it takes longer than 1 s" in error["error"]["message"]
        )
        answers: list = []

        def keep_asking(body):
            while not stop.is_set():
                try:
                    answers.append(served.ask(server.url, "/v1/chat/completions", body)[0])
                except (OSError, ValueError):
                    # The server has ended.
                    return

        stop = threading.Event()
        threads = [threading.Thread(target=keep_asking, args=(body,), daemon=True) for body in hostile]
        for thread in threads:
            thread.start()
        time.sleep(1)
        # Other work on this machine may slow a round down.
        for _ in range(3):
            pairs = [(seconds_of(server, "/health"), seconds_of(server, "/v1/chat/completions", chat)) for _ in range(7)]
            health, busy = map(statistics.median, zip(*pairs))
            print(f"/health {health:.3f} s, a chat {busy:.3f} s, idle {idle:.3f} s")
            if health < 0.2 and busy < 1.5 * idle:
                break
        else:
            pytest.fail("other requests wait for hostile grammars")
        assert "Traceback" not in server.errors
        assert set(answers) <= {400, 503}
        stop.set()
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) in (0, -signal.SIGTERM) and time.monotonic() - start < 5 + 5
