"""The body of a request to OpenAI's /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from castiron.pipelines.serve.content import Content, Kind, OneOf, TextPart, one_of, parsed, text_of, unsupported
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.responses_tools import AnyTool, chosen_tools, full_name
from castiron.pipelines.serve.schemas import (
    MAX_MESSAGES,
    Asking,
    Body,
    ChatRequest,
    Harmless,
    JsonSchema,
    Message,
    Objects,
    ResponseFormat,
)

# Fields of a chat, by the names that they have here.
FIELDS = {
    "messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


class Refusal(BaseModel):
    """A part of an earlier answer, whose words are text too."""

    model_config = ConfigDict(extra="allow")
    type: Literal["refusal"]
    refusal: str


class InputMessage(Kind):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Annotated[dict[str, Any], OneOf(TextPart, Refusal)]], Field(fail_fast=True)]
    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Kind):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    # OpenAI's clients note what they have read of these.
    parsed_arguments: Any = None
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Kind):
    wanted_here: ClassVar[dict[str, str]] = {"output": "a string or a list of parts of type input_text"}

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(Kind):
    """Thoughts of an earlier answer; those that are encrypted are another server's."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Objects | None = None
    content: Objects | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        parts = self.content or self.summary or []
        return "".join(text for part in parts if isinstance(text := part.get("text"), str))


class ItemReference(Kind):
    """Stands for an item of a response that is kept."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[str, type[Body]] = {
    "message": InputMessage, "function_call": FunctionCall, "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}  # fmt: skip
AnyItem = Annotated[dict[str, Any], OneOf(*ITEMS.values(), ItemReference)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    wanted: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Thoughts are told in full, so that no summary is made of them."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = None


class ObfuscationOptions(Body):
    include_obfuscation: bool | None = None


class PromptOfResponse(Body):
    """What makes the prompt of a response."""

    wanted_here: ClassVar[dict[str, str]] = {
        "input": f"a string or a list of at most {MAX_MESSAGES} items",
        "tool_choice": 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
        "verbosity": "medium, or left out: this server knows no others",
    }

    input: str | Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[AnyTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Annotated[Any, Harmless("disabled")] = None
    conversation: Annotated[Any, Harmless()] = None

    def items(self, kept: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Those of the input, what they refer to in place of references; `kept` finds an item by its id. ApiError for one that
        is not there."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found = list(self.input or ())
        for index, item in enumerate(found):
            if item.get("type") != "item_reference":
                continue
            name = parsed(ItemReference, item, f"input.{index}").id
            if (whole := kept(name)) is None:
                raise unsupported(f"input.{index}.id", f"this server has no item {name!r:.80} (any more); send the item itself")
            found[index] = whole
        return found


class InputTokensRequest(PromptOfResponse):
    """POST /v1/responses/input_tokens."""

    model: str | None = None


class ResponsesRequest(PromptOfResponse, Asking):
    """POST /v1/responses."""

    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    stream_options: ObfuscationOptions | None = None
    include: Annotated[list[Literal[
        "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    ]], Field(fail_fast=True)] | None = None  # fmt: skip
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Of tools that a server has itself.
    max_tool_calls: int | None = Field(None, ge=1)
    # What only names the request or the customer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    # What a bundle cannot do, unless it asks for nothing; see Harmless.
    background: Annotated[Any, Harmless(False)] = None
    service_tier: Annotated[Any, Harmless("auto", "default")] = None
    prompt: Annotated[Any, Harmless()] = None
    prompt_cache_retention: Annotated[Any, Harmless("in-memory", "in_memory")] = None
    prompt_cache_options: Annotated[Any, Harmless()] = None
    context_management: Annotated[Any, Harmless([])] = None
    moderation: Annotated[Any, Harmless()] = None
    image: Annotated[Any, Harmless()] = None
    access_programs: Annotated[Any, Harmless()] = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def messages_of(items: Sequence[dict[str, Any]], place: str = "input") -> list[Message]:
    """The messages of a chat that say what `items` say: thoughts, words and calls one after another are one message of the
    assistant's."""
    found: list[dict[str, Any]] = []

    def assistant(field: str, value: Any) -> None:
        order = ("reasoning_content", "content", "tool_calls")
        last = found[-1] if found else {}
        if last.get("role") != "assistant" or any(name in last for name in order[order.index(field) :]):
            found.append({"role": "assistant"})
        found[-1][field] = value

    for index, item in enumerate(items):
        here = f"{place}.{index}"
        match one_of(ITEMS, item, here, "message"):
            case InputMessage(role="assistant", content=content):
                assistant("content", text_of(_without_refusals(content), f"{here}.content"))
            case InputMessage(role=role, content=content):
                found.append({"role": role, "content": text_of(content, f"{here}.content")})
            case ReasoningItem() as thoughts:
                if thoughts.text:
                    assistant("reasoning_content", thoughts.text)
            case FunctionCall() as call:
                function = {"name": full_name(call.namespace, call.name), "arguments": call.arguments}
                made = {"id": call.call_id, "type": "function", "function": function}
                if found and "tool_calls" in found[-1]:
                    found[-1]["tool_calls"].append(made)
                else:
                    assistant("tool_calls", [made])
            case FunctionCallOutput() as result:
                text = text_of(result.output, f"{here}.output")
                found.append({"role": "tool", "tool_call_id": result.call_id, "content": text})
    return [Message(**message) for message in found]


def chat_request(body: PromptOfResponse, before: Sequence[Message], messages: Sequence[Message]) -> ChatRequest:
    """The chat that goes on with the messages `before` by those of the request; ApiError for what there is not in one."""
    conversation = [*before, *messages]
    if body.instructions:
        conversation.insert(0, Message(role="system", content=body.instructions))
    first = list(takewhile(lambda message: message.role in ("system", "developer"), conversation))
    if len(first) > 1:
        # Templates know one of these at the beginning.
        text = "\n\n".join(message.plain()["content"] for message in first)
        conversation[: len(first)] = [Message(role="system", content=text)]
    if not conversation:
        raise ApiError(400, "you must provide input", "input", "missing_required_parameter")
    given: dict[str, Any] = {"messages": conversation, "chat_template_kwargs": body.chat_template_kwargs}
    if body.reasoning:
        given["reasoning_effort"] = body.reasoning.effort
    if body.text and body.text.format:
        given["response_format"] = _format(body.text.format)
    given |= chosen_tools(body.tools or (), body.tool_choice) | {"parallel_tool_calls": body.parallel_tool_calls}
    if isinstance(body, ResponsesRequest):
        given |= {name: getattr(body, name) for name in Asking.model_fields} | {"max_tokens": body.max_output_tokens}
        if body.logprobs:
            given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return parsed(ChatRequest, given, "")


def _without_refusals(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """An answer's parts, where a refusal is text too."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": p.get("refusal")} if p.get("type") == "refusal" else p for p in content]


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.wanted is None:
        raise ApiError(400, "you must provide text.format.schema", "text.format.schema", "missing_required_parameter")
    return ResponseFormat(type=asked.type, json_schema=JsonSchema(name=asked.name, schema=asked.wanted, strict=asked.strict))
