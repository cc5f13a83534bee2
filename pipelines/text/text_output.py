"""Convert the tokens of a request to text while they are generated.

Reasoning and tool calls are separated from the answer. A budget limits the tokens of reasoning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from castiron.pipelines.engine.constraint import Constraint, ConstraintError
from castiron.pipelines.engine.request import Event, Failed, Finished, Request, Token, Tokens
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.reasoning import Marks, Reasoning, ReasoningSplitter, split_at_mark
from castiron.pipelines.text.tokenizer import Detokeniser, Tokenizer
from castiron.pipelines.text.tool_calls import CallPart, Tools

if TYPE_CHECKING:
    from castiron.pipelines.engine.engine import Engine
    from castiron.pipelines.engine.receipt import Receipt
    from castiron.pipelines.engine.speculation import Speculator
    from castiron.pipelines.text.grammar import Grammar

# The marks of reasoning in the harmony format (gpt-oss), and the text that ends it and starts the answer.
HARMONY: Marks = (("<|channel|>analysis<|message|>", "<|end|>"),)
HARMONY_CLOSE = "<|end|><|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True)
class TextToken(Token):
    """A token; `offset`: index of the token's first character in the generated text."""

    offset: int = 0


@dataclass(frozen=True)
class Delta(Event):
    """An event with newly generated text."""

    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    @classmethod
    def joined(cls, parts: Collection[Delta]) -> Delta:
        """Return consecutive deltas merged into one."""
        tokens = tuple(chain.from_iterable(part.tokens for part in parts))
        calls = tuple(chain.from_iterable(part.calls for part in parts))
        return cls("".join(part.text for part in parts), tokens, "".join(part.reasoning for part in parts), calls)


