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
    """A copy of the KV cache of a preempted request, with which the request continues later.

    rows: the KV cache, and recurrent states if the model has them; one array for each. An empty
        list if there was no memory for a copy: then the model reads all tokens again.
    position: number of tokens that the model had read.
    chunked_tokens: how many of them, counted from the start of the text, it read in prefill calls
        of the maximum size. Only the states after such calls can be stored on disk.
    prefilling: whether the model has more than the last token to read.
    """

    rows: list[np.ndarray]
    position: int
    chunked_tokens: int
    prefilling: bool

    @classmethod
    def of(cls, session: Session, prefilling: bool, max_bytes: int) -> Paused:
        """Copy the states of `session`, if they have at most `max_bytes`."""
        position = session.position
        rows = session.rows(position)
        if sum(array.nbytes for array in rows) > max_bytes:
            return cls([], 0, 0, True)
        return cls([array.copy() for array in rows], position, session.chunked_tokens, prefilling)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)

    def resume(self, session: Session) -> None:
        """Write the copied states into `session`."""
        session.take(self.rows, self.position, self.chunked_tokens)


# A prompt reuses a slot's states in place if at most this many of the slot's last tokens differ.
# Some differ because a client sends an answer back as text, which may be tokenized differently.
REWRITTEN = 16


class PrefixCache:
    """A prefix cache: prompts reuse the KV caches that earlier requests left in the slots.

    A slot has the states of one sequence: its KV cache, and recurrent states if the model has them.
    They stay in the slot after the request has ended. A prompt that continues the text in a slot
    uses this slot. A prompt that shares only a prefix of the text gets a copy of the states in
    another slot. If `store`, a cache on disk, has a longer prefix of the prompt than every slot,
    and this saves at least one prefill call, the states are read from disk.

    A prompt reuses only states that were computed for its own salt, so clients with different salts
    cannot learn each other's prompts from the number of cached tokens.

    sessions: the session of each slot.
    tokens: the text in each slot, as token ids, i32 [slots, context]; only the first
        `sessions[slot].position` ids are valid.
    scores: for each slot, the log-probabilities of the text's tokens except the first. Only
        requests with prompt_logprobs compute them, and such requests reuse only a prefix that has
        them.
    salts: the salt of the text in each slot.
    """

    def __init__(self, sessions: Sequence, store: PrefixStore | None = None, score_width: int = 1):
        """Create an empty cache for slots with the given sessions.

        store: a second cache, on disk.
        score_width: number of tokens that a model call reads if a request needs the
            log-probabilities of its prompt.
        """
        self.sessions, self.store, self.score_width = sessions, store, score_width
        self.tokens = np.zeros((len(sessions), sessions[0].context), np.int32)
        self.scores: list[list[Score]] = [[] for _ in sessions]
        self.salts = [""] * len(sessions)
        # For each slot the value of the counter `_clock` when the slot was last used.
        self.used = [0] * len(sessions)
        self._clock = 0

    def cached_in(self, prompt: np.ndarray, slot: int, top: int | None = None, salt: str = "") -> int:
        """Return how many tokens of `prompt`, i32 [n], can be reused from a slot's KV cache.

        top: the request's option prompt_logprobs, or None. If it is a number, a token can be reused
            only if its log-probability and those of the `top` most probable tokens are cached too.
        """
        if self.salts[slot] != salt:
            return 0
        session, scores = self.sessions[slot], self.scores[slot]
        found = common_prefix(self.tokens[slot, : session.position], prompt)
        if top is not None:
            # If the last score has enough of the most probable tokens, all earlier ones do.
            found = self.scored_positions(min(found, len(scores) + 1)) if scores and len(scores[-1].top) >= top else 0
        return session.reachable(found)

    def scored_positions(self, cached: int) -> int:
        """Return how many of a slot's `cached` tokens a request with prompt_logprobs can reuse.

        Such a request needs the logits after every token that it does not reuse, and computes
        `self.score_width` tokens in a call. So it reuses a multiple of this number. It computes the
        last cached token again, because logits are not cached.
        """
        return max(0, cached - 1) // self.score_width * self.score_width

    def store_of(self, salt: str) -> PrefixStore | None:
        """Return the cache on disk for prompts with `salt`; None without a cache on disk."""
        return self.store and self.store.salted(salt)

    def longest(self, prompt: np.ndarray, top: int | None = None, salt: str = "") -> int:
        """Return the length of the longest prefix of `prompt` that is in a slot or on disk.

        top: the request's option prompt_logprobs, or None. If it is a number, a token counts only
            if its log-probability is cached too.
        """
        return max(*self._cached(prompt, top, salt), self._on_disk(prompt, top, salt))

    def fetching(self, prompt: np.ndarray, top: int | None = None, salt: str = "") -> bool:
        """Return whether the longest cached prefix of `prompt` is still being read from disk.

        The first call for a prefix starts to read it in another thread.

        top: the request's option prompt_logprobs, or None.
        """
        store = self.store_of(salt)
        longer = store and self._on_disk(prompt, top, salt) >= max(self._cached(prompt, top, salt)) + store.width
        return bool(longer and store.fetching(self.sessions[0], prompt))

    def _cached(self, prompt: np.ndarray, top: int | None, salt: str) -> list[int]:
        return [self.cached_in(prompt, slot, top, salt) for slot in range(len(self.sessions))]

    def _on_disk(self, prompt: np.ndarray, top: int | None, salt: str) -> int:
        """Return how many of the first tokens of `prompt` are in the store on disk.

        top: the request's option prompt_logprobs, or None. If it is a number, the result is 0,
            because the store has no log-probabilities.
        """
        store = self.store_of(salt)
        return store.lookup(self.sessions[0], prompt) if store and top is None else 0

    def take(self, prompt: np.ndarray, free: Collection[int], top: int | None = None, salt: str = "") -> tuple[int, int]:
        """Prepare a slot for `prompt`; return (slot, number of prompt tokens that it already has).

        If another slot or the store on disk has a longer prefix of the prompt than the chosen slot,
        the KV cache of this prefix is copied to the chosen slot.

        free: the slots to choose from.
        top: the request's option prompt_logprobs, or None. If it is a number, a token can be reused
            only if its log-probability is cached too.
        """
        cached, store = self._cached(prompt, top, salt), self.store_of(salt)
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
        """Return how many of the `cached` tokens of `prompt` to reuse from the session `source`.

        The store on disk accepts a KV cache only if it was computed in prefill calls of the maximum
        size. So if a longer prefix of `prompt` will be stored, only the tokens of complete calls of
        this size are reused, and the result may be less than `cached`.
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
        """Copy a preempted request's KV cache to one of the `free` slots; return this slot.

        tokens: the request's prompt and answer so far, i32 [n].
        """
        slot = self._unused_longest(free)
        paused.resume(self.sessions[slot])
        self._replace(slot, tokens[: paused.position], salt)
        return slot

    def load(self, rows: Sequence[np.ndarray], tokens: np.ndarray) -> None:
        """Load a KV cache into the least recently used slot; call this only while no request runs.

        rows: the KV cache, and recurrent states if the model has them; one array for each.
        tokens: the tokens that were read to compute it, i32 [n].
        """
        slot = self._unused_longest(range(len(self.sessions)))
        self.sessions[slot].take(rows, len(tokens))
        self._replace(slot, tokens, "")

    def _replace(self, slot: int, tokens: Sequence[int] | np.ndarray, salt: str) -> None:
        self.tokens[slot, : len(tokens)], self.scores[slot], self.salts[slot] = tokens, [], salt
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Mark the slot as the most recently used one."""
        self._clock += 1
        self.used[slot] = self._clock
