"""Responses that are kept for a while, so that later requests go on from them and clients look them up."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.schemas import Message


@dataclass(frozen=True)
class Kept:
    """A response as JSON, and the messages of its conversation to its end, without its instructions."""

    owner: bytes
    body: bytes
    messages: Sequence[Message]
    bytes: int


class ResponseStore:
    """At most `count` responses and about `bytes` of them in memory; the longest unused goes first. Each is its owner's alone,
    who is whoever has the API key that it was asked for with."""

    def __init__(self, count: int = 1000, bytes: int = 64 << 20):
        self.count, self.bytes = count, bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def put(self, owner: bytes, response: dict, messages: Sequence[Message]) -> None:
        body = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        size = len(body) + sum(len(message.model_dump_json()) for message in messages)
        self._kept[response["id"]] = Kept(owner, body, messages, size)
        while self._kept and (len(self._kept) > self.count or sum(each.bytes for each in self._kept.values()) > self.bytes):
            self._kept.popitem(last=False)

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
        del self._kept[name]
