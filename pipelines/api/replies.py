"""Builders of answers: one JSON object, or the events of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.chat_records import InputStream, input_of
from castiron.pipelines.engine.request import Finished, Request
from castiron.pipelines.text.text_output import Delta, TextToken
from castiron.pipelines.text.tokenizer import TokenBytes
from castiron.pipelines.text.tool_calls import CallPart, joined
from castiron.vmfb.bundle.json_record import to_json
from castiron.vmfb.bundle.manifest import Manifest

# OpenAI's finish reasons, by the engine's.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}


def _finish_fields(end: Finished | None, call_reason: str | None = None) -> dict:
    """Return the JSON fields of a choice that say why it ended: `finish_reason`, `stop_reason`.

    end: how generation ended; None for a choice that has not ended, whose finish_reason is null.
    call_reason: for a choice with tool calls, the finish_reason that replaces "stop".
    `stop_reason` is present only after a repetition loop.
    """
    reason = end and FINISH_REASONS[end.reason]
    found = {"finish_reason": call_reason if call_reason and reason == "stop" else reason}
    return found | {"stop_reason": "repetition"} if end and end.repeated else found


def _call_id() -> str:
    return uuid.uuid4().hex[:9]


class Reply(ABC):
    """A builder of the answer to one API request: as one JSON object, or as events of a stream.

    Attributes that derived classes or `GenerationApi.start_job` set:

    prefix: start of the answer's id, such as "chatcmpl-".
    last: text sent after the last event of a stream, such as "[DONE]".
    continuous_usage: whether every event of a stream has the token counts so far.
    is_ndjson: whether a stream is sent as JSON lines instead of server-sent events.
    requests: the engine request of each choice of the answer.
    manifest: the manifest of the bundle that computes the answer.
    """

    prefix = ""
    last: str | None = None
    continuous_usage = False
    is_ndjson = False
    requests: Sequence[Request] = ()
    manifest: Manifest | None = None

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool):
        self.token_bytes, self.logprobs = token_bytes, logprobs
        self.head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        """Return the events with which a choice of the answer begins in a stream.

        index: number of the choice, from 0.
        usage: token counts so far.
        """
        return ()

    @abstractmethod
    def extend(self, index: int, delta: Delta, end: Finished | None) -> Iterable[dict]:
        """Yield the events of a stream for new text of a choice.

        index: number of the choice, from 0.
        delta: the new text.
        end: how the choice ended; None if it has not ended.
        """

    @abstractmethod
    def finish(self, usage: dict) -> Iterable[dict]:
        """Yield the events that end a stream, after all choices have finished.

        usage: token counts.
        """

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[dict]:
        """Yield the events that end a stream with an error."""

    def receipt(self, index: int) -> dict[str, Any]:
        """Return {"receipt": ...} for a finished choice; {} if the request asked for none."""
        found = self.requests[index].receipt(self.manifest) if self.manifest else None
        return {"receipt": to_json(found)} if found else {}

    def logprobs_of(self, tokens: Iterable[TextToken]) -> list[dict]:
        """Return the log-probabilities of `tokens`, in the format of chat completions."""
        return [
            {**self._token(token.id, token.logprob), "top_logprobs": [self._token(*other) for other in token.top]}
            for token in tokens
        ]

    def _token(self, token: int, logprob: float) -> dict:
        data = self.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


class ChoicesReply(Reply):
    """A builder of an answer with one or more choices, for chat and text completions.

    Attributes that derived classes or the API set:

    kind: value of `object` in a complete answer.
    chunk_kind: value of `object` in each event of a stream.
    include_usage: whether the last event of a stream has the token counts.
    prompt_top: how many of the most probable tokens to report for each position of the prompt; None
        to report no log-probabilities of the prompt.
    """

    kind = chunk_kind = ""
    last = "[DONE]"
    include_usage = False
    prompt_top: int | None = None
    # Whether the answer has vLLM's fields token_ids and prompt_token_ids.
    has_token_ids = False

    @abstractmethod
    def choice(self, index: int, delta: Delta, end: Finished) -> dict: ...

    @abstractmethod
    def delta(self, index: int, delta: Delta, end: Finished | None = None) -> dict:
        """Return the entry of `choices` in an event of a stream, with new text of one choice.

        index: number of the choice, from 0.
        delta: the new text.
        end: how the choice ended; None if it has not ended.
        """

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """Return vLLM's {"prompt_logprobs": ...} for choice number `index`; {} if not requested.

        The value is a list with one entry for each token of the prompt: None for the first token,
        and log-probabilities by token id for each of the others.
        """
        if self.prompt_top is None:
            return {}
        found: list[dict | None] = [None]
        request = self.requests[index]
        for token, score in zip(request.prompt[1:].tolist(), request.scores):
            ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(score.top[: self.prompt_top], 1)}
            ranked.setdefault(token, (score.logprob, None))
            found.append({
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token_bytes.text(other)}
                for other, (logprob, rank) in ranked.items()
            })  # fmt: skip
        return {"prompt_logprobs": found}

    def token_ids(self, delta: Delta) -> dict[str, list[int]]:
        """Return {"token_ids": ids of the new tokens} for a choice; {} if it is not requested."""
        return {"token_ids": [token.id for token in delta.tokens]} if self.has_token_ids else {}

    def prompt_token_ids(self, index: int) -> dict[str, list[int]]:
        """Return {"prompt_token_ids": ids} for choice number `index`; {} if it is not requested."""
        return {"prompt_token_ids": self.requests[index].prompt.tolist()} if self.has_token_ids else {}

    def complete(self, choices: list[dict], usage: dict) -> dict:
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, *choices: dict, usage: dict | None = None) -> dict:
        """Return one event of a stream.

        choices: the event's list `choices`, from `delta`; empty for an event with only the usage.
        usage: token counts.
        """
        return {**self.head, "object": self.chunk_kind, "choices": choices, "usage": usage}

    def extend(self, index: int, delta: Delta, end: Finished | None) -> list[dict]:
        return [self.chunk(self.delta(index, delta, end))]

    def finish(self, usage: dict) -> list[dict]:
        return [self.chunk(usage=usage)] if self.include_usage else []

    def fail(self, error: ApiError) -> list[dict]:
        return [error.body]


class ChatReply(ChoicesReply):
    """A builder of the answer to a chat completion request."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, model: str, token_bytes: TokenBytes, logprobs: bool, *, is_legacy: bool = False, custom: Collection[str] = (),
        shows_reasoning: bool = True,
    ):  # fmt: skip
        """Set the options of the answer.

        model: the name that the answer contains.
        token_bytes: returns the bytes of a token id, for the log-probabilities.
        logprobs: whether the answer has log-probabilities.
        is_legacy: whether a call is in OpenAI's old field function_call instead of tool_calls.
        custom: names of custom tools; a call to such a tool has a text as input instead of
            arguments.
        shows_reasoning: whether the answer has the model's reasoning.
        """
        super().__init__(model, token_bytes, logprobs)
        self.is_legacy, self.custom, self.shows_reasoning = is_legacy, custom, shows_reasoning
        self.call_reason = "function_call" if is_legacy else "tool_calls"
        # Inputs of calls to custom tools in a stream, by index of the choice and of the call.
        self._inputs: dict[tuple[int, int], InputStream] = {}
        # Indices of the choices that have called a function.
        self._with_calls: set[int] = set()

    def choice(self, index: int, delta: Delta, end: Finished) -> dict:
        message = {"role": "assistant", "content": delta.text, **self._reasoning(delta), "refusal": None}
        if delta.calls:
            calls = [{"name": name, "arguments": arguments} for name, arguments in joined(delta.calls)]
            if self.is_legacy:
                message["function_call"] = calls[0]
            else:
                message["tool_calls"] = [self._call(call) for call in calls]
            message["content"] = delta.text or None
        fields = _finish_fields(end, self.call_reason if delta.calls else None) | self.token_ids(delta) | self.receipt(index)
        return {"index": index, "message": message, "logprobs": self._logprobs(delta.tokens), **fields}

    def complete(self, choices: list[dict], usage: dict) -> dict:
        return super().complete(choices, usage) | self.prompt_fields(0) | self.prompt_token_ids(0)

    def _reasoning(self, delta: Delta) -> dict[str, str]:
        return {"reasoning_content": delta.reasoning} if delta.reasoning and self.shows_reasoning else {}

    def begin(self, index: int, usage: dict) -> list[dict]:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, **_finish_fields(None)}
        return [self.chunk(choice) | self.prompt_token_ids(index)]

    def extend(self, index: int, delta: Delta, end: Finished | None) -> list[dict]:
        has_text = delta.text or delta.reasoning and self.shows_reasoning or delta.calls
        if not (has_text or end or self.logprobs or self.has_token_ids):
            # Some tokens have no text, such as those that mark the start of a tool call.
            return []
        # Some clients read only the first call of a chunk.
        first, *others = self._calls_to_send(index, _merged(delta.calls), end is not None) or [None]
        deltas = [replace(delta, calls=(first,) if first else ()), *(Delta(calls=(part,)) for part in others)]
        return [self.chunk(self.delta(index, each, end if each is deltas[-1] else None)) for each in deltas]

    def delta(self, index: int, delta: Delta, end: Finished | None = None) -> dict:
        fields: dict[str, Any] = self._reasoning(delta)
        if delta.calls:
            self._with_calls.add(index)
            chunks = [_call_chunk(part, (index, part.index) in self._inputs) for part in delta.calls]
            fields |= {"function_call": chunks[0]["function"]} if self.is_legacy else {"tool_calls": chunks}
        if delta.text or not (end or fields):
            fields["content"] = delta.text
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        end_fields = _finish_fields(end, self.call_reason if index in self._with_calls else None)
        receipt = self.receipt(index) if end else {}
        return {"index": index, "delta": fields, "logprobs": logprobs, **end_fields, **self.token_ids(delta), **receipt}

    def _call(self, call: dict[str, str]) -> dict:
        if call["name"] in self.custom:
            custom = {"name": call["name"], "input": input_of(call["arguments"])}
            return {"id": _call_id(), "type": "custom", "custom": custom}
        return {"id": _call_id(), "type": "function", "function": call}

    def _calls_to_send(self, index: int, parts: list[CallPart], is_end: bool) -> list[CallPart]:
        """Return the pieces of tool calls to send in the next event of a stream.

        index: number of the choice, from 0.
        parts: new pieces of its calls. The model writes the arguments of a call as JSON text.
        is_end: whether the choice ends with this event.

        Pieces are returned unchanged, except for custom tools: the model writes {"input": TEXT},
        and only the pieces of TEXT are returned. When the choice ends, the rest of TEXT is
        returned.
        """
        found = []
        for part in parts:
            if part.name in self.custom:
                self._inputs[index, part.index] = InputStream()
            if custom := self._inputs.get((index, part.index)):
                part = replace(part, arguments=custom.add(part.arguments))
            found.append(part)
        if is_end:
            own = [(call, custom) for (choice, call), custom in self._inputs.items() if choice == index]
            found += [CallPart(call, None, custom.add("", is_end=True)) for call, custom in own]
        return [part for part in found if part.name or part.arguments]

    def _logprobs(self, tokens: Collection[TextToken]) -> dict | None:
        return {"content": self.logprobs_of(tokens), "refusal": None} if self.logprobs else None


