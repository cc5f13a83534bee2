"""Builders of the answers to OpenAI's chat and text completions."""

import uuid
from abc import abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.openai.custom_tools import InputStream, input_of
from castiron.pipelines.api.openai.records import ChatRequest, CompletionFields, CompletionRequest, FreeformTool
from castiron.pipelines.api.replies import Reply, finite
from castiron.pipelines.engine.request import Finished
from castiron.pipelines.text.text_output import Delta, TextToken
from castiron.pipelines.text.tokenizer import TokenBytes
from castiron.pipelines.text.tool_calls import CallPart, joined

# OpenAI's finish reasons, by the engine's.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}


def _finish_fields(end: Finished | None, call_reason: str | None = None) -> dict:
    """Return the fields that state why a choice ended; call_reason replaces "stop" after calls."""
    reason = end and FINISH_REASONS[end.reason]
    found = {"finish_reason": call_reason if call_reason and reason == "stop" else reason}
    return found | {"stop_reason": "repetition"} if end and end.repeated else found


def _call_id() -> str:
    return uuid.uuid4().hex[:9]


class ChoicesReply(Reply):
    """An answer with one or more choices.

    kind, chunk_kind: values of `object` in a complete answer and in each event of a stream.
    """

    kind = chunk_kind = ""
    last = "[DONE]"

    def __init__(self, model: str, token_bytes: TokenBytes, body: CompletionFields, has_logprobs: bool):
        super().__init__(model, token_bytes, has_logprobs)
        self.body = body
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        # Whether the answer has vLLM's fields token_ids and prompt_token_ids.
        self.has_token_ids = bool(body.return_token_ids)

    @abstractmethod
    def choice(self, index: int, delta: Delta, end: Finished) -> dict: ...

    @abstractmethod
    def delta(self, index: int, delta: Delta, end: Finished | None = None) -> dict:
        """Return the entry of `choices` in an event of a stream; `end`: None while it runs."""

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """Return vLLM's prompt_logprobs, with an entry for each token; {} if not requested."""
        if (count := self.body.prompt_logprobs) is None:
            return {}
        found: list[dict | None] = [None]
        request = self.requests[index]
        for token, score in zip(request.prompt[1:].tolist(), request.scores):
            ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(score.top[:count], 1)}
            ranked.setdefault(token, (score.logprob, None))
            found.append({
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token_bytes.text(other)}
                for other, (logprob, rank) in ranked.items()
            })  # fmt: skip
        return {"prompt_logprobs": found}

    def token_ids(self, delta: Delta) -> dict[str, list[int]]:
        return {"token_ids": [token.id for token in delta.tokens]} if self.has_token_ids else {}

    def prompt_token_ids(self, index: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.requests[index].prompt.tolist()} if self.has_token_ids else {}

    def complete(self, choices: list[dict], usage: dict) -> dict:
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, *choices: dict, usage: dict | None = None) -> dict:
        return {**self.head, "object": self.chunk_kind, "choices": choices, "usage": usage}

    def extend(self, index: int, delta: Delta, end: Finished | None) -> list[dict]:
        return [self.chunk(self.delta(index, delta, end))]

    def finish(self, usage: dict) -> list[dict]:
        return [self.chunk(usage=usage)] if self.include_usage else []

    def fail(self, error: ApiError) -> list[dict]:
        return [error.body]


class ChatReply(ChoicesReply):
    """The answer to a chat completion request."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, model: str, token_bytes: TokenBytes, body: ChatRequest):
        super().__init__(model, token_bytes, body, bool(body.logprobs))
        # Whether a call is in OpenAI's old field function_call instead of tool_calls.
        self.is_legacy = bool(body.functions)
        self.custom = {tool.custom.name for tool in body.tools or () if isinstance(tool, FreeformTool)}
        self.shows_reasoning = body.include_reasoning is not False
        self.call_reason = "function_call" if self.is_legacy else "tool_calls"
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
        # The model writes {"input": TEXT} to a custom tool, of which only the pieces of TEXT are sent.
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
    """A prompt that is repeated at the start of a completion.

    offsets: the index in `text` of each token; empty without log-probabilities.
    """

    text: str = ""
    offsets: Collection[int] = ()


class CompletionReply(ChoicesReply):
    """The answer to a text completion request."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str, token_bytes: TokenBytes, body: CompletionRequest, echoes: list[Echo]):
        """Prepare the answer; echoes: for each choice, the prompt to repeat at its start."""
        super().__init__(model, token_bytes, body, body.logprobs is not None)
        self.top, self.echoes = body.logprobs, echoes

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
        # The first token of a prompt has no log-probability.
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in (*(token.top or ()), (token.id, token.logprob)):
            found.setdefault(self.token_bytes.text(other), finite(logprob))
        return found
