"""Clients that mean no good, on a server of this machine with 256 descriptors, and what they cost the one that means well.

    python -m tests.pipelines.hostile_clients

compiles a small model, serves it, and prints for each kind of client how long it was answered, how long /health took meanwhile
at most, and how much memory the server took for it. All the while a client with a key of its own asks and compares what it is
told with what the model says alone. A minute or two; it ends with 1 if an answer was another one, or /health took a second.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from tests.pipelines.served import MESSAGES, RENDERED, Alone, Served, bundle, served

DESCRIPTORS, IDLE, SLOW_BODIES, LARGE, AT_ONCE = 256, 400, 300, 3_900_000, 6
GOOD, BAD = "means-well", "means-no-good"
HEALTH_SECONDS = 1.0


class Asker:
    """One client of a server, by its key."""

    def __init__(self, server: Served, key: str):
        parts = urllib.parse.urlsplit(server.url)
        self.place = parts.hostname, parts.port
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def ask(self, path: str, body: dict | bytes | None = None) -> tuple[int, bytes]:
        """Status and body of an answer; 0 where the server closed the connection."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        with contextlib.closing(http.client.HTTPConnection(*self.place, timeout=60)) as connection:
            try:
                connection.request("POST" if data is not None else "GET", path, data, self.headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                return 0, b""

    def open(self, data: bytes) -> socket.socket | None:
        """A connection on which this much was sent."""
        try:
            found = socket.create_connection(self.place, timeout=10)
            found.sendall(data)
            return found
        except OSError:
            return None


class MeansWell(threading.Thread):
    """Asks and looks at /health again and again; `slowest` since it was last asked for."""

    def __init__(self, server: Served, alone: Alone):
        super().__init__(daemon=True)
        self.asker, self.ended = Asker(server, GOOD), threading.Event()
        self.wanted = alone.says(RENDERED, 8)
        self.right = self.wrong = 0
        self._slowest = 0.0

    def run(self) -> None:
        body = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "max_tokens": 8}
        while not self.ended.is_set():
            start = time.perf_counter()
            status, _ = self.asker.ask("/health")
            self._slowest = max(self._slowest, time.perf_counter() - start if status == 200 else 60.0)
            status, answer = self.asker.ask("/v1/chat/completions", body)
            told = status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == self.wanted
            self.right, self.wrong = self.right + told, self.wrong + (not told)
            time.sleep(0.02)

    def slowest(self) -> float:
        found, self._slowest = self._slowest, 0.0
        return found


def memory(server: Served) -> int:
    """Bytes that the server has resident."""
    return 4096 * int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])


