"""Builders of answers: one JSON object, or the events of a stream."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.engine.request import Finished, Request
from castiron.pipelines.text.text_output import Delta, TextToken
from castiron.pipelines.text.tokenizer import TokenBytes
from castiron.vmfb.bundle.json_record import to_json
from castiron.vmfb.bundle.manifest import Manifest


class Reply(ABC):
    """A builder of the answer to a request: one JSON object, or the events of a stream.

    last: text after the last event of a stream. continuous_usage: whether every event has counts.
    is_ndjson: whether a stream is JSON lines instead of server-sent events.
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
        """Return the events with which a choice of the answer begins in a stream."""
        return ()

    @abstractmethod
    def extend(self, index: int, delta: Delta, end: Finished | None) -> Iterable[dict]:
        """Yield the events for new text of a choice; `end` is None if it goes on."""

    @abstractmethod
    def finish(self, usage: dict) -> Iterable[dict]:
        """Yield the events that end a stream, after all choices have finished."""

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


def finite(logprob: float) -> float:
    """Return max(logprob, -9999): JSON has no minus infinity; OpenAI's API sends -9999 for it."""
    return max(logprob, -9999.0)


@dataclass
class Block:
    """A part of an answer: "reasoning", "text" or a "call", whose text is JSON."""

    kind: str
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    logprobs: list[dict] = field(default_factory=list)

    @property
    def call_id(self) -> str:
        """The id of a call: 9 letters and digits, which every template accepts."""
        return self.id[:9]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call; empty while the call is in progress, or if it was cut off."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class BlocksReply(Reply):
    """An answer that consists of blocks: reasoning, text and function calls.

    answer: the JSON, complete after `finish`. end: None while the generation runs.
    """

    def __init__(self, model: str, token_bytes: TokenBytes, logprobs: bool = False):
        super().__init__(model, token_bytes, logprobs)
        self.answer: dict[str, Any] = {}
        self.blocks: list[Block] = []
        self.end: Finished | None = None
        # Tokens whose text has not been streamed.
        self._tokens: list[TextToken] = []
        self._is_open = False

    def open(self, block: Block) -> Iterable[dict]:
        """Return the JSON events that begin `block`, which is already the last of `self.blocks`."""
        return ()

    @abstractmethod
    def fill(self, block: Block, text: str, logprobs: list[dict]) -> Iterable[dict]:
        """Yield the events for `text`, which has just been appended to `block.text`."""

    @abstractmethod
    def close(self, block: Block) -> Iterable[dict]:
        """Yield the events that end `block`; `self.end` is set if it is the last."""

    def extend(self, index: int, delta: Delta, end: Finished | None) -> Iterable[dict]:
        self._tokens += delta.tokens
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add("text", delta.text)
        for part in delta.calls:
            if part.name is not None:
                yield from self._open_next(Block("call", part.name))
            if part.arguments:
                yield from self._add("call", part.arguments)
        if end:
            self.end = end
            yield from self._close_last()

    def _add(self, kind: str, text: str) -> Iterable[dict]:
        if not (self._is_open and self.blocks[-1].kind == kind):
            yield from self._open_next(Block(kind))
        block, tokens, self._tokens = self.blocks[-1], self._tokens, []
        block.text += text
        logprobs = self.logprobs_of(tokens) if self.logprobs and kind == "text" else []
        block.logprobs += logprobs
        yield from self.fill(block, text, logprobs)

    def _open_next(self, block: Block) -> Iterable[dict]:
        yield from self._close_last()
        self.blocks.append(block)
        self._is_open = True
        yield from self.open(block)

    def _close_last(self) -> Iterable[dict]:
        if self._is_open:
            self._is_open = False
            yield from self.close(self.blocks[-1])
