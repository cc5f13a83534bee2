"""Propose the next tokens for speculative decoding, from earlier text or with a draft model.

A draft model is a smaller, faster model with the same vocabulary as the target model, which
generates the text. Both sample with the same random numbers. A token that the draft model proposes
is accepted only if the target model chooses the same token. So the text is the same as without a
draft (drafter-invariant speculative decoding: Daliri, Musco and Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from castiron.pipelines.engine.request import Chooser
from castiron.pipelines.engine.sampling import weights
from castiron.vmfb.run.session import Session, move_after, move_to
from castiron.vmfb.run.states import Snapshot

# Min tokens of a match that is looked up, and max tokens of a match that are counted.
MIN_MATCH, MAX_MATCH = 2, 32
# Number of the latest occurrences of a pair of tokens that are compared with the text's end.
OCCURRENCES = 8
# The draft model first reads only this many last tokens of a longer text.
WINDOW = 32
# Max tokens that the draft reads after the end of the text and can undo.
AHEAD = 64
# Number of timing runs when a draft is opened, and tokens of each.
ROUNDS, ROUND_TOKENS = 2, 32
# Proposals are divided into kinds by their probability in the draft model: limits between kinds, and
# initial acceptance rates of each kind, then of all kinds together.
CONFIDENCES, ACCEPTED = (0.3, 0.6, 0.8, 0.95), (0.3, 0.5, 0.7, 0.85, 0.95, 0.8)
ALL_KINDS = -1
# Weight that earlier proposals keep at each token of the text.
FADING = 0.998


class Ngrams:
    """Proposes the tokens that followed the last ones earlier (prompt lookup, Saxena 2023).

    tokens: the text so far. length: how many of its last tokens also occur earlier; 0 without a
    match. end: index of the first token after the earlier occurrence.
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
        """Return the `count` tokens that followed the earlier occurrence; [] without a match.

        If fewer follow it in the text, the result repeats them.
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


class HitRates:
    """Fractions of proposals that were right, by kind of proposal; recent ones have more weight.

    prior: the rate of each kind without proposals, with the weight of `CASES` of them.
    decay: what the weights of earlier proposals are multiplied by at each new one.
    """

    CASES = 4.0

    def __init__(self, prior: Sequence[float], decay: float):
        self._prior, self._decay = prior, decay
        self._hits, self._cases = [0.0] * len(prior), [0.0] * len(prior)

    def __getitem__(self, kind: int) -> float:
        return (self._hits[kind] + self.CASES * self._prior[kind]) / (self._cases[kind] + self.CASES)

    def learn(self, kind: int, right: bool) -> None:
        self._hits[kind] = self._hits[kind] * self._decay + right
        self._cases[kind] = self._cases[kind] * self._decay + 1

    def fade(self, share: float) -> None:
        """Multiply the weights of all proposals, so that the rates approach the prior."""
        self._hits = [share * hits for hits in self._hits]
        self._cases = [share * cases for cases in self._cases]


def expected_tokens(rates: Iterable[float]) -> float:
    """Return the expected new tokens of a call whose proposals are right at these rates."""
    expected = probability = 1.0
    for rate in rates:
        probability *= rate
        expected += probability
    return expected


class CallCosts:
    """Seconds of a call of the model by width: the median of the last calls, or an estimate."""

    GROWTH = 0.4  # low, because a width with a high estimate would never be tried

    def __init__(self):
        self._seconds: dict[int, deque[float]] = {}

    @property
    def known(self) -> bool:
        return 1 in self._seconds

    def learn(self, width: int, seconds: float) -> None:
        """Record that a call of `width` tokens took `seconds`."""
        self._seconds.setdefault(width, deque(maxlen=7)).append(seconds)

    def of(self, width: int) -> float:
        """Return the seconds of a call of `width` tokens, measured or estimated."""
        if width in self._seconds:
            return statistics.median(self._seconds[width])
        narrower = max(known for known in self._seconds if known < width)
        return self.of(narrower) * (width / narrower) ** self.GROWTH


@dataclass(frozen=True)
class Guess:
    """A proposed token; `confidence`: its probability in the draft model, None if it is forced."""

    token: int
    confidence: float | None

    @property
    def kind(self) -> int:
        return bisect_right(CONFIDENCES, self.confidence)


class Draft:
    """A draft model, which reads the end of a text and proposes the next tokens."""

    def __init__(self, session: Session, vocab: int, clock: Callable[[], float] = time.perf_counter):
        """Prepare the draft model and measure its speed."""
        self.session, self.vocab, self.clock = session, vocab, clock
        self._rates, self.costs = HitRates(ACCEPTED, 0.95), CallCosts()
        # `_read`: tokens that the session has read. `_start`: index in `_text` at which they start.
        # `_agreed`: how many of them equal the tokens of `_text`.
        self._read: list[int] = []
        self._start, self._text, self._agreed = 0, [0], 0
        # A position that the session can return to.
        self._before: Snapshot | None = None
        self._measure()

    def _measure(self) -> None:
        session, count = self.session, min(ROUND_TOKENS, self.session.context - 1)
        move_to(session, 0)
        reading, steps = [], []
        for _ in range(ROUNDS):
            start = self.clock()
            session.prefill([0] * count)
            middle = self.clock()
            session.step(0)
            reading.append((middle - start) / count)
            steps.append(self.clock() - middle)
            move_to(session, 0)
        # The minimum, because the first round reads the weights from disk.
        self._read_seconds, self._step_seconds = min(reading), deque([min(steps)], maxlen=7)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._step_seconds)

    def acceptance(self, guess: Guess | None) -> float:
        """Return the acceptance rate of earlier guesses with a confidence similar to `guess`."""
        if guess is None:
            return self._rates[ALL_KINDS]
        return 1.0 if guess.confidence is None else self._rates[guess.kind]

    def learn(self, guess: Guess, right: bool) -> None:
        """Update the acceptance rates."""
        if guess.confidence is not None:
            for kind in (guess.kind, ALL_KINDS):
                self._rates.learn(kind, right)

    def fade(self) -> None:
        """Forget a little of the acceptance rates: a draft that lost time is tried again later."""
        self._rates.fade(FADING)

    def plan(self, text: list[int], seconds: float) -> tuple[int, float] | None:
        """Return (first token of `text` to read, estimated seconds), or None if over `seconds`.

        Tokens that the draft has already read take no time. Of a long text, only the last `WINDOW`
        tokens are read, unless reading more takes at most `seconds` / 4.
        """
        affordable, length = int(min(seconds / self._read_seconds, 1e9)), len(text)
        cached = length - self._start
        behind = cached - self._agree(text)
        # If the text is longer than the draft's context, the draft reads as many last tokens as
        # half its context, which leaves space for new ones.
        context = self.session.context
        longest = length if length < context else context // 2
        extends = 2 * cached <= longest <= affordable // 4
        if self._agreed >= behind and 0 < cached < context and not extends:
            return (self._start, behind * self._read_seconds) if behind <= affordable else None
        count = longest if longest <= max(WINDOW, affordable // 4) else WINDOW
        return (length - count, count * self._read_seconds) if count <= affordable else None

    def propose(self, text: list[int], start: int, chooser: Chooser, go_on: Callable[[list[Guess]], bool]) -> list[Guess]:
        """Return the draft model's guesses of the next tokens; [] if it cannot read `text`."""
        if max(text[start:][self._agreed if start == self._start else 0 :], default=0) >= self.session.vocab:
            return []
        argmax = self._follow(text, start)
        guesses: list[Guess] = []
        while not chooser.done:
            guesses.append(self._guess(argmax, chooser))
            token = guesses[-1].token
            if self.session.position >= self.session.context or not go_on(guesses):
                break
            chooser.accept(token)
            if token >= self.session.vocab:
                break
            begun = self.clock()
            argmax = self._feed([token])
            self._step_seconds.append(self.clock() - begun)
        return guesses

    def _follow(self, text: list[int], start: int) -> int:
        """Read `text` from index `start` on; return the most probable next token."""
        if start != self._start:
            self._start, self._agreed = start, 0
        agreed = self._agree(text)
        before, self._before = self._before, None
        common, self._read = self._read[:agreed], []
        if before and not before.stale and before.position <= agreed <= self.session.position:
            move_after(self.session, before, common[before.position :])
        else:
            move_to(self.session, min(agreed, self.session.position), common)
        self._read = common[: self.session.position]
        unread = text[start + len(self._read) :]
        begun = self.clock()
        argmax = self._feed(unread)
        if len(unread) >= ROUND_TOKENS:
            self._read_seconds = (self._read_seconds + (self.clock() - begun) / len(unread)) / 2
        self._before = self.session.snapshot(AHEAD)
        self._agreed = len(self._read)
        return argmax

    def _feed(self, tokens: Sequence[int]) -> int:
        argmax = self.session.step(tokens[0]) if len(tokens) == 1 else self.session.prefill(tokens)
        self._read += tokens
        return argmax

    def _agree(self, text: list[int]) -> int:
        """Return how many tokens from `_start` on, but the last, the model has already read."""
        if text is not self._text:
            self._text, self._agreed = text, 0
        count, limit = self._agreed, min(len(self._read), len(text) - 1 - self._start, self.session.position)
        while count < limit and self._read[count] == text[self._start + count]:
            count += 1
        self._agreed = max(0, min(count, limit))
        return self._agreed

    def _guess(self, argmax: int, chooser: Chooser) -> Guess:
        if chooser.forced:
            return Guess(chooser.pick(0, self._logits), None)
        logits = self._logits()
        token = chooser.pick(argmax if argmax < self.vocab else int(logits.argmax()), lambda: logits)
        weight = weights(logits)
        return Guess(token, float(weight[token] / weight.sum()))

    def _logits(self) -> np.ndarray:
        logits = self.session.logits()[: self.vocab]
        if len(logits) < self.vocab:
            logits = np.concatenate([logits, np.full(self.vocab - len(logits), -np.inf, np.float32)])
        return logits
