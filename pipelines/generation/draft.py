"""Proposals from a draft: a smaller model with the same vocabulary, in a session of its own that follows the text.

The draft draws what it proposes with the very random numbers that the text's own tokens will be drawn with, so that a proposal
is right where both models choose the same token by the same number, and the text is what it would be without a draft (Daliri,
Musco and Suresh, arXiv 2408.07978, call it drafter-invariant).
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.choosing import Chooser
from castiron.pipelines.generation.costs import Costs
from castiron.pipelines.generation.positions import stand, stand_after
from castiron.pipelines.generation.sampling import weights
from castiron.pipelines.generation.vocabulary import read_vocabulary
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.manifest import VOCABULARY
from castiron.vmfb.session import Session
from castiron.vmfb.states import Snapshot

# Of a longer text as many tokens at its end are enough to begin with.
WINDOW = 64
# Positions behind the text from which the draft may have to come back.
AHEAD = 64
# How often and with how many tokens the times of a draft are taken when it is opened.
TRIALS, TRIAL = 2, 32


@dataclass(frozen=True)
class Guess:
    """A proposed token, and how probable the draft found it; None where a grammar left no choice."""

    token: int
    confidence: float | None


class Trust:
    """How often proposals were right, by how probable the draft found them, and in all; what was long ago counts less."""

    BOUNDS, START, CASES, FORGET = (0.3, 0.6, 0.8, 0.95), (0.3, 0.5, 0.7, 0.85, 0.95), 4.0, 0.95
    USUAL = 0.7

    def __init__(self):
        self._hits = [share * self.CASES for share in (*self.START, self.USUAL)]
        self._cases = [self.CASES] * len(self._hits)

    @property
    def usual(self) -> float:
        """Of a proposal that is not made yet."""
        return self._hits[-1] / self._cases[-1]

    def of(self, guess: Guess) -> float:
        if guess.confidence is None:
            return 1.0
        kind = bisect_right(self.BOUNDS, guess.confidence)
        return self._hits[kind] / self._cases[kind]

    def learn(self, guess: Guess, right: bool) -> None:
        if guess.confidence is None:
            return
        for kind in (bisect_right(self.BOUNDS, guess.confidence), -1):
            self._hits[kind] = self._hits[kind] * self.FORGET + right
            self._cases[kind] = self._cases[kind] * self.FORGET + 1


class Draft:
    """A session that reads the end of a text and says what it expects next.

    `trust` and `costs`, those of the model that is drafted for, outlive a text: what one has taught serves the next.
    """

    def __init__(self, session: Session, vocab: int, clock: Callable[[], float] = time.perf_counter):
        """`session`: of the draft, used by nobody else; `vocab`: how many tokens the other model has. Times the draft."""
        self.session, self.vocab, self.clock = session, vocab, clock
        self.trust, self.costs = Trust(), Costs()
        # What the session has read, where that begins in the text, the text, and how much of it is known to be the text's.
        self._read: list[int] = []
        self._start, self._text, self._agreed = 0, [0], 0
        # Where the session can go back to.
        self._before: Snapshot | None = None
        # Seconds that it has saved with earlier texts.
        self.saved = 0.0
        self._measure()

    def _measure(self) -> None:
        session, count = self.session, min(TRIAL, self.session.context - 1)
        stand(session, 0)
        reading, steps = [], []
        for _ in range(TRIALS):
            start = self.clock()
            session.prefill([0] * count)
            middle = self.clock()
            session.step(0)
            reading.append((middle - start) / count)
            steps.append(self.clock() - middle)
            stand(session, 0)
        # The first ones wait for the weights.
        self._reading, self._steps = min(reading), deque([min(steps)], maxlen=7)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._steps)

    def plan(self, text: list[int], seconds: float) -> tuple[int, float] | None:
        """Where in `text` to begin for a proposal behind it, and the seconds that reading takes; None if they are more than
        `seconds`. A draft that has read the end alone begins anew further in front once that takes little of them."""
        affordable, length = int(min(seconds / self._reading, 1e9)), len(text)
        held = length - self._start
        behind = held - self._agree(text)
        # Of a text that is longer than the draft's context it begins with half of that, so as to go on for a while.
        context = self.session.context
        whole = length if length < context else context // 2
        extends = 2 * held <= whole <= affordable // 4
        if self._agreed >= behind and 0 < held < context and not extends:
            return (self._start, behind * self._reading) if behind <= affordable else None
        count = whole if whole <= max(WINDOW, affordable // 4) else WINDOW
        return (length - count, count * self._reading) if count <= affordable else None

    def propose(self, text: list[int], start: int, chooser: Chooser, go_on: Callable[[list[Guess]], bool]) -> list[Guess]:
        """What comes behind `text`, of which the draft has read, or reads now, what is from `start` on: one guess or more, as
        long as `go_on`, which gets those so far, is true. None at all where `text` has tokens that the draft has not."""
        if max(text[start:][self._agreed if start == self._start else 0 :], default=0) >= self.session.vocab:
            return []
        argmax = self._follow(text, start)
        guesses: list[Guess] = []
        while not chooser.done:
            guesses.append(self._guess(argmax, chooser))
            if self.session.position >= self.session.context or not go_on(guesses):
                break
            chooser.accept(guesses[-1].token)
            if guesses[-1].token >= self.session.vocab:
                break
            begun = self.clock()
            argmax = self._take([guesses[-1].token])
            self._steps.append(self.clock() - begun)
        return guesses

    def _follow(self, text: list[int], start: int) -> int:
        """Reads `text` from `start` on, as far as that is not done; returns the most probable token behind it."""
        if start != self._start:
            self._start, self._agreed = start, 0
        agreed = self._agree(text)
        before, self._before = self._before, None
        held, self._read = self._read[:agreed], []
        if before and not before.stale and before.position <= agreed <= self.session.position:
            stand_after(self.session, before, held[before.position :])
        else:
            stand(self.session, min(agreed, self.session.position), held)
        self._read = held[: self.session.position]
        unread = text[start + len(self._read) :]
        begun = self.clock()
        argmax = self._take(unread)
        if len(unread) >= TRIAL:
            self._reading = (self._reading + (self.clock() - begun) / len(unread)) / 2
        self._before = self.session.snapshot(AHEAD)
        self._agreed = len(self._read)
        return argmax

    def _take(self, tokens: Sequence[int]) -> int:
        argmax = self.session.step(tokens[0]) if len(tokens) == 1 else self.session.prefill(tokens)
        self._read += tokens
        return argmax

    def _agree(self, text: list[int]) -> int:
        """How much of what was read is the text's, from where it begins; never all of the text, whose last token has to be
        read for what follows it."""
        if text is not self._text:
            self._text, self._agreed = text, 0
        count, most = self._agreed, min(len(self._read), len(text) - 1 - self._start, self.session.position)
        while count < most and self._read[count] == text[self._start + count]:
            count += 1
        self._agreed = max(0, min(count, most))
        return self._agreed

    def _guess(self, argmax: int, chooser: Chooser) -> Guess:
        if chooser.forced:
            return Guess(chooser.pick(0, self._logits), None)
        logits = self._logits()
        token = chooser.pick(argmax if argmax < self.vocab else int(logits.argmax()), lambda: logits)
        weight = weights(logits)
        return Guess(token, float(weight[token] / weight.sum()))

    def _logits(self) -> np.ndarray:
        """As many as the other model has: the two may be padded to different lengths."""
        logits = self.session.logits()[: self.vocab]
        if len(logits) < self.vocab:
            logits = np.concatenate([logits, np.full(self.vocab - len(logits), -np.inf, np.float32)])
        return logits


def open_draft(bundle: Bundle | Path | str, target: Bundle, threads: int | None = None) -> Draft:
    """The draft in `bundle` for the model in `target`; PipelineError, one sentence, for one that cannot draft for it."""
    bundle = open_bundle(bundle)
    check_draft(bundle, target)
    return Draft(Session(bundle, threads), target.manifest.vocab)


def check_draft(draft: Bundle, target: Bundle) -> None:
    """PipelineError for a draft that encodes texts or has other tokens, and for a model that cannot check proposals."""
    if draft.manifest.encoder:
        raise PipelineError(f"{draft.path} encodes texts and generates none: it cannot be a draft")
    if not target.manifest.widths("verify"):
        raise PipelineError(f"{target.path} cannot check what a draft proposes: compile it with --speculate 4,8")
    mine, others = draft.manifest, target.manifest
    files = [manifest.files.get(VOCABULARY) for manifest in (mine, others)]
    # The same file is the same vocabulary; others may differ in how far they are padded.
    if mine.vocab == others.vocab and (files[0] == files[1] is not None or not (draft.tokenizer or target.tokenizer)):
        return
    if not (draft.tokenizer and target.tokenizer):
        bare = target if draft.tokenizer else draft
        raise PipelineError(
            f"whether {draft.path} has the tokens of {target.path} cannot be told: {bare.path} has no tokenizer"
        )
    tokens = [read_vocabulary(each).tokens for each in (draft, target)]
    length = max(map(len, tokens))
    padded = [[*each, *[b""] * (length - len(each))] for each in tokens]
    if padded[0] != padded[1]:
        differs = next(index for index, (first, second) in enumerate(zip(*padded)) if first != second)
        raise PipelineError(
            f"{draft.path} has another vocabulary than {target.path}, from token {differs} on: take a smaller model of the "
            "same family"
        )
