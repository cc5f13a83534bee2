"""Answers in the shape of Anthropic's /v1/messages: the message, and the events of its stream."""

import json
from collections.abc import Iterable
from typing import Any

from castiron.pipelines.generation.sequence import Delta, Finished
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.serve.blocks import Block, Blocks
from castiron.pipelines.serve.errors import ApiError

# What Anthropic calls the ends of a sequence; that of a text that calls is "tool_use".
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "context": "model_context_window_exceeded"}
DELTAS = {
    "text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


class MessagesReply(Blocks):
    prefix = "msg_"

    def __init__(self, model: str, token_bytes: TokenBytes, thoughts: bool):
        """`thoughts`: whether they are told."""
        super().__init__(model, token_bytes)
        self.thoughts = thoughts
        self.message: dict[str, Any] = {
            "id": self.head["id"], "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    @property
    def answer(self) -> dict:
        return self.message

    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        yield {"type": "message_start", "message": {**self.message, "usage": _usage(usage)}}
        yield {"type": "ping"}

    def go_on(self, index: int, more: Delta, end: Finished | None) -> Iterable[dict]:
        if not self.thoughts:
            more = Delta(more.text, more.tokens, "", more.calls)
        return super().go_on(index, more, end)

    def opened(self, block: Block) -> Iterable[dict]:
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": _content(block)}

    def filled(self, block: Block, more: str, logprobs: list[dict]) -> Iterable[dict]:
        kind, name = DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: more}}

    def closed(self, block: Block) -> Iterable[dict]:
        self.message["content"].append(_content(block))
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def finish(self, usage: dict) -> Iterable[dict]:
        end, called = self.end or Finished("stop"), any(block.kind == "call" for block in self.blocks)
        reason = "tool_use" if called and end.reason == "stop" else STOP_REASONS[end.reason]
        stop = {"stop_reason": "stop_sequence" if end.stop_string else reason, "stop_sequence": end.stop_string}
        self.message |= stop | {"usage": _usage(usage)}
        yield {"type": "message_delta", "delta": stop, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterable[dict]:
        yield error.anthropic_body


def _content(block: Block) -> dict:
    """A block as it is so far."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "thought":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(block.text)}


def _object(arguments: str) -> dict:
    """The arguments of a call; none of one that was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: dict) -> dict:
    """input_tokens are those that were computed; what was found in the cache is apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }
