"""The functions that an answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.api.api_errors import ApiError, invalid
from castiron.pipelines.api.generation import ANY_OBJECT, AnswerFormat, CallableFunction, Generation
from castiron.pipelines.text.repairs import completed_schema
from castiron.pipelines.text.tool_calls import Tools
from castiron.pipelines.text.tool_formats import ToolFormat

# The schema of a function without parameters.
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallableTools:
    """The functions that an answer may call.

    forced: {name: schema of the arguments} of the functions of which it must call one.
    """

    functions: Sequence[CallableFunction]
    tools: Tools
    forced: Mapping[str, Any]

    def answer_format(self, form: AnswerFormat | None) -> AnswerFormat | None:
        """Return the format of an answer with calls and with text in the format `form`.

        A JSON schema has no effect if a call is forced; another format then raises ApiError 400.
        """
        tools, forced = self.tools, self.forced
        if forced and form and form.schema is None:
            raise invalid("tool_choice", f"tool_choice requires a call, but {form.param} requires text; leave one of them out")
        # The grammar of an answer in harmony format (gpt-oss) begins with the final channel, after any tool calls.
        if forced or form and form.schema is not None and tools.form.style != "harmony":
            # If the answer must consist of tool calls, it has no text, so the requested format does not apply.
            schema = None if forced or not form else form.schema
            return AnswerFormat("tools", "tools", tools.grammar(forced or tools.schemas, answer=schema, strict=self._strict))
        if not form and (schemas := self._schemas_of_optional_calls()):
            return AnswerFormat("tools", "tools", tools.grammar(schemas, free=True, strict=self._strict))
        return form

    @property
    def _strict(self) -> set[str]:
        return {function.name for function in self.functions if function.is_strict}

    def _schemas_of_optional_calls(self) -> dict[str, Any]:
        # Nothing restricts calls if no function is strict, or if no text in the model's format marks a call.
        strict, form = self._strict, self.tools.form
        if not strict or not form.triggers:
            return {}
        loose = form.style == "json"
        return {name: ANY_OBJECT if loose and name not in strict else schema for name, schema in self.tools.schemas.items()}


def callable_tools(generation: Generation, form: ToolFormat) -> CallableTools | None:
    """Return the functions that the answer may call, or None; ApiError 400 for a wrong choice."""
    functions, called = generation.functions, generation.called
    if not functions:
        if called is not None or generation.tool_choice == "required":
            raise invalid("tool_choice", "tool_choice needs tools; give tools, or leave tool_choice out")
        return None
    if generation.tool_choice == "none":
        return None
    schemas = {each.name: completed_schema(each.parameters) if each.parameters else NO_PARAMETERS for each in functions}
    if called is None:
        forced = schemas if generation.tool_choice == "required" else {}
    elif called in schemas:
        forced = {called: schemas[called]}
    else:
        raise unknown_function(called)
    return CallableTools(functions, Tools(form, schemas, single=generation.has_single_call or called is not None), forced)


def unknown_function(name: str) -> ApiError:
    return invalid("tool_choice", f"tool_choice names {name!r:.80}, but tools has no such function; name one of tools")
