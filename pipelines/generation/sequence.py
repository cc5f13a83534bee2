"""The state of one sequence that is generated: the model's next token goes in, events come out.

Whoever runs the model drives it: a `Generation` pulls its session, the `Scheduler` pushes what a batch has found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.choosing import Chooser
from castiron.pipelines.generation.least import AtLeast
from castiron.pipelines.generation.positions import check_room
from castiron.pipelines.generation.repetition import Repetition
from castiron.pipelines.generation.sampling import REPEAT_WINDOW, Sampler, log_probabilities
from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.generation.text import Detokeniser, Text
from castiron.pipelines.generation.thoughts import Thought

if TYPE_CHECKING:
    from castiron.pipelines.generation.constraint import Constraint
    from castiron.pipelines.generation.grammar import Grammar
    from castiron.pipelines.generation.pausing import Paused
    from castiron.pipelines.generation.sampling import Score
    from castiron.pipelines.generation.tool_calls import CallPart, Tools


def _none() -> np.ndarray:
    raise RuntimeError("a token that is not forced needs logits")


@dataclass(frozen=True)
class Token:
    """A generated token and where its text begins in the whole, in characters.

    `logprob`: the natural logarithm of its probability in the model's own distribution; `top`: the likeliest tokens as
    (id, logarithm), likeliest first. Both None unless asked for.
    """

    id: int
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Delta:
    """Text that is certain, and the tokens that it came from; of a sequence without a tokenizer its tokens alone.

    `thought` is what the model thought before it said `text`, and `calls` are the functions that it calls, where a sequence
    tells them apart.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    thought: str = ""
    calls: tuple[CallPart, ...] = ()

    @classmethod
    def joined(cls, parts: Collection[Delta]) -> Delta:
        """Several that follow each other as one."""
        tokens = tuple(chain.from_iterable(part.tokens for part in parts))
        calls = tuple(chain.from_iterable(part.calls for part in parts))
        return cls("".join(part.text for part in parts), tokens, "".join(part.thought for part in parts), calls)


@dataclass(frozen=True)
class Finished:
    """The end: "stop" (a stop token, a stop string, or as `repeated` tells a text that went round in a circle), "length"
    (max_tokens) or "context" (no position is left). `stop_string`: the one that ended it."""

    reason: str
    repeated: bool = False
    stop_string: str | None = None


@dataclass(frozen=True)
class Failed:
    """An end without a result."""

    error: PipelineError


Event = Delta | Finished | Failed


