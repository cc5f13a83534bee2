"""Parse and validate request bodies.

In the bodies of `/v1/responses` and `/v1/messages`, some lists contain objects of different types.
Those objects are validated later, when the body is converted to a chat request (`parse_one_of`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import from_json

from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.api.schemas import Body, Unsupported

Model = TypeVar("Model", bound=Body)
# Max strings, lists and objects of a body: each takes a microsecond to parse, and delays other requests.
MAX_VALUES = 2**16
_VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]', re.DOTALL)
# Pairs of fields that set the same option.
SYNONYMS = (
    ("repeat_penalty", "repetition_penalty"),
    ("max_completion_tokens", "max_tokens"),
    ("add_special", "add_special_tokens"),
)
# Descriptions of the values of fields that accept more than one type, for error messages.
EXPECTED = {
    "stop": "a string of 1 to 256 characters or a list of at most 16 such strings",
    "prompt": "a string, a list of token ids, or a list of 1 to 128 of either; lists of token ids are not empty",
    "input": "a string, a list of token ids, or a list of 1 to 2048 of either; lists of token ids are not empty",
    "documents": "a list of 1 to 2048 strings or objects with a text",
    "content": "a string or a list of parts of type text",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}


def parse_body(record: type[Model], data: bytes) -> Model:
    """Parse and validate the body of a request; raise ApiError 400 with the first invalid field.

    `record`: class of the body. A body of 4 MB takes up to 0.2 s, so call this outside the event
    loop.
    """
    check_values(data)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body of this request is not valid JSON: {error}") from None
    try:
        body = record.model_validate(value)
    except ValidationError as error:
        raise field_error(error, record.expected) from None
    given = {name: value for name in record.model_fields if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        for mark in record.model_fields[name].metadata:
            if isinstance(mark, Unsupported) and not mark.allows(value):
                raise ApiError(400, f"{name} is not supported by this server; leave it out", name, mark.code)
    for name, other in SYNONYMS:
        if name in given and given[name] != given.get(other, given[name]):
            raise invalid(name, f"{name} and {other} differ; give one of them")
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise invalid("stream_options", "stream_options needs stream to be true; set it, or leave stream_options out")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise unsupported(name, "not supported by this server; leave it out")
    return body


def check_values(data: bytes) -> None:
    """Raise ApiError 400 for a body of more than MAX_VALUES strings, lists and objects."""
    if data.count(b'"') // 2 + data.count(b"[") + data.count(b"{") <= MAX_VALUES:
        return
    # The quick count above includes quotes and brackets inside strings; only the regex counts exactly.
    for count, _ in enumerate(_VALUE.finditer(data)):
        if count == MAX_VALUES:
            raise ApiError(400, f"the body of this request has more than {MAX_VALUES} strings, lists and objects; send less")


def field_error(found: ValidationError, expected: Mapping[str, str] = MappingProxyType({}), path: str = "") -> ApiError:
    """Return the first validation error as an ApiError in OpenAI's words.

    `expected`: descriptions of valid values by field, which take precedence over EXPECTED. `path`:
    path of the field that holds the validated object.
    """
    error, expected = found.errors(include_url=False, include_context=False)[0], {**EXPECTED, **expected}
    parts = [*filter(None, [path]), *map(str, error["loc"])]
    param = ".".join(parts) or None
    if error["type"] == "missing":
        return ApiError(400, f"you must provide {param}", param, "missing_required_parameter")
    for depth, part in enumerate(parts):
        if part in expected:
            param = ".".join(parts[: depth + 1])
            return invalid(param, f"{param} must be {expected[part]}")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    message = error["msg"][0].lower() + error["msg"][1:]
    return invalid(param, f"{param or 'the body'}: {message}")


class OneOf:
    """An annotation of a dict field: OpenAPI describes it as one of `records`.

    `parse_one_of` parses the dict later.
    """

    def __init__(self, *records: type[BaseModel]):
        self.records = records

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(record.__pydantic_core_schema__) for record in self.records]}


class Item(Body):
    """A record for `parse_item`: a null field is the same as a missing one."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})


class TextPart(BaseModel):
    """A text part; other fields, such as those for caching and citations, are ignored."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "input_text", "output_text"]
    text: str


TEXT_TYPES = get_args(TextPart.model_fields["type"].annotation)
# Content of a message: a text or a list of text parts.
Content = str | Annotated[list[Annotated[dict[str, Any], OneOf(TextPart)]], Field(fail_fast=True)]


def parse_item(record: type[Model], value: Any, path: str) -> Model:
    """Validate the value of the field `path`; raise ApiError 400 with the first invalid field."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    try:
        return record.model_validate(value)
    except ValidationError as error:
        raise field_error(error, record.expected, path) from None


def parse_one_of(records: Mapping[str, type[Model]], value: Mapping[str, Any], path: str, default: str | None = None) -> Model:
    """Validate `value` as the record for its `type`, or for `default` if it has no type."""
    name = value.get("type") or default
    if not isinstance(name, str) or name not in records:
        raise unsupported(f"{path}.type", f"{name!r:.60} is not supported by this server; it takes {', '.join(records)}")
    return parse_item(records[name], value, path)


def text_of(content: str | list[dict[str, Any]] | None, path: str) -> str:
    """Return the text of a message's content; raise ApiError 400 for an image or other part."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(text_of_part(part, f"{path}.{index}") for index, part in enumerate(content))


def text_of_part(part: Mapping[str, Any], path: str) -> str:
    """Return the text of a text part; raise ApiError 400 for another part."""
    if (kind := part.get("type")) not in TEXT_TYPES:
        raise unsupported(path, f"this model reads text only; leave out the part of type {kind!r:.60}")
    if not isinstance(text := part.get("text"), str):
        raise invalid(f"{path}.text", f"{path}.text must be a string")
    return text


@contextmanager
def fields_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in an ApiError raised in the `with` block.

    `names`: name in the request's own API, by name of the chat field.
    """
    try:
        yield
    except ApiError as error:
        param = next((own for chat, own in names.items() if f"{error.param}.".startswith(f"{chat}.")), error.param)
        raise ApiError(error.status, error.message, param, error.code) from None
