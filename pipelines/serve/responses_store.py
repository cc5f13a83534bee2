"""Responses that are kept for a while, so that later requests go on from them and clients look them up."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.schemas import Message


@dataclass(frozen=True)
class Kept:
    """A response as JSON, its items by their ids, and the messages of its conversation to its end, without its instructions."""

    owner: bytes
    body: bytes
    items: Mapping[str, dict[str, Any]]
    messages: Sequence[Message]
    bytes: int


class ResponseStore:
    """At most `count` responses and about `bytes` of them in memory; the longest unused goes first. Each is its owner's alone,
    who is whoever has the API key that it was asked for with."""

    def __init__(self, count: int = 1000, bytes: int = 64 << 20):
        self.count, self.bytes = count, bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        # The response that each item is of.
        self._items: dict[str, str] = {}

    def put(self, owner: bytes, response: dict, messages: Sequence[Message]) -> None:
        body = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        size = len(body) + sum(len(message.model_dump_json()) for message in messages)
        items = {item["id"]: _without_logprobs(item) for item in response.get("output", ())}
        self._kept[response["id"]] = Kept(owner, body, items, messages, size)
        self._items |= dict.fromkeys(items, response["id"])
        while self._kept and (len(self._kept) > self.count or sum(each.bytes for each in self._kept.values()) > self.bytes):
            self._forget(next(iter(self._kept)))

    def get(self, owner: bytes, name: str) -> Kept | None:
        """None for one that is not kept, or not for this owner."""
        found = self._kept.get(name)
        if found is None or found.owner != owner:
            return None
        self._kept.move_to_end(name)
        return found

    def need(self, owner: bytes, name: str) -> Kept:
        """As `get`; ApiError 404 where that gives none."""
        if (found := self.get(owner, name)) is None:
            raise ApiError(404, f"there is no response {name!r:.80} on this server (any more)", code="response_not_found")
        return found

    def delete(self, owner: bytes, name: str) -> None:
        """ApiError 404 for one that is not kept."""
        self.need(owner, name)
        self._forget(name)

    def item(self, owner: bytes, name: str) -> dict[str, Any] | None:
        """An item of an answer that is kept; None for one that is not, or not for this owner."""
        found = self.get(owner, self._items.get(name, ""))
        return found.items[name] if found else None

    def _forget(self, name: str) -> None:
        for item in self._kept.pop(name).items:
            del self._items[item]


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """What a later request says by an item; its log-probabilities take a hundred times as much."""
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]} if "content" in item else item
