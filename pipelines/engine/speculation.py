"""Speculative decoding: the model checks several proposed tokens in one pass.

Proposals come from earlier text (`Ngrams`) and from a smaller model (`Draft`). The model chooses
every token as it would without speculation. A proposal is right if it equals the chosen token. So
the text is the same as without speculation (Leviathan et al., arXiv 2211.17192, greedy form).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from castiron.pipelines.engine.draft import MAX_MATCH, CallCosts, Draft, Guess, HitRates, Ngrams, expected_tokens
from castiron.pipelines.engine.request import Event, Request
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.device.program import NanLogitsError
from castiron.vmfb.run.session import move_after
from castiron.vmfb.run.states import Snapshot

# Initial hit rates of the token proposed after a match of 2-3, 4-7, 8-15, 16-31 and 32 tokens.
FOLLOWED = (0.25, 0.5, 0.75, 0.9, 0.95)
# Decode steps that the draft may take to read the text before it proposes.
READING = 8
# The estimated cost of a pass of the draft includes this fraction (1 / PASSES) of the time to read the text.
PASSES = 8

# Expected tokens per second, the source of the proposals, and their number.
Option = tuple[float, str | None, int]


def match_kind(length: int) -> int:
    """Return the class, 0 to 4, of an n-gram match of `length` tokens."""
    return min(length, MAX_MATCH).bit_length() - 2


@dataclass
class SourceStats:
    """Counts of proposed tokens of a source, and of those that were right."""

    proposed: int = 0
    accepted: int = 0


@dataclass
class Pass:
    """One call of the model in speculative decoding, with its results."""

    tokens: list[int]
    argmaxes: list[int]
    source: str | None = None
    before: Snapshot | None = None
    guesses: list[Guess] = field(default_factory=list)
    seconds: float = 0.0
    taken: int = 0
    doubtful: bool = False


class Speculator:
    """The speculative decoding of one request; a pass is a call of the model with proposals.

    stats: by source, "ngram" or "draft". spent: seconds of all passes and steps. For each call, the
    planner compares the expected tokens per second of a step, of n-grams and of the draft.
    """

    def __init__(
        self, session, request: Request, draft: Draft | None = None, clock: Callable[[], float] = time.perf_counter
    ):  # fmt: skip
        """Prepare to generate; PipelineError if the bundle has no verify functions."""
        self.session, self.request, self.draft, self.clock = session, request, draft, clock
        self.widths = session.manifest.widths("verify")
        if not self.widths:
            raise PipelineError("the bundle has no verify functions for speculation; compile it with --verify-widths 2,4,8")
        self.ngrams, self.match_rates = Ngrams([*map(int, request.prompt)]), HitRates(FOLLOWED, 0.98)
        self.costs = draft.costs if draft else CallCosts()
        self.stats = {"ngram": SourceStats()} | ({"draft": SourceStats()} if draft else {})
        self.passes, self.spent, self.draft_seconds = 0, 0.0, 0.0
        # How many of the request's tokens are in `ngrams`, and where the draft starts to read.
        self._noted = self._start = 0

    @property
    def proposed(self) -> int:
        return sum(source.proposed for source in self.stats.values())

    @property
    def accepted(self) -> int:
        return sum(source.accepted for source in self.stats.values())

    @property
    def draft_share(self) -> float:
        """The fraction of the decoding time that the draft model took, 0 to 1."""
        return self.draft_seconds / self.spent if self.spent else 0.0

    def __str__(self) -> str:
        by = [f"{stats.proposed} by the {'text' if name == 'ngram' else name}" for name, stats in self.stats.items()]
        sources = f" ({', '.join(by)}, {self.draft_share:.0%} of the time)" if self.draft else ""
        return f"{self.accepted} of {self.proposed} proposed tokens were right{sources}"

    def report(self) -> dict:
        """Return counts of passes and tokens, and `draft_share`, as JSON values."""
        sources = {name: {"proposed": stats.proposed, "accepted": stats.accepted} for name, stats in self.stats.items()}
        return {"passes": self.passes, "draft_share": round(self.draft_share, 4), "sources": sources}

    def run(self, unread: Sequence[int]) -> Iterator[list[Event]]:
        """Call the model once, after the `unread` tokens; yield the events of each new token."""
        for token in self.request.tokens[self._noted :]:
            self._note(token)
        found = self._read(unread[0]) if len(unread) == 1 else Pass([*unread], [self.session.prefill(unread)])
        right = True
        while right:
            at = found.taken
            argmax, logits, chosen = self._choose(found, at)
            found.taken = at + 1
            if at < len(found.guesses) and self.draft:
                self.draft.learn(found.guesses[at], chosen == found.guesses[at].token)
            right = found.before is not None and at + 1 < len(found.tokens) and chosen == found.tokens[at + 1]
            if right and found.source:
                self.stats[found.source].accepted += 1
            events = self.request.advance(argmax, logits, chosen)
            right = right and self.request.finish_reason is None and not found.doubtful
            if not right:
                self._end(found)
            yield events

    def _read(self, token: int) -> Pass:
        """Call the model with `token`, the text's last one, followed by proposed tokens."""
        start = self.clock()
        source, count = self._plan()
        if source == "draft":
            found = self._draft_pass(token, count)
        elif source:
            found = self._check(token, self.ngrams.propose(count), source)
        else:
            found = self._step(token)
        found.seconds = self.clock() - start
        return found

    def _note(self, token: int) -> None:
        if length := self.ngrams.length:
            self.match_rates.learn(match_kind(length), self.ngrams.propose(1)[0] == token)
        self.ngrams.add(token)
        self._noted += 1
        if self.draft:
            self.draft.fade()

    def _choose(self, found: Pass, at: int) -> tuple[int, Callable[[], np.ndarray], int]:
        """Choose the next token after `found.tokens[at]`."""
        argmax, chooser, session = found.argmaxes[at], self.request.chooser, self.session
        if argmax < 0:
            raise NanLogitsError
        if found.before is None:
            return argmax, session.logits, chooser.pick(argmax, session.logits)
        start = self.clock()
        logits = lambda: session.verified_logits(at)
        chosen = chooser.pick_if_certain(argmax, logits)
        if chosen is None:
            found.doubtful = True
            move_after(session, found.before, found.tokens[:at])
            argmax, logits = session.step(found.tokens[at]), session.logits
            chosen = chooser.pick(argmax, logits)
        found.seconds += self.clock() - start
        return argmax, logits, chosen

    def _end(self, found: Pass) -> None:
        before = found.before
        if before and self.session.position != before.position + found.taken:
            start = self.clock()
            move_after(self.session, before, found.tokens[: found.taken])
            found.seconds += self.clock() - start
        self.spent += found.seconds

    def _step(self, token: int) -> Pass:
        start = self.clock()
        found = Pass([token], [self.session.step(token)])
        self.costs.learn(1, self.clock() - start)
        return found

    def _check(self, token: int, proposal: list[int], source: str) -> Pass:
        start, tokens = self.clock(), [token, *proposal]
        width = self._width(len(proposal))
        before = self.session.snapshot(width)
        argmaxes = self.session.verify([*tokens, *[0] * (width - len(tokens))])
        self.costs.learn(width, self.clock() - start)
        self.passes += 1
        self.stats[source].proposed += len(proposal)
        return Pass(tokens, argmaxes, source, before)

    def _width(self, count: int) -> int:
        return min(width for width in self.widths if width > count)

    def _plan(self) -> tuple[str | None, int]:
        """Return ("ngram" or "draft", number of proposals) for the next model call, or (None, 0)."""
        position, original = self.session.position, self.session.manifest.original_context
        # A longer sequence has other logits at all positions (LongRoPE).
        end = original if original and position < original else self.session.context
        free = end - position
        widest = max((width for width in self.widths if width <= free), default=1)
        left = self.request.limit - len(self.request.tokens)
        if not self.costs.known or widest == 1 or left == 1:
            return None, 0
        options = [(1 / self.costs.of(1), None, 0), *self._ngram_options(widest, left), *self._draft_options(widest, left)]
        _, source, count = max(options, key=lambda option: option[0])
        return source, count

    def _ngram_options(self, widest: int, left: int) -> list[Option]:
        """Return proposals of n-grams that calls of up to `widest` tokens can check."""
        if not (length := self.ngrams.length) or (longest := min(left, 1 + self._allowed(widest))) < 2:
            return []
        rates = [self.match_rates[match_kind(length + i)] for i in range(widest - 1)]
        return [
            (min(expected_tokens(rates[: width - 1]), longest) / self.costs.of(width), "ngram", width - 1)
            for width in self.widths
            if width <= widest
        ]

    def _draft_options(self, widest: int, left: int) -> list[Option]:
        """Return numbers of proposals of the draft; several passes share the time to read the text."""
        plan = self.draft.plan(self.ngrams.tokens, READING * self.costs.of(1)) if self.draft else None
        if plan is None:
            return []
        self._start, reading = plan
        return [(self._rate([], count, reading / PASSES), "draft", count) for count in range(1, min(widest, left))]

    def _cost(self, count: int) -> float:
        assert self.draft
        return self.costs.of(self._width(count)) + count * self.draft.step_seconds

    def _rate(self, guesses: Sequence[Guess], count: int, more_seconds: float = 0.0) -> float:
        """Return the expected tokens per second if a model call checks `count` draft proposals."""
        assert self.draft
        padded = [*guesses[:count], *[None] * (count - len(guesses))]
        return expected_tokens(map(self.draft.acceptance, padded)) / (self._cost(count) + more_seconds)

    def _draft_pass(self, token: int, longest: int) -> Pass:
        """Call the model to check up to `longest` proposals of the draft model."""
        assert self.draft
        draft, start = self.draft, self.clock()

        def go_on(guesses: list[Guess]) -> bool:
            done = len(guesses)
            more = (self._rate(guesses, count) for count in range(done + 1, longest + 1))
            return max(more, default=0.0) > self._rate(guesses, done)

        guesses = draft.propose(self.ngrams.tokens, self._start, self.request.chooser.lookahead(), go_on)
        self.draft_seconds += self.clock() - start
        step_rate = 1 / (self.costs.of(1) + len(guesses) * draft.step_seconds)
        if guesses and self._rate(guesses, len(guesses)) > step_rate:
            found = self._check(token, [guess.token for guess in guesses], "draft")
        else:
            found = self._step(token)
            found.source = "draft"
        found.guesses = guesses
        return found

    def _allowed(self, width: int) -> int:
        """Return how many of the next n-gram proposals the constraint allows, at most `width`."""
        if not self.request.constraint:
            return width
        constraint, count = self.request.constraint.copy(), 0
        for token in self.ngrams.propose(width - 1):
            if constraint.done or not constraint.allows(token):
                break
            constraint.accept(token)
            count += 1
        return count
