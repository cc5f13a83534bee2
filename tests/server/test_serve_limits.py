"""Limits, keys, clients that leave or send invalid data, and signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from castiron.pipelines.cli import main as cli
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from tests.support import toy_text
from tests.support.served import CONTEXT, MESSAGES, RENDERED, SLOTS, ask, served

# A request of MANY choices takes seconds, because a step takes STEP seconds or more.
MANY, STEP = 60, 0.003
LONG = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "n": MANY}


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    """A server with wide limits, so that only a test's own action fails."""
    with served(path, tmp_path_factory.mktemp("serve") / "log", "--max-queue", "100", slow=STEP) as found:
        yield found
    assert "Traceback" not in found.errors, found.errors


@pytest.fixture(scope="module")
def strict(path, tmp_path_factory):
    options = ("--api-key", "first", "--max-queue", "2", "--max-body", "0.002")
    log = tmp_path_factory.mktemp("strict") / "log"
    with served(path, log, *options, slow=STEP, CASTIRON_API_KEY="second, third") as found:
        yield found


def connect(server) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(server.url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)


def raw_connection(server, timeout: float = 30) -> socket.socket:
    parts = urllib.parse.urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout)


def headers_of(key: str | None) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def is_answering(server, reference, count: int = 12) -> bool:
    """Return whether the server generates the expected text."""
    body = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "max_tokens": count}
    status, _, answer = ask(server.url, "/v1/chat/completions", body)
    return status == 200 and answer["choices"][0]["message"]["content"] == reference.generate(RENDERED, count)


def gauge(server, name: str, key: str | None = None) -> float:
    page = ask(server.url, "/metrics", key=key)[2]
    return float(re.search(rf"^(?:vllm:|castiron_){name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)[1])


def until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.02)


def stream_of(server, body: dict, key: str | None = None):
    """Return a connection and its response, which has begun."""
    connection = connect(server)
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers_of(key))
    return connection, connection.getresponse()


def events_of(connection, response) -> list[str]:
    """Return the remaining events of a stream and close the connection."""
    with contextlib.closing(connection):
        return response.read().decode().strip().split("\n\n")


def idle_connection(server) -> http.client.HTTPConnection:
    """Return a connection that has had an answer."""
    connection = connect(server)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    return connection


def test_keys_are_required_except_for_health_and_the_page(strict):
    for key, status in ((None, 401), ("wrong", 401), ("first", 200), ("second", 200), ("third", 200)):
        for url in ("/v1/models", "/metrics"):
            found, headers, body = ask(strict.url, url, key=key)
            assert found == status
            if status == 401:
                assert headers["WWW-Authenticate"] == "Bearer" and body["error"]["code"] == "invalid_api_key"
    assert ask(strict.url, "/health")[0] == ask(strict.url, "/")[0] == 200
    assert ask(strict.url, "/v1/completions", {"prompt": "a"})[0] == 401


def test_a_body_that_is_too_large_is_refused_with_or_without_its_length(strict):
    status, _, body = ask(strict.url, "/v1/completions", {"prompt": "a" * 3000}, "first")
    assert status == 413 and "2000 bytes" in body["error"]["message"]
    with contextlib.closing(connect(strict)) as connection:
        parts = iter([b'{"prompt": "', b"a" * 1500, b"a" * 1500, b'"}'])
        connection.request("POST", "/v1/completions", parts, headers_of("first"), encode_chunked=True)
        assert connection.getresponse().status == 413


@pytest.mark.parametrize(("key", "status"), [("first", 413), ("wrong", 401)])
def test_a_client_that_is_still_sending_reads_its_refusal(strict, key, status):
    """The body is larger than the socket buffers of both sides together."""
    with contextlib.closing(connect(strict)) as connection:
        headers = headers_of(key) | {"Connection": "close"}
        connection.request("POST", "/v1/completions", b'{"prompt": "' + b"a" * (16 << 20), headers)
        response = connection.getresponse()
        assert response.status == status and json.loads(response.read())["error"]["message"]


def test_a_rejected_client_cannot_send_forever(strict):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 1000000000\r\n\r\n"
    with raw_connection(strict) as client:
        client.sendall(head)
        assert b" 401 " in client.recv(4096)
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"a" * 1_000_000)


