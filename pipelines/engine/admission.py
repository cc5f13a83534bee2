"""The queue of requests: it chooses the prompt to prefill next and the request that gets a slot."""

from __future__ import annotations

from bisect import insort, insort_left
from collections import Counter

from castiron.pipelines.engine.prefix_cache import PrefixCache
from castiron.pipelines.engine.prefix_store import common_prefix
from castiron.pipelines.engine.request import Request

# A request that was passed over this often is chosen before others; if there are several such requests, the oldest is chosen.
PATIENCE = 4

# A request that may run next: (number of tokens left to read, its slot or None, the request).
Candidate = tuple[int, int | None, Request]


class Admission:
    """The queue of requests, which chooses the request whose prompt the model reads next.

    In this order: the lowest `priority`; the client with the fewest slots; the oldest request that
    was passed over `PATIENCE` times; the fewest tokens left to read. While the model reads an older
    prompt with the same prefix, a request waits until the prefix is in the prefix cache.

    waiting: by priority, then in order of arrival. prefilling, decoding: requests by slot.
    """

    def __init__(self, slots: int, cache: PrefixCache):
        self.slots, self.cache = slots, cache
        self.waiting: list[Request] = []
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}

    @property
    def running(self) -> dict[int, Request]:
        return {**self.prefilling, **self.decoding}

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(self.slots) if slot not in self.prefilling and slot not in self.decoding]

    def add(self, request: Request) -> None:
        """Queue a request after the others of its priority, or before them if it was preempted."""
        (insort_left if request.paused else insort)(self.waiting, request, key=lambda r: r.priority)

    def remove(self, request: Request) -> int | None:
        """Remove a request and return its slot, or None if it had no slot."""
        for running in (self.prefilling, self.decoding):
            for slot, other in running.items():
                if other is request:
                    del running[slot]
                    return slot
        if request in self.waiting:
            self.waiting.remove(request)
        return None

    def next(self, forced: dict[int, Request]) -> tuple[int | None, Request] | None:
        """Choose the request whose tokens the model reads next; return (its slot, the request).

        None if no request has tokens to read; a slot of None is still to be chosen. forced:
        requests by slot that are generating, and have forced tokens that the model has not read.
        """
        found: list[Candidate] = [
            (len(request.unread(self.cache.sessions[slot].position)), slot, request)
            for slot, request in (*self.prefilling.items(), *forced.items())
        ]
        if self.waiting and (free := self.free):
            found += self._for_free_slots(len(free))
        if not found:
            return None

        def order(candidate: Candidate) -> tuple[int, bool, int, float]:
            left, _, request = candidate
            patient = request.passed_over < PATIENCE
            return request.priority, patient, left if patient else 0, request.timing.arrived

        _, slot, chosen = min(found, key=order)
        for _, _, request in found:
            request.passed_over = 0 if request is chosen else request.passed_over + 1
        return slot, chosen

    def preempted(self) -> int | None:
        """Return the slot whose request should be preempted, or None.

        The waiting request must have a higher priority (a lower number), or the same and a client
        with at least two slots fewer. So clients' numbers of slots become equal, and no two
        requests preempt each other.
        """
        if not self.waiting or self.free:
            return None
        slots_of = self._slots_of()

        def rank(request: Request) -> tuple[int, int]:
            return request.priority, slots_of[request.client]

        def gives_way(running: Request, waiting: tuple[int, int]) -> bool:
            priority, slots = rank(running)
            return priority > waiting[0] or priority == waiting[0] and slots >= waiting[1] + 2

        *_, slot = max((*rank(request), request.timing.arrived, slot) for slot, request in self.running.items())
        victim = self.running[slot]
        if not gives_way(victim, min(map(rank, self.waiting))):
            return None
        # Only a request that could use the slot now, not one that waits for a prefix to be read.
        ready = self._for_free_slots(1)
        return slot if ready and gives_way(victim, rank(ready[0][2])) else None

    def _slots_of(self) -> Counter[str]:
        return Counter(request.client for request in self.running.values())

    def _for_free_slots(self, free: int) -> list[Candidate]:
        slots_of = self._slots_of()
        seen: Counter[str] = Counter()
        found: dict[tuple[int, int], list[Candidate]] = {}
        for request in self.waiting:
            seen[request.client] += 1
            if seen[request.client] > free:
                continue
            if left := self._left_to_read(request):
                found.setdefault((request.priority, slots_of[request.client]), []).append((left, None, request))
        return found[min(found)] if found else []

    def _left_to_read(self, request: Request) -> int:
        """Return how many tokens a waiting request has to read; 0 if it waits for a prefix."""
        if request.paused:
            return len(request.unread(request.paused.position))
        wanted = request.prompt, request.prompt_logprobs, request.cache_salt
        cached = self.cache.longest(*wanted)
        if self.decoding and self.cache.fetching(*wanted):
            return 0
        older = (r for r in self.prefilling.values() if r.timing.arrived <= request.timing.arrived)
        return 0 if any(self._will_cache_more(r, request, cached) for r in older) else len(request.prompt) - cached

    def _will_cache_more(self, other: Request, request: Request, cached: int) -> bool:
        is_long = self.cache.sessions[0].manifest.is_long
        if other.cache_salt != request.cache_salt or is_long(len(other.prompt)) != is_long(len(request.prompt)):
            return False
        common, wanted, given = common_prefix(request.prompt, other.prompt), request.prompt_logprobs, other.prompt_logprobs
        if wanted is None:
            return common > cached
        return given is not None and given >= wanted and self.cache.scored_positions(common) > cached
