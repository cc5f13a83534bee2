"""OpenAI's /v1/responses: its answers, and the store of earlier responses."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.generation import Generation, Message
from castiron.pipelines.api.generation_api import generating
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.openai.custom_tools import InputStream, input_of
from castiron.pipelines.api.openai.responses_records import (
    CustomTool,
    FunctionTool,
    InputTokensRequest,
    ResponsesRequest,
    StoredItem,
    messages_of,
    names_in_namespaces,
    parse_response,
)
from castiron.pipelines.api.replies import Block, BlocksReply
from castiron.pipelines.api.request_body import Body
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.text.tokenizer import TokenBytes

# Prefixes of item ids, and of the names of events, by kind of block.
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
# Fields of the request that the response repeats as they are.
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier",
    "user",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A response of the client with the API key `owner`.

    messages: the conversation up to its end, without the request's `instructions`.
    """

    owner: bytes
    body: bytes
    items: Mapping[str, StoredItem]
    messages: Sequence[Message]
    bytes: int


class ResponseStore:
    """The most recently used responses, each for the client with the API key `owner` only."""

    def __init__(self, count: int = 1000, bytes: int = 64 << 20):
        self.count, self.bytes = count, bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        # Ids of responses, by the ids of their items.
        self._items: dict[str, str] = {}

    def put(self, owner: bytes, response: dict, messages: Sequence[Message]) -> None:
        """Store a response after `messages`; a full store loses the least recently used."""
        body = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        output = InputTokensRequest(input=response.get("output")).items(lambda name: None)
        messages = [*messages, *messages_of(output)]
        size = len(body) + sum(len(json.dumps(message, separators=(",", ":"))) for message in messages)
        items = {item.id or "": item for item in output}
        self._stored[response["id"]] = Stored(owner, body, items, messages, size)
        self._items |= dict.fromkeys(items, response["id"])
        while len(self._stored) > self.count or sum(each.bytes for each in self._stored.values()) > self.bytes:
            self._drop(next(iter(self._stored)))

    def get(self, owner: bytes, name: str) -> Stored | None:
        """Return the response with the id `name`; None if the client has none."""
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            return None
        self._stored.move_to_end(name)
        return found

    def item(self, owner: bytes, name: str) -> StoredItem | None:
        """Return the output item with the id `name`; None if the client has none."""
        found = self.get(owner, self._items.get(name, ""))
        return found.items[name] if found else None

    def body(self, owner: bytes, name: str) -> bytes:
        """Return the response with the id `name` as JSON; ApiError 404 if it is not found."""
        if (found := self.get(owner, name)) is None:
            raise ApiError(
                404,
                f"no such response: {name!r:.80}; use the id of a response that this server still stores, "
                "or create a new response",
                code="response_not_found",
            )
        return found.body

    def delete(self, owner: bytes, name: str) -> None:
        """Delete the response with the id `name`; ApiError 404 if it is not found."""
        self.body(owner, name)
        self._drop(name)

    def _drop(self, name: str) -> None:
        for item in self._stored.pop(name).items:
            del self._items[item]


# The store for batch jobs: it stores nothing.
NO_STORE = ResponseStore(count=0)


async def start_response(model: ModelApi, body: ResponsesRequest, store: ResponseStore = NO_STORE, owner: bytes = b"") -> Job:
    """Start to answer a request to /v1/responses; owner: API key of the client."""
    api = generating(model)
    generation, conversation = await _parse(body, store, owner)
    is_stored = store.count > 0 and body.store is not False
    put = (lambda response: store.put(owner, response, conversation)) if is_stored else None
    reply = ResponsesReply(api.names[0], api.token_bytes, body, api.sampling_of(generation), put)
    return await api.start(generation, reply)


async def count_response_tokens(model: ModelApi, body: InputTokensRequest, store: ResponseStore, owner: bytes) -> int:
    generation, _ = await _parse(body, store, owner)
    return await generating(model).count(generation)


async def _parse(body: InputTokensRequest, store: ResponseStore, owner: bytes) -> tuple[Generation, list[Message]]:
    """Convert `body`; return also the conversation to store, which has no instructions."""
    before: Sequence[Message] = ()
    if (name := body.previous_response_id) is not None:
        if (found := store.get(owner, name)) is None:
            raise ApiError(
                400,
                f"no such response: {name!r:.80}; send the complete conversation",
                "previous_response_id",
                "previous_response_not_found",
            )
        before = found.messages
    items = body.items(lambda name: store.item(owner, name))

    def convert() -> tuple[Generation, list[Message]]:
        messages = messages_of(items)
        return parse_response(body, before, messages), [*before, *messages]

    return await run_in_thread(convert)