class ReasoningBudget:
    """A constraint that ends a model's reasoning after a max number of tokens.

    It forces the text that ends reasoning; at all other times `inner`, if any, applies.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Collection[int], budget: int, inner: Constraint | None = None):
        is_harmony = tokenizer.tool_format.style == "harmony"
        marks = HARMONY if is_harmony else tokenizer.marks
        # Tokens may end inside a character, so the splitter gets bytes, one character for each byte.
        self._splitter = ReasoningSplitter(
            tuple((as_latin(start.encode()), as_latin(end.encode())) for start, end in marks),
            as_latin(tokenizer.end_of(prompt).encode()),
        )
        self._bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._encode = lambda end: tokenizer.encode(HARMONY_CLOSE if is_harmony else end, add_special_tokens=False)
        self.left, self.inner = budget, inner
        # Tokens of the end mark that are not generated yet; None before the budget is used.
        self._closing: list[int] | None = None
        self._close_if_used()

    def copy(self) -> ReasoningBudget:
        other = copy(self)
        other._splitter, other.inner = copy(self._splitter), self.inner and self.inner.copy()
        return other

    @property
    def forced(self) -> Sequence[int]:
        return self._closing or (self.inner.forced if self.inner else ())

    @property
    def done(self) -> bool:
        return bool(self.inner and not self._closing and self.inner.done)

    @property
    def eos(self) -> Sequence[int]:
        return self.inner.eos if self.inner else ()

    def allows(self, token: int) -> bool:
        if self._closing:
            return token == self._closing[0]
        return self.inner is None or self.inner.allows(token)

    def masked(self, logits: np.ndarray) -> np.ndarray:
        if not self._closing:
            return self.inner.masked(logits) if self.inner else logits
        found = np.full_like(logits, -np.inf)
        found[self._closing[0]] = logits[self._closing[0]]
        return found

    def accept(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError(f"token {token} is not allowed by the reasoning budget or grammar; choose an allowed one")
        if self.inner:
            self.inner.accept(token)
        if self._splitter.done:
            return
        if self._closing:
            # A new list, because copies share this one.
            self._closing = self._closing[1:]
        was_reasoning = self._splitter.reasoning
        self._splitter.add(as_latin(self._bytes(token)))
        self.left -= was_reasoning
        self._close_if_used()

    def _close_if_used(self) -> None:
        if self._splitter.reasoning and self.left <= 0 and self._closing is None:
            # The only end mark of the reasoning in progress.
            self._closing = self._encode(self._splitter.end.encode("latin-1").decode())


def as_latin(data: bytes) -> str:
    """Decode `data` as Latin-1, so that each byte becomes one character."""
    return data.decode("latin-1")


class StopStrings:
    """A streaming filter that ends a text before the first stop string in it, which is `met`."""

    def __init__(self, strings: Collection[str]):
        self.strings = tuple(strings)
        if "" in self.strings:
            raise PipelineError("a stop string (--stop) is empty; give at least one character")
        self._pending = ""
        self.met: str | None = None

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def add(self, more: str, final: bool = False) -> str:
        """Append `more`; return the text that now certainly is not part of a stop string."""
        if self.stopped:
            return ""
        text, met, self._pending = split_at_mark(self._pending + more, self.strings, final)
        self.met = met or None
        return text


class TextOutput:
    """Converts the tokens of a request to events with text, as soon as it can no longer change.

    prompt: may end in the text that starts reasoning. tools: whose calls are separated, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Collection[int], *, stop_strings: str | Iterable[str] | StopStrings = (),
        reasoning: bool = False, tools: Tools | None = None,
    ):  # fmt: skip
        self.reasoning_tokens = 0
        self._detokeniser = Detokeniser(tokenizer)
        if not isinstance(stop_strings, StopStrings):
            stop_strings = StopStrings((stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings))
        self._stops = stop_strings
        self._reasoning = (
            ReasoningSplitter(tokenizer.marks, tokenizer.end_of(prompt)) if reasoning and tokenizer.marks else None
        )
        if reasoning and tokenizer.tool_format.style == "harmony":
            # Harmony (gpt-oss) writes every answer as messages to channels, even without functions.
            tools = tools or Tools(tokenizer.tool_format)
        self._calls = tools.reader() if tools else None
        # Tokens whose text is not final, and the numbers of characters decoded and returned so far.
        self._pending: list[TextToken] = []
        self._decoded = self._reported = 0

    @property
    def stopped(self) -> bool:
        """Whether generation must stop: at a stop string, or after the only allowed tool call."""
        return self._stops.stopped or bool(self._calls and self._calls.full)

    @property
    def stop_strings(self) -> Collection[str]:
        return self._stops.strings

    def add(self, token: Token) -> list[Event]:
        self._pend(token)
        return self._release(self._detokeniser.add(token.id))

    def finish(self, end: Finished, last: Token | None) -> list[Event]:
        if last:
            self._pend(last)
        events = self._release(self._detokeniser.finish(), rest=True)
        reason = "stop" if self._stops.stopped else end.reason
        return [*events, replace(end, reason=reason, stop_string=self._stops.met)]

    def _pend(self, token: Token) -> None:
        self._pending.append(TextToken(token.id, token.logprob, token.top, self._decoded))

    def _release(self, text: str, rest: bool = False) -> list[Event]:
        """Append decoded text; return events with the text that can no longer change."""
        self._decoded += len(text)
        final = self._stops.add(text, rest)
        self._reported += len(final)
        # Tokens whose text a stop string cut off are not reported.
        complete = rest and not self._stops.stopped
        if not final and not rest:
            return []
        tokens = tuple(token for token in self._pending if complete or token.offset < self._reported)
        self._pending = self._pending[len(tokens) :]
        delta = self._separated(final, tokens, rest)
        return [delta] if delta.text or delta.reasoning or delta.calls or tokens else []

    def _separated(self, text: str, tokens: tuple[TextToken, ...], rest: bool) -> Delta:
        """Separate reasoning and tool calls in `text` from the answer; return all as a `Delta`."""
        reasoning, calls, thinking = "", (), False
        if self._reasoning:
            thinking = self._reasoning.reasoning
            pieces = self._reasoning.add(text) + (self._reasoning.finish() if rest else [])
            text, reasoning = _separate(pieces)
            thinking = thinking or self._reasoning.reasoning
        if self._calls:
            parts = self._calls.add(text) + (self._calls.finish() if rest else [])
            text, more = _separate(part for part in parts if isinstance(part, str))
            reasoning, calls = reasoning + more, tuple(part for part in parts if isinstance(part, CallPart))
        if reasoning or thinking:
            self.reasoning_tokens += len(tokens)
        return Delta(text, tokens, reasoning, calls)