class Sequence:
    """A prompt, how it is to go on, and its progress.

    `tokens`: ids so far, a stop token is none of them; `thought_tokens`: how many of them the model thought with;
    `finish_reason`: None or that of `Finished`. What runs the model keeps the times, in seconds of the monotonic clock, and
    how many of the prompt's tokens were `cached`.
    """

    def __init__(
        self,
        prompt: Collection[int],
        context: int,
        *,
        position: int = 0,
        max_tokens: int | None = None,
        text: Text | None = None,
        sampler: Sampler | None = None,
        stop_tokens: Collection[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        top_logprobs: int | None = None,
        history: Collection[int] = (),
        repetition_stop: bool = False,
        thoughts: bool = False,
        grammar: Grammar | None = None,
        tools: Tools | None = None,
        prompt_logprobs: int | None = None,
        min_tokens: int = 0,
    ):
        """A prompt that begins at `position` of `context`, where `history` stands. max_tokens None goes on until a stop or the
        end of the context. stop_tokens None are those of the model that runs it. Without `text` there are tokens alone, and no
        stop strings. top_logprobs None tells no log-probabilities, N >= 0 those of the token and of the N likeliest.
        `repetition_stop` ends a text that repeats one cycle of tokens over and over (`generation.repetition`). `thoughts` tells
        what a reasoning model thinks apart from its answer. `grammar`: what the text has to be, behind its thoughts where they
        are told apart; tokens that it leaves no choice about are `forced`. `tools`: functions whose calls are told apart from
        the text. prompt_logprobs N >= 0 puts the log-probabilities of the prompt's own tokens after the first, and the N
        likeliest of each place, into `scores`; max_tokens may then be 0, and the token that ends the text is told too.
        `min_tokens`: none of the stop_tokens, which are then given, is chosen before the text has so many; a grammar says
        itself when its text may end.

        PipelineError if the prompt is empty, if it and max_tokens do not fit in the context, or for stop strings that
        cannot be looked for.
        """
        scored = prompt_logprobs is not None
        room = check_room(context, position, len(prompt), None if scored and max_tokens == 0 else max_tokens)
        self.limit, self.limit_reason = (room, "context") if max_tokens is None else (max_tokens, "length")
        self.prompt = np.asarray(prompt)
        self.sampler = sampler or Sampler()
        self.stop_tokens = None if stop_tokens is None else frozenset(stop_tokens)
        self.top_logprobs, self.prompt_logprobs = top_logprobs, prompt_logprobs
        # Those of the prompt's tokens 1 and on that are known.
        self.scores: list[Score] = []
        self.tokens: list[int] = []
        self.thought_tokens = 0
        self.finish_reason: str | None = None
        self.arrived = time.monotonic()
        # When its prompt began to be read, and when its first and its latest token came.
        self.began = self.first = self.last = 0.0
        self.cached = 0
        # Whose share of the slots it takes, who else finds its prompt in a cache, and of those that wait the lower goes first.
        self.client, self.owner, self.priority = "", "", 0
        # How often the scheduler read another sequence's prompt first; where it stood when it gave its slot to another.
        self.passed_over = 0
        self.paused: Paused | None = None
        self._repetition = Repetition() if repetition_stop else None
        # Whether the text ended because it went round in a circle.
        self.repeated = False
        recent = [*history, *prompt][-REPEAT_WINDOW:]
        self.text = text
        self._detokeniser = text and Detokeniser(text)
        self._thoughts = text.thoughts(recent) if text and thoughts else None
        constraint: Constraint | AtLeast | None = AtLeast(min_tokens, self.stop_tokens or ()) if min_tokens else None
        if grammar:
            if text is None:
                raise PipelineError("a grammar needs a tokenizer, and there is none")
            # Calls may be in a channel of their own.
            marks = text.marks if grammar.calls else text.answer_marks
            constraint = grammar.constraint(*(marks, text.end_of(recent)) if thoughts else ())
        self.chooser = Chooser(self.sampler, constraint, recent)
        if text and text.tool_form and thoughts and text.tool_form.kind == "harmony":
            from castiron.pipelines.generation.tool_calls import Tools

            # Its answers are messages to channels, whether there are functions or not.
            tools = tools or Tools(text.tool_form)
        self._calls = tools.reader() if tools and text else None
        self._stops = StopStrings((stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings))
        if self._stops.strings and text is None:
            raise PipelineError("stop strings (--stop) need a tokenizer, and there is none")
        # Tokens whose text is not certain yet; characters that are decoded, and those that are told.
        self._waiting: list[Token] = []
        self._decoded = self._told = 0

    @property
    def constraint(self) -> Constraint | AtLeast | None:
        """What holds the text to its grammar or length; None for a text that is free."""
        return self.chooser.constraint

    @property
    def forced(self) -> bool:
        """Whether the next token is certain, so that `advance` needs nothing of the model."""
        return self.chooser.forced and self.top_logprobs is None and self.finish_reason is None

    def advance(self, argmax: int = 0, logits: Callable[[], np.ndarray] = _none, chosen: int | None = None) -> list[Event]:
        """Takes the next token, where the model has found `argmax` and `logits()` gives f32 [vocab]; what there is to
        tell, a Finished last if this was the end. `chosen` is what `chooser` has picked of these already."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        if not self.limit:
            return self._finish(self.limit_reason)
        token = self._choose(argmax, logits, chosen)
        whole = bool(self.constraint and self.constraint.done)
        if self.stop_tokens and token.id in self.stop_tokens or whole and token.id in self.constraint.eos:
            if self.prompt_logprobs is not None:
                self._waiting.append(token)
            return self._finish("stop")
        self.tokens.append(token.id)
        self._waiting.append(token)
        events = self._release(self._detokeniser.add(token.id) if self._detokeniser else None)
        if self._repetition and self._repetition.add(token.id) and not self._stops.stopped:
            self.repeated = True
            return events + self._finish("stop")
        if whole:
            return events + self._finish("stop")
        if self._calls and self._calls.full:
            return events + self._finish("stop")
        if self._stops.stopped or len(self.tokens) == self.limit:
            return events + self._finish(self.limit_reason)
        return events

    def _choose(self, argmax: int, logits: Callable[[], np.ndarray], chosen: int | None) -> Token:
        token = self.chooser.pick(argmax, logits) if chosen is None else chosen
        self.chooser.accept(token)
        probabilities = () if self.top_logprobs is None else log_probabilities(logits(), token, self.top_logprobs)
        return Token(token, self._decoded, *probabilities)

    def _release(self, text: str | None, rest: bool = False) -> list[Event]:
        """Tells what is certain after `text` more; at the end, with `rest`, what was held back too."""
        if text is None:
            told, self._waiting = tuple(self._waiting), []
            return [Delta("", told)] if told else []
        self._decoded += len(text)
        certain = self._stops.add(text) + (self._stops.finish() if rest else "")
        self._told += len(certain)
        # Tokens whose text is held back, or was cut off by a stop string, are not told.
        whole = rest and not self._stops.stopped
        if not certain and not whole and not rest:
            return []
        told = tuple(token for token in self._waiting if whole or token.offset < self._told)
        self._waiting = self._waiting[len(told) :]
        delta = Delta(certain, told)
        if self._thoughts:
            thinking = self._thoughts.thinking
            pieces = self._thoughts.add(certain) + (self._thoughts.finish() if rest else [])
            thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
            if thought or thinking or self._thoughts.thinking:
                self.thought_tokens += len(told)
            delta = Delta("".join(piece for piece in pieces if not isinstance(piece, Thought)), told, thought)
        if self._calls:
            found = self._calls.add(delta.text) + (self._calls.finish() if rest else [])
            if any(isinstance(piece, Thought) for piece in found):
                self.thought_tokens += len(told)
            said = "".join(piece for piece in found if isinstance(piece, str) and not isinstance(piece, Thought))
            thought = delta.thought + "".join(piece for piece in found if isinstance(piece, Thought))
            delta = Delta(said, told, thought, tuple(piece for piece in found if not isinstance(piece, str)))
        return [delta] if delta.text or delta.thought or delta.calls or told else []

    def _finish(self, reason: str) -> list[Event]:
        events = self._release(self._detokeniser.finish() if self._detokeniser else None, rest=True)
        self.finish_reason = "stop" if self._stops.stopped else reason
        return [*events, Finished(self.finish_reason, self.repeated, self._stops.met)]


def yielding(running: Mapping[int, Sequence], priority: int) -> int | None:
    """The slot of the sequence, of those that run, that gives way to one of this priority: of the largest number the one that
    came last; None if there is none of a larger one that can pause."""
    # The scores of a prompt are its slot's as well.
    found = [
        (s.priority, s.arrived, slot) for slot, s in running.items() if s.priority > priority and s.prompt_logprobs is None
    ]
    return max(found)[2] if found else None
