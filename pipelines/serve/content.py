"""What the messages of the APIs that came after completions are made of: items and parts, each of a kind that it names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError

from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.schemas import Body, Model, bad


class OneOf:
    """Describes an object that is read later, as one of these kinds."""

    def __init__(self, *kinds: type[BaseModel]):
        self.kinds = kinds

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(kind.__pydantic_core_schema__) for kind in self.kinds]}


class Kind(Body):
    """An object as `parsed` reads it: a field that is null is none, whatever its name."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})


class TextPart(BaseModel):
    """What else it carries is about caching, citations and probabilities."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "input_text", "output_text"]
    text: str


TEXTS = get_args(TextPart.model_fields["type"].annotation)
# Text, or its parts.
Content = str | Annotated[list[Annotated[dict[str, Any], OneOf(TextPart)]], Field(fail_fast=True)]


def parsed(kind: type[Model], value: Any, place: str) -> Model:
    """`value`, found in the field `place` of a request, as a `kind`, fields that are null left out; ApiError 400 for one that
    is none."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad(error, kind.wanted_here, place) from None


def one_of(kinds: Mapping[str, type[Model]], value: Mapping[str, Any], place: str, usual: str | None = None) -> Model:
    """As `parsed`, of the kind that its type says; without one it is the `usual`."""
    name = value.get("type") or usual
    if not isinstance(name, str) or name not in kinds:
        raise unsupported(f"{place}.type", f"{name!r:.60} is not supported by this server; it takes {', '.join(kinds)}")
    return parsed(kinds[name], value, place)


def text_of(content: str | list[dict[str, Any]] | None, place: str) -> str:
    """The text of a content that is text alone; ApiError 400 for an image and the like."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part_of(part, f"{place}.{index}") for index, part in enumerate(content))


def part_of(part: Mapping[str, Any], place: str) -> str:
    """The text of one part."""
    kind = part.get("type")
    if kind not in TEXTS:
        raise unsupported(place, f"this model reads text alone, and a part of type {kind!r:.60} is none")
    if not isinstance(text := part.get("text"), str):
        raise ApiError(400, f"{place}.text must be a string", f"{place}.text", "invalid_value")
    return text


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param, "unsupported_parameter")


@contextmanager
def named(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat's field are about that of the other API."""
    try:
        yield
    except ApiError as error:
        param = next((own for chat, own in fields.items() if f"{error.param}.".startswith(f"{chat}.")), error.param)
        raise ApiError(error.status, error.message, param, error.code) from None
