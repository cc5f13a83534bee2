"""The JSON objects of a chat: messages, the parts of their content, and the functions to call."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import from_json

from castiron.pipelines.api.request_body import Body, ByType, Unsupported

# Names of functions: OpenAI allows 64 characters, Anthropic 128.
FunctionIdentifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# The JSON schema of the arguments of a custom tool.
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}


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


class CalledFunction(Body):
    """A function's name and arguments: JSON text, or what a model wrote in its place."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    name: str
    arguments: Any = None


class Call(Body):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["function", None] = None
    id: str | None = None
    function: CalledFunction


class CalledFreeform(Body):
    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    name: str
    input: str | None = None


class FreeformCall(Body):
    """A call to a custom tool in an earlier answer."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["custom"]
    id: str | None = None
    custom: CalledFreeform

    @property
    def function(self) -> CalledFunction:
        return CalledFunction(name=self.custom.name, arguments={"input": self.custom.input})


class Message(BaseModel):
    """A chat message; fields other than role and content are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: Annotated[list[Annotated[Call | FreeformCall, ByType("function")]], Field(fail_fast=True)] | None = None
    # OpenAI's old name of a single call, which has no id.
    function_call: CalledFunction | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message with its content as text, and all calls in `tool_calls`."""
        found = {**(self.model_extra or {}), "role": self.role, "content": text_of(self.content)}
        old = [Call(function=self.function_call)] if self.function_call else []
        calls = [{"id": call.id, "function": call.function.model_dump()} for call in (*(self.tool_calls or ()), *old)]
        return {**found, "tool_calls": calls} if calls else found


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
