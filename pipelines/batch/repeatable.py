"""Answers of endpoints without what is another each time, so that the same job gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

# Times of an answer.
TIMES = ("created", "created_at", "completed_at")
# What an answer says of its tokens that were found in the cache, or of those that were not.
CACHED = ("prompt_tokens_details", "input_tokens_details", "cache_creation_input_tokens", "cache_read_input_tokens")


def repeatable(body: dict[str, Any], key: str) -> dict[str, Any]:
    """An answer whose ids are made from the row's key and whose times are 0; what was found in the cache is the job's to
    tell. Its calls and items are changed in place."""
    body = {**body, **{name: 0 for name in TIMES if body.get(name) is not None}}
    if "id" in body:
        body["id"] = _like(body["id"], key)
    calls = count()
    for choice in body.get("choices", ()):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            call["id"] = _call(key, choice["index"], number)
    for number, item in enumerate(_items(body)):
        if item["type"] == "tool_use":
            item["id"] = _call(key, 0, next(calls))
        elif "id" in item:
            item["id"] = f"{_like(item['id'], key)}{number:02}"
        if "call_id" in item:
            item["call_id"] = _call(key, 0, next(calls))
    used = {name: value for name, value in body["usage"].items() if name not in CACHED}
    if found := body["usage"].get("cache_read_input_tokens"):
        # Elsewhere they are part of the prompt's tokens.
        used["input_tokens"] += found
    return {**body, "usage": used}


def _items(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a response or a message is made of."""
    content = body.get("content")
    yield from body.get("output") or (content if isinstance(content, list) else ())


def _like(name: str, key: str) -> str:
    """An id that begins as `name` does."""
    end = min(place for mark in "-_" if (place := name.find(mark)) >= 0)
    return name[: end + 1] + key


def _call(key: str, choice: int, number: int) -> str:
    """Nine letters and digits, as the server's are."""
    return f"{key[:5]}{choice % 100:02}{number % 100:02}"
