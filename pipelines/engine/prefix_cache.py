"""The prefix cache: it finds the slot whose KV cache already has the longest prefix of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from castiron.pipelines.engine.prefix_store import PrefixStore, common_prefix
from castiron.pipelines.engine.sampling import Score
from castiron.vmfb.run.session import Session, move_to


@dataclass(frozen=True)
class Paused:
    """A copy of the states of a preempted request, with which it continues later.

    rows: [] if there was no memory for a copy: then the model reads all tokens again.
    chunked_tokens, is_long: see `Session`. prefilling: whether more than the last token is unread.
    """

    rows: list[np.ndarray]
    position: int
    chunked_tokens: int
    is_long: bool
    prefilling: bool

    @classmethod
    def of(cls, session: Session, prefilling: bool, max_bytes: int) -> Paused:
        """Copy the states of `session`, if they have at most `max_bytes`."""
        position = session.position
        rows = session.rows(position)
        if sum(array.nbytes for array in rows) > max_bytes:
            return cls([], 0, 0, False, True)
        return cls([array.copy() for array in rows], position, session.chunked_tokens, session.is_long, prefilling)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)


# A prompt reuses a slot's states in place if at most this many of the slot's last tokens differ.
# Some differ because a client sends an answer back as text, which may be tokenized differently.
REWRITTEN = 16


class PrefixCache:
    """The prompts' states in slots, for prompts that share a prefix with them.

    A prompt that continues the text in a slot uses this slot; one that shares only a prefix gets a
    copy of its states in another slot. If `store`, a cache on disk, has a longer prefix than every
    slot, by at least one prefill call, the states are read from disk.

    tokens: the text in each slot, i32 [slots, context], valid up to its session's position.
    scores: log-probabilities of the text's tokens except the first, by slot, if a request needed
        them. Requests with prompt_logprobs reuse only a prefix that has them.
    salts: the salt of the text in each slot.
    """

    def __init__(self, sessions: Sequence, store: PrefixStore | None = None, score_width: int = 1):
        """Create an empty cache; `score_width`: tokens of a call for prompt_logprobs."""
        self.sessions, self.store, self.score_width = sessions, store, score_width
        self.tokens = np.zeros((len(sessions), sessions[0].context), np.int32)
        self.scores: list[list[Score]] = [[] for _ in sessions]
        self.salts = [""] * len(sessions)
        # For each slot the value of the counter `_clock` when the slot was last used.
        self.used = [0] * len(sessions)
        self._clock = 0

    def cached_in(self, prompt: np.ndarray, slot: int, top: int | None = None, salt: str = "") -> int:
        """Return how many tokens of `prompt`, i32 [n], can be reused from a slot."""
        session, scores = self.sessions[slot], self.scores[slot]
        if self.salts[slot] != salt or not session.is_valid_for(len(prompt)):
            return 0
        found = common_prefix(self.tokens[slot, : session.position], prompt)
        if top is not None:
            # If the last score has enough of the most probable tokens, all earlier ones do.
            found = self.scored_positions(min(found, len(scores) + 1)) if scores and len(scores[-1].top) >= top else 0
        return session.reachable(found)

    def scored_positions(self, cached: int) -> int:
        """Return how many of a slot's `cached` tokens a request with prompt_logprobs can reuse.

        It needs the logits after every token that it does not reuse, in calls of `score_width`, and
        reads the last cached token again, because logits are not cached.
        """
        return max(0, cached - 1) // self.score_width * self.score_width

    def store_of(self, salt: str, total: int) -> PrefixStore | None:
        """Return the cache on disk for texts of `total` tokens with `salt`, if there is one."""
        return self.store and self.store.of(salt, self.store.manifest.is_long(total))

    def longest(self, prompt: np.ndarray, top: int | None = None, salt: str = "") -> int:
        """Return the length of the longest prefix of `prompt` that is in a slot or on disk."""
        return max(*self._cached(prompt, top, salt), self._on_disk(prompt, top, salt))

    def fetching(self, prompt: np.ndarray, top: int | None = None, salt: str = "") -> bool:
        """Return whether the longest cached prefix of `prompt` is still being read from disk.

        The first call for a prefix starts to read it in another thread.
        """
        store = self.store_of(salt, len(prompt))
        longer = store and self._on_disk(prompt, top, salt) >= max(self._cached(prompt, top, salt)) + store.width
        return bool(longer and store.fetching(self.sessions[0], prompt))

    def _cached(self, prompt: np.ndarray, top: int | None, salt: str) -> list[int]:
        return [self.cached_in(prompt, slot, top, salt) for slot in range(len(self.sessions))]

    def _on_disk(self, prompt: np.ndarray, top: int | None, salt: str) -> int:
        store = self.store_of(salt, len(prompt))
        return store.lookup(self.sessions[0], prompt) if store and top is None else 0

    def take(self, prompt: np.ndarray, free: Collection[int], top: int | None = None, salt: str = "") -> tuple[int, int]:
        """Prepare one of the `free` slots for `prompt`; return (slot, length of the reused prefix).

        A longer prefix in another slot or on disk is copied to the slot.
        """
        cached, store = self._cached(prompt, top, salt), self.store_of(salt, len(prompt))
        best = max(cached)
        if store and self._on_disk(prompt, top, salt) >= best + store.width:
            slot = self._unused_longest(free)
            if found := store.take(self.sessions[slot], prompt):
                self._replace(slot, prompt[:found], salt)
                return slot, found
        slot = max(free, key=lambda s: (cached[s], -s))
        continues = cached[slot] == best and self.sessions[slot].position - best <= REWRITTEN
        if not continues:
            # The prompt shares only a part of that slot's tokens: copy them to another slot.
            slot = self._unused_longest(free)
        source = slot if cached[slot] == best else cached.index(best)
        if store and top is None:
            best = self._storable(store, self.sessions[source], prompt, best)
        move_to(self.sessions[slot], best, source=self.sessions[source])
        self.tokens[slot, :best] = self.tokens[source, :best]
        # Logits give the score of the next token, so there is one score less than tokens.
        self.scores[slot] = self.scores[source][: best if top is not None else max(0, best - 1)]
        self.salts[slot] = salt
        self.touch(slot)
        return slot, best

    def _storable(self, store: PrefixStore, source: Session, prompt: np.ndarray, cached: int) -> int:
        """Return how many of the `cached` tokens to reuse from the session `source`.

        The store accepts only states after full chunks. So if a longer prefix of `prompt` will be
        stored, only full chunks are reused.
        """
        start = min(source.chunked_tokens, cached // store.width * store.width)
        is_near = cached - start < store.width and source.reachable(start) == start
        return start if is_near and store.will_store(source, prompt, start) else cached

    def _unused_longest(self, slots: Collection[int]) -> int:
        return min(slots, key=lambda s: (self.used[s], s))

    def latest(self) -> int:
        """Return the slot that was used last."""
        return max(range(len(self.sessions)), key=lambda s: self.used[s])

    def appended(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Record that the session of a slot has just read `tokens`."""
        end = self.sessions[slot].position
        self.tokens[slot, end - len(tokens) : end] = tokens

    def resume(self, paused: Paused, tokens: np.ndarray, free: Collection[int], salt: str = "") -> int:
        """Copy a preempted request with these tokens to a free slot; return the slot."""
        slot = self._unused_longest(free)
        self.sessions[slot].take(paused.rows, tokens[: paused.position], paused.chunked_tokens, paused.is_long)
        self._replace(slot, tokens[: paused.position], salt)
        return slot

    def load(self, rows: Sequence[np.ndarray], tokens: np.ndarray, is_long: bool) -> None:
        """Load states after `tokens` into the oldest slot; only while no request runs."""
        slot = self._unused_longest(range(len(self.sessions)))
        self.sessions[slot].take(rows, tokens, is_long=is_long)
        self._replace(slot, tokens, "")

    def _replace(self, slot: int, tokens: Sequence[int] | np.ndarray, salt: str) -> None:
        self.tokens[slot, : len(tokens)], self.scores[slot], self.salts[slot] = tokens, [], salt
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Mark the slot as the most recently used one."""
        self._clock += 1
        self.used[slot] = self._clock
