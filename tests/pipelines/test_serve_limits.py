"""What the server refuses, survives and ends: limits, keys, clients that leave or talk nonsense, signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.vmfb.bundle import open_bundle, pack_bundle
from tests.pipelines import toy_text
from tests.pipelines.served import CONTEXT, MESSAGES, RENDERED, SLOTS, Alone, bundle, served

# A request of so many choices keeps the small model busy for seconds, at STEP seconds a step.
MANY, STEP = 60, 0.003
LONG = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "n": MANY}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return bundle(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def alone(path):
    return Alone(path)


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    """Generous: only what a test does to it can go wrong."""
    with served(path, tmp_path_factory.mktemp("serve") / "log", "--queue", "100", slow=STEP) as found:
        yield found
    assert "Traceback" not in found.errors, found.errors


@pytest.fixture(scope="module")
def strict(path, tmp_path_factory):
    options = ("--api-key", "first", "--queue", "2", "--max-body", "0.002")
    with served(
        path, tmp_path_factory.mktemp("strict") / "log", *options, slow=STEP, CASTIRON_API_KEY="second, third"
    ) as found:
        yield found


def connect(server) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(server.url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)


def ask(server, path: str, body: dict | None = None, key: str | None = None):
    """Status, headers and the decoded JSON or text of an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST" if body is not None else "GET", path, body and json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read().decode()
        return response.status, response.headers, json.loads(data) if data.startswith("{") else data


def said(server, alone, count: int = 12) -> bool:
    """Whether the server answers as it should."""
    body = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "max_tokens": count}
    status, _, answer = ask(server, "/v1/chat/completions", body)
    return status == 200 and answer["choices"][0]["message"]["content"] == alone.says(RENDERED, count)


