"""Request bodies of OpenAI's /v1/responses, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from castiron.pipelines.api.api_errors import ApiError, unsupported
from castiron.pipelines.api.parse_body import Content, Item, OneOf, TextPart, parse_item, parse_one_of, text_of
from castiron.pipelines.api.schemas import (
    Body,
    ChatRequest,
    DirectCallers,
    Function,
    FunctionIdentifier,
    GenerationFields,
    JsonSchema,
    Message,
    Objects,
    Unsupported,
)

# Names of this API's fields, by the chat fields that they are converted to.
FIELDS = {
    "messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


class Refusal(BaseModel):
    """A refusal of an earlier answer, which is read as text."""

    model_config = ConfigDict(extra="allow")
    type: Literal["refusal"]
    refusal: str


class StoredItem(Item):
    """An item that may be from an earlier answer."""

    id: str | None = None
    status: str | None = None


class InputMessage(StoredItem):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Annotated[dict[str, Any], OneOf(TextPart, Refusal)]], Field(fail_fast=True)]
    type: Literal["message"] | None = None
    phase: str | None = None


class FunctionCall(StoredItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    # Added by OpenAI's clients.
    parsed_arguments: Any = None


class FunctionCallOutput(StoredItem):
    expected: ClassVar[dict[str, str]] = {"output": "a string or a list of parts of type input_text"}

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(StoredItem):
    """Reasoning of an earlier answer; encrypted reasoning is not supported."""

    type: Literal["reasoning"]
    summary: Objects | None = None
    content: Objects | None = None

    @property
    def text(self) -> str:
        parts = self.content or self.summary or []
        return "".join(text for part in parts if isinstance(text := part.get("text"), str))


class ItemReference(Item):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[str, type[Body]] = {
    "message": InputMessage, "function_call": FunctionCall, "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}  # fmt: skip
AnyItem = Annotated[dict[str, Any], OneOf(*ITEMS.values(), ItemReference)]


class FunctionTool(Item, Function):
    type: Literal["function"]
    defer_loading: Literal[False] | None = None
    allowed_callers: DirectCallers | None = None


class Namespace(Item):
    """Functions that the model calls as `NAMESPACE.NAME`."""

    type: Literal["namespace"]
    name: FunctionIdentifier
    description: str | None = None
    tools: Annotated[list[Annotated[dict[str, Any], OneOf(FunctionTool)]], Field(fail_fast=True)]


AnyTool = Annotated[dict[str, Any], OneOf(FunctionTool, Namespace)]


class AllowedTools(Item):
    """A tool choice that lists the tools which the answer may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Objects


