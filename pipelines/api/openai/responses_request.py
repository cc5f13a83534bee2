"""Request bodies of OpenAI's /v1/responses, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from castiron.pipelines.api import schemas
from castiron.pipelines.api.api_errors import ApiError, unsupported
from castiron.pipelines.api.chat_records import Content, Freeform, Function, FunctionIdentifier, Message, text_of
from castiron.pipelines.api.request_body import Body, ByType, Unsupported, parse_record
from castiron.pipelines.api.schemas import ChatRequest, GenerationFields

# Names of this API's fields, by the chat fields that they are converted to.
FIELDS = {
    "messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


class Item(Body):
    """Base class of the items in the field `input` of a request.

    An item that the client copies from an earlier answer also has its `id` and `status`.
    """

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: Literal["message", None] = None
    phase: str | None = None


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    # Added by OpenAI's clients.
    parsed_arguments: Any = None


class CustomCall(Item):
    """A call to a custom tool, whose input is a free text instead of JSON arguments."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class FunctionCallOutput(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(Item):
    """Reasoning of an earlier answer; encrypted reasoning is not supported."""

    type: Literal["reasoning"]
    summary: schemas.Objects | None = None
    content: schemas.Objects | None = None

    @property
    def text(self) -> str:
        parts = self.content or self.summary or []
        return "".join(text for part in parts if isinstance(text := part.get("text"), str))


class ItemReference(Body):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: str


StoredItem = InputMessage | FunctionCall | CustomCall | FunctionCallOutput | ReasoningItem
AnyItem = Annotated[StoredItem | ItemReference, ByType("message")]
Items = Annotated[list[AnyItem], Field(fail_fast=True)]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Function):
    type: Literal["function"]
    defer_loading: Literal[False] | None = None
    allowed_callers: schemas.DirectCallers | None = None


class CustomTool(Freeform):
    """A custom tool, whose input is a free text instead of JSON arguments."""

    type: Literal["custom"]
    defer_loading: Literal[False] | None = None
    allowed_callers: schemas.DirectCallers | None = None


class Namespace(Body):
    """A named group of functions; the model calls each of them as `NAMESPACE.FUNCTION`."""

    type: Literal["namespace"]
    name: FunctionIdentifier
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)]


AnyTool = FunctionTool | CustomTool | Namespace


class ChosenFunction(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Body):
    """A tool choice that allows calls only to the tools in its list."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(fail_fast=True)]


class TextFormat(schemas.JsonSchema):
    """The format of the answer; `schema` is required for the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # type: ignore[assignment]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: schemas.Verbosity | None = None


class Reasoning(Body):
    """Options of reasoning. Answers have the complete reasoning, even if a summary is requested."""

    effort: schemas.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = None


class InputTokensRequest(Body):
    """The body of POST /v1/responses/input_tokens: the fields that determine the prompt."""

    expected: ClassVar[dict[str, str]] = {
        "input": "a string or a list of items",
        "output": "a string or a list of parts of type input_text",
        "tool_choice": 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
    }

    model: str | None = None
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Annotated[AnyTool, ByType()]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Annotated[ChosenFunction | AllowedTools, ByType()] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # auto: leave out the oldest messages of a conversation that is too long for the context.
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Annotated[Any, Unsupported()] = None

    def items(self, stored: Callable[[str], StoredItem | None]) -> list[StoredItem]:
        """Return the items in the field `input`, with each reference replaced by the item it names.

        stored: returns the item with a given id, or None if it is not stored.
        Raises ApiError 400 for an unknown id.
        """
        found: list[StoredItem] = []
        for index, item in enumerate(self.input or ()):
            if isinstance(item, ItemReference):
                if (referred := stored(item.id)) is None:
                    raise unsupported(f"input.{index}.id", f"no such item: {item.id!r:.80}; send the item itself")
                item = referred
            found.append(item)
        return found


