"""Turn a request's tokens into text as they come, separated from reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from castiron.pipelines.engine.request import Event, Finished, Request, Token
from castiron.pipelines.engine.sampling import REPEAT_WINDOW
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.reasoning import Reasoning, prefix_start
from castiron.pipelines.text.tokenizer import Detokeniser, Tokenizer
from castiron.pipelines.text.tool_calls import Tools

if TYPE_CHECKING:
    from castiron.pipelines.text.grammar import Grammar
    from castiron.pipelines.text.tool_calls import CallPart


@dataclass(frozen=True)
class TextToken(Token):
    """A token with the `offset` in characters at which its text starts."""

    offset: int = 0


@dataclass(frozen=True)
class Delta(Event):
    """More text that is final, and the tokens that it came from.

    `reasoning`: what the model wrote before its answer; `calls`: pieces of tool calls.
    """

    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    @classmethod
    def joined(cls, parts: Collection[Delta]) -> Delta:
        """Return consecutive deltas as one."""
        tokens = tuple(chain.from_iterable(part.tokens for part in parts))
        calls = tuple(chain.from_iterable(part.calls for part in parts))
        return cls("".join(part.text for part in parts), tokens, "".join(part.reasoning for part in parts), calls)


class StopStrings:
    """A filter that ends a text before the stop string that starts first.

    It holds back only text that may be the start of a stop string. `self.met`: the stop string that
    ended the text, None before.
    """

    def __init__(self, strings: Collection[str]):
        """Raise PipelineError for an empty string, which would end every text at once."""
        self.strings = tuple(strings)
        if "" in self.strings:
            raise PipelineError("a stop string (--stop) is empty; give at least one character")
        self._pending = ""
        self.met: str | None = None

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def add(self, more: str) -> str:
        """Add `more`; return the text that can no longer change."""
        if self.stopped or not more:
            return ""
        if not self.strings:
            return more
        text = self._pending + more
        cut, met = self._find(text)
        # A stop string that starts before the one found may still be completed.
        start = min(prefix_start(text, string) for string in self.strings)
        if start < cut:
            self._pending = text[start:]
            return text[:start]
        self.met, self._pending = met, ""
        return text[:cut]

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        text, self._pending = self._pending, ""
        if self.stopped:
            return ""
        cut, self.met = self._find(text)
        return text[:cut]

    def _find(self, text: str) -> tuple[int, str | None]:
        """Return the start of the first stop string, and that string; the length of `text` and None
        without one."""
        found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        return min(found, key=lambda one: one[0], default=(len(text), None))


class TextOutput:
    """An engine's Output that makes deltas, as soon as their text is final.

    `reasoning_tokens`: how many tokens were reasoning.

    Args:
        prompt: the ids that the text follows.
        reasoning, tools: what to separate from the answer.

    Raises:
        PipelineError: a stop string is empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Collection[int], *, stop_strings: str | Iterable[str] = (),
        reasoning: bool = False, tools: Tools | None = None,
    ):  # fmt: skip
        self.reasoning_tokens = 0
        self._detokeniser = Detokeniser(tokenizer)
        self._stops = StopStrings((stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings))
        self._reasoning = tokenizer.reasoning_splitter(list(prompt)[-REPEAT_WINDOW:]) if reasoning else None
        if reasoning and tokenizer.tool_format and tokenizer.tool_format.kind == "harmony":
            # Harmony's answers are messages to channels, with or without functions.
            tools = tools or Tools(tokenizer.tool_format)
        self._calls = tools.reader() if tools else None
        # Tokens whose text is not final; characters that are decoded, and those that were reported.
        self._pending: list[TextToken] = []
        self._decoded = self._reported = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met, or the only call that the text may have is complete."""
        return self._stops.stopped or bool(self._calls and self._calls.full)

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
        """Add `text` and report what is final; with `rest`, at the end, also what was held back."""
        self._decoded += len(text)
        final = self._stops.add(text) + (self._stops.finish() if rest else "")
        self._reported += len(final)
        # Tokens whose text a stop string cut off are not reported.
        complete = rest and not self._stops.stopped
        if not final and not rest:
            return []
        tokens = tuple(token for token in self._pending if complete or token.offset < self._reported)
        self._pending = self._pending[len(tokens) :]
        delta = self._without_calls(self._without_reasoning(Delta(final, tokens), rest), rest)
        return [delta] if delta.text or delta.reasoning or delta.calls or tokens else []

    def _without_reasoning(self, delta: Delta, rest: bool) -> Delta:
        if not self._reasoning:
            return delta
        before = self._reasoning.reasoning
        pieces = self._reasoning.add(delta.text) + (self._reasoning.finish() if rest else [])
        answer, reasoning = _separate(pieces)
        if reasoning or before or self._reasoning.reasoning:
            self.reasoning_tokens += len(delta.tokens)
        return replace(delta, text=answer, reasoning=reasoning)

    def _without_calls(self, delta: Delta, rest: bool) -> Delta:
        if not self._calls:
            return delta
        pieces = self._calls.add(delta.text) + (self._calls.finish() if rest else [])
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self.reasoning_tokens += len(delta.tokens)
        answer, reasoning = _separate(piece for piece in pieces if isinstance(piece, str))
        calls = tuple(piece for piece in pieces if not isinstance(piece, str))
        return replace(delta, text=answer, reasoning=delta.reasoning + reasoning, calls=calls)


def _separate(pieces: Iterable[str]) -> tuple[str, str]:
    """Return the answer and the reasoning in some pieces of text."""
    pieces = list(pieces)
    answer = "".join(piece for piece in pieces if not isinstance(piece, Reasoning))
    return answer, "".join(piece for piece in pieces if isinstance(piece, Reasoning))


def text_request(
    prompt: Collection[int], context: int, tokenizer: Tokenizer | None, *, stop_strings: str | Iterable[str] = (),
    reasoning: bool = False, grammar: Grammar | None = None, tools: Tools | None = None, **options: Any,
) -> Request:  # fmt: skip
    """Return a request whose events are `Delta`s, or `Tokens` without a tokenizer.

    Args:
        stop_strings: the text ends before the first one.
        reasoning: report it apart from the answer.
        grammar: what the answer has to match; with `reasoning` only what follows the reasoning.
        tools: functions whose calls are reported apart from the answer.
        options: of `Request`.

    Raises:
        PipelineError: for the reasons of `Request`, and for stop strings or a grammar without a
        tokenizer.
    """
    if tokenizer is None:
        if stop_strings or grammar:
            option = "a grammar" if grammar else "stop strings (--stop)"
            raise PipelineError(f"{option} needs a tokenizer, and this model has none; leave it out")
        return Request(prompt, context, **options)
    constraint = None
    if grammar:
        # Calls may be in a channel of their own.
        marks = tokenizer.marks if grammar.calls else tokenizer.answer_marks
        constraint = grammar.constraint(*((marks, tokenizer.end_of(list(prompt)[-REPEAT_WINDOW:])) if reasoning else ()))
    output = TextOutput(tokenizer, prompt, stop_strings=stop_strings, reasoning=reasoning, tools=tools)
    return Request(prompt, context, constraint=constraint, output=output, **options)
