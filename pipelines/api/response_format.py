"""The format that a request requires of its answer, such as a JSON schema or a regex."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.api.api_errors import invalid
from castiron.pipelines.api.schemas import CompletionFields, ResponseFormat, StructuredOutputs

# The JSON schema that every object matches.
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class AnswerFormat:
    """The format that an answer must have.

    param: field of the request that sets the format. kind: name of an argument of
    `Tokenizer.grammar`, such as "json_schema" or "regex". value: its value, such as the schema.
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
    if a request sets two of them.
    """
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    found = [
        *_response_format(body.response_format or ResponseFormat(type="text")),
        *_structured(body.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_structured(guided, "guided_"),
        *_given("", json_schema=body.json_schema, grammar=body.grammar, regex=body.regex),
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
        message = f"response_format.json_schema must be given with the type json_schema, and only then; the type is {form.type}"
        raise invalid("response_format.json_schema", message)
    if form.schema_ is not None and (form.json_schema is not None or form.type == "text"):
        message = "response_format.schema goes with the type json_object, or json_schema without a field json_schema; use one"
        raise invalid("response_format.schema", message)
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
