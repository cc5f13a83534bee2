"""Measure what hostile clients cost another client: `python -m tests.support.hostile_clients`.

Compiles and serves a small model. Prints the duration of each kind of hostile requests, and the
slowest /health during them. Another client compares its answers with the library's meanwhile. Exits
with 1 if an answer is wrong or /health takes a second.
"""

from __future__ import annotations

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

from tests.support.served import MESSAGES, RENDERED, ReferenceSession, Served, bundle, served

SLOW_BODIES, LARGE = 300, 3_900_000
GOOD, BAD = "other", "hostile"
HEALTH_SECONDS = 1.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "Hello", "max_tokens": 2}


def schema_format(schema: dict) -> dict:
    return {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


# Path, bodies and number of copies of requests that are sent at once.
REQUESTS: dict[str, tuple[str, list[dict | bytes], int]] = {
    "long text": (CHAT, [{"messages": [{"role": "user", "content": "a " * (LARGE // 2)}], "max_tokens": 1}], 6),
    "empty messages": (
        CHAT, [b'{"messages": [' + b'{"role": "user", "content": ""},' * 100_000 + b'{"role": "user", "content": ""}]}'], 6
    ),
    "invalid prompts": (COMPLETIONS, [b'{"prompt":[' + b"-1," * (LARGE // 3) + b"-1]}"], 1),
    "invalid items": ("/v1/responses", [b'{"input":[' + b"-1," * (LARGE // 3) + b"-1]}"], 1),
    "unknown fields": (CHAT, [{"messages": MESSAGES, **{f"k{i}": 1 for i in range(250_000)}}], 6),
    "all slots": (CHAT, [{"messages": MESSAGES, "n": 68, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}], 1),
    "biases": (COMPLETIONS, [{**SHORT, "logit_bias": {str(i): 1 for i in range(49_152)}}], 7),
    "large enums": (
        CHAT, [schema_format({"enum": [f"{i} {j} {'x' * 20}" for j in range(5_000)]}) | {"n": 8} for i in range(5)], 1
    ),
    "slow grammars": (
        CHAT, [schema_format({"patternProperties": {f"^k{i}_$": {"type": "string"} for i in range(3000)}})], 8
    ),
}  # fmt: skip


class Client:
    """A client of a server, with its API key."""

    def __init__(self, server: Served, key: str):
        parts = urllib.parse.urlsplit(server.url)
        self.address = parts.hostname, parts.port
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def request(self, path: str, body: dict | bytes | None = None) -> tuple[int, bytes]:
        """Return status and body of an answer; status 0 if the server closed the connection."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=60)) as connection:
            try:
                connection.request("POST" if data is not None else "GET", path, data, self.headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                return 0, b""

    def open(self, headers: str, body: bytes) -> socket.socket | None:
        """Return a connection on which this part of a completion request was sent."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        try:
            found = socket.create_connection(self.address, timeout=10)
            found.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{lines}{headers}\r\n\r\n".encode() + body)
            return found
        except OSError:
            return None


class OtherClient(threading.Thread):
    """A client that alternates between /health and a chat request, and compares the answers with
    the library's; `slowest` returns the slowest /health since its last call."""

    def __init__(self, server: Served, reference: ReferenceSession):
        super().__init__(daemon=True)
        self.client, self.ended = Client(server, GOOD), threading.Event()
        self.expected = reference.generate(RENDERED, 8)
        self.right = self.wrong = 0
        self._slowest = 0.0

    def run(self) -> None:
        body = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "max_tokens": 8}
        while not self.ended.is_set():
            start = time.perf_counter()
            status, _ = self.client.request("/health")
            self._slowest = max(self._slowest, time.perf_counter() - start if status == 200 else 60.0)
            status, answer = self.client.request(CHAT, body)
            is_right = status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == self.expected
            self.right, self.wrong = self.right + is_right, self.wrong + (not is_right)
            time.sleep(0.02)

    def slowest(self) -> float:
        found, self._slowest = self._slowest, 0.0
        return found


def at_once(works: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def connect(client: Client, headers: str, body: bytes, count: int, seconds: float = 0) -> None:
    """Send a part of a request on `count` connections, and close them after some seconds."""
    connections = [client.open(headers, body) for _ in range(count)]
    time.sleep(seconds)
    for connection in filter(None, connections):
        connection.close()


def hostile_clients(client: Client, wrong: Client) -> dict[str, Callable[[], None]]:
    """Return a function that sends the requests, for each kind of client."""

    def send(path: str, bodies: list[dict | bytes], copies: int) -> Callable[[], None]:
        # Encoded now, because that would delay the other client's thread.
        encoded = [json.dumps(body).encode() if isinstance(body, dict) else body for body in bodies]
        return lambda: at_once([lambda body=body: client.request(path, body) for body in encoded * copies])

    body = json.dumps({**SHORT, "max_tokens": 100, "ignore_eos": True, "n": 8}).encode()
    return {
        **{name: send(*requests) for name, requests in REQUESTS.items()},
        "slow bodies": lambda: connect(client, "Content-Length: 3000000", b"{" + b" " * 1_000_000, SLOW_BODIES, 2),
        "tiny chunks": lambda: connect(wrong, "Transfer-Encoding: chunked", b"1\r\na\r\n" * 200_000, 6),
        "leaving": lambda: connect(client, f"Content-Length: {len(body)}", body, 100),
    }


def measure(server: Served, reference: ReferenceSession) -> dict:
    """Return the durations of every kind of client, and the numbers of right and wrong answers."""
    other, found = OtherClient(server, reference), {}
    other.start()
    for name, run in hostile_clients(Client(server, BAD), Client(server, "wrong")).items():
        other.slowest()
        start = time.perf_counter()
        run()
        found[name] = {"seconds": round(time.perf_counter() - start, 2), "health_seconds": round(other.slowest(), 3)}
    other.ended.set()
    other.join()
    return {"clients": found, "answers": {"right": other.right, "wrong": other.wrong}}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = bundle(Path(folder))
        keys = ("--api-key", GOOD, "--api-key", BAD)
        with served(path, Path(folder) / "log", *keys, "--quiet") as server:
            found = measure(server, ReferenceSession(path))
    print(json.dumps(found, indent=2))
    is_slow = any(each["health_seconds"] > HEALTH_SECONDS for each in found["clients"].values())
    return 1 if is_slow or found["answers"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
