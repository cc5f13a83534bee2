"""What passes over several tokens cost, as they are measured."""

from __future__ import annotations

import statistics
from collections import deque


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
