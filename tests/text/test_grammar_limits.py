"""Hostile grammars: their client gets an error that names the limit; other requests do not wait."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from castiron.pipelines.child_process import ChildProcess, Interrupted, LimitExceeded
from castiron.pipelines.cli import main as cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text import grammar
from castiron.pipelines.text.grammar import MAX_WAIT, GrammarBusy, GrammarError
from castiron.pipelines.text.lane import Lane
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
    nested = text.grammar(**hostile_grammars.lark_terminals(150))
    start = time.thread_time()
    schemas.generate_text(text, nested, 1, 20)
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


def interrupted(*given, **more):
    raise Interrupted("stopped")


def slow_grammars(count: int) -> Iterator[dict]:
    """Yield arguments of different grammars, each of which takes longer than the limit."""
    for index in range(count):
        yield {"json_schema": {"$comment": str(index), **HOSTILE["patternProperties"]["json_schema"]}}


def test_slow_grammars_delay_only_their_own_clients():
    """Also the errors of slow grammars come within the limit."""
    grammars, rejected, waited = Tokenizer(schemas.tokenizer(), eos=(0,)).grammars, [], []

    async def keep_asking(client: str):
        for given in slow_grammars(1000):
            start = time.monotonic()
            with pytest.raises(GrammarError, match=LIMITS + "|not compiled within 5 s"):
                await grammars.compile_async(client, **given)
            rejected.append(time.monotonic() - start)

    async def main():
        await grammars.compile_async("good", regex="a")
        others = [asyncio.create_task(keep_asking(f"bad {index}")) for index in range(4)]
        async with asyncio.timeout(60):
            while len(grammars._slow_until) < len(others):
                await asyncio.sleep(0.1)
        for index in range(5):
            start = time.monotonic()
            assert await grammars.compile_async("good", regex=f"a{index}")
            waited.append(time.monotonic() - start)
        async with asyncio.timeout(60):
            while not rejected:
                await asyncio.sleep(0.1)
        for other in others:
            other.cancel()
        await asyncio.wait(others)

    asyncio.run(main())
    print(f"waited {max(waited):.2f} s, errors after {max(rejected):.2f} s")
    assert statistics.median(waited) < 1 and max(rejected) < MAX_WAIT + 1


def test_a_cancelled_call_stops_only_itself():
    stopped, release = [], threading.Event()
    lane = Lane(SimpleNamespace(stop=lambda: stopped.append(release.set())))

    async def main():
        first, queued = (asyncio.create_task(lane.run(None, release.wait)) for _ in range(2))
        await asyncio.sleep(0.1)
        for task in (queued, first):
            # A call that has ended, or was never started, stops no other.
            lane._stop(object())
            assert not stopped
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(main())
    assert len(stopped) == 1


def test_an_error_is_stored_but_not_that_the_server_was_busy(monkeypatch):
    grammars = Tokenizer(schemas.tokenizer(), eos=(0,)).grammars
    (slow,) = slow_grammars(1)
    for given, message in (
        (slow, "takes longer than 1 s"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a" * 1_000_001}, "shorten it"),
    ):
        with pytest.raises(GrammarError, match=message):
            grammars.compile(**given)
        with monkeypatch.context() as patch:
            patch.setattr(ChildProcess, "call", lambda *given, **more: pytest.fail("compiled again"))
            with pytest.raises(GrammarError, match=message):
                grammars.compile(**given)
            with pytest.raises(GrammarError, match=message):
                asyncio.run(grammars.compile_async("client", **given))
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "MAX_WAIT", 0.0)
        with pytest.raises(GrammarBusy, match="the server is busy; retry later"):
            asyncio.run(grammars.compile_async("client", regex="b"))
    with pytest.raises(GrammarBusy), monkeypatch.context() as patch:
        patch.setattr(ChildProcess, "call", interrupted)
        grammars.compile(regex="b")
    assert grammars.compile(regex="b") and asyncio.run(grammars.compile_async("client", regex="b"))


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
    assert child.call(fail, "value") and child.used < 0.5
    with pytest.raises(Interrupted, match="the machine is too busy"):
        child.call(fail, "time", wall_seconds=0.05)
    assert child.used == 0.5


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


def different(body: dict, number: int) -> dict:
    """Return the grammar of a request with a comment, so that it is not known from before."""
    if "grammar" in body:
        return {"grammar": f"{body['grammar']}# {number}\n"}
    return {"json_schema": {**body["json_schema"], "$comment": str(number)}}


def test_hostile_grammars_do_not_delay_other_requests(path, tmp_path):
    chat = {"model": "tiny", "messages": served.MESSAGES, "max_tokens": 50, "ignore_eos": True, "temperature": 0}
    # Each takes the time up to its limit.
    names = ["patternProperties", "patterns", "required", "GBNF white space"] * 2
    hostile = [{**chat, **HOSTILE[name]} for name in names]
    # Slow steps, because the machine may be busy.
    with served.served(path, tmp_path / "log", "--shutdown-timeout", "5", slow=0.01) as server:
        idle = statistics.median(seconds_of(server, "/v1/chat/completions", chat) for _ in range(9))
        # A client that gets 503 asks again.
        asked = (served.ask(server.url, "/v1/chat/completions", {**chat, **HOSTILE["patternProperties"]}) for _ in range(20))
        status, _, error = next(answer for answer in asked if answer[0] != 503)
        assert (
            status == 400
            and "json schema: the definition is too complex: it takes longer than 1 s" in error["error"]["message"]
        )
        answers: list = []

        numbers = count()

        def keep_asking(body):
            while not stop.is_set():
                body = {**body, **different(body, next(numbers))}
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