def _merged(parts: Iterable[CallPart]) -> list[CallPart]:
    found: dict[int, CallPart] = {}
    for part in parts:
        before = found.get(part.index)
        found[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
    return list(found.values())


def _call_chunk(part: CallPart, is_custom: bool) -> dict:
    kind, field = ("custom", "input") if is_custom else ("function", "arguments")
    if part.name is None:
        return {"index": part.index, kind: {field: part.arguments}}
    return {"index": part.index, "id": _call_id(), "type": kind, kind: {"name": part.name, field: part.arguments}}


class Echo(NamedTuple):
    """The text of a prompt that is repeated at the start of a completion.

    offsets: for each token of the prompt, the index in `text` of its first character; empty if no
        log-probabilities are requested.
    """

    text: str = ""
    offsets: Collection[int] = ()


class CompletionReply(ChoicesReply):
    """A builder of the answer to a text completion request."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: int | None, echoes: list[Echo]):
        """Set the options of the answer.

        model: the name that the answer contains.
        token_bytes: returns the bytes of a token id, for the log-probabilities.
        logprobs: how many of the most probable tokens to report at each position; None for an
            answer without log-probabilities.
        echoes: for each choice, the prompt to repeat at its start.
        """
        super().__init__(model, token_bytes, logprobs is not None)
        self.top, self.echoes = logprobs, echoes

    def choice(self, index: int, delta: Delta, end: Finished) -> dict:
        tokens = (*self._prompt(index), *self._answer(index, delta.tokens))
        found = self._choice(index, self.echoes[index].text + delta.text, tokens, end)
        return found | self.prompt_fields(index) | self.token_ids(delta) | self.prompt_token_ids(index)

    def begin(self, index: int, usage: dict) -> list[dict]:
        echo = self.echoes[index]
        if not (echo.text or echo.offsets or self.has_token_ids):
            return []
        return [self.chunk(self._choice(index, echo.text, self._prompt(index), None) | self.prompt_token_ids(index))]

    def delta(self, index: int, delta: Delta, end: Finished | None = None) -> dict:
        return self._choice(index, delta.text, self._answer(index, delta.tokens), end) | self.token_ids(delta)

    def _prompt(self, index: int) -> tuple[TextToken, ...]:
        offsets, request = self.echoes[index].offsets, self.requests[index]
        # The first token has no log-probability.
        scores = [None, *request.scores] if offsets else []
        return tuple(
            TextToken(token, *((score.logprob, score.top[: self.top]) if score else (None, None)), offset=offset)
            for token, offset, score in zip(request.prompt.tolist(), offsets, scores)
        )

    def _answer(self, index: int, tokens: Collection[TextToken]) -> tuple[TextToken, ...]:
        before = len(self.echoes[index].text)
        return tuple(replace(token, offset=before + token.offset) for token in tokens) if self.logprobs else ()

    def _choice(self, index: int, text: str, tokens: Collection[TextToken], end: Finished | None) -> dict:
        logprobs = None
        if self.logprobs and (tokens or end is not None):
            logprobs = {
                "tokens": [self.token_bytes.text(token.id) for token in tokens],
                "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
                "top_logprobs": [self._top(token) for token in tokens],
                "text_offset": [token.offset for token in tokens],
            }
        receipt = self.receipt(index) if end else {}
        return {"index": index, "text": text, "logprobs": logprobs, **_finish_fields(end), **receipt}

    def _top(self, token: TextToken) -> dict[str, float] | None:
        """Return {text: log-probability} of the most probable tokens and of `token` itself.

        Returns None for the first token of a prompt, which has no log-probability.
        """
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in (*(token.top or ()), (token.id, token.logprob)):
            found.setdefault(self.token_bytes.text(other), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """Return max(logprob, -9999): JSON has no minus infinity; OpenAI's API sends -9999 for it."""
    return max(logprob, -9999.0)