class ResponsesReply(BlocksReply):
    """A builder of the answer to a request to /v1/responses."""

    prefix = "resp_"

    def __init__(
        self, model: str, token_bytes: TokenBytes, body: ResponsesRequest, sampling: Sampling,
        put: Callable[[dict], None] | None,
    ):  # fmt: skip
        """Prepare the answer; put: called with the complete answer to store it."""
        super().__init__(model, token_bytes, body.logprobs)
        self.put, self.names = put, names_in_namespaces(body.tools or ())
        self._number = 0
        self._custom = {tool.name for tool in body.tools or () if isinstance(tool, CustomTool)}
        # Input of the current call to a custom tool.
        self._input = InputStream()
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        nulls = {"strict": None, "parameters": None}
        tools = [
            (nulls if isinstance(tool, FunctionTool) else {}) | tool.model_dump(exclude_none=True) for tool in body.tools or ()
        ]
        choice = body.tool_choice.model_dump(exclude_none=True) if isinstance(body.tool_choice, Body) else body.tool_choice
        self.answer = {
            "id": self.head["id"], "object": "response", "created_at": self.head["created"], "completed_at": None,
            "status": "in_progress", "background": False, "error": None, "incomplete_details": None, "model": model,
            "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False, "metadata": body.metadata or {},
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default", "store": put is not None, "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **text}, "tool_choice": choice or "auto",
            "tools": tools, "top_logprobs": body.top_logprobs or 0, "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None, **body.model_dump(include=set(ECHOED)),
        }  # fmt: skip

    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        yield self._event("response.created", response=dict(self.answer))
        yield self._event("response.in_progress", response=dict(self.answer))

    def open(self, block: Block) -> Iterable[dict]:
        item = self._item(block, "in_progress")
        if block.kind == "call":
            self._input = InputStream()
            yield self._event("response.output_item.added", item=item)
        else:
            yield self._event("response.output_item.added", item={**item, "content": []})
            yield self._block_event("response.content_part.added", block, part=self._part(block))

    def fill(self, block: Block, text: str, logprobs: list[dict]) -> Iterable[dict]:
        more = {"logprobs": logprobs} if block.kind == "text" else {}
        text = self._input.add(text) if self._kind(block) == "custom" else text
        if text:
            yield self._block_event(f"{TEXT_EVENTS[self._kind(block)]}.delta", block, delta=text, **more)

    def close(self, block: Block) -> Iterable[dict]:
        kind = self._kind(block)
        done = f"{TEXT_EVENTS[kind]}.done"
        if kind == "custom":
            if rest := self._input.add("", is_end=True):
                yield self._block_event(f"{TEXT_EVENTS[kind]}.delta", block, delta=rest)
            yield self._block_event(done, block, input=input_of(block.text))
        elif kind == "call":
            yield self._block_event(done, block, name=self._names(block)["name"], arguments=block.text)
        else:
            more = {"logprobs": block.logprobs} if block.kind == "text" else {}
            yield self._block_event(done, block, text=block.text, **more)
            yield self._block_event("response.content_part.done", block, part=self._part(block))
        item = self._item(block, self._final_status)
        self.answer["output"].append(item)
        yield self._event("response.output_item.done", item=item)

    def finish(self, usage: dict) -> Iterable[dict]:
        status = self._final_status
        is_cut = status == "incomplete"
        self.answer |= {
            "status": status, "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "usage": _usage(usage),
        } | self.receipt(0)  # fmt: skip
        if self.put:
            self.put(self.answer)
        yield self._event(f"response.{status}", response=self.answer)

    def fail(self, error: ApiError) -> Iterable[dict]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self.answer)

    @property
    def _final_status(self) -> str:
        return "incomplete" if self.end and self.end.reason != "stop" else "completed"

    def _event(self, kind: str, **fields: Any) -> dict:
        if "item" in fields:
            fields["output_index"] = len(self.blocks) - 1
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _block_event(self, kind: str, block: Block, **fields: Any) -> dict:
        index = {} if block.kind == "call" else {"content_index": 0}
        return self._event(kind, item_id=self._id(block), output_index=len(self.blocks) - 1, **index, **fields)

    def _kind(self, block: Block) -> str:
        return "custom" if block.kind == "call" and block.name in self._custom else block.kind

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[self._kind(block)]}_{block.id}"

    def _part(self, block: Block) -> dict:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}

    def _item(self, block: Block, status: str) -> dict:
        head = {"id": self._id(block), "status": status}
        match self._kind(block):
            case "reasoning":
                return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
            case "text":
                return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}
            case "custom":
                call = {"call_id": block.call_id, "name": block.name, "input": input_of(block.text)}
                return {**head, "type": "custom_tool_call", **call}
        return {**head, "type": "function_call", "call_id": block.call_id, **self._names(block), "arguments": block.text}

    def _names(self, block: Block) -> dict[str, str]:
        return self.names.get(block.name, {"name": block.name})


def _usage(usage: dict) -> dict:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
