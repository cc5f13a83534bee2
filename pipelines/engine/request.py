"""A request to the engine, and the events with which the engine reports its progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

import castiron
from castiron.pipelines.engine.constraint import Constraint
from castiron.pipelines.engine.prefix_cache import Paused
from castiron.pipelines.engine.receipt import FORMAT, Receipt, Transcript, repeatable, sampling_fields
from castiron.pipelines.engine.sampling import NEAR, Sampler, Sampling, Score, lead, log_probabilities
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.bundle.manifest import Manifest

# A repetition loop has a period of up to MAX_PERIOD tokens, and is at least MIN_REPEATS periods and
# MIN_TOKENS tokens long. Tables and code repeat a line a few times, but no model leaves such a loop.
MAX_PERIOD, MIN_REPEATS, MIN_TOKENS = 128, 8, 192

# Default max tokens of an answer: enough for nearly all answers, and a limit for base models, which
# have no end token.
DEFAULT_MAX_TOKENS = 1024


def free_positions(context: int, prompt_tokens: int) -> int:
    """Return how many tokens can follow a prompt; below 1 if the prompt does not fit."""
    # The last generated token needs no position, because the model never reads it.
    return context - prompt_tokens + 1


class Chooser:
    """The choice of the tokens of one request: `pick` returns the next token, `accept` appends it.

    recent: tokens of prompt and answer to which the repeat penalty applies. counts: how often each
    token was generated. Greedy decoding without penalties uses neither.
    """

    def __init__(self, sampler: Sampler, constraint: Constraint | None = None, recent: Sequence[int] = ()):
        self.sampler, self.constraint = sampler, constraint
        self.recent, self.counts = sampler.sampling.penalised(recent), Counter[int]()

    @property
    def done(self) -> bool:
        """Whether the text is complete under its constraint and cannot continue."""
        return bool(self.constraint and self.constraint.done)

    @property
    def forced(self) -> bool:
        """Whether the constraint allows only one next token, so that no logits are needed."""
        return bool(self.constraint and self.constraint.forced)

    def pick(self, argmax: int, logits: Callable[[], np.ndarray]) -> int:
        """Return the next token; `logits` is called only if `argmax` does not determine it."""
        return self._pick(argmax, logits, False)[0]

    def pick_if_certain(self, argmax: int, logits: Callable[[], np.ndarray]) -> int | None:
        """Return the token that `pick` would return, or None if rounding errors could change it.

        The functions of a bundle add numbers in different orders, so their logits differ by
        rounding.
        """
        token, certain = self._pick(argmax, logits, True)
        return token if certain else None

    def _pick(self, argmax: int, logits: Callable[[], np.ndarray], check: bool) -> tuple[int, bool]:
        constraint = self.constraint
        if constraint and constraint.forced:
            return constraint.forced[0], True
        if self.sampler.sampling.needs_logits:
            allowed = constraint.masked(logits()) if constraint else logits()
            return self.sampler.pick(allowed, self.recent, self.counts, check)
        if not constraint or constraint.allows(argmax):
            return argmax, not check or lead(logits()) >= NEAR
        allowed = constraint.masked(logits())
        return int(allowed.argmax()), not check or lead(allowed) >= NEAR

    def accept(self, token: int) -> None:
        """Append `token` to the text; raise ConstraintError if the constraint forbids it."""
        forced = self.forced
        if self.constraint:
            self.constraint.accept(token)
        if not self.sampler.sampling.needs_logits:
            return
        self.recent = self.sampler.sampling.penalised([*self.recent, token])
        self.counts[token] += 1
        # A forced token uses no random number.
        if not forced:
            self.sampler.used()

    def lookahead(self) -> Chooser:
        """Return an independent copy, which chooses the same tokens for the same logits."""
        other = copy(self)
        other.sampler = self.sampler.copy()
        other.constraint, other.counts = self.constraint and self.constraint.copy(), self.counts.copy()
        return other


class RepetitionDetector:
    """A detector of repetition loops: text that ends in many copies of one sequence of tokens."""

    def __init__(self) -> None:
        # At index p - 1, for period p: the token p positions before the next one, and how many
        # consecutive last tokens equal the token p positions before them.
        self._ago = np.full(MAX_PERIOD, -1, np.int64)
        self._runs = np.zeros(MAX_PERIOD, np.int64)
        periods = np.arange(1, MAX_PERIOD + 1)
        self._needed = np.maximum(MIN_TOKENS, MIN_REPEATS * periods) - periods

    def add(self, token: int) -> bool:
        """Append `token` to the text; return whether the text now ends in a repetition loop."""
        self._runs = np.where(self._ago == token, self._runs + 1, 0)
        self._ago[1:] = self._ago[:-1]
        self._ago[0] = token
        return bool((self._runs >= self._needed).any())


class Event: ...


@dataclass(frozen=True)
class Token:
    """A generated token.

    logprob: natural logarithm of its probability, before penalties, temperature and constraint.
    top: (id, logprob) of the most probable tokens. Both are None without `top_logprobs`.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Tokens(Event):
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Finished(Event):
    """The last event of a request.

    reason: "stop" after a stop token, a stop string, a repetition loop (`repeated`) or a complete
    constraint; "length" after max_tokens; "context" if the context is full.
    """

    reason: str
    repeated: bool = False
    stop_string: str | None = None


