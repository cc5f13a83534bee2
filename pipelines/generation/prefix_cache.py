"""Which tokens each slot's caches hold, and the slot where a prompt costs least."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.generation.positions import shared, stand

if TYPE_CHECKING:
    from castiron.pipelines.generation.pausing import Paused
    from castiron.pipelines.generation.prefix_store import PrefixStore
    from castiron.pipelines.generation.sampling import Score

# A prompt goes on from a slot where at most so many tokens at its end are others: an answer's last ones may come back
# from a client in another tokenisation.
REWRITTEN = 16


class PrefixCache:
    """The tokens behind the caches of `sessions`, one a slot, up to each session's position.

    Caches outlive the sequence that filled them. A prompt that begins as one of them, at rest or in use, takes that
    beginning over: in place where it goes on from there, as a copy where something else hangs on it. Where a `store` of states
    on disk has a whole chunk more of it than any slot, it comes from there. A slot's tokens are its last prompt's `owner`'s: to
    others they are as if they were not there.

    `scores[slot]` are those of the slot's tokens 1 and on that were asked for; whoever scores a prompt adds to them. A prompt
    that is to be scored takes over no more of a beginning than has scores, which go with it.
    """

    def __init__(self, sessions: Sequence, store: PrefixStore | None = None, scoring: int = 1):
        """`scoring`: how many tokens a call scores."""
        self.sessions, self.store, self.scoring = sessions, store, scoring
        self.tokens = np.zeros((len(sessions), sessions[0].context), np.int32)
        self.scores: list[list[Score]] = [[] for _ in sessions]
        self.used = [0] * len(sessions)
        self.owners = [""] * len(sessions)
        self.clock = 0

    def common(self, prompt: np.ndarray, slot: int, owner: str = "", top: int | None = None) -> int:
        """How many tokens at the beginning of `prompt` i32 [n] the slot holds, up to where its session can go back; of one that
        is scored with the `top` likeliest those whose successors have such scores, in whole calls."""
        if self.owners[slot] != owner:
            return 0
        session, scores = self.sessions[slot], self.scores[slot]
        found = shared(self.tokens[slot, : session.position], prompt)
        if top is not None:
            # Of scores none has more of the likeliest than those before it.
            found = self.whole(min(found, len(scores) + 1)) if scores and len(scores[-1].top) >= top else 0
        return session.reachable(found)

    def whole(self, found: int) -> int:
        """Of so many tokens that are held with their scores, those that need not be read again to score what follows them: the
        logits after the last one are not kept."""
        return max(0, found - 1) // self.scoring * self.scoring

    def longest(self, prompt: np.ndarray, owner: str = "", top: int | None = None) -> int:
        """What `take` would find in the cache."""
        held = max(self._all_common(prompt, owner, top))
        return max(held, self.store.place(self.sessions[0], prompt)) if self.store and top is None else held

    def fetching(self, prompt: np.ndarray, owner: str = "", top: int | None = None) -> bool:
        """Whether what `take` would take from disk is still being read, by another thread."""
        if not self.store or top is not None:
            return False
        held = max(self._all_common(prompt, owner, top))
        on_disk = self.store.place(self.sessions[0], prompt) >= held + self.store.width
        return on_disk and self.store.fetching(self.sessions[0], prompt)

    def take(self, prompt: np.ndarray, free: Collection[int], owner: str = "", top: int | None = None) -> tuple[int, int]:
        """A slot of `free`, which is not empty, prepared for `prompt`, and how many of its tokens it holds already; `top` as
        of `common`."""
        slot, found = self._take(prompt, free, self._all_common(prompt, owner, top), top)
        self.owners[slot] = owner
        self.touch(slot)
        return slot, found

    def _all_common(self, prompt: np.ndarray, owner: str, top: int | None) -> list[int]:
        return [self.common(prompt, slot, owner, top) for slot in range(len(self.sessions))]

    def _take(self, prompt: np.ndarray, free: Collection[int], common: list[int], top: int | None) -> tuple[int, int]:
        """The same, where each slot has `common` tokens with the prompt."""
        best = max(common)
        if self.store and top is None and self.store.place(self.sessions[0], prompt) >= best + self.store.width:
            slot = self._given_away(free)
            if found := self.store.take(self.sessions[slot], prompt):
                self.tokens[slot, :found], self.scores[slot] = prompt[:found], []
                return slot, found
        slot = max(free, key=lambda s: (common[s], -s))
        goes_on = common[slot] == best and self.sessions[slot].position - best <= REWRITTEN
        if not goes_on:
            # What shares only a beginning with this prompt keeps its slot; what was in use longest ago goes.
            slot = self._given_away(free)
        source = slot if common[slot] == best else common.index(best)
        stand(self.sessions[slot], best, source=self.sessions[source])
        self.tokens[slot, :best] = self.tokens[source, :best]
        # A score is that of the token that follows.
        self.scores[slot] = self.scores[source][: best if top is not None else max(0, best - 1)]
        return slot, best

    def _given_away(self, free: Collection[int]) -> int:
        return min(free, key=lambda s: (self.used[s], s))

    def fed(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """The slot's session has just appended `tokens`."""
        end = self.sessions[slot].position
        self.tokens[slot, end - len(tokens) : end] = tokens

    def give(self, paused: Paused, tokens: Sequence[int], free: Collection[int], owner: str) -> int:
        """A slot of `free` for a sequence that goes on, of whose `tokens` it then holds as many as before."""
        slot = self._given_away(free)
        paused.resume(self.sessions[slot])
        self.tokens[slot, : paused.position] = tokens[: paused.position]
        self.scores[slot], self.owners[slot] = [], owner
        self.touch(slot)
        return slot

    def touch(self, slot: int) -> None:
        """The slot is in use now: of those free it will be the last to be given away."""
        self.clock += 1
        self.used[slot] = self.clock
