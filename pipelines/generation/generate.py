"""Tokens out of a session, one after another."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.sampling import Sampler, Sampling


class Generation:
    """An iterator over the tokens that follow `prompt`, which starts at the session's position.

        for token in Generation(session, prompt, max_tokens=64, stop_tokens=eos):
            ...

    max_tokens None goes on until a stop token or the end of the context. A stop token is not part of the result. The
    last token is never fed, so the session stands before it. `progress` gets (tokens done, tokens in all) of the
    prompt. `speculate` checks several proposed tokens at once where the text repeats itself: the same tokens, sooner.
    `history`: the tokens that stand in the session already, for the repeat penalty and for proposals. PipelineError at
    once if the prompt is empty, if prompt and max_tokens do not fit in the context, or if what is to be speculated on is
    not greedy; nothing has run then.

    While and after iterating: `tokens` so far; `finish_reason` None, "stop" (a stop token), "length" (max_tokens) or
    "context" (no position is left); `prompt_tokens`; `prefill_seconds` and `decode_seconds` spent in the model and in
    choosing, `steps` tokens decoded after the first.
    """

    def __init__(
        self,
        session,
        prompt: Sequence[int],
        *,
        sampler: Sampler | None = None,
        max_tokens: int | None = None,
        stop_tokens: Collection[int] = (),
        progress: Callable[[int, int], None] | None = None,
        speculate: bool = False,
        history: Sequence[int] = (),
    ):
        prompt = list(prompt)
        check_room(session.position, session.context, len(prompt), max_tokens)
        self.session = session
        self.prompt = prompt
        self.sampler = sampler or Sampler()
        self.history = [*history, *prompt]
        self.speculator = self._speculator() if speculate else None
        self.stop_tokens = frozenset(stop_tokens)
        self.progress = progress
        self.room = session.context - session.position - len(prompt) + 1
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = 0
        # Tokens that are known and not yet asked for; the session stands before the last of them.
        self._ahead: deque[int] = deque()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.finish_reason is None and len(self.tokens) == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is None and len(self.tokens) == self.room:
            self.finish_reason = "context"
        if self.finish_reason is not None:
            self.settle()
            raise StopIteration
        token = self._ahead.popleft() if self._ahead else self._advance()
        if token in self.stop_tokens:
            self.finish_reason = "stop"
            self.settle()
            raise StopIteration
        self.tokens.append(token)
        return token

    def settle(self) -> None:
        """Puts the session before the last of `tokens`, for a caller that leaves off before the end: speculation may
        have fed more than was asked for. The end of the iteration does it by itself."""
        if self._ahead:
            self.session.rewind(self.session.position - len(self._ahead))
            self._ahead.clear()

    def _advance(self) -> int:
        """Runs the model and returns the next token; more that speculation finds wait in `_ahead`."""
        start = time.perf_counter()
        if not self.tokens:
            token = self._choose(self.session.prefill(self.prompt, progress=self.progress))
            self.prefill_seconds = time.perf_counter() - start
            return token
        if self.speculator:
            limit = self.room if self.max_tokens is None else self.max_tokens
            token, *more = self.speculator.advance(self.tokens[-1], limit - len(self.tokens))
            self._ahead.extend(more)
        else:
            token = self._choose(self.session.step(self.tokens[-1]))
        self.decode_seconds += time.perf_counter() - start
        self.steps += 1 + len(self._ahead)
        return token

    def _choose(self, argmax: int) -> int:
        if not self.sampler.sampling.needs_logits:
            return argmax
        return self.sampler.choose(self.session.logits(), self.history + self.tokens)

    def _speculator(self):
        from castiron.pipelines.generation.speculate import Speculator

        if self.sampler.sampling.needs_logits:
            raise PipelineError(
                "proposed tokens are checked against the likeliest ones: --speculate goes without --temperature and "
                "--repeat-penalty"
            )
        return Speculator(self.session, self.history)


def check_room(position: int, context: int, prompt: int, max_tokens: int | None) -> None:
    """PipelineError unless `prompt` tokens from `position` on, and the `max_tokens` after them, fit in the context."""
    if prompt < 1:
        raise PipelineError("the prompt has no tokens; give at least one")
    if max_tokens is not None and max_tokens < 1:
        raise PipelineError(f"{max_tokens} tokens to generate is not a positive number")
    before = f"{position} tokens are in the cache, " if position else ""
    if position + prompt > context:
        raise PipelineError(
            f"{before}the prompt has {prompt} tokens and the bundle's context is {context}: shorten the prompt, or "
            "compile with a larger --context"
        )
    # The last token that is generated needs no position: it is never fed.
    room = context - position - prompt + 1
    if max_tokens is not None and max_tokens > room:
        raise PipelineError(
            f"{before}the prompt has {prompt} tokens and {max_tokens} more are asked for, where the bundle's context "
            f"is {context}: ask for at most {room}, or compile with a larger --context"
        )


def generate(
    session,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: Collection[int] = (),
    speculate: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """An iterator over the token ids that follow `prompt`, which starts at the session's position; see `Generation`."""
    return Generation(
        session,
        prompt,
        sampler=Sampler(sampling),
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        speculate=speculate,
        progress=progress,
    )
