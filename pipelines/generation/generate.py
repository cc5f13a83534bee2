"""Tokens out of a session, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.sequence import Delta, Event, Sequence
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.thoughts import Thought

if TYPE_CHECKING:
    from castiron.pipelines.generation.draft import Draft
    from castiron.pipelines.generation.grammar import Grammar
    from castiron.pipelines.generation.speculate import Speculator


class Generation:
    """An iterator over the tokens that follow `prompt`, which starts at the session's position.

        for token in Generation(session, prompt, max_tokens=64):
            ...

    max_tokens None goes on until a stop token or the end of the context. stop_tokens None are the model's own, () are none; a
    stop token is not part of the result. The last token is never fed, so the session stands before it. `stream` gives text
    instead, where `text` is given, up to the first of `stop_strings`. `sampling` is greedy unless it says otherwise; a
    `sampler` goes on with the random numbers of an earlier generation. `progress` gets (tokens done, tokens in all) of the
    prompt. `speculate` checks several proposed tokens at once where the text repeats itself, and with a `draft`, as
    `open_draft` opens one, also what that proposes: the same tokens, sooner. `history`: the tokens that stand in the session
    already, for the repeat penalty and for proposals. `repetition_stop` ends a text that goes round in a circle; `repeated`
    then tells so. With `thoughts` those pieces of `stream` that a reasoning model thinks before it answers are `Thought`,
    without the marks around them. `grammar`, as `text.grammar` makes it, is what the text has to be; tokens that it forces are
    read together. PipelineError at once if the prompt is empty, or if prompt and max_tokens do not fit in the context; nothing
    has run then. PipelineError, too, once something else has moved the session meanwhile.

    While and after iterating: `tokens` so far; `finish_reason` None, "stop" (a stop token or string, or a circle), "length"
    (max_tokens) or "context" (no position is left); `prompt_tokens`; `prefill_seconds` and `decode_seconds` spent on the
    first token and on the `steps` after it, without what the caller does between them.
    """

    def __init__(
        self,
        session,
        prompt: Collection[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling = Sampling(),
        sampler: Sampler | None = None,
        stop_tokens: Collection[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        text: Text | None = None,
        progress: Callable[[int, int], None] | None = None,
        speculate: bool = False,
        draft: Draft | None = None,
        history: Collection[int] = (),
        repetition_stop: bool = False,
        thoughts: bool = False,
        grammar: Grammar | None = None,
    ):
        self.session = session
        self.prompt = list(prompt)
        self.sequence = Sequence(
            self.prompt, session.context, position=session.position, max_tokens=max_tokens, text=text,
            sampler=sampler or Sampler(sampling), stop_strings=stop_strings, history=history,
            stop_tokens=session.manifest.tokens.eos if stop_tokens is None else stop_tokens,
            repetition_stop=repetition_stop, thoughts=thoughts, grammar=grammar,
        )  # fmt: skip
        self.speculator: Speculator | None = None
        if speculate or draft:
            from castiron.pipelines.generation.speculate import Speculator

            self.speculator = Speculator(session, self.sequence, history, draft)
        self.progress = progress
        self.tokens = self.sequence.tokens
        self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = 0
        # Where the prompt began, and where this generation has put the session.
        self._start = self._position = session.position

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def finish_reason(self) -> str | None:
        return self.sequence.finish_reason

    @property
    def repeated(self) -> bool:
        """Whether it ended because the text went round in a circle."""
        return self.sequence.repeated

    def __iter__(self):
        return self

    def __next__(self) -> int:
        before = len(self.tokens)
        if self.finish_reason is None:
            self._advance()
        if len(self.tokens) == before:
            raise StopIteration
        return self.tokens[-1]

    def stream(self) -> Iterator[str]:
        """The rest as text, as soon as it is certain: never in the middle of a character or of a stop string."""
        while self.finish_reason is None:
            for event in self._advance():
                if isinstance(event, Delta) and event.thought:
                    yield Thought(event.thought)
                if isinstance(event, Delta) and event.text:
                    yield event.text

    def settle(self) -> None:
        """Puts the session before the last of `tokens`, for a caller that leaves off before the end: speculation may
        have fed more than was asked for. The end of the generation does it by itself."""
        if self.speculator and self.session.position == self._position:
            self.speculator.settle()
            self._position = self.session.position

    def _advance(self) -> list[Event]:
        """Takes the next token, from the model unless it is known; what there is to tell."""
        start = time.perf_counter()
        if self.session.position != self._position:
            raise PipelineError(
                f"the session is at position {self.session.position}, where this generation had left it at {self._position}: "
                "run one generation after the other, or each on a fork"
            )
        if not self.tokens:
            argmax = self.session.prefill(self.prompt, progress=self.progress)
            # What is asked next begins as this prompt does, and an answer may have to be taken back.
            self.session.keep()
            self._position = self.session.position
            events = self.sequence.advance(argmax, self.session.logits)
            self.prefill_seconds = time.perf_counter() - start
            if self.speculator:
                self.speculator.prompt_seconds = self.prefill_seconds
        else:
            events = self._advance_text()
            self.steps += 1
            self.decode_seconds += time.perf_counter() - start
        return events

    def _advance_text(self) -> list[Event]:
        """One token more: one that was checked already, one that is certain, or what the model says of the last ones."""
        speculator, session, sequence = self.speculator, self.session, self.sequence
        unread = self.tokens[session.position - self._start - len(self.prompt) :]
        argmax = 0
        if speculator:
            if not speculator.ready and not sequence.forced:
                speculator.feed(unread)
                # Whatever comes now, this is where the session stands.
                self._position = session.position
            events = speculator.advance() if speculator.ready else sequence.advance()
        else:
            if not sequence.forced:
                argmax = session.prefill(unread) if len(unread) > 1 else session.step(unread[0])
            self._position = session.position
            events = sequence.advance(argmax, session.logits)
        self._position = session.position
        return events