def test_a_body_of_tiny_chunks_costs_the_server_little(strict):
    """Three such connections with a wrong key once blocked the server for many seconds."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nTransfer-Encoding: chunked\r\n\r\n"

    def seconds() -> float:
        fields = Path(f"/proc/{strict.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = seconds()
    for _ in range(3):
        with raw_connection(strict) as client:
            client.sendall(head + b"1\r\na\r\n" * 200_000)
            assert b" 401 " in client.recv(4096)
    assert ask(strict.url, "/health")[0] == 200
    assert seconds() - before < 1.5


def test_a_full_queue_rejects_with_its_length(strict):
    fullest = {**LONG, "n": SLOTS + 2}
    connection, _ = stream_of(strict, fullest, "first")
    status, headers, body = ask(strict.url, "/v1/chat/completions", fullest, "first")
    assert status == 503 and headers["Retry-After"] == "1" and "queue of 2" in body["error"]["message"]
    connection.close()
    until(lambda: ask(strict.url, "/v1/chat/completions", {**fullest, "max_tokens": 2}, "first")[0] == 200)


@pytest.mark.parametrize(("url", "more", "param"), [
    ("/v1/chat/completions", {"n": SLOTS + 3}, "n"), ("/v1/completions", {"prompt": "x", "n": SLOTS + 3, "best_of": SLOTS + 3}, "n"),
    ("/v1/completions", {"prompt": "x", "n_cmpl": SLOTS + 3}, "n_cmpl"), ("/v1/completions", {"prompt": ["x"] * 3, "n": SLOTS}, "n"),
    ("/v1/completions", {"prompt": ["x"] * (SLOTS + 3)}, "prompt"),
])  # fmt: skip
def test_more_answers_than_the_queue_can_hold_are_an_error_of_the_request(strict, url, more, param):
    status, _, body = ask(strict.url, url, ({} if "prompt" in more else LONG) | more, "first")
    assert status == 400 and body["error"]["param"] == param
    assert f"one client can have {SLOTS + 2} in progress" in body["error"]["message"]


def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_slots(path, tmp_path):
    with served(path, tmp_path / "log", "--timeout", "1", slow=STEP) as server:
        status, _, body = ask(server.url, "/v1/chat/completions", LONG)
        assert status == 504 and "than the 1 s" in body["error"]["message"] and body["error"]["code"] == "timeout"
        connection, response = stream_of(server, LONG)
        events = events_of(connection, response)
        assert response.status == 200 and events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
        until(lambda: gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_stops_its_generation(server, reference, streaming):
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
    assert is_answering(server, reference)


def test_a_client_that_leaves_in_the_queue_is_never_served(server, reference):
    busy, answer = stream_of(server, {**LONG, "n": SLOTS})
    waiting = connect(server)
    waiting.request("POST", "/v1/chat/completions", json.dumps({**LONG, "n": 1}), {"Content-Type": "application/json"})
    until(lambda: gauge(server, "num_requests_waiting") == 1 or gauge(server, "num_requests_running") == 0)
    waiting.close()
    until(lambda: gauge(server, "num_requests_waiting") == 0)
    answer.read()
    busy.close()
    assert is_answering(server, reference)


def test_invalid_http_disturbs_no_other_client(server, reference):
    """A stream continues unchanged while others send invalid HTTP, JSON or requests."""
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
            with contextlib.suppress(OSError), raw_connection(server, 5) as s:
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
            assert is_answering(server, reference, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert server.process.poll() is None and ask(server.url, "/health")[2] == {"status": "ok"}


def test_sigterm_lets_requests_finish_and_ends_with_0(path, reference, tmp_path):
    (pause := tmp_path / "held").touch()
    with served(path, tmp_path / "log", pause=pause) as server:
        connection, response = stream_of(server, {**LONG, "n": 8})
        response.read(10)
        idle = idle_connection(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in server.errors)
        idle.sock.settimeout(60)
        assert idle.sock.recv(1) == b"", "an idle connection is not closed"
        idle.close()
        assert ask(server.url, "/health")[::2] == (503, {"status": "stopping"})
        status, headers, body = ask(server.url, "/v1/chat/completions", LONG)
        assert status == 503 and headers["Retry-After"] and body["error"]["code"] == "shutting_down"
        pause.unlink()
        events = events_of(connection, response)
        assert server.process.wait(60) == 0
        texts = [""] * 8
        # The first event is incomplete, because its first bytes were read above.
        for event in events[1:-1]:
            for choice in json.loads(event[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        full = reference.generate(RENDERED, CONTEXT - len(RENDERED) + 1)
        assert texts == [full] * 8 and events[-1] == "data: [DONE]"
        with pytest.raises(OSError):
            ask(server.url, "/health")
        assert "Traceback" not in server.errors


@pytest.mark.parametrize("again", [True, False])
def test_requests_that_exceed_the_grace_period_end_with_an_error(path, tmp_path, again):
    """Requests end after the grace period, or at once on a second signal."""
    with served(path, tmp_path / "log", "--shutdown-timeout", "60" if again else "0.2", slow=STEP) as server:
        connection, response = stream_of(server, {**LONG, "n": MANY})
        response.read(10)
        server.process.send_signal(signal.SIGTERM)
        if again:
            until(lambda: "stopping" in server.errors)
            server.process.send_signal(signal.SIGINT)
        events = events_of(connection, response)
        assert json.loads(events[-2][6:])["error"]["code"] == "shutting_down" and events[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0 and "Traceback" not in server.errors


def test_an_idle_server_ends_at_once_on_ctrl_c(path, tmp_path):
    with served(path, tmp_path / "log", "--shutdown-timeout", "600") as server:
        idle = idle_connection(server)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        idle.close()


def test_a_packed_bundle_is_served_as_its_directory(path, reference, tmp_path):
    packed = tmp_path / "packed.castiron"
    pack_bundle(open_bundle(path), packed)
    with served(packed, tmp_path / "log") as server:
        assert is_answering(server, reference)
        # The weights are mapped from the packed file.
        if (maps := Path(f"/proc/{server.process.pid}/maps")).exists():
            assert str(packed) in maps.read_text()


def test_a_bundle_without_batch_functions_is_reported_at_start(path, tmp_path):
    for directory, message in ((toy_text.write(tmp_path / "toy"), True), (path, False)):
        with served(directory, tmp_path / "log") as server:
            lines = [line for line in server.errors.splitlines() if "--batch 4,8" in line]
            assert len(lines) == message and all("one at a time" in line for line in lines)


def test_options_set_the_default_sampling(path, tmp_path):
    with served(path, tmp_path / "log", "--temperature", "0", "--repeat-penalty", "1.2") as server:
        assert "default sampling: greedy, repeat-penalty 1.2" in server.errors
        params = ask(server.url, "/props")[2]["default_generation_settings"]["params"]
        assert (params["temperature"], params["repeat_penalty"]) == (0, 1.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--temperature", "3"], "--temperature is 3"),
        (["--repeat-penalty", "0"], "--repeat-penalty is 0"),
        (["--api-key", ""], "--api-key is empty"),
        (["--host", "203.0.113.1", "--port", "0"], "choose another --host or --port"),
        (["--host", ""], "--host is empty"),
        (["--cors", "example.com"], "https://example.com"),
        (["--cors", "https://example.com/"], "https://example.com"),
        (["--host", "\udcff", "--port", "0"], "--host is '\\udcff', which is not an address"),
    ],
)
def test_rejects_invalid_options(capsys, options, message):
    assert cli.main(["serve", ".", *options]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("castiron: ")


@pytest.mark.parametrize("keys", ["", ",", " , ,"])
def test_an_environment_without_keys_does_not_serve_without_authentication(capsys, monkeypatch, keys):
    monkeypatch.setenv("CASTIRON_API_KEY", keys)
    assert cli.main(["serve", "."]) == 1
    err = capsys.readouterr().err
    assert "CASTIRON_API_KEY is set but has no key" in err and err.count("\n") == 1


def test_a_port_in_use_is_one_error_message(capsys, path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(path), "--port", str(port)]) == 1
    assert f"port {port} (Address already in use)" in capsys.readouterr().err