class ResponsesRequest(InputTokensRequest, GenerationFields):
    """The body of POST /v1/responses."""

    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    stream_options: dict[str, bool] | None = None
    include: Annotated[list[Literal[
        "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    ]], Field(fail_fast=True)] | None = None  # fmt: skip
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Ignored, because it limits tools that the server runs, and this server runs no tools.
    max_tool_calls: int | None = None
    # Ignored labels of the request or the customer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    # Not supported, unless the value changes nothing.
    background: Annotated[Any, Unsupported(False)] = None
    prompt: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported([])] = None
    moderation: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported()] = None
    access_programs: Annotated[Any, Unsupported()] = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def messages_of(items: Iterable[StoredItem]) -> list[Message]:
    """Convert the items of a conversation to chat messages.

    Reasoning, text and tool calls that follow each other become one assistant message.
    """
    found: list[dict[str, Any]] = []

    def assistant(field: str, value: Any) -> None:
        order = ("reasoning_content", "content", "tool_calls")
        last = found[-1] if found else {}
        if last.get("role") != "assistant" or any(name in last for name in order[order.index(field) :]):
            found.append({"role": "assistant"})
        found[-1][field] = value

    for item in items:
        match item:
            case InputMessage(role="assistant"):
                assistant("content", text_of(item.content))
            case InputMessage():
                found.append({"role": item.role, "content": text_of(item.content)})
            case ReasoningItem():
                if item.text:
                    assistant("reasoning_content", item.text)
            case FunctionCall() | CustomCall():
                kind, field = ("custom", "input") if isinstance(item, CustomCall) else ("function", "arguments")
                called = {"name": full_name(item.namespace, item.name), field: getattr(item, field)}
                call = {"id": item.call_id, "type": kind, kind: called}
                if found and "tool_calls" in found[-1]:
                    found[-1]["tool_calls"].append(call)
                else:
                    assistant("tool_calls", [call])
            case FunctionCallOutput():
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
    return [Message(**message) for message in found]


def chat_request(body: InputTokensRequest, before: Sequence[Message], messages: Sequence[Message]) -> ChatRequest:
    """Convert a request of the Responses API to a chat request.

    before: the earlier conversation, which ends with the response that `body` continues; empty if
        `body` starts a conversation.
    messages: the new messages, from the field `input`.
    """
    conversation = [*before, *messages]
    if body.instructions:
        conversation.insert(0, Message(role="system", content=body.instructions))
    first = list(takewhile(lambda message: message.role in ("system", "developer"), conversation))
    if len(first) > 1:
        # Many templates read one system message only.
        text = "\n\n".join(text_of(message.content) for message in first)
        conversation[: len(first)] = [Message(role="system", content=text)]
    if not conversation:
        raise ApiError(400, "you must provide input", "input", "missing_required_parameter")
    given: dict[str, Any] = {"messages": conversation, "chat_template_kwargs": body.chat_template_kwargs}
    given |= _chosen_tools(body) | {"parallel_tool_calls": body.parallel_tool_calls}
    if body.reasoning:
        given["reasoning_effort"] = body.reasoning.effort
    if body.text:
        given["verbosity"] = body.text.verbosity
    if body.text and (form := body.text.format):
        given["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                param = "text.format.schema"
                raise ApiError(400, "you must provide text.format.schema", param, "missing_required_parameter")
            given["response_format"]["json_schema"] = {"schema": form.schema_}
    if isinstance(body, ResponsesRequest):
        given |= {name: getattr(body, name) for name in GenerationFields.model_fields} | {"max_tokens": body.max_output_tokens}
        if body.logprobs:
            given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return parse_record(ChatRequest, given)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function: `namespace.name`, or only `name`."""
    return f"{namespace}.{name}" if namespace else name


def names_in_namespaces(tools: Iterable[AnyTool]) -> dict[str, dict[str, str]]:
    """Return {full name: {"name": ..., "namespace": ...}} for each function in a namespace.

    The full name is `namespace.name`.
    """
    return {
        full_name(space.name, function.name): {"name": function.name, "namespace": space.name}
        for space in tools
        if isinstance(space, Namespace)
        for function in space.tools
    }


def _chat_tool(tool: FunctionTool | CustomTool, space: Namespace | None = None) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {"type": "custom", "custom": tool.model_dump(include={"name", "description"})}
    # The description of a namespace is put before that of its first function.
    descriptions = [space.description if space and tool is space.tools[0] else None, tool.description]
    function = {
        "name": full_name(space and space.name, tool.name), "description": " ".join(filter(None, descriptions)) or None,
        "parameters": tool.parameters, "strict": tool.strict,
    }  # fmt: skip
    return {"type": "function", "function": function}


def _chosen_tools(body: InputTokensRequest) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    for tool in body.tools or ():
        tools += [_chat_tool(each, tool) for each in tool.tools] if isinstance(tool, Namespace) else [_chat_tool(tool)]
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {full_name(each.namespace, each.name) for each in choice.tools}
        tools, choice = [each for each in tools if each[each["type"]]["name"] in names], choice.mode
    elif isinstance(choice, ChosenFunction):
        choice = {"type": choice.type, choice.type: {"name": full_name(choice.namespace, choice.name)}}
    return {"tools": tools or None, "tool_choice": choice}
