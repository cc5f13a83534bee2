"""The JSON objects of a chat: messages, the parts of their content, and the functions to call."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import from_json

from castiron.pipelines.api.request_body import Body, ByType, Unsupported

# Names of functions: OpenAI allows 64 characters, Anthropic 128.
FunctionIdentifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# Roles of messages that chat templates know by another name.
ROLES = {"developer": "system", "function": "tool"}
# The JSON schema of the arguments of a custom tool.
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
# The id of a call in OpenAI's old field function_call, which has none.
OLD_CALL = "function1"


class TextPart(Body):
    """A part with text; fields for other purposes, such as citations, have no effect."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer; the model reads it as text."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def parts_of(value: Any) -> Any:
    """Convert a string to a list with one part of type text; return other values unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Annotated[TextPart | RefusalPart, ByType()]], Field(fail_fast=True)]
# Content of a message: a text or a list of parts.
Content = Annotated[Parts, BeforeValidator(parts_of, json_schema_input_type=str | Parts)]


def text_of(content: Iterable[TextPart | RefusalPart] | None) -> str:
    return "".join(part.text for part in content or ())


class Message(BaseModel):
    """A chat message; fields other than role and content are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None

    def plain(self) -> dict:
        """Return the message as chat templates expect it: content as text, no deprecated fields.

        For example, `function_call` becomes `tool_calls`, and the role function becomes tool.
        """
        extra, role = dict(self.model_extra or {}), ROLES.get(self.role, self.role)
        if self.role == "function":
            extra = {"tool_call_id": OLD_CALL, **extra}
        if isinstance(call := extra.get("function_call"), dict):
            extra = {**extra, "tool_calls": [{"id": OLD_CALL, "type": "function", "function": call}]}
            del extra["function_call"]
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = [_with_object(call) for call in calls]
        return {**extra, "role": role, "content": text_of(self.content)}


def _with_object(call: Any) -> Any:
    """Convert a tool call of a message to the form that chat templates expect.

    The arguments, which are JSON text in the API, become an object. If this is not possible, the
    call is returned unchanged. A call to a custom tool becomes a function call with the argument
    `input`.
    """
    if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        return {"id": call.get("id"), "type": "function", "function": function}
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("arguments"), str)):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """A tool choice that names the function which the answer must call."""

    type: Literal["function"]
    function: FunctionName


class NamedFreeform(Body):
    """A tool choice that names the custom tool which the answer must call."""

    type: Literal["custom"]
    function: FunctionName = Field(alias="custom")


class AllowedToolList(Body):
    """The functions that an answer may call, and whether it must call one (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedTool | NamedFreeform, ByType()]], Field(fail_fast=True)]


class AllowedTools(Body):
    """A tool choice that lists the functions which the answer may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class Function(Body):
    """A function that the model may call.

    parameters: JSON schema of the arguments; None if the function has no arguments. strict: whether
    the arguments of a call must match this schema.
    """

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict:
        """Return the tool as JSON for chat templates, with defaults for keys that were left out."""
        function = {"name": self.function.name, "description": self.function.description or "",
                    "parameters": self.function.parameters or {"type": "object", "properties": {}}}  # fmt: skip
        return {"type": "function", "function": function}


class Freeform(Body):
    """The description of a custom tool, whose input is a text.

    format: a grammar for this text, which is not supported.
    """

    name: FunctionIdentifier
    description: str | None = None
    format: Annotated[Any, Unsupported({"type": "text"})] = None


class FreeformTool(Body):
    """OpenAI's custom tool, which the model calls like a function with the argument `input`."""

    type: Literal["custom"]
    custom: Freeform

    @property
    def function(self) -> Function:
        return Function(name=self.custom.name, description=self.custom.description, parameters=INPUT, strict=True)


def _input(arguments: str) -> Any:
    """Return the value of the key `input` in a JSON object; None if the key is missing.

    `arguments`: the object as text, whose end may be missing.
    """
    try:
        return from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, LookupError, TypeError):
        return None


def input_of(arguments: str) -> str:
    """Return the text that a call passes to a custom tool.

    The model calls a custom tool like a function with one argument, `input`. arguments: the
    arguments of the call as JSON text. If this text has no key `input`, it is returned unchanged.
    An input that is not a string is returned as JSON text.
    """
    found = _input(arguments)
    if found is None or isinstance(found, str):
        return arguments if found is None else found
    return json.dumps(found, ensure_ascii=False)


class InputStream:
    """A parser that extracts a custom tool's input while the model generates the call.

    The call's arguments are JSON text, {"input": ...}, which arrives in pieces.
    """

    def __init__(self) -> None:
        self._arguments = self._returned = ""

    def add(self, more: str, is_end: bool = False) -> str:
        """Append `more` to the JSON text; return the part of the input that this adds.

        `is_end`: whether the JSON text is now complete.
        """
        self._arguments += more
        text = input_of(self._arguments) if is_end else _input(self._arguments)
        new = text[len(self._returned) :] if isinstance(text, str) and text.startswith(self._returned) else ""
        self._returned += new
        return new
