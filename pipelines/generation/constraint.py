"""One text under a grammar: which tokens may come next, and which must."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.thoughts import Marks


class CannotFollow(PipelineError):
    """The text has come to where no token of the vocabulary goes on as its grammar wants."""


class Constraint:
    """Holds a text to its grammar from behind the model's thoughts on, where it has any.

    `forced`: tokens that must come next, in the tokenizer's own cut, because the grammar leaves no other text. `done`: the
    text is whole and cannot go on.
    """

    def __init__(
        self,
        matcher,
        tokens: Sequence[bytes],
        eos: Collection[int],
        encode: Callable[[str], list[int]],
        marks: Marks = (),
        prompt: str = "",
    ):
        """`matcher`: llguidance's, of which this is the only user. `tokens`, `eos` and `encode`: the vocabulary's. `marks`:
        what begins thoughts and what ends them, which may stand at the end of the `prompt`."""
        self._matcher, self._tokens, self.eos, self._encode = matcher, tokens, eos, encode
        self.forced: deque[int] = deque()
        # The marks that end thoughts which have begun; the last bytes that came since.
        self._ends = tuple(end.encode() for begin, end in marks if prompt.rstrip().endswith(begin))
        self._thought = b""
        # Tokens that may begin thoughts now, with what ends them. A mark of several could be the text's own beginning.
        self._begins: dict[int, bytes] = {}
        if not self._ends and not any(prompt.rstrip().endswith(end) for _, end in marks):
            self._begins = {ids[0]: end.encode() for begin, end in marks if len(ids := encode(begin)) == 1}
        self._look_ahead()

    def copy(self) -> Constraint:
        """Another that goes on from here by itself."""
        other = copy(self)
        other._matcher, other.forced = self._matcher.deep_copy(), self.forced.copy()
        return other

    @property
    def done(self) -> bool:
        return not self._ends and self._matcher.is_stopped()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        if self.forced:
            return token == self.forced[0]
        return bool(self._ends) or token in self._begins or self._matcher.validate_tokens([token]) == 1

    def mask(self, vocab: int) -> np.ndarray:
        """Which tokens may come next, bool [vocab]; CannotFollow if none may."""
        found = np.full(vocab, bool(self._ends) and not self.forced)
        if self.forced:
            found[self.forced[0]] = True
        elif not self._ends:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab]
            found[: len(bits)] = bits
            found[list(self._begins)] = True
            # Of a text that is forced llguidance gives the first token that there is, though bytes before it have none.
            if np.count_nonzero(bits) == 1 and self._matcher.validate_tokens([int(bits.argmax())]) != 1:
                found[int(bits.argmax())] = False
            if self._matcher.is_error() or not found.any():
                raise CannotFollow(self._reason())
        return found

    def best(self, argmax: int, logits: Callable[[], np.ndarray]) -> int:
        """The likeliest token of those allowed, the lowest id of equals, where `argmax` is that of all and `logits()` gives
        f32 [vocab]."""
        if self.allows(argmax):
            return argmax
        if self.forced:
            return self.forced[0]
        return int(self.masked(logits()).argmax())

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """`logits` [vocab] with minus infinity for what may not come next."""
        return np.where(self.mask(len(logits)), logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """The text goes on by `token`; CannotFollow for one that is not allowed, or where the grammar grows too large."""
        if self._ends:
            self._think(token)
        elif token in self._begins:
            self._ends, self._begins = (self._begins[token],), {}
        else:
            self._begins = {}
            if not self._matcher.consume_token(token):
                self._fail()
        if self.forced:
            self.forced.popleft()
        self._look_ahead()

    def _think(self, token: int) -> None:
        """Notes what is thought, up to the mark that ends it."""
        self._thought += self._tokens[token] if token < len(self._tokens) else b""
        for end in self._ends:
            before, found, rest = self._thought.partition(end)
            if found:
                self._ends = ()
                # A token that holds the mark and more is as good as two.
                if rest.strip() and not self._matcher.consume_tokens(self._encode(rest.decode("utf-8", "replace").lstrip())):
                    self._fail()
                return
        # A mark may have begun.
        self._thought = self._thought[-max(map(len, self._ends)) :]

    def _look_ahead(self) -> None:
        if not (self.forced or self._ends or self._begins):
            tokens = self._matcher.compute_ff_tokens()
            # Bytes that the vocabulary has not may be forced, which then no token is.
            self.forced.extend(tokens[: self._matcher.validate_tokens(tokens)])

    def _fail(self) -> None:
        raise CannotFollow(self._reason())

    def _reason(self) -> str:
        reason = next(iter(self._matcher.get_error().splitlines()), "")
        # llguidance's names for its ends are single words.
        return f"the grammar cannot be followed any further: {reason if ' ' in reason else 'no token of this model fits'}"
