"""Which replica of a deployment has a request: the one that has read the longest beginning of its prompt, unless it is full."""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Characters that are compared as one, some 64 tokens; and how many such blocks of a prompt are looked at.
BLOCK, BLOCKS = 256, 64
# Blocks that are remembered, of all prompts.
KEPT = 100_000


def beginnings(body: bytes) -> tuple[bytes, ...]:
    """Of the prompt in a request's body a mark for every beginning of whole blocks, shortest first; none of other bodies."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    text = "".join(_texts(value)).encode("utf-8", "surrogatepass")
    marks, hashed = [], hashlib.blake2b(digest_size=16)
    for start in range(0, min(len(text) // BLOCK, BLOCKS) * BLOCK, BLOCK):
        hashed.update(text[start : start + BLOCK])
        marks.append(hashed.digest())
    return tuple(marks)


def _texts(value: Any) -> Iterator[str]:
    """The parts of a prompt in the order in which templates put them."""
    if isinstance(value, dict):
        for name in ("tools", "instructions", "system", "messages", "input", "prompt"):
            if name in value:
                yield json.dumps(value[name], ensure_ascii=False)


class PrefixRouter(RequestRouter):
    """For calls whose first argument has `beginnings`. Each router, one in every front, knows of what went through it.

    Ray's own router for this (ray.serve.llm) imports vLLM or SGLang.
    """

    def initialize_state(self, slots: int) -> None:  # type: ignore[override]
        """`slots`: requests that a replica runs at once; one that has as many is passed over for one that has fewer."""
        self.slots = slots
        self.has_read: OrderedDict[bytes, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Whoever knows the prompt, and then the less busy one of any two."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        # Those are all: with none of them free there is nothing to be tried without waiting.
        pending_request.routing_context.should_backoff = True
        known = next((found for mark in reversed(_marks(pending_request)) if (found := self._reader(mark))), None)
        return [two, candidate_replicas] if known is None or self._is_full(known) else [[known], two, candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """From now on this replica has the prompt."""
        for mark in _marks(pending_request):
            self.has_read[mark] = replica_id
            self.has_read.move_to_end(mark)
        while len(self.has_read) > KEPT:
            self.has_read.popitem(last=False)

    def _reader(self, mark: bytes) -> RunningReplica | None:
        """Who has read this beginning, if it still runs."""
        return self.curr_replicas.get(self.has_read[mark]) if mark in self.has_read else None

    def _is_full(self, replica: RunningReplica) -> bool:
        """Whether it has no slot free where another one may have."""
        lengths = {found: self.replica_queue_len_cache.get(found) or 0 for found in self.curr_replicas}
        return lengths[replica.replica_id] >= self.slots > min(lengths.values())


def _marks(pending: PendingRequest) -> tuple[bytes, ...]:
    return getattr(pending.args[0], "beginnings", ()) if pending.args else ()
