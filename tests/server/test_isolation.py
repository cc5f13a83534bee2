"""Clients of one server that try to learn each other's prompts, or to hold all slots."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.served import CONTEXT, MESSAGES, RENDERED, SLOTS, SLOW, Served, ask, running, served

SECRET = "".join(random.Random(5).choices("0123456789", k=8))
PREFIX = "The PIN of the victim is "


def cached(server: Served, prompt: str, key: str, path: str = "/v1/completions") -> int:
    """Return how many tokens of the prompt the server reports as cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    status, _, answer = ask(server.url, path, body, key)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def attack(server: Served, key: str) -> str:
    """Guess the digits after PREFIX one by one from `cached_tokens`, while the victim repeats its prompt."""
    found = ""
    for _ in SECRET:
        hits = {}
        for digit in "0123456789":
            cached(server, f"{PREFIX}{SECRET}, keep it", "victim")
            # The last token never counts as cached, so a space follows the guess.
            hits[digit] = cached(server, f"{PREFIX}{found}{digit} ", key)
        best = max(hits, key=hits.__getitem__)
        # The attacker's own guesses are cached too: a digit is known only if it is the only one.
        found += best if list(hits.values()).count(hits[best]) == 1 else "?"
    return found


@pytest.mark.parametrize("shares", [False, True])
def test_a_key_learns_nothing_of_other_keys_prompts(path, tmp_path, shares):
    """Without isolation, `cached_tokens` of each guess is one more for the right digit."""
    options = ["--share-prefixes"] if shares else []
    with served(path, tmp_path / "log", *options, CASTIRON_API_KEY="victim,attacker") as server:
        cached(server, f"{PREFIX}{SECRET}, keep it", "victim")
        assert cached(server, f"{PREFIX}{SECRET}, keep it safe", "victim") == len(f"{PREFIX}{SECRET}, keep it")
        assert attack(server, "attacker") == (SECRET if shares else "?" * len(SECRET))


def gauge(server: Served, name: str, key: str = "") -> float:
    page = ask(server.url, "/metrics", key=key)[2]
    return float(re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)[1])


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.02)


def stream(server: Served, key: str = "", **options) -> http.client.HTTPConnection:
    """Start a stream of all tokens that fit in the context."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    body = {"messages": MESSAGES, "ignore_eos": True, "temperature": 0, "stream": True, **options}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {key}"})
    return connection


def test_streams_of_one_client_do_not_hold_all_slots(path, reference, tmp_path):
    """The newest one is paused for another client, continues later, and has the same text."""
    ends: list[str] = []
    with served(path, tmp_path / "log", slow=0.02, CASTIRON_API_KEY="many,one") as server:
        connections = [stream(server, "many") for _ in range(2 * SLOTS)]
        texts = [""] * len(connections)

        def read(index: int) -> None:
            events = connections[index].getresponse().read().decode().split("\n\n")
            chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
            texts[index] = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
            ends.append("many")

        threads = [threading.Thread(target=read, args=(index,)) for index in range(len(connections))]
        for thread in threads:
            thread.start()
        until(lambda: gauge(server, "num_requests_running", "one") == SLOTS)
        assert ask(server.url, "/v1/completions", {"prompt": "Short", "max_tokens": 2}, "one")[0] == 200
        ends.append("one")
        for thread in threads:
            thread.join()
        assert ends[0] == "one" and gauge(server, "num_preemptions_total", "one") == 1
        assert texts == [reference.generate(RENDERED, CONTEXT - len(RENDERED) + 1)] * len(texts)


UNREAD = """
import sys
from castiron.pipelines.server import http_server
http_server.UNREAD_SECONDS = 1
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has TCP_USER_TIMEOUT")
def test_a_stream_that_nobody_reads_ends(path, tmp_path):
    command = [sys.executable, "-c", UNREAD + SLOW, "0.01", "", "serve", path, "--port", "0", "--threads", "1"]
    choices = 60
    with running(command, tmp_path / "log", dict(os.environ), Path(__file__).parents[2]) as server:
        parts = urlsplit(server.url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((parts.hostname, parts.port))
            body = json.dumps({"messages": MESSAGES, "ignore_eos": True, "stream": True, "n": choices}).encode()
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            until(lambda: gauge(server, "num_requests_running") == SLOTS)
            until(lambda: gauge(server, "num_requests_running") == gauge(server, "num_requests_waiting") == 0)
        assert gauge(server, "generation_tokens_total") < choices * (CONTEXT - len(RENDERED)) / 2
        assert ask(server.url, "/v1/completions", {"prompt": "Short", "max_tokens": 2})[0] == 200
