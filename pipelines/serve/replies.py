"""Answers in the shapes of OpenAI's API: whole completions, and the chunks of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from castiron.pipelines.generation.sequence import Delta, Finished, Sequence, Token
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.generation.tool_calls import CallPart, joined
from castiron.pipelines.serve.errors import ApiError

# What OpenAI calls the ends of a sequence.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}


def usage(choices: list[tuple[int, Sequence]]) -> dict:
    """Tokens of a request, from its sequences as (which of its prompts, sequence): a prompt counts once for all its
    choices."""
    prompts = dict(reversed(choices)).values()
    prompt = sum(len(sequence.prompt) for sequence in prompts)
    generated = sum(len(sequence.tokens) for _, sequence in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.cached for sequence in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(sequence.thought_tokens for _, sequence in choices)},
    }


def so_far(usage: dict, told: int) -> dict:
    """`usage` where no more tokens than `told` have been sent; the model may be ahead of that."""
    return usage | {"completion_tokens": told, "total_tokens": usage["prompt_tokens"] + told}


def ending(end: Finished | None, called: bool = False) -> dict:
    """What a choice says of its end, which is that of its calls where it `called` a function; "stop_reason" is castiron's,
    for a text that went round in a circle."""
    reason = end and FINISH_REASONS[end.reason]
    found = {"finish_reason": "tool_calls" if called and reason == "stop" else reason}
    return found | {"stop_reason": "repetition"} if end and end.repeated else found


def _reasoning(thoughts: str) -> dict:
    """What a message says of its thoughts; the name is vLLM's and DeepSeek's, OpenAI's API shows none."""
    return {"reasoning_content": thoughts} if thoughts else {}


def _call_id() -> str:
    """Letters and digits, 9 of them, are what every template takes."""
    return uuid.uuid4().hex[:9]


def _merged(parts: Iterable[CallPart]) -> list[CallPart]:
    """One piece of each call: clients read no more than the first of a chunk."""
    found: dict[int, CallPart] = {}
    for part in parts:
        before = found.get(part.index)
        found[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
    return list(found.values())


def _part(part: CallPart) -> dict:
    """A piece of a call as a stream has it."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": _call_id(), "type": "function", "function": function}


class Reply(ABC):
    """Builds the answer to one request: the events of a stream, each a JSON object."""

    prefix = ""
    # What a stream ends with, behind its last event.
    last: str | None = None
    # Whether every event tells the usage so far.
    continuous_usage = False

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool):
        self.token_bytes, self.logprobs = token_bytes, logprobs
        self.head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @abstractmethod
    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        """Before the first text of a choice; `usage` as far as it is known."""

    @abstractmethod
    def go_on(self, index: int, more: Delta, end: Finished | None) -> Iterable[dict]:
        """Some more of a choice, or with `end` its end."""

    @abstractmethod
    def finish(self, usage: dict) -> Iterable[dict]:
        """Behind the ends of all choices."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[dict]:
        """What ends a stream that has begun and cannot go on."""

    def logprobs_of(self, tokens: Iterable[Token]) -> list[dict]:
        """Log-probabilities of tokens, as chats have them."""
        return [
            {**self._token(token.id, token.logprob), "top_logprobs": [self._token(*other) for other in token.top]}
            for token in tokens
        ]

    def _token(self, token: int, logprob: float) -> dict:
        data = self.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


class Choices(Reply):
    """Answers of one or several choices; the two kinds of completions differ in the names of things."""

    kind = chunk_kind = ""
    last = "[DONE]"
    # Whether a stream tells its usage.
    include_usage = False

    def whole(self, choices: list[dict], usage: dict) -> dict:
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict], usage: dict | None = None) -> dict:
        return {**self.head, "object": self.chunk_kind, "choices": choices, "usage": usage}

    @abstractmethod
    def choice(self, index: int, said: Delta, end: Finished) -> dict:
        """One whole answer."""

    def opening(self, index: int) -> dict | None:
        """What a stream begins with, if it has something to say before the first text."""
        return None

    @abstractmethod
    def delta(self, index: int, more: Delta, end: Finished | None = None) -> dict:
        """Some more of an answer, or with `end` its end."""

    def begin(self, index: int, usage: dict) -> list[dict]:
        return [self.chunk([opening])] if (opening := self.opening(index)) else []

    def go_on(self, index: int, more: Delta, end: Finished | None) -> list[dict]:
        return [self.chunk([self.delta(index, more, end)])]

    def finish(self, usage: dict) -> list[dict]:
        return [self.chunk([], usage)] if self.include_usage else []

    def fail(self, error: ApiError) -> list[dict]:
        return [error.body]


