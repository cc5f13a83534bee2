"""Anthropic's /v1/messages: request bodies, their conversion to chat requests, and answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from castiron.pipelines.api.api_errors import ApiError, unsupported
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.generation import AnswerFormat, CallableFunction, Generation, Message, only_format, plain_message
from castiron.pipelines.api.generation_api import generating
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.replies import Block, BlocksReply
from castiron.pipelines.api.request_body import Body, ByType, Unsupported
from castiron.pipelines.api.request_fields import (
    LIMITED,
    Content,
    DirectCallers,
    FunctionIdentifier,
    GenerationFields,
    Objects,
    Stops,
    TextPart,
    parts_of,
    text_of,
)
from castiron.pipelines.engine.request import Finished
from castiron.pipelines.text.text_output import Delta
from castiron.pipelines.text.tokenizer import TokenBytes

# This API's names of fields of `Generation`.
NAMES = {"reasoning_effort": "output_config.effort", "reasoning_budget": "thinking.budget_tokens"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Anthropic's stop reasons, by the engine's finish reasons; an answer with calls has tool_use.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "context": "model_context_window_exceeded"}
# Variables of chat templates, and their values with which earlier reasoning stays in the prompt.
KEEPS_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "drop_thinking": False,
    "truncate_history_thinking": False,
}
DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Reasoning that another server has encrypted; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    cache_control: Any = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None
    cache_control: Any = None


AnyBlock = TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks = Annotated[list[Annotated[AnyBlock, ByType()]], Field(fail_fast=True)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, BeforeValidator(parts_of, json_schema_input_type=str | Blocks)]


class ClientTool(Body):
    type: Literal["custom", None] = None
    name: FunctionIdentifier
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: DirectCallers | None = None
    # It has no effect, like all fields of this name: shared prefixes are always cached.
    cache_control: Any = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Options of reasoning; with display "omitted" the answer has none."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    @property
    def formats(self) -> list[AnswerFormat]:
        return [AnswerFormat("output_config.format", "json_schema", self.format.schema_)] if self.format else []


class Metadata(Body):
    user_id: str | None = None


class CountTokensRequest(Body):
    """The body of POST /v1/messages/count_tokens: the fields that determine the prompt."""

    expected: ClassVar[dict[str, str]] = {
        "content": "a string or a list of blocks",
        "input": "an object",
        "system": "a string or a list of blocks of type text",
    }

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[Annotated[ClientTool, ByType("custom")]], LIMITED] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    # Labels of the customer; they have no effect.
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Unsupported fields; values that have no effect are accepted.
    mcp_servers: Annotated[Any, Unsupported([])] = None
    context_management: dict[str, Objects] | None = None
    # With this error code Anthropic's clients retry with the complete conversation.
    thread: Annotated[Any, Unsupported(code="thread_unsupported_request")] = None

    @property
    def continues_last_message(self) -> bool:
        """Whether the answer continues the last message, an assistant's text without calls."""
        last = self.messages[-1]
        has_text = any(isinstance(block, TextPart) and block.text for block in last.content)
        return last.role == "assistant" and has_text and not any(isinstance(block, ToolUseBlock) for block in last.content)


class MessagesRequest(CountTokensRequest, GenerationFields):
    """The body of POST /v1/messages."""

    # 0 only reads the prompt, so that a later request finds it in the cache.
    max_tokens: int = Field(ge=0)
    stop_sequences: Stops | None = None
    metadata: Metadata | None = None
    container: Annotated[Any, Unsupported()] = None


async def start_message(model: ModelApi, body: MessagesRequest) -> Job:
    """Start to generate the answer to a request to /v1/messages."""
    api = generating(model)
    shows_reasoning = not (body.thinking and body.thinking.display == "omitted")
    generation = await run_in_thread(parse_message, body, api.variables)
    return await api.start(generation, MessagesReply(api.names[0], api.token_bytes, shows_reasoning))


async def count_message_tokens(model: ModelApi, body: CountTokensRequest) -> int:
    api = generating(model)
    return await api.count(await run_in_thread(parse_message, body, api.variables))


