"""Clients of one server that try to learn each other's prompts, or to hold all slots."""

from __future__ import annotations

import random

import pytest

from tests.support.served import Served, ask, served

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
