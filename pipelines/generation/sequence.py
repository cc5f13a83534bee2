"""One sequence that is generated for a request, and what it tells the request as it goes."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from castiron.pipelines.generation.choosing import Chooser, Choosing, Chosen
from castiron.pipelines.generation.stops import StopStrings
from castiron.pipelines.generation.text import Detokeniser, Text
from castiron.pipelines.serve.errors import ApiError


@dataclass(frozen=True)
class Said:
    """A token that is part of the text and where its text begins there, in characters."""

    chosen: Chosen
    offset: int


@dataclass(frozen=True)
class Piece:
    """Text that is certain, and the tokens that it came from."""

    text: str
    said: tuple[Said, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end: "stop" (the model's end-of-text token or a stop string) or "length"; `cached` of the prompt's tokens
    were in the cache. Seconds are of the queue, of prefill and of decoding."""

    reason: str
    prompt: int
    cached: int
    generated: int
    queued_seconds: float
    first_token_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Failed:
    """An end without a result."""

    error: ApiError


Event = Piece | Finished | Failed


class Sequence:
    """A sequence: its prompt, its limits and, once the scheduler has taken it, its progress.

    `tell(event)` is called on the loop of the request. `cancelled` may be set by any thread, and the scheduler lets go
    of the sequence at its next turn.
    """

    def __init__(
        self,
        text: Text,
        prompt: list[int],
        tell: Callable[[Event], None],
        *,
        max_tokens: int,
        choosing: Choosing = Choosing(),
        stop_strings: Iterable[str] = (),
        stop_tokens: Collection[int] = (),
    ):
        self.prompt = np.asarray(prompt, np.int32)
        self.tell = tell
        self.max_tokens = max_tokens
        self.stop_tokens = frozenset(stop_tokens)
        self.chooser = Chooser(choosing, prompt)
        self.pieces, self.stops = Detokeniser(text), StopStrings(tuple(stop_strings))
        self.cancelled = False
        self.tokens: list[int] = []
        self.cached = 0
        # How often another sequence's prompt went first.
        self.passed_over = 0
        self.arrived = time.monotonic()
        self.began = self.first = self.last = 0.0
        # What was said but waits for its text to become certain.
        self._waiting: list[Said] = []
        self._length = self._told = 0

    def advance(self, argmax: int, logits: Callable[[], np.ndarray]) -> list[Event]:
        """Takes the next token; what this tells the request, a Finished last if it was the end."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        chosen = self.chooser.choose(argmax, logits)
        if chosen.token in self.stop_tokens:
            return self._end("stop")
        self.tokens.append(chosen.token)
        self._waiting.append(Said(chosen, self._length))
        piece = self.pieces.add(chosen.token)
        self._length += len(piece)
        events = self._release(self.stops.add(piece))
        if self.stops.stopped or len(self.tokens) >= self.max_tokens:
            return events + self._end("stop" if self.stops.stopped else "length")
        return events

    def _release(self, text: str, end: bool = False) -> list[Event]:
        self._told += len(text)
        if not text and not (end and self._waiting):
            return []
        # Tokens whose text is still held back, or was cut off by a stop string, are not told.
        whole = end and not self.stops.stopped
        said = tuple(s for s in self._waiting if whole or s.offset < self._told)
        self._waiting = self._waiting[len(said) :]
        return [Piece(text, said)] if text or said else []

    def _end(self, reason: str) -> list[Event]:
        rest = self.stops.add(self.pieces.finish()) + self.stops.finish()
        events = self._release(rest, end=True)
        if self.stops.stopped:
            reason = "stop"
        done = Finished(
            reason, len(self.prompt), self.cached, len(self.tokens), self.began - self.arrived,
            self.first - self.arrived, self.last - self.first,
        )  # fmt: skip
        return [*events, done]
