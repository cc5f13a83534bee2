"""The body of a request to Anthropic's /v1/messages, and the chat that it asks for."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from castiron.pipelines.serve.content import Content, Kind, OneOf, TextPart, one_of, parsed, part_of, text_of, unsupported
from castiron.pipelines.serve.schemas import (
    MAX_MESSAGES,
    Asking,
    Body,
    ChatRequest,
    DirectCallers,
    Function,
    FunctionIdentifier,
    FunctionName,
    Harmless,
    JsonSchema,
    Message,
    NamedTool,
    Objects,
    ResponseFormat,
    StopString,
    Tool,
)

# Fields of a chat, by the names that they have here.
FIELDS = {"response_format": "output_config.format", "stop": "stop_sequences", "reasoning_effort": "output_config.effort"}


class Marked(Kind):
    """What may say where a cache begins: beginnings that prompts share are computed once without being told."""

    cache_control: Any = None


class ThinkingBlock(Kind):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Kind):
    """Thoughts that another server has encrypted."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Marked):
    wanted_here: ClassVar[dict[str, str]] = {"input": "an object"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


# What an answer has besides text.
ANSWERED = {"thinking": ThinkingBlock, "redacted_thinking": RedactedThinkingBlock, "tool_use": ToolUseBlock}
AnyBlock = Annotated[dict[str, Any], OneOf(TextPart, *ANSWERED.values(), ToolResultBlock)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(fail_fast=True)]


class CustomTool(Marked):
    type: Literal["custom"] | None = None
    name: FunctionIdentifier
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: DirectCallers | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """budget_tokens is what a model may think, not what it has to; max_tokens bounds its thoughts too."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    wanted: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class PromptOfMessage(Body):
    """What makes the prompt of a message."""

    wanted_here: ClassVar[dict[str, str]] = {
        "content": "a string or a list of blocks",
        "system": "a string or a list of blocks of type text",
    }

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[Annotated[dict[str, Any], OneOf(CustomTool)]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    # What only names the customer.
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # What a bundle cannot do, unless it asks for nothing; see Harmless.
    speed: Annotated[Any, Harmless("standard")] = None
    mcp_servers: Annotated[Any, Harmless([])] = None
    context_management: dict[str, Objects] | None = None
    # The code is one by which Anthropic's clients know to send the whole conversation.
    thread: Annotated[Any, Harmless(code="thread_unsupported_request")] = None


class CountTokensRequest(PromptOfMessage):
    """POST /v1/messages/count_tokens."""

    model: str | None = None


class MessagesRequest(PromptOfMessage, Asking):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Harmless("auto", "standard_only")] = None
    container: Annotated[Any, Harmless()] = None
    inference_geo: Annotated[Any, Harmless()] = None
    diagnostics: Annotated[Any, Harmless()] = None


def goes_on(body: PromptOfMessage) -> bool:
    """Whether the answer goes on with the last message, which is then the assistant's words."""
    last = body.messages[-1]
    words = last.content if isinstance(last.content, str) else [block for block in last.content if block.get("type") == "text"]
    return last.role == "assistant" and bool(words) and not _calls(last)


def chat_request(body: PromptOfMessage, variables: Collection[str]) -> ChatRequest:
    """The chat that a request asks for, of a model whose template reads `variables`; ApiError for what there is not in one."""
    for index, edit in enumerate((body.context_management or {}).get("edits", ())):
        # Which thoughts of earlier turns are read is the template's.
        if not str(edit.get("type")).startswith("clear_thinking"):
            raise unsupported(f"context_management.edits.{index}", "this server takes nothing out of a conversation")
    conversation = [{"role": "system", "content": system}] if (system := text_of(body.system, "system")) else []
    for index, turn in enumerate(body.messages):
        here = f"messages.{index}.content"
        if turn.role == "assistant":
            conversation.append(_answer(turn, here))
        elif turn.role == "user" and not isinstance(turn.content, str):
            conversation += _question(turn.content, here)
        else:
            conversation.append({"role": turn.role, "content": text_of(turn.content, here)})
    given = {
        "messages": [Message(**message) for message in conversation],
        "chat_template_kwargs": body.chat_template_kwargs, **_tools(body), **_thinking(body, variables),
    }  # fmt: skip
    if body.output_config and (asked := body.output_config.format):
        given["response_format"] = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=asked.wanted))
    if isinstance(body, MessagesRequest):
        given |= {name: getattr(body, name) for name in Asking.model_fields}
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return parsed(ChatRequest, given, "")


def _calls(turn: Turn) -> bool:
    return not isinstance(turn.content, str) and any(block.get("type") == "tool_use" for block in turn.content)


def _answer(turn: Turn, place: str) -> dict[str, Any]:
    """A message of the assistant's: thoughts, words and calls."""
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    words, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for index, block in enumerate(turn.content):
        here = f"{place}.{index}"
        # A list, as what stands there may be anything.
        if block.get("type") not in [*ANSWERED]:
            words.append(part_of(block, here))
            continue
        match one_of(ANSWERED, block, here):
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUseBlock() as use:
                function = {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}
                calls.append({"id": use.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(words)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _question(blocks: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Messages that say what a user's blocks say: words, and results of calls."""
    found: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{place}.{index}"
        if block.get("type") == "tool_result":
            result = parsed(ToolResultBlock, block, here)
            text = text_of(result.content, f"{here}.content")
            text = f"Error: {text}" if result.is_error else text
            found.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
            continue
        text = part_of(block, here)
        if not (found and found[-1]["role"] == "user"):
            found.append({"role": "user", "content": ""})
        found[-1]["content"] += text
    return found or [{"role": "user", "content": ""}]


def _tools(body: PromptOfMessage) -> dict[str, Any]:
    """tools, tool_choice and parallel_tool_calls of a chat."""
    tools = []
    for index, given in enumerate(body.tools or ()):
        one = one_of({"custom": CustomTool}, given, f"tools.{index}", "custom")
        function = Function(name=one.name, description=one.description, parameters=one.input_schema, strict=one.strict)
        tools.append(Tool(type="function", function=function))
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools or None}
    if choice.type == "tool" and choice.name is None:
        raise unsupported("tool_choice.name", "name the tool that is to be used")
    named = NamedTool(type="function", function=FunctionName(name=choice.name or ""))
    return {
        "tools": tools or None,
        "tool_choice": {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _thinking(body: PromptOfMessage, variables: Collection[str]) -> dict[str, Any]:
    """reasoning_effort and chat_template_kwargs of a chat, where `thinking` and the effort say something."""
    asked, effort = body.thinking, body.output_config.effort if body.output_config else None
    if asked and asked.type == "disabled":
        return {"reasoning_effort": "none"}
    found: dict[str, Any] = {}
    if asked and asked.type == "enabled" and "enable_thinking" in variables:
        found["chat_template_kwargs"] = {"enable_thinking": True} | (body.chat_template_kwargs or {})
    # Anthropic's API takes "high" where nothing is said.
    if effort and (effort != "high" or "reasoning_effort" in variables):
        found["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return found
