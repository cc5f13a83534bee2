"""Request bodies of OpenAI's /v1/responses, and their conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.api.generation import (
    ANY_OBJECT,
    AnswerFormat,
    CallableFunction,
    Effort,
    Generation,
    Message,
    only_format,
    plain_message,
)
from castiron.pipelines.api.openai.records import INPUT, Freeform, JsonSchema, Verbosity
from castiron.pipelines.api.request_body import Body, ByType, Unsupported
from castiron.pipelines.api.request_fields import (
    LIMITED,
    MAX_FUNCTIONS,
    MAX_NAME,
    Content,
    DirectCallers,
    Function,
    FunctionIdentifier,
    GenerationFields,
    Objects,
    text_of,
)

# This API's names of fields of `Generation`.
NAMES = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
LOGPROBS = "message.output_text.logprobs"


class Item(Body):
    """An item of `input`; one copied from an earlier answer also has its id and status."""

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
    summary: Objects | None = None
    content: Objects | None = None

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
    allowed_callers: DirectCallers | None = None


class CustomTool(Freeform):
    """A custom tool, whose input is a free text instead of JSON arguments."""

    type: Literal["custom"]
    defer_loading: Literal[False] | None = None
    allowed_callers: DirectCallers | None = None


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


class AllowedFunctions(Body):
    """A tool choice that allows calls only to the tools in its list."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(fail_fast=True)]


class TextFormat(JsonSchema):
    """The format of the answer; `schema` is required for the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # type: ignore[assignment]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None

    @property
    def formats(self) -> list[AnswerFormat]:
        if self.format is None or self.format.type == "text":
            return []
        if self.format.type == "json_object":
            return [AnswerFormat("text.format", "json_schema", ANY_OBJECT)]
        if self.format.schema_ is None:
            param = "text.format.schema"
            raise ApiError(400, f"you must provide {param}", param, "missing_required_parameter")
        return [AnswerFormat("text.format", "json_schema", self.format.schema_)]


class Reasoning(Body):
    """Options of reasoning. Answers have the complete reasoning, even if a summary is requested."""

    effort: Effort | None = None
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
    tools: Annotated[list[Annotated[AnyTool, ByType()]], LIMITED] | None = None
    tool_choice: Literal["none", "auto", "required"] | Annotated[ChosenFunction | AllowedFunctions, ByType()] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # auto: leave out the oldest messages of a conversation that is too long for the context.
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Annotated[Any, Unsupported()] = None

    def items(self, stored: Callable[[str], StoredItem | None]) -> list[StoredItem]:
        """Return the items of `input`, where `stored` returns those that are referred to by id.

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
    """Convert items; reasoning, text and calls that follow each other become one message."""
    found: list[dict[str, Any]] = []
    order = ("reasoning_content", "content", "calls")

    def assistant(part: str, value: Any) -> None:
        last = found[-1] if found else {}
        if last.get("role") != "assistant" or any(name in last for name in order[order.index(part) :]):
            found.append({"role": "assistant"})
        found[-1][part] = value

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
                arguments = {"input": item.input} if isinstance(item, CustomCall) else item.arguments
                call = {"id": item.call_id, "function": {"name": full_name(item.namespace, item.name), "arguments": arguments}}
                if found and "calls" in found[-1]:
                    found[-1]["calls"].append(call)
                else:
                    assistant("calls", [call])
            case FunctionCallOutput():
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
    return [plain_message(**{"content": "", **message}) for message in found]


def parse_response(body: InputTokensRequest, before: Sequence[Message], messages: Sequence[Message]) -> Generation:
    """Convert a request; `messages` come from its input and follow the conversation `before`."""
    conversation = [*before, *messages]
    if body.instructions:
        conversation.insert(0, plain_message("system", body.instructions))
    first = list(takewhile(lambda message: message["role"] in ("system", "developer"), conversation))
    if len(first) > 1:
        # Many templates read one system message only.
        conversation[: len(first)] = [plain_message("system", "\n\n".join(message["content"] for message in first))]
    if not conversation:
        raise ApiError(400, "you must provide input", "input", "missing_required_parameter")
    options = {}
    formats = body.text.formats if body.text else []
    if isinstance(body, ResponsesRequest):
        formats = [*formats, *body.formats]
        options = body.options | {"max_tokens": body.max_output_tokens}
        options["top_logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return Generation(
        param="input", names=NAMES, messages=conversation, template_args=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning and body.reasoning.effort, verbosity=body.text and body.text.verbosity,
        drops_oldest=body.truncation == "auto", format=only_format(formats), has_reasoning=True,
        has_single_call=body.parallel_tool_calls is False, **_functions(body), **options,
    )  # fmt: skip


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function: `namespace.name`, or only `name`."""
    return f"{namespace}.{name}" if namespace else name


def names_in_namespaces(tools: Iterable[AnyTool]) -> dict[str, dict[str, str]]:
    """Return {full name: {"name": ..., "namespace": ...}} for each function in a namespace."""
    return {
        full_name(space.name, function.name): {"name": function.name, "namespace": space.name}
        for space in tools
        if isinstance(space, Namespace)
        for function in space.tools
    }


def _functions(body: InputTokensRequest) -> dict[str, Any]:
    functions: list[CallableFunction] = []
    for index, tool in enumerate(body.tools or ()):
        match tool:
            case CustomTool():
                functions.append(CallableFunction(tool.name, tool.description, INPUT, True))
            case FunctionTool():
                functions.append(CallableFunction(tool.name, tool.description, tool.parameters, bool(tool.strict)))
            case Namespace():
                functions += _functions_of(tool, f"tools.{index}.tools")
    if len(functions) > MAX_FUNCTIONS:
        raise invalid("tools", f"tools has {len(functions)} functions; send at most {MAX_FUNCTIONS}")
    choice = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        names = {full_name(each.namespace, each.name) for each in choice.tools}
        return {"functions": [each for each in functions if each.name in names], "tool_choice": choice.mode}
    if isinstance(choice, ChosenFunction):
        return {"functions": functions, "called": full_name(choice.namespace, choice.name)}
    return {"functions": functions, "tool_choice": choice or "auto"}


def _functions_of(space: Namespace, param: str) -> Iterator[CallableFunction]:
    # The description of the namespace is put before that of its first function.
    before = space.description
    for index, tool in enumerate(space.tools):
        name = full_name(space.name, tool.name)
        if len(name) > MAX_NAME:
            message = f"{param}.{index}.name has {len(name)} characters with its namespace; send at most {MAX_NAME}"
            raise invalid(f"{param}.{index}.name", message)
        description = " ".join(filter(None, (before, tool.description))) or None
        yield CallableFunction(name, description, tool.parameters, bool(tool.strict))
        before = None