class ChosenFunction(Item):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class TextFormat(JsonSchema):
    """The form of the answer; `schema` is required for the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # type: ignore[assignment]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Options of reasoning; answers have the complete reasoning instead of a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = None


class ObfuscationOptions(Body):
    include_obfuscation: bool | None = None


class PromptOfResponse(Body):
    """The fields of /v1/responses that determine the prompt."""

    expected: ClassVar[dict[str, str]] = {
        "input": "a string or a list of items",
        "tool_choice": 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
        "verbosity": "medium if it is given",
    }

    input: str | Annotated[list[AnyItem], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[AnyTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Annotated[Any, Unsupported("disabled")] = None
    conversation: Annotated[Any, Unsupported()] = None

    def items(self, stored: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Return the input's items, with references replaced by the items that `stored` returns."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found = list(self.input or ())
        for index, item in enumerate(found):
            if item.get("type") != "item_reference":
                continue
            name = parse_item(ItemReference, item, f"input.{index}").id
            if (item := stored(name)) is None:
                raise unsupported(f"input.{index}.id", f"no such item: {name!r:.80}; send the item itself")
            found[index] = item
        return found


class InputTokensRequest(PromptOfResponse):
    """POST /v1/responses/input_tokens."""

    model: str | None = None


class ResponsesRequest(PromptOfResponse, GenerationFields):
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
    # Ignored, because it limits tools that the server runs, and this server runs no tools.
    max_tool_calls: int | None = Field(None, ge=1)
    # Ignored labels of the request or the customer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    # Not supported, unless the value changes nothing.
    background: Annotated[Any, Unsupported(False)] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    prompt: Annotated[Any, Unsupported()] = None
    prompt_cache_retention: Annotated[Any, Unsupported("in-memory", "in_memory")] = None
    prompt_cache_options: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported([])] = None
    moderation: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported()] = None
    access_programs: Annotated[Any, Unsupported()] = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def messages_of(items: Sequence[dict[str, Any]], path: str = "input") -> list[Message]:
    """Convert items to chat messages: consecutive reasoning, text and calls become one."""
    found: list[dict[str, Any]] = []

    def assistant(field: str, value: Any) -> None:
        order = ("reasoning_content", "content", "tool_calls")
        last = found[-1] if found else {}
        if last.get("role") != "assistant" or any(name in last for name in order[order.index(field) :]):
            found.append({"role": "assistant"})
        found[-1][field] = value

    for index, item in enumerate(items):
        here = f"{path}.{index}"
        match parse_one_of(ITEMS, item, here, "message"):
            case InputMessage(role="assistant", content=content):
                assistant("content", text_of(_without_refusals(content), f"{here}.content"))
            case InputMessage(role=role, content=content):
                found.append({"role": role, "content": text_of(content, f"{here}.content")})
            case ReasoningItem() as reasoning:
                if reasoning.text:
                    assistant("reasoning_content", reasoning.text)
            case FunctionCall() as call:
                function = {"name": full_name(call.namespace, call.name), "arguments": call.arguments}
                chat_call = {"id": call.call_id, "type": "function", "function": function}
                if found and "tool_calls" in found[-1]:
                    found[-1]["tool_calls"].append(chat_call)
                else:
                    assistant("tool_calls", [chat_call])
            case FunctionCallOutput() as result:
                text = text_of(result.output, f"{here}.output")
                found.append({"role": "tool", "tool_call_id": result.call_id, "content": text})
    return [Message(**message) for message in found]


def _without_refusals(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of an assistant message with refusals converted to text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.get("refusal")} if part.get("type") == "refusal" else part for part in content]


def chat_request(body: PromptOfResponse, before: Sequence[Message], messages: Sequence[Message]) -> ChatRequest:
    """Convert a request to a chat request that continues the messages `before`."""
    conversation = [*before, *messages]
    if body.instructions:
        conversation.insert(0, Message(role="system", content=body.instructions))
    first = list(takewhile(lambda message: message.role in ("system", "developer"), conversation))
    if len(first) > 1:
        # Many templates read one system message only.
        text = "\n\n".join(message.plain()["content"] for message in first)
        conversation[: len(first)] = [Message(role="system", content=text)]
    if not conversation:
        raise ApiError(400, "you must provide input", "input", "missing_required_parameter")
    given: dict[str, Any] = {"messages": conversation, "chat_template_kwargs": body.chat_template_kwargs}
    given |= _chosen_tools(body) | {"parallel_tool_calls": body.parallel_tool_calls}
    if body.reasoning:
        given["reasoning_effort"] = body.reasoning.effort
    if body.text and (form := body.text.format):
        given["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                message = "you must provide text.format.schema"
                raise ApiError(400, message, "text.format.schema", "missing_required_parameter")
            given["response_format"]["json_schema"] = {"schema": form.schema_}
    if isinstance(body, ResponsesRequest):
        given |= {name: getattr(body, name) for name in GenerationFields.model_fields} | {"max_tokens": body.max_output_tokens}
        if body.logprobs:
            given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return parse_item(ChatRequest, given, "")


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function."""
    return f"{namespace}.{name}" if namespace else name


def names_in_namespaces(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return {"name": ..., "namespace": ...} by full name, for each function in a namespace."""
    return {
        full_name(space["name"], function["name"]): {"name": function["name"], "namespace": space["name"]}
        for space in tools
        if space.get("type") == "namespace"
        for function in space["tools"]
    }


def _functions(tools: Iterable[dict[str, Any]]) -> list[Function]:
    """Return all functions with their full names; raise ApiError for tools of other types."""
    found: list[Function] = []
    for index, given in enumerate(tools):
        path = f"tools.{index}"
        tool = parse_one_of({"function": FunctionTool, "namespace": Namespace}, given, path)
        space = tool if isinstance(tool, Namespace) else None
        inner = [(path, given)] if space is None else [(f"{path}.tools.{i}", each) for i, each in enumerate(space.tools)]
        for here, each in inner:
            function = parse_one_of({"function": FunctionTool}, each, here)
            # Chat requests have no namespaces, so the description of one is put before its first function's.
            descriptions = [space.description if space and each is space.tools[0] else None, function.description]
            fields = {"name": full_name(space and space.name, function.name), "parameters": function.parameters}
            fields |= {"description": " ".join(filter(None, descriptions)) or None, "strict": function.strict}
            found.append(parse_item(Function, fields, here))
    return found


def _chosen_tools(body: PromptOfResponse) -> dict[str, Any]:
    """Return the chat fields tools and tool_choice."""
    functions, choice = _functions(body.tools or ()), body.tool_choice
    if isinstance(choice, dict):
        chosen = parse_one_of({"function": ChosenFunction, "allowed_tools": AllowedTools}, choice, "tool_choice")
        if isinstance(chosen, AllowedTools):
            allowed = [parse_item(ChosenFunction, tool, f"tool_choice.tools.{i}") for i, tool in enumerate(chosen.tools)]
            names = {full_name(each.namespace, each.name) for each in allowed}
            functions, choice = [each for each in functions if each.name in names], chosen.mode
        else:
            choice = {"type": "function", "function": {"name": full_name(chosen.namespace, chosen.name)}}
    tools = [{"type": "function", "function": each} for each in functions]
    return {"tools": tools or None, "tool_choice": choice}