def gauge(server, name: str, key: str | None = None) -> float:
    page = ask(server, "/metrics", key=key)[2]
    return float(re.search(rf"^(?:vllm:|castiron_){name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)[1])


def until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.02)


def stream_of(server, body: dict, key: str | None = None):
    """A connection whose answer has begun to come."""
    connection = connect(server)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
    return connection, connection.getresponse()


def test_a_key_is_asked_for_where_it_counts(strict):
    for key, status in ((None, 401), ("wrong", 401), ("first", 200), ("second", 200), ("third", 200)):
        for place in ("/v1/models", "/metrics"):
            found, headers, body = ask(strict, place, key=key)
            assert found == status
            if status == 401:
                assert headers["WWW-Authenticate"] == "Bearer" and body["error"]["code"] == "invalid_api_key"
    assert ask(strict, "/health")[0] == ask(strict, "/")[0] == 200
    assert ask(strict, "/v1/completions", {"prompt": "a"})[0] == 401


def test_a_body_that_is_too_large_is_refused_with_or_without_its_length(strict):
    status, _, body = ask(strict, "/v1/completions", {"prompt": "a" * 3000}, "first")
    assert status == 413 and "2000 bytes" in body["error"]["message"]
    with contextlib.closing(connect(strict)) as connection:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer first"}
        parts = iter([b'{"prompt": "', b"a" * 1500, b"a" * 1500, b'"}'])
        connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_a_full_queue_refuses_and_says_how_long_it_is(strict):
    status, headers, body = ask(strict, "/v1/chat/completions", {**LONG, "n": SLOTS + 3}, "first")
    assert status == 503 and headers["Retry-After"] == "1" and "queue of 2" in body["error"]["message"]
    assert ask(strict, "/v1/chat/completions", {**LONG, "n": SLOTS + 2, "max_tokens": 2}, "first")[0] == 200


def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_slots(path, tmp_path):
    with served(path, tmp_path / "log", "--timeout", "1", slow=STEP) as server:
        status, _, body = ask(server, "/v1/chat/completions", LONG)
        assert status == 504 and "than the 1 s" in body["error"]["message"] and body["error"]["code"] == "timeout"
        connection, response = stream_of(server, LONG)
        events = response.read().decode().strip().split("\n\n")
        connection.close()
        assert response.status == 200 and events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
        until(lambda: gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_stops_its_generation(server, alone, streaming):
    before = gauge(server, "generation_tokens_total")
    connection, response = stream_of(server, LONG) if streaming else (connect(server), None)
    if not streaming:
        connection.request("POST", "/v1/chat/completions", json.dumps(LONG), {"Content-Type": "application/json"})
    until(lambda: gauge(server, "num_requests_running") == SLOTS)
    if response:
        response.close()
    connection.close()
    until(lambda: gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0)
    assert gauge(server, "generation_tokens_total") - before < MANY * (CONTEXT - len(RENDERED)) / 2
    assert said(server, alone)


def test_a_client_that_leaves_in_the_queue_is_never_served(server, alone):
    busy, answer = stream_of(server, {**LONG, "n": SLOTS})
    waiting = connect(server)
    waiting.request("POST", "/v1/chat/completions", json.dumps({**LONG, "n": 1}), {"Content-Type": "application/json"})
    until(lambda: gauge(server, "num_requests_waiting") == 1 or gauge(server, "num_requests_running") == 0)
    waiting.close()
    until(lambda: gauge(server, "num_requests_waiting") == 0)
    answer.read()
    busy.close()
    assert said(server, alone)


def test_a_client_that_sends_no_more_has_its_answer(server, alone):
    body = json.dumps({"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "max_tokens": 40})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    parts = urllib.parse.urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as client:
        client.sendall((head + body).encode())
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert json.loads(answer.rpartition(b"\r\n")[2])["choices"][0]["message"]["content"] == alone.says(RENDERED, 40)


def test_nonsense_disturbs_nobody(server, alone):
    """A stream goes on, word for word, while others send what is no HTTP, no JSON or no request."""
    parts = urllib.parse.urlsplit(server.url)
    rng = random.Random(1)
    stop = threading.Event()

    def nonsense() -> None:
        while not stop.is_set():
            garbage = rng.randbytes(rng.randrange(1, 400))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            request = rng.choice([
                garbage,
                head + b"Content-Length: %d\r\n\r\n" % len(garbage) + garbage,
                head + b"Content-Length: 500\r\n\r\n" + garbage[:100],
                head + b"Content-Length: banana\r\n\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + garbage,
                b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
            ])  # fmt: skip
            with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=5) as s:
                s.sendall(request)
                if rng.random() < 0.5:
                    s.shutdown(socket.SHUT_WR)
                    s.settimeout(0.2)
                    s.recv(4096)

    threads = [threading.Thread(target=nonsense) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert said(server, alone, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert server.process.poll() is None and ask(server, "/health")[2] == {"status": "ok"}


def test_sigterm_lets_requests_finish_and_ends_with_0(path, alone, tmp_path):
    (held := tmp_path / "held").touch()
    with served(path, tmp_path / "log", held=held) as server:
        connection, response = stream_of(server, {**LONG, "n": 8})
        response.read(10)
        idle = connect(server)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in server.errors)
        idle.sock.settimeout(60)
        assert idle.sock.recv(1) == b"", "an idle connection stays"
        idle.close()
        assert ask(server, "/health")[::2] == (503, {"status": "stopping"})
        status, headers, body = ask(server, "/v1/chat/completions", LONG)
        assert status == 503 and headers["Retry-After"] and body["error"]["code"] == "shutting_down"
        held.unlink()
        events = response.read().decode().strip().split("\n\n")
        connection.close()
        assert server.process.wait(60) == 0
        texts = [""] * 8
        # The first event is the one that was cut in two above.
        for event in events[1:-1]:
            for choice in json.loads(event[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        whole = alone.says(RENDERED, CONTEXT - len(RENDERED) + 1)
        assert texts == [whole] * 8 and events[-1] == "data: [DONE]"
        with pytest.raises(OSError):
            ask(server, "/health")
        assert "Traceback" not in server.errors


@pytest.mark.parametrize("again", [True, False])
def test_what_does_not_finish_in_time_is_told_and_ended(path, tmp_path, again):
    """After the grace, or at once on a second signal."""
    with served(path, tmp_path / "log", "--grace", "60" if again else "0.2", slow=STEP) as server:
        connection, response = stream_of(server, {**LONG, "n": MANY})
        response.read(10)
        server.process.send_signal(signal.SIGTERM)
        if again:
            until(lambda: "stopping" in server.errors)
            server.process.send_signal(signal.SIGINT)
        events = response.read().decode().strip().split("\n\n")
        connection.close()
        assert json.loads(events[-2][6:])["error"]["code"] == "shutting_down" and events[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0 and "Traceback" not in server.errors


def test_an_idle_server_ends_at_once_on_ctrl_c(path, tmp_path):
    with served(path, tmp_path / "log", "--grace", "600") as server:
        idle = connect(server)
        idle.request("GET", "/health")
        idle.getresponse().read()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        idle.close()


def test_a_packed_bundle_is_served_as_its_directory(path, alone, tmp_path):
    packed = tmp_path / "packed.castiron"
    pack_bundle(open_bundle(path), packed)
    with served(packed, tmp_path / "log") as server:
        assert said(server, alone)
        # The weights are pages of the file itself.
        if (maps := Path(f"/proc/{server.process.pid}/maps")).exists():
            assert str(packed) in maps.read_text()


def test_the_load_script_finds_texts_equal_and_prefixes_cached(path, tmp_path):
    with served(path, tmp_path / "log", "--quiet") as server:
        command = [sys.executable, "-m", "castiron.pipelines.serve.load", server.url, "--parallel", "4", "--tokens", "5",
                   "--rounds", "1", "--words", "2", "--json"]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": "."}

        def load(*more: str) -> subprocess.CompletedProcess:
            return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, env=environment)

        done = load("--prefix", "6")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["texts_equal"] and result["ratio"] > 0
        assert len("s:Write about ") < result["prefix"]["cached_tokens"] < result["prefix"]["prompt_tokens"]
        too_long = load("--prefix", "100")
        assert too_long.returncode == 1 and "maximum context length" in too_long.stderr
        assert "POST" not in server.errors


def test_a_bundle_that_cannot_batch_says_at_start_what_to_do(path, tmp_path):
    for directory, says in ((toy_text.write(tmp_path / "toy"), True), (path, False)):
        with served(directory, tmp_path / "log") as server:
            lines = [line for line in server.errors.splitlines() if "--batch 4,8" in line]
            assert len(lines) == says and all("one after another" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--queue", "-1"], "--queue is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--temperature", "3"], "--temperature is 3"),
        (["--api-key", ""], "--api-key is empty"),
        (["--host", "203.0.113.1", "--port", "0"], "choose another --host or --port"),
        (["--host", ""], "--host is empty"),
        (["--host", "\udcff", "--port", "0"], "--host is '\\udcff', which is no address"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(capsys, options, says):
    assert cli.main(["serve", "nowhere", *options]) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and err.startswith("castiron: ")


def test_a_port_in_use_and_a_directory_that_is_no_bundle_are_one_sentence(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(tmp_path), "--port", str(port)]) == 1
    assert f"port {port} (Address already in use)" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "is not a bundle" in capsys.readouterr().err


def test_a_variable_that_the_template_does_not_read_is_one_sentence(capsys, path):
    assert cli.main(["serve", str(path), "--port", "0", "--template-arg", "tone=dry"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("castiron: ") and "does not read tone" in err