def at_once(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def idle(bad: Asker) -> None:
    """Connections that never ask."""
    held = [bad.open(b"") for _ in range(IDLE)]
    time.sleep(3)
    for one in filter(None, held):
        one.close()


def slow_bodies(bad: Asker) -> None:
    """Bodies of which a megabyte comes and then no more."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 3000000\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in bad.headers.items() if name == "Authorization") + "\r\n"
    held = [bad.open(head.encode() + b"{" + b" " * 1_000_000) for _ in range(SLOW_BODIES)]
    time.sleep(2)
    for one in filter(None, held):
        one.close()


def large_message(bad: Asker) -> None:
    """A text that no context holds, several at once."""
    body = {"messages": [{"role": "user", "content": "a " * (LARGE // 2)}], "max_tokens": 1}
    at_once(AT_ONCE, lambda: bad.ask("/v1/chat/completions", body))


def many_messages(bad: Asker) -> None:
    """Empty ones, which a template takes long to render."""
    body = b'{"messages": [' + b'{"role": "user", "content": ""},' * 100_000 + b'{"role": "user", "content": ""}]}'
    at_once(AT_ONCE, lambda: bad.ask("/v1/chat/completions", body))


def many_mistakes(bad: Asker) -> None:
    """Bodies that are wrong in a million places."""
    for path, head in (
        ("/v1/completions", b'{"prompt":['),
        ("/v1/responses", b'{"input":['),
        ("/v1/messages", b'{"max_tokens":1,"messages":[{"role":"user","content":['),
    ):
        bad.ask(path, head + b"-1," * (LARGE // 3) + b"-1" + b"]}" * head.count(b"{"))


def many_answers(bad: Asker) -> None:
    """All slots and the whole queue, for as long as the context allows, with log-probabilities."""
    body = {"messages": MESSAGES, "n": 68, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    bad.ask("/v1/chat/completions", body)


def many_biases(bad: Asker) -> None:
    for _ in range(7):
        bad.ask("/v1/completions", {"prompt": "a", "max_tokens": 50, "logit_bias": {str(i): 1 for i in range(49_152)}})


def grammars(bad: Asker) -> None:
    """Schemas that are all different and take long to read."""
    for i in range(5):
        schema = {"enum": [f"{i} {j} {'x' * 20}" for j in range(5_000)]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        bad.ask("/v1/chat/completions", {"messages": MESSAGES, "n": 8, "max_tokens": 20, "response_format": form})


def leaving(bad: Asker) -> None:
    """Clients that ask for much and are gone."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += "".join(f"{name}: {value}\r\n" for name, value in bad.headers.items()).encode() + b"\r\n"
    for _ in range(100):
        if one := bad.open(head + body):
            one.close()


KINDS = (idle, slow_bodies, large_message, many_messages, many_mistakes, many_answers, many_biases, grammars, leaving)


def measure(server: Served, alone: Alone, requests: int) -> dict:
    """Figures of every kind of client, and of `requests` plain requests behind them all."""
    bad, good = Asker(server, BAD), MeansWell(server, alone)
    good.start()
    bad.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 5})
    found = {}
    for kind in KINDS:
        good.slowest()
        before, start = memory(server), time.perf_counter()
        watched, ended = [before], threading.Event()
        watch = threading.Thread(target=lambda: [watched.append(memory(server)) for _ in iter(lambda: ended.wait(0.02), True)])
        watch.start()
        kind(bad)
        seconds = time.perf_counter() - start
        ended.set()
        watch.join()
        time.sleep(0.2)
        found[kind.__name__] = {"seconds": round(seconds, 2), "health_seconds": round(good.slowest(), 3),
                                "memory_mb": round((max(watched) - before) / 1e6, 1)}  # fmt: skip
    files = lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    at_once(4, lambda: [bad.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 2}) for _ in range(50)])
    before, open_files = memory(server), files()
    at_once(4, lambda: [bad.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 2}) for _ in range(requests // 4)])
    time.sleep(0.5)
    grown = {"requests": requests, "memory_mb": round((memory(server) - before) / 1e6, 1), "descriptors": files() - open_files}
    good.ended.set()
    good.join()
    answers = {"right": good.right, "wrong": good.wrong}
    return {"clients": found, "afterwards": grown, "answers": answers, "log_bytes": len(server.errors)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pipelines.hostile_clients", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="plain requests behind the others (default: 2000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = bundle(Path(folder))
        keys = ("--api-key", GOOD, "--api-key", BAD)
        with served(path, Path(folder) / "log", *keys, "--quiet", descriptors=DESCRIPTORS) as server:
            found = measure(server, Alone(path), args.requests)
    print(json.dumps(found) if args.json else table(found))
    slow = [name for name, each in found["clients"].items() if each["health_seconds"] > HEALTH_SECONDS]
    return 1 if slow or found["answers"]["wrong"] else 0


def table(found: dict) -> str:
    """The figures for people."""
    lines = [f"{'':<16}{'seconds':>9}{'/health ms':>12}{'memory MB':>11}"]
    for name, each in found["clients"].items():
        health = each["health_seconds"] * 1e3
        lines.append(f"{name.replace('_', ' '):<16}{each['seconds']:>9.2f}{health:>12.0f}{each['memory_mb']:>11.1f}")
    grown, answers = found["afterwards"], found["answers"]
    lines.append(f"{grown['requests']} plain requests: {grown['memory_mb']:+.1f} MB, {grown['descriptors']:+d} descriptors")
    lines.append(f"answers to others: {answers['right']} right, {answers['wrong']} wrong; log: {found['log_bytes']} bytes")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