def parse_message(body: CountTokensRequest, variables: Collection[str]) -> Generation:
    """Convert a request for a template that reads `variables`; ApiError 400 if impossible."""
    arguments: dict[str, Any] = {}
    for index, edit in enumerate((body.context_management or {}).get("edits", ())):
        # The chat template decides which earlier reasoning is in the prompt, but some templates can keep all.
        if not str(edit.get("type")).startswith("clear_thinking"):
            raise unsupported(f"context_management.edits.{index}", "this server does not edit conversations; leave it out")
        if edit.get("keep") == "all":
            arguments = {name: value for name, value in KEEPS_REASONING.items() if name in variables}
    system = text_of(body.system)
    messages = [plain_message("system", system)] if system else []
    for turn in body.messages:
        # Models are trained to answer a user's message, so a system message after it is put before it.
        is_before = turn.role == "system" and len(messages) > 0 and messages[-1]["role"] == "user"
        index = len(messages) - is_before
        messages[index:index] = _messages_of(turn)
    options: dict[str, Any] = {}
    formats = body.output_config.formats if body.output_config else []
    if isinstance(body, MessagesRequest):
        formats = [*formats, *body.formats]
        options = body.options | {"max_tokens": body.max_tokens, "stop_strings": body.stop_sequences or ()}
    return Generation(
        param="messages", names=NAMES, messages=messages, template_args=arguments | (body.chat_template_kwargs or {}),
        continues_last_message=body.continues_last_message, format=only_format(formats), has_reasoning=True,
        **_functions(body), **_reasoning(body, variables), **options,
    )  # fmt: skip


def _messages_of(turn: Turn) -> list[Message]:
    """Convert a turn; each tool result becomes a separate message."""
    found: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            text = "Error: " * bool(block.is_error) + text_of(block.content)
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            continue
        if not (found and found[-1]["role"] == turn.role):
            found.append({"role": turn.role, "content": ""})
        message = found[-1]
        match block:
            case TextPart():
                message["content"] += block.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                message.setdefault("calls", []).append({"id": block.id, "function": function})
    return [plain_message(**message) for message in found or [{"role": turn.role, "content": ""}]]


def _functions(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise unsupported("tool_choice.name", "the type tool needs a name; give the name of one of tools")
    return {
        "functions": [
            CallableFunction(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in body.tools or ()
        ],
        "tool_choice": CHOICES.get(choice.type, "auto"), "called": choice.name if choice.type == "tool" else None,
        "has_single_call": bool(choice.disable_parallel_tool_use),
    }  # fmt: skip


def _reasoning(body: CountTokensRequest, variables: Collection[str]) -> dict[str, Any]:
    thinking, effort = body.thinking, body.output_config.effort if body.output_config else None
    if thinking and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return {
        "thinking": True if thinking and thinking.type == "enabled" else None,
        "reasoning_budget": thinking and thinking.budget_tokens,
        # Unlike OpenAI's, this effort does not turn reasoning on, so only a template that reads it needs it.
        "reasoning_effort": effort if "reasoning_effort" in variables else None,
    }


class MessagesReply(BlocksReply):
    prefix = "msg_"

    def __init__(self, model: str, token_bytes: TokenBytes, shows_reasoning: bool):
        super().__init__(model, token_bytes)
        self.shows_reasoning = shows_reasoning
        self.answer = {
            "id": self.head["id"], "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def begin(self, index: int, usage: dict) -> Iterable[dict]:
        yield {"type": "message_start", "message": {**self.answer, "usage": _usage(usage)}}
        yield {"type": "ping"}

    def extend(self, index: int, delta: Delta, end: Finished | None) -> Iterable[dict]:
        if not self.shows_reasoning:
            delta = Delta(delta.text, delta.tokens, "", delta.calls)
        return super().extend(index, delta, end)

    def open(self, block: Block) -> Iterable[dict]:
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": _content(block)}

    def fill(self, block: Block, text: str, logprobs: list[dict]) -> Iterable[dict]:
        kind, name = DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: text}}

    def close(self, block: Block) -> Iterable[dict]:
        self.answer["content"].append(_content(block))
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def finish(self, usage: dict) -> Iterable[dict]:
        end, has_calls = self.end or Finished("stop"), any(block.kind == "call" for block in self.blocks)
        reason = "tool_use" if has_calls and end.reason == "stop" else STOP_REASONS[end.reason]
        stop = {"stop_reason": "stop_sequence" if end.stop_string else reason, "stop_sequence": end.stop_string}
        more = {"usage": _usage(usage)} | self.receipt(0)
        self.answer |= stop | more
        yield {"type": "message_delta", "delta": stop, **more}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterable[dict]:
        yield error.anthropic_body


def _content(block: Block) -> dict:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments}


def _usage(usage: dict) -> dict:
    """Convert OpenAI's `usage`; Anthropic's input_tokens exclude cached ones."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }
