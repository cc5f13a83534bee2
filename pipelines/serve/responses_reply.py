"""Answers in the shape of OpenAI's /v1/responses: the response, and the events of its stream."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.serve.blocks import Block, Blocks
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.responses_request import ResponsesRequest
from castiron.pipelines.serve.responses_tools import names_of

PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
# What goes back as it came.
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier",
    "user",
)  # fmt: skip


class ResponsesReply(Blocks):
    prefix = "resp_"

    def __init__(
        self, model: str, token_bytes: TokenBytes, body: ResponsesRequest, sampling: Sampling,
        keep: Callable[[dict], None] | None,
    ):  # fmt: skip
        """`sampling`: how its tokens are drawn. `keep` takes the response once it is whole."""
        super().__init__(model, token_bytes, body.logprobs)
        self.keep, self.names = keep, names_of(body.tools or ())
        self._number = 0
        echoed = body.model_dump(include=set(ECHOED))
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        self.response: dict[str, Any] = {
            "id": self.head["id"], "object": "response", "created_at": self.head["created"], "completed_at": None,
            "status": "in_progress", "background": False, "error": None, "incomplete_details": None, "model": model,
            "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False, "metadata": body.metadata or {},
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default", "store": keep is not None, "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **text}, "tool_choice": body.tool_choice or "auto",
            "tools": [tool if "tools" in tool else {"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0, "top_p": sampling.top_p, "truncation": "disabled", "usage": None, **echoed,
        }  # fmt: skip

    @property
    def answer(self) -> dict:
        return self.response

    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        yield self._event("response.created", response=dict(self.response))
        yield self._event("response.in_progress", response=dict(self.response))

    def opened(self, block: Block) -> Iterable[dict]:
        part = {"content_index": 0, "part": self._part(block)}
        yield self._event("response.output_item.added", item={**self._item(block, "in_progress"), **self._nothing(block)})
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), **part)

    def filled(self, block: Block, more: str, logprobs: list[dict]) -> Iterable[dict]:
        match block.kind:
            case "thought":
                yield self._event("response.reasoning_text.delta", **self._place(block), content_index=0, delta=more)
            case "text":
                place = {**self._place(block), "content_index": 0}
                yield self._event("response.output_text.delta", **place, delta=more, logprobs=logprobs)
            case "call":
                yield self._event("response.function_call_arguments.delta", **self._place(block), delta=more)

    def closed(self, block: Block) -> Iterable[dict]:
        place = self._place(block)
        match block.kind:
            case "thought":
                yield self._event("response.reasoning_text.done", **place, content_index=0, text=block.text)
            case "text":
                text = {"text": block.text, "logprobs": block.logprobs}
                yield self._event("response.output_text.done", **place, content_index=0, **text)
            case "call":
                call = {"name": self._named(block)["name"], "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **call)
        if block.kind != "call":
            yield self._event("response.content_part.done", **place, content_index=0, part=self._part(block))
        cut = self.end is not None and self.end.reason != "stop"
        item = self._item(block, "incomplete" if cut else "completed")
        self.response["output"].append(item)
        yield self._event("response.output_item.done", item=item)

    def finish(self, usage: dict) -> Iterable[dict]:
        cut = self.end is not None and self.end.reason != "stop"
        kind = "incomplete" if cut else "completed"
        self.response |= {
            "status": kind, "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": _usage(usage),
        }  # fmt: skip
        if self.keep:
            self.keep(self.response)
        yield self._event(f"response.{kind}", response=self.response)

    def fail(self, error: ApiError) -> Iterable[dict]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self.response)

    def _event(self, kind: str, **more: Any) -> dict:
        if kind.startswith("response.output_item."):
            more["output_index"] = len(self.blocks) - 1
        event = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event

    def _place(self, block: Block) -> dict:
        return {"item_id": f"{PREFIXES[block.kind]}_{block.id}", "output_index": len(self.blocks) - 1}

    def _part(self, block: Block) -> dict:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}

    def _item(self, block: Block, status: str) -> dict:
        head = {"id": f"{PREFIXES[block.kind]}_{block.id}", "status": status}
        match block.kind:
            case "thought":
                return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
            case "text":
                return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}
        return {**head, "type": "function_call", "call_id": block.call_id, **self._named(block), "arguments": block.text}

    def _named(self, block: Block) -> dict[str, str]:
        """The function's name, and its namespace if it is in one."""
        return self.names.get(block.name, {"name": block.name})

    def _nothing(self, block: Block) -> dict:
        """What an item has before its content."""
        return {} if block.kind == "call" else {"content": []}


def _usage(usage: dict) -> dict:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
