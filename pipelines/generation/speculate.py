"""Speculation that stays exact: continuations found in the context are checked, several tokens in one pass.

What the text has said before it often says again: code that is edited, passages that are quoted. The longest run of
last tokens that stands earlier in the context proposes what came after it there (prompt lookup: Saxena 2023; checking:
Leviathan et al., arXiv 2211.17192, in its greedy form). A proposal is kept only as far as it is what the model says.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.constraint import Constraint
from castiron.vmfb.states import Snapshot

# Of a match, the fewest tokens that are looked up and the most that are counted.
SHORTEST, LONGEST = 2, 32
# Of one pair of tokens, the latest occurrences that are compared.
OCCURRENCES = 8
# A verify function sums in another order than decode_step. Where the two best logits are nearer than this share of the
# largest, its choice is not taken: decode_step decides, as it would without speculation.
MARGIN = 1e-4
# Share of the decode time that proposals may lose in all; with what a first try costs it stays below 5 % of a text.
LOSS = 0.02


class Ngrams:
    """The tokens so far, and where the longest run of last ones occurred before."""

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        self._occurrences: dict[tuple[int, int], deque[int]] = {}
        # The match: of how many last tokens, and the index behind their earlier occurrence.
        self.length = self.end = 0
        for token in tokens:
            self._append(token)
        self._find()

    def add(self, token: int) -> None:
        follows = self.length and self.tokens[self.end] == token
        before = (self.length + 1, self.end + 1) if follows else (0, 0)
        self._append(token)
        self._find()
        # A long match is followed even where the pair it ends in has been seen too often since.
        if before[0] > self.length:
            self.length, self.end = min(before[0], LONGEST), before[1]

    def propose(self, count: int) -> list[int]:
        """What followed the match, `count` tokens; one nearer than that is a period and repeats. Empty: no match."""
        if not self.length:
            return []
        period = len(self.tokens) - self.end
        return [self.tokens[self.end + i % period] for i in range(count)]

    def _append(self, token: int) -> None:
        tokens = self.tokens
        # The pair that now has a token after it; the last pair itself is what is looked for.
        if len(tokens) >= SHORTEST:
            self._occurrences.setdefault((tokens[-2], tokens[-1]), deque(maxlen=OCCURRENCES)).append(len(tokens))
        tokens.append(token)

    def _find(self) -> None:
        tokens = self.tokens
        self.length = self.end = 0
        for end in reversed(self._occurrences.get(tuple(tokens[-2:]), ())):
            length = SHORTEST
            while length < min(LONGEST, end) and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > self.length:
                self.length, self.end = length, end


class Odds:
    """How probable it is that a match goes on by one token, by the length of the match, learnt from the text itself."""

    # Matches of 2-3, 4-7, 8-15, 16-31 and 32 tokens, before anything is known, as if seen in this many cases.
    START, CASES, FORGET = (0.25, 0.5, 0.75, 0.9, 0.95), 4.0, 0.98

    def __init__(self):
        self._hits = [share * self.CASES for share in self.START]
        self._cases = [self.CASES] * len(self.START)

    def learn(self, length: int, hit: bool) -> None:
        kind = length.bit_length() - 2
        self._hits[kind] = self._hits[kind] * self.FORGET + hit
        self._cases[kind] = self._cases[kind] * self.FORGET + 1

    def tokens(self, length: int, width: int) -> float:
        """Tokens to expect of a pass over `width` of them, the first of which is certain."""
        expected = probability = 1.0
        for i in range(width - 1):
            kind = min(length + i, LONGEST).bit_length() - 2
            probability *= self._hits[kind] / self._cases[kind]
            expected += probability
        return expected


class Costs:
    """Seconds of a pass by its width, as the last ones took; before there is one, a guess from the next narrower."""

    GROWTH = 0.6  # of the guess: rather low, or a width would never be tried

    def __init__(self):
        self._seen: dict[int, deque[float]] = {}

    @property
    def known(self) -> bool:
        """Whether a step has been timed, without which nothing can be guessed."""
        return 1 in self._seen

    def learn(self, width: int, seconds: float) -> None:
        self._seen.setdefault(width, deque(maxlen=7)).append(seconds)

    def of(self, width: int) -> float:
        if width in self._seen:
            return statistics.median(self._seen[width])
        narrower = max(known for known in self._seen if known < width)
        return self.of(narrower) * (width / narrower) ** self.GROWTH


class Speculator:
    """Feeds a session greedily, one token or several a pass; the tokens are those of one at a time.

    `proposed` and `accepted` count proposed tokens, `passes` the verify calls.
    """

    def __init__(
        self,
        session,
        history: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        constraint: Constraint | None = None,
    ):
        """`history`: the tokens that stand in the session, which is where `advance` goes on. `constraint`: that of the text,
        which its sequence moves on. PipelineError for a bundle that was compiled without verify functions."""
        self.session, self.clock, self.constraint = session, clock, constraint
        self.widths = session.manifest.widths("verify")
        if not self.widths:
            raise PipelineError("this bundle was compiled without verify functions; compile it with --speculate 4,8")
        self.ngrams, self.odds, self.costs = Ngrams(history), Odds(), Costs()
        self.proposed = self.accepted = self.passes = 0
        # Seconds in all, and those that passes took beyond what steps to the same tokens would have.
        self._spent = self._lost = 0.0
        self._step_next = False

    def advance(self, tokens: Sequence[int], most: int) -> list[int]:
        """Feeds `tokens` and returns the 1 to `most` that follow them greedily; the last of them is not fed. One that the
        constraint does not allow comes by itself, for the sequence to choose another."""
        for each in tokens:
            self._note(each)
        if len(tokens) > 1:
            return [self.session.prefill(tokens)]
        (token,) = tokens
        start = self.clock()
        width = self._width(most)
        found = self._check(token, width, most) if width > 1 else [self.session.step(token)]
        seconds = self.clock() - start
        if width == 1:
            self.costs.learn(1, seconds)
        else:
            self.costs.learn(width, seconds)
            self._lost += seconds - len(found) * self.costs.of(1)
        self._spent += seconds
        self._step_next = self._step_next and width > 1
        for each in found[:-1]:
            self._note(each)
        return found

    def _note(self, token: int) -> None:
        if length := self.ngrams.length:
            self.odds.learn(length, self.ngrams.propose(1)[0] == token)
        self.ngrams.add(token)

    def _width(self, most: int) -> int:
        """The width with the most tokens a second to expect; 1 is a step."""
        length, room = self.ngrams.length, self.session.context - self.session.position
        if not length or self._step_next or self._lost > LOSS * self._spent or not self.costs.known:
            return 1
        rates = {1: 1 / self.costs.of(1)}
        most = min(most, 1 + self._fitting(max(self.widths)))
        if most == 1:
            return 1
        for width in self.widths:
            if width <= room:
                rates[width] = min(self.odds.tokens(length, width), most) / self.costs.of(width)
        return max(rates, key=rates.get)

    def _fitting(self, width: int) -> int:
        """How many tokens of a proposal the constraint allows; of one that it cuts there are `width` - 1 at most."""
        if not self.constraint:
            return width
        trial, count = self.constraint.copy(), 0
        for each in self.ngrams.propose(width - 1):
            if trial.done or not trial.allows(each):
                break
            trial.accept(each)
            count += 1
        return count

    def _check(self, token: int, width: int, most: int) -> list[int]:
        session, before = self.session, self.session.snapshot(width)
        proposal = self.ngrams.propose(width - 1)
        says = session.verify([token, *proposal])
        margins = session.margins()
        most = min(width, most)
        if self.constraint:
            most = min(most, self._follow(self.constraint.copy(), proposal, says, margins))
        good = 0
        while good < most - 1 and says[good] == proposal[good]:
            good += 1
        self.passes += 1
        self.proposed += width - 1
        doubtful = next((i for i in range(good + 1) if margins[i] < MARGIN), None)
        if doubtful == 0:
            session.restore(before)
            return [session.step(token)]
        if doubtful is not None:
            good, self._step_next = doubtful - 1, True
        self.accepted += good
        self._take_back(before, [token, *proposal][: good + 1])
        return says[: good + 1]

    def _follow(self, constraint: Constraint, proposal: list[int], says: list[int], margins: list[float]) -> int:
        """Puts the likeliest allowed tokens into `says` and their margins into `margins`, as far as the proposal is right;
        how many tokens there are before the text is whole."""
        logits = None
        for i, wanted in enumerate([*proposal, None]):
            if constraint.forced:
                says[i], margins[i] = constraint.forced[0], np.inf
            elif not constraint.allows(says[i]):
                logits = self.session.verified_logits() if logits is None else logits
                allowed = constraint.masked(logits[i])
                says[i] = int(allowed.argmax())
                second, first = np.partition(allowed, -2)[-2:]
                margins[i] = float((first - second) / np.abs(logits[i]).max())
            if says[i] != wanted:
                break
            constraint.accept(wanted)
            if constraint.done:
                return i + 1
        return len(says)

    def _take_back(self, before: Snapshot, tokens: list[int]) -> None:
        """Leaves the session with `tokens` after `before`, the first of those that were checked."""
        session, position = self.session, before.position + len(tokens)
        if session.reachable(position) == position:
            session.rewind(position)
        else:
            session.restore(before)
            session.prefill(tokens)
