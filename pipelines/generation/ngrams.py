"""Proposals from the text itself: what the text has said before it often says again, as edited code and quotations do.

The longest run of last tokens that stands earlier in the context proposes what came after it there (prompt lookup: Saxena
2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# Of a match, the fewest tokens that are looked up and the most that are counted.
SHORTEST, LONGEST = 2, 32
# Of one pair of tokens, the latest occurrences that are compared.
OCCURRENCES = 8


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