def _separate(pieces: Iterable[str]) -> tuple[str, str]:
    pieces = list(pieces)
    answer = "".join(piece for piece in pieces if not isinstance(piece, Reasoning))
    return answer, "".join(piece for piece in pieces if isinstance(piece, Reasoning))


def text_request(
    prompt: Collection[int], context: int, tokenizer: Tokenizer | None, *, stop_strings: str | Iterable[str] | StopStrings = (),
    reasoning: bool = False, grammar: Grammar | None = None, tools: Tools | None = None,
    constraint: Constraint | None = None, reasoning_budget: int | None = None, **options: Any,
) -> Request:  # fmt: skip
    """Return an engine request that reports the generated text in `Delta` events.

    max_tokens: None for no limit. Raise PipelineError for invalid arguments, and for stop strings
    or a grammar without a tokenizer.
    """
    if tokenizer is None:
        if stop_strings or grammar:
            option = "a grammar" if grammar else "stop strings (--stop)"
            raise PipelineError(f"{option} needs a tokenizer, but this model has none; remove {option}")
        return Request(prompt, context, constraint=constraint, **options)
    if tools and options.get("receipt"):
        raise PipelineError("receipt does not support tools; leave one of them out")
    if grammar:
        # Harmony writes tool calls to another channel than answers, so they need other marks.
        marks = tokenizer.marks if grammar.calls else tokenizer.answer_marks
        constraint = grammar.constraint(marks, tokenizer.end_of(prompt)) if reasoning else grammar.constraint()
    # Without `reasoning`, a grammar applies from the first token on, so that the text has no reasoning.
    if reasoning_budget is not None and (reasoning or not grammar):
        constraint = ReasoningBudget(tokenizer, prompt, reasoning_budget, constraint)
    output = TextOutput(tokenizer, prompt, stop_strings=stop_strings, reasoning=reasoning, tools=tools)
    return Request(prompt, context, constraint=constraint, output=output, **options)


class Stream(Iterator[str]):
    """An iterator over the pieces of a text that an engine generates for one request.

    The model runs only while the caller waits for a piece, and the times count only this waiting.
    finish_reason: None before the end. steps: tokens after the first.
    """

    def __init__(self, engine: Engine, request: Request, *, reasoning: bool = False):
        self.request, self._engine, self._reasoning = request, engine, reasoning
        self._events = engine.stream()
        self._pieces: deque[str] = deque()
        self._start = self._seconds = 0.0

    def __next__(self) -> str:
        while not self._pieces:
            self._pieces += [piece for event in self.read() for piece in self._texts(event)]
            if not self._pieces and self._events.idle:
                raise StopIteration
        return self._pieces.popleft()

    def read(self) -> list[Event]:
        """Wait for events and return them, [] after the end; raise a failed request's error."""
        start = time.monotonic()
        if not self._start:
            self._start = start
            self._events.submit(self.request)
        events = [event for _, event in self._events.read()]
        self._seconds += time.monotonic() - start
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return events

    def run(self) -> Stream:
        """Generate the complete text; return this stream."""
        while not self._start or not self._events.idle:
            self.read()
        return self

    def _texts(self, event: Event) -> list[str]:
        if isinstance(event, Tokens):
            return [f"{token.id} " for token in event.tokens]
        if not isinstance(event, Delta):
            return []
        reasoning = [Reasoning(event.reasoning)] if self._reasoning and event.reasoning else []
        return reasoning + [event.text] * bool(event.text)

    def close(self) -> None:
        """Cancel the rest of the generation; deleting the stream does the same."""
        self._events.close()

    def __del__(self) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    @property
    def repeated(self) -> bool:
        return self.request.repeated

    @property
    def receipt(self) -> Receipt | None:
        return self.request.receipt(self._engine.manifest)

    @property
    def steps(self) -> int:
        return max(0, self.request.chosen - 1)

    @property
    def prefill_seconds(self) -> float:
        first = self.request.timing.first
        return first - self._start if first else 0.0

    @property
    def decode_seconds(self) -> float:
        return self._seconds - self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def speculator(self) -> Speculator | None:
        found = self._engine.scheduler.speculator
        return found if found and found.request is self.request else None
