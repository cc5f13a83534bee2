"""Propose the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# Min tokens of a match that is looked up, and max tokens of a match that are counted.
MIN_MATCH, MAX_MATCH = 2, 32
# Number of the latest occurrences of a pair of tokens that are compared with the text's end.
OCCURRENCES = 8


class Ngrams:
    """A predictor that proposes the tokens after an earlier occurrence of the text's last tokens.

    Source: prompt lookup (Saxena 2023). `length`: number of last tokens that match the earlier
    occurrence, 0 without a match. `end`: index in `tokens` of the token after that occurrence.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        self._occurrences: dict[tuple[int, int], deque[int]] = {}
        self.length = self.end = 0
        for token in tokens:
            self._append(token)
        self._find()

    def add(self, token: int) -> None:
        """Append `token` to the text, and look for an earlier occurrence of its new end."""
        follows = self.length and self.tokens[self.end] == token
        length, end = (self.length + 1, self.end + 1) if follows else (0, 0)
        self._append(token)
        self._find()
        # Keep a long match, even if the last pair of tokens has occurred more than OCCURRENCES
        # times since.
        if length > self.length:
            self.length, self.end = min(length, MAX_MATCH), end

    def propose(self, count: int) -> list[int]:
        """Return `count` tokens that followed the earlier occurrence, or no tokens without a match.

        If fewer than `count` tokens follow the occurrence in the text, these tokens are repeated.
        """
        if not self.length:
            return []
        period = len(self.tokens) - self.end
        return [self.tokens[self.end + i % period] for i in range(count)]

    def _append(self, token: int) -> None:
        tokens = self.tokens
        # Index the pair that now has a next token; the last pair is looked up, not indexed.
        if len(tokens) >= MIN_MATCH:
            self._occurrences.setdefault((tokens[-2], tokens[-1]), deque(maxlen=OCCURRENCES)).append(len(tokens))
        tokens.append(token)

    def _find(self) -> None:
        tokens = self.tokens
        self.length = self.end = 0
        for end in reversed(self._occurrences.get(tuple(tokens[-2:]), ())):
            length = MIN_MATCH
            while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > self.length:
                self.length, self.end = length, end
