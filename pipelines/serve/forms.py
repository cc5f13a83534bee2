"""What the text of an answer has to be, by whichever field a request says it: OpenAI's, castiron's, vLLM's or llama.cpp's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.schemas import Generating, ResponseFormat, StructuredOutputs

# The schema of any object.
OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Form:
    """`value` is of the `kind` that `Text.grammar` takes; `param` is the field that asks for it."""

    param: str
    kind: str
    value: Any

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema; None for a text that is no JSON."""
        return self.value if self.kind == "json_schema" else None


def asked_form(body: Generating) -> Form | None:
    """The form that a request asks for, None for a text that may be anything; ApiError for one that is none, and for two."""
    found = [
        *_response_format(body.response_format or ResponseFormat(type="text")),
        *_structured(body.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_structured(StructuredOutputs(json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice,
                                       grammar=body.guided_grammar), "guided_"),
        *_of("", json_schema=body.json_schema, grammar=body.grammar, regex=body.regex),
    ]  # fmt: skip
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise ApiError(400, f"{first} and {second} each say what the answer has to be; give one", second, "invalid_value")
    return found[0] if found else None


def _of(place: str, **values: Any) -> Iterator[Form]:
    for kind, value in values.items():
        if value is not None:
            yield Form(f"{place}{kind}", kind, value)


def _response_format(form: ResponseFormat) -> Iterator[Form]:
    if (form.json_schema is None) == (form.type == "json_schema") and form.wanted is None:
        message = f"response_format: json_schema goes with the type json_schema, and the type is {form.type}"
        raise ApiError(400, message, "response_format.json_schema", "invalid_value")
    if form.wanted is not None and (form.json_schema is not None or form.type == "text"):
        message = "response_format: a schema goes with the type json_object, and with json_schema in its place"
        raise ApiError(400, message, "response_format.schema", "invalid_value")
    if form.type != "text":
        wanted = form.json_schema.wanted if form.json_schema else OBJECT if form.wanted is None else form.wanted
        yield Form("response_format", "json_schema", wanted)


def _structured(asked: StructuredOutputs, place: str) -> Iterator[Form]:
    if asked.wanted is not None:
        yield Form(f"{place}json", "json_schema", _read(asked.wanted, f"{place}json"))
    if asked.json_object:
        yield Form(f"{place}json_object", "json_schema", OBJECT)
    if asked.choice is not None:
        yield Form(f"{place}choice", "regex", "|".join(map(re.escape, asked.choice)))
    yield from _of(place, regex=asked.regex, grammar=asked.grammar)


def _read(schema: dict[str, Any] | bool | str, param: str) -> dict[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict | bool):
        raise ApiError(400, f"{param} must be a JSON schema, or the text of one", param, "invalid_value")
    return found
