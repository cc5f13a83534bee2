"""What a request demands of its answer: a format, such as a JSON schema, or function calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.api.api_errors import invalid
from castiron.pipelines.api.chat_records import AllowedTools, FunctionName, NamedFreeform, NamedTool, Tool
from castiron.pipelines.api.schemas import ChatRequest, CompletionFields, ResponseFormat, StructuredOutputs
from castiron.pipelines.text.repairs import completed_schema
from castiron.pipelines.text.tool_calls import Tools
from castiron.pipelines.text.tool_formats import ToolFormat

# The JSON schema that every object matches.
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class AnswerFormat:
    """The format that an answer must have.

    param: field of the request that sets the format. kind: "json_schema", "regex", "grammar" or
    "tools" (function calls). value: the schema, regular expression or grammar.
    """

    param: str
    kind: str
    value: Any

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema, or None if the answer is not JSON."""
        return self.value if self.kind == "json_schema" else None


def requested_format(body: CompletionFields) -> AnswerFormat | None:
    """Return the format that a request sets, or None for free text.

    OpenAI, vLLM, llama.cpp and castiron have different fields for the format. Raises ApiError 400
    if a request sets two of these fields.
    """
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    found = [
        *_response_format(body.response_format or ResponseFormat(type="text")),
        *_structured(body.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_structured(guided, "guided_"),
        *_given("", json_schema=body.json_schema, grammar=body.grammar or None, regex=body.regex),
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise invalid(second, f"{first} and {second} each set the form of the answer; give one")
    return found[0] if found else None


def _given(prefix: str, **values: Any) -> Iterator[AnswerFormat]:
    for kind, value in values.items():
        if value is not None:
            yield AnswerFormat(f"{prefix}{kind}", kind, value)


def _response_format(form: ResponseFormat) -> Iterator[AnswerFormat]:
    if (form.json_schema is None) == (form.type == "json_schema") and form.schema_ is None:
        param = "response_format.json_schema"
        if form.type == "json_schema":
            raise invalid(param, "response_format.json_schema is missing; give it, because the type is json_schema")
        raise invalid(
            param, f"response_format.json_schema needs the type json_schema, but the type is {form.type}; change one of them"
        )
    if form.schema_ is not None and form.json_schema is not None:
        raise invalid(
            "response_format.schema", "response_format.schema and response_format.json_schema each give a schema; leave one out"
        )
    if form.schema_ is not None and form.type == "text":
        raise invalid(
            "response_format.schema",
            "response_format.schema needs the type json_schema, but the type is text; change one of them",
        )
    if form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema else ANY_OBJECT if form.schema_ is None else form.schema_
        yield AnswerFormat("response_format", "json_schema", schema)


def _structured(fields: StructuredOutputs, prefix: str) -> Iterator[AnswerFormat]:
    schema = fields.json_
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict | bool):
            param = f"{prefix}json"
            raise invalid(param, f"{param} must be a JSON schema, as an object or as text")
    if schema is not None:
        yield AnswerFormat(f"{prefix}json", "json_schema", schema)
    if fields.json_object:
        yield AnswerFormat(f"{prefix}json_object", "json_schema", ANY_OBJECT)
    if fields.choice is not None:
        yield AnswerFormat(f"{prefix}choice", "regex", "|".join(map(re.escape, fields.choice)))
    yield from _given(prefix, regex=fields.regex, grammar=fields.grammar)


# The schema of a function without parameters.
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallableTools:
    """The functions that an answer may call.

    shown: functions that the prompt describes.
    tools: parser of the calls in the answer.
    forced: functions of which the answer must call one, {name: JSON schema of the arguments};
        empty if calls are optional.
    """

    shown: list[Tool]
    tools: Tools
    forced: Mapping[str, Any]

    def answer_format(self, form: AnswerFormat | None) -> AnswerFormat | None:
        """Return the format of an answer that may, or if `forced` must, call these functions.

        None means any text. `form`: the format that the request sets for the text, None for free
        text; a JSON schema has no effect if a call is forced. Raises ApiError 400 if a call is
        forced and `form` is not a JSON schema.
        """
        tools, forced = self.tools, self.forced
        if forced and form and form.schema is None:
            raise invalid("tool_choice", f"tool_choice requires a call, but {form.param} requires text; leave one of them out")
        # The grammar of an answer in harmony format (gpt-oss) begins with the final channel, after any tool calls.
        if forced or form and form.schema is not None and tools.form.style != "harmony":
            # If the answer must consist of tool calls, it has no text, so response_format does not apply.
            schema = None if forced or not form else form.schema
            return AnswerFormat("tools", "tools", tools.grammar(forced or tools.schemas, answer=schema, strict=self._strict))
        if not form and (schemas := self._schemas_of_optional_calls()):
            return AnswerFormat("tools", "tools", tools.grammar(schemas, free=True, strict=self._strict))
        return form

    @property
    def _strict(self) -> set[str]:
        return {tool.function.name for tool in self.shown if tool.function.strict}

    def _schemas_of_optional_calls(self) -> dict[str, Any]:
        """Return {function name: JSON schema that the arguments of a call must match}.

        The dict is empty if nothing restricts the arguments, because no function is `strict`, or
        because the model's format of calls has no text by which a call can be recognised.
        """
        strict, form = self._strict, self.tools.form
        if not strict or not form.triggers:
            return {}
        loose = form.style == "json"
        return {name: ANY_OBJECT if loose and name not in strict else schema for name, schema in self.tools.schemas.items()}


def callable_tools(body: ChatRequest, form: ToolFormat) -> CallableTools | None:
    """Return the functions that the answer may call, or None if calls are not allowed.

    `form`: format in which the model writes calls. Raises ApiError 400 for an invalid tool_choice.
    """
    tools = [Tool(type="function", function=tool.function) for tool in body.tools or ()]
    choice, is_single = body.tool_choice, body.parallel_tool_calls is False
    if body.functions:
        if tools:
            raise invalid("functions", "functions is the old name of tools; give one of them")
        tools, is_single = [Tool(type="function", function=function) for function in body.functions], True
        named = body.function_call
        choice = NamedTool(type="function", function=named) if isinstance(named, FunctionName) else named
    if isinstance(choice, AllowedTools):
        names = [each.function.name for each in choice.allowed_tools.tools]
        tools, choice = [_named(tools, name) for name in names], choice.allowed_tools.mode
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice needs tools; give tools, or leave tool_choice out")
        return None
    if choice == "none":
        return None
    parameters = {tool.function.name: tool.function.parameters for tool in tools}
    schemas = {name: completed_schema(schema) if schema else NO_PARAMETERS for name, schema in parameters.items()}
    forced: dict[str, Any] = schemas if choice == "required" else {}
    if isinstance(choice, NamedTool | NamedFreeform):
        name = _named(tools, choice.function.name).function.name
        forced, is_single = {name: schemas[name]}, True
    return CallableTools(tools, Tools(form, schemas, single=is_single), forced)


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise invalid("tool_choice", f"tool_choice names {name!r:.80}, but tools has no such function; name one of tools")
