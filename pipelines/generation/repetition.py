"""The end of an answer that goes round in a circle, as greedy decoding does: "The dragon is a dragon" without end."""

import numpy as np

# A cycle counts that is at most so long, has come so often in a row and fills at least so many tokens. Tables and code
# repeat a line a few times; a model that has said the same thing eight times over two hundred tokens says nothing else.
LONGEST, TIMES, LEAST = 128, 8, 192


class Repetition:
    """Sees tokens one by one and tells when the last of them are one cycle over and over.

    Memory and time of a token are those of `LONGEST` numbers.
    """

    def __init__(self) -> None:
        # By period p, at p - 1: the token p ago; how many tokens in a row were the one p before them.
        self._ago = np.full(LONGEST, -1, np.int64)
        self._runs = np.zeros(LONGEST, np.int64)
        periods = np.arange(1, LONGEST + 1)
        self._needed = np.maximum(LEAST, TIMES * periods) - periods

    def add(self, token: int) -> bool:
        """Whether with `token` the text has become a circle."""
        self._runs = np.where(self._ago == token, self._runs + 1, 0)
        self._ago[1:] = self._ago[:-1]
        self._ago[0] = token
        return bool((self._runs >= self._needed).any())