@dataclass(frozen=True)
class Failed(Event):
    error: PipelineError


class Output(Protocol):
    """The interface of an object that converts the tokens of one request to events."""

    @property
    def stopped(self) -> bool:
        """Whether the request must end now, for example because of a stop string."""
        ...

    @property
    def stop_strings(self) -> Collection[str]: ...

    def add(self, token: Token) -> list[Event]: ...

    def finish(self, end: Finished, last: Token | None) -> list[Event]:
        """Return the last events of the request, of which the last is `end` or a changed copy.

        last: the stop token if an event must report it.
        """
        ...


class TokenOutput:
    """An output whose events have token ids, but no text."""

    stopped = False
    stop_strings = ()

    def add(self, token: Token) -> list[Event]:
        return [Tokens((token,))]

    def finish(self, end: Finished, last: Token | None) -> list[Event]:
        return [Tokens((last,)), end] if last else [end]


@dataclass
class Timing:
    """Times in `time.monotonic` seconds; 0 for what has not happened.

    started: when the request got a slot. first, last: of its generated tokens.
    """

    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


class Request:
    """A request to generate tokens: a prompt, options, and what has been generated so far.

    prompt: i32 [n]. tokens: generated ids, without the stop token.
    scores: log-probabilities of the prompt's tokens from index 1 on, as far as they are computed.
    finish_reason: None before the end. cached: length of the reused prefix.
    transcript: what the request's receipt records of each token; None without a receipt.
    """

    def __init__(
        self,
        prompt: Collection[int],
        context: int,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | Sampler = Sampling(),
        stop_tokens: Collection[int] | None = None,
        constraint: Constraint | None = None,
        repetition_stop: bool = False,
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        output: Output | None = None,
        client: str = "",
        cache_salt: str = "",
        priority: int = 0,
        on_prefill: Callable[[int, int], None] | None = None,
        receipt: bool = False,
    ):
        """Create a request; PipelineError if the prompt is empty or longer than the context.

        prompt: token ids. context: max tokens of prompt and answer together.
        max_tokens: of the answer; None for the context. 0 only reads the prompt, so that its states
            are in the prefix cache.
        sampling: options, or a Sampler that continues its sequence of random numbers.
        stop_tokens: None for the end tokens of the model.
        repetition_stop: whether a repetition loop ends the request.
        top_logprobs: number of most probable tokens to report for each token of the answer; None
            for no log-probabilities.
        prompt_logprobs: the same for `scores` of the prompt; the events then report the stop token.
        output: converts tokens to events; by default a TokenOutput.
        client: clients get equal shares of the slots. priority: lower numbers run first.
        cache_salt: the prompt reuses only states of requests with the same salt.
        on_prefill: called with (tokens read, tokens of the prompt) after each prefill call.
        """
        free = free_positions(context, len(prompt))
        if not len(prompt):
            raise PipelineError("the prompt has no tokens; give at least one")
        if free < 1:
            raise PipelineError(
                f"the prompt has {len(prompt)} tokens and the bundle's context is {context}; shorten the prompt, or give a "
                "larger --context"
            )
        if max_tokens is not None and max_tokens < 0:
            raise PipelineError(f"max_tokens is {max_tokens}; give at least 0")
        if receipt:
            if constraint or max_tokens == 0:
                option = "grammar, tools, budget of reasoning or filter of tokens" if constraint else "max_tokens of 0"
                raise PipelineError(f"receipt does not support a {option}; leave one of them out")
            sampling = repeatable(sampling)
        self.transcript = Transcript() if receipt else None
        is_short = max_tokens is not None and max_tokens <= free
        self.limit, self.limit_reason = (max_tokens, "length") if is_short else (free, "context")
        self.prompt, self.context = np.asarray(prompt), context
        self.stop_tokens = None if stop_tokens is None else frozenset(stop_tokens)
        self.top_logprobs, self.prompt_logprobs = top_logprobs, prompt_logprobs
        self.client, self.cache_salt, self.priority, self.on_prefill = client, cache_salt, priority, on_prefill
        self.output = output or TokenOutput()
        sampler = sampling if isinstance(sampling, Sampler) else Sampler(sampling)
        self.chooser = Chooser(sampler, constraint, [*prompt])
        self.repetition_stop = repetition_stop
        self._repetition = RepetitionDetector() if repetition_stop else None
        self.tokens: list[int] = []
        self.scores: list[Score] = []
        self.finish_reason: str | None = None
        self.repeated = False
        # `chosen`: number of tokens chosen, including a stop token.
        self.chosen, self.cached, self.timing = 0, 0, Timing()
        # How often another prompt was read before this one; the states of a preempted request.
        self.passed_over = 0
        self.paused: Paused | None = None

    @property
    def constraint(self) -> Constraint | None:
        return self.chooser.constraint

    @property
    def forced(self) -> bool:
        """Whether a constraint allows only one next token, so that `advance` needs no logits."""
        return self.chooser.forced and self.top_logprobs is None and self.finish_reason is None

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities of the prompt's tokens must still be computed."""
        return self.prompt_logprobs is not None and not self.chosen

    def receipt(self, manifest: Manifest) -> Receipt | None:
        """Return the receipt; None before the end, or if the request asked for none."""
        if self.transcript is None or self.finish_reason is None:
            return None
        receipt = Receipt(
            format=FORMAT,
            castiron=castiron.__version__,
            bundle=manifest.sha256,
            checkpoint=manifest.source.get("sha256"),
            numerics=manifest.numerics,
            context=self.context,
            prompt=tuple(self.prompt.tolist()),
            answer=tuple(self.transcript.tokens),
            logits=tuple(self.transcript.hashes),
            finish_reason=self.finish_reason,
            sampling=sampling_fields(self.chooser.sampler.sampling),
            max_tokens=self.limit if self.limit_reason == "length" else None,
            stop_tokens=tuple(sorted(self.stop_tokens or ())),
            stop_strings=tuple(self.output.stop_strings),
            repetition_stop=self.repetition_stop,
        )
        return replace(receipt, sha256=receipt.digest)

    def unread(self, position: int) -> Sequence[int]:
        """Return the tokens of prompt and answer from `position` on."""
        if position >= len(self.prompt):
            return self.tokens[position - len(self.prompt) :]
        return np.concatenate([self.prompt[position:], self.tokens]) if self.tokens else self.prompt[position:]

    def advance(self, argmax: int, logits: Callable[[], np.ndarray], chosen: int | None = None) -> list[Event]:
        """Choose and append the next token; return its events, `Finished` last if the request ends.

        chosen: the next token, if `self.chooser` has already picked it.
        """
        self.timing.last = time.monotonic()
        self.timing.first = self.timing.first or self.timing.last
        if not self.limit:
            return self._finish(self.limit_reason)
        token, constraint = self._choose(argmax, logits, chosen), self.constraint
        complete = bool(constraint and constraint.done)
        if self.stop_tokens and token.id in self.stop_tokens or complete and token.id in constraint.eos:
            return self._finish("stop", token if self.prompt_logprobs is not None else None)
        self.tokens.append(token.id)
        events, output = self.output.add(token), self.output
        if self._repetition and self._repetition.add(token.id) and not output.stopped:
            self.repeated = True
        if self.repeated or complete or output.stopped:
            return events + self._finish("stop")
        return events + self._finish(self.limit_reason) if len(self.tokens) == self.limit else events

    def _choose(self, argmax: int, logits: Callable[[], np.ndarray], chosen: int | None) -> Token:
        token = self.chooser.pick(argmax, logits) if chosen is None else chosen
        self.chooser.accept(token)
        self.chosen += 1
        if self.transcript:
            self.transcript.add(token, logits())
        return Token(token, *(() if self.top_logprobs is None else log_probabilities(logits(), token, self.top_logprobs)))

    def _finish(self, reason: str, last: Token | None = None) -> list[Event]:
        events = self.output.finish(Finished(reason, self.repeated), last)
        self.finish_reason = events[-1].reason
        return events