class ChatReply(Choices):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool):
        super().__init__(model, token_bytes, logprobs)
        # Choices of a stream that have called a function.
        self._called: set[int] = set()

    def choice(self, index: int, said: Delta, end: Finished) -> dict:
        message = {"role": "assistant", "content": said.text, **_reasoning(said.thought), "refusal": None}
        if said.calls:
            calls = [{"name": name, "arguments": arguments} for name, arguments in joined(said.calls)]
            message["tool_calls"] = [{"id": _call_id(), "type": "function", "function": call} for call in calls]
            message["content"] = said.text or None
        return {"index": index, "message": message, "logprobs": self._logprobs(said.tokens), **ending(end, bool(said.calls))}

    def opening(self, index: int) -> dict:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, **ending(None)}

    def go_on(self, index: int, more: Delta, end: Finished | None) -> list[dict]:
        if not (more.text or more.thought or more.calls or end or self.logprobs):
            # Tokens of a mark, which no client is told of.
            return []
        first, *others = _merged(more.calls) or [None]
        deltas = [replace(more, calls=(first,) if first else ()), *(Delta("", calls=(part,)) for part in others)]
        return [self.chunk([self.delta(index, each, end if each is deltas[-1] else None)]) for each in deltas]

    def delta(self, index: int, more: Delta, end: Finished | None = None) -> dict:
        delta: dict[str, Any] = _reasoning(more.thought)
        if more.calls:
            self._called.add(index)
            delta["tool_calls"] = [_part(part) for part in more.calls]
        if more.text or not (end or delta):
            delta["content"] = more.text
        logprobs = self._logprobs(more.tokens) if more.tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, **ending(end, index in self._called)}

    def _logprobs(self, tokens: Collection[Token]) -> dict | None:
        return {"content": self.logprobs_of(tokens), "refusal": None} if self.logprobs else None


@dataclass(frozen=True)
class Echo:
    """What comes before an answer: the prompt's text, or nothing; and where in it its tokens begin, if they are shown."""

    text: str = ""
    offsets: Collection[int] = ()


class CompletionReply(Choices):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: int | None, echoes: list[Echo]):
        """`logprobs`: how many of the likeliest tokens are shown in each place, None for no log-probabilities. `echoes` is what
        comes before each answer."""
        super().__init__(model, token_bytes, logprobs is not None)
        self.top, self.echoes = logprobs, echoes
        # That of each choice.
        self.sequences: list[Sequence] = []

    def choice(self, index: int, said: Delta, end: Finished) -> dict:
        tokens = (*self._prompt(index), *self._answer(index, said.tokens))
        return self._choice(index, self.echoes[index].text + said.text, tokens, end)

    def opening(self, index: int) -> dict | None:
        echo = self.echoes[index]
        return self._choice(index, echo.text, self._prompt(index), None) if echo.text or echo.offsets else None

    def delta(self, index: int, more: Delta, end: Finished | None = None) -> dict:
        return self._choice(index, more.text, self._answer(index, more.tokens), end)

    def _prompt(self, index: int) -> tuple[Token, ...]:
        """The prompt's own tokens, of which the first has no log-probability; none where these were not asked for."""
        offsets, sequence = self.echoes[index].offsets, self.sequences[index]
        scores = [None, *sequence.scores] if offsets else []
        ids = sequence.prompt.tolist()
        return tuple(
            Token(*place, *((score.logprob, score.top[: self.top]) if score else ()))
            for *place, score in zip(ids, offsets, scores)
        )

    def _answer(self, index: int, tokens: Collection[Token]) -> tuple[Token, ...]:
        """Tokens of an answer, where they stand behind its echo."""
        before = len(self.echoes[index].text)
        return tuple(replace(token, offset=before + token.offset) for token in tokens) if self.logprobs else ()

    def _choice(self, index: int, text: str, tokens: Collection[Token], end: Finished | None) -> dict:
        logprobs = None
        if self.logprobs and (tokens or end is not None):
            logprobs = {
                "tokens": [self.token_bytes.text(token.id) for token in tokens],
                "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
                "top_logprobs": [self._top(token) for token in tokens],
                "text_offset": [token.offset for token in tokens],
            }
        return {"index": index, "text": text, "logprobs": logprobs, **ending(end)}

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one, by their text; of equal texts the first, which is likeliest, counts."""
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in (*(token.top or ()), (token.id, token.logprob)):
            found.setdefault(self.token_bytes.text(other), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(logprob, -9999.0)
