"""Parse and validate request bodies, whose classes are derived from `Body`."""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, from_json

from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.terminal import print_message

# Prefix of the parts of an error's path that are types of records, not fields.
TAG = "type="
# Max unknown fields of an object that are ignored; more would only cost time.
MAX_UNKNOWN = 100


def is_allowed(value: Any, allowed: Iterable[Any]) -> bool:
    """Return whether `value` is one of `allowed`, or a function among them accepts it."""
    # 1 and 1.0 are the same number in JSON, but 0 and False differ.
    is_same = lambda other: value == other and isinstance(value, bool) == isinstance(other, bool)
    return any(each(value) if callable(each) else is_same(each) for each in allowed)


def is_one_or_more(value: Any) -> bool:
    return type(value) in (int, float) and value >= 1


class Unsupported:
    """An annotation of a field that may only be null or one of `values`, which change nothing.

    A function among them returns whether it accepts a value.
    """

    def __init__(self, *values: Any, code: str = "unsupported_parameter"):
        self.values, self.code = values, code

    def _check(self, value: Any) -> Any:
        if is_allowed(value, self.values):
            return value
        raise PydanticCustomError(self.code, "this field is not supported by this server; leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {} if any(map(callable, self.values)) else {"enum": [None, *self.values]}


class ByType:
    """An annotation of a union of classes, chosen by the field `type`, or `default` without it."""

    def __init__(self, default: str | None = None):
        self.default = default

    def _tag(self, value: Any) -> str:
        return TAG + str((value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or self.default)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {
            TAG + name: handler.generate_schema(record)
            for record in get_args(source) or (source,)
            for name in get_args(record.model_fields["type"].annotation)
            if name
        }
        return core_schema.tagged_union_schema(choices, self._tag)


class Body(BaseModel):
    """A JSON object in a request. A field that is null counts as left out; 1.0 is an integer.

    The validation context is a set that gets the names of unknown fields, or None to reject them.
    expected: {field: description of its valid values}, for error messages.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )
    # Descriptions of the values of fields, for error messages.
    expected: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Remove null and unknown fields; one unknown field stays if it is to be an error."""
        if not isinstance(value, dict):
            return value
        known, integers = cls._names(), cls._integers()
        # JSON schema's integers include 1.0.
        integral = {name for name in integers & value.keys() if isinstance(value[name], float) and value[name].is_integer()}
        if known.issuperset(value) and None not in value.values() and not integral:
            return value
        given = {name: int(each) if name in integral else each for name, each in value.items() if each is not None}
        unknown = [name for name in given if name not in known]
        reported = unknown[:1]
        if info.context is not None and cls.model_config["extra"] == "forbid":
            if len(unknown) > MAX_UNKNOWN:
                limits = {"count": len(unknown), "limit": MAX_UNKNOWN}
                raise PydanticCustomError(
                    "too_many",
                    "the object has too many unknown fields: {count} (limit: {limit}); remove the unknown fields",
                    limits,
                )
            info.context.update(unknown)
            reported = []
        return {name: each for name, each in given.items() if name in known or name in reported}

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @cache
    def _integers(cls) -> frozenset[str]:
        """The names of the fields that are integers."""
        fields = cls.model_fields.items()
        return frozenset(name for name, field in fields if int in (field.annotation, *get_args(field.annotation)))


Model = TypeVar("Model", bound=Body)
# Max strings, lists and objects of a body: each takes a microsecond to parse, and delays other requests.
MAX_VALUES = 2**16
_VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]', re.DOTALL)
# Pairs of fields that set the same option.
SYNONYMS = (
    ("repeat_penalty", "repetition_penalty"),
    ("max_completion_tokens", "max_tokens"),
    ("n_predict", "max_tokens"),
    ("n_cmpl", "n"),
    ("add_special", "add_special_tokens"),
)
# Names of ignored fields that were logged. Their number is limited, because clients choose the names.
_logged: set[str] = set()
MAX_LOGGED = 1000
# Descriptions of the values of fields that accept more than one type, for error messages.
EXPECTED = {
    "stop": "a string of at most 256 characters or a list of at most 16 such strings",
    "prompt": "a string, a list of token ids, or a list of 1 to 128 of either; lists of token ids are not empty",
    "input": "a string, a list of token ids, or a list of 1 to 2048 of either; lists of token ids are not empty",
    "documents": "a list of 1 to 2048 strings or objects with a text",
    "logit_bias": "an object or a list of at most 1024 items: token ids or texts of 1 to 256 characters, each with -100 to 100",
    "content": "a string or a list of parts of type text",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}


def parse_body(record: type[Model], data: bytes, strict: bool = False) -> Model:
    """Parse and validate the body of a request; ApiError 400 for the first invalid field.

    strict: whether an unknown field is an error. 4 MB take up to 0.2 s.
    """
    check_values(data)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body of this request is not valid JSON: {error}; send one JSON object") from None
    ignored = None if strict else set[str]()
    body = parse_record(record, value, ignored)
    log_ignored(ignored or ())
    for name, other in SYNONYMS:
        if len({getattr(body, name, None), getattr(body, other, None)} - {None, -1}) > 1:
            raise invalid(name, f"{name} and {other} differ; give one of them")
    if getattr(body, "stream_options", None) and not body.stream:
        raise invalid("stream_options", "stream_options needs stream to be true; set it, or leave stream_options out")
    return body


def check_values(data: bytes) -> None:
    """Raise ApiError 400 if a body has more than MAX_VALUES strings, lists and objects in total."""
    if data.count(b'"') // 2 + data.count(b"[") + data.count(b"{") <= MAX_VALUES:
        return
    # The quick count above includes quotes and brackets inside strings; only the regex counts exactly.
    for count, _ in enumerate(_VALUE.finditer(data)):
        if count == MAX_VALUES:
            raise ApiError(
                400, f"the body of this request has more than {MAX_VALUES} strings, lists and objects; send fewer of them"
            )


def log_ignored(names: Iterable[str]) -> None:
    """Log the names of fields that have no effect: each name once, and at most MAX_LOGGED names."""
    for name in names:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            print_message(f"ignored a request field: {name!a:.60} has no effect; --strict-requests rejects such requests")


def parse_record(record: type[Model], value: Any, ignored: set[str] | None = None) -> Model:
    """Convert a JSON value; ApiError 400 for an invalid field.

    ignored: gets the names of unknown fields; None to make them an error.
    """
    try:
        return record.model_validate(value, context=ignored)
    except ValidationError as found:
        error, expected = found.errors(include_url=False)[0], {**EXPECTED, **record.expected}
    kind, parts = error["type"], [part for part in map(str, error["loc"]) if not part.startswith(TAG)]
    param = ".".join(parts) or None
    if kind == "missing":
        raise ApiError(400, f"you must provide {param}", param, "missing_required_parameter")
    if kind == "union_tag_invalid":
        given = error["input"].get("type") if isinstance(error["input"], dict) else error["input"]
        takes = error["ctx"]["expected_tags"].replace(TAG, "").replace("'", "")
        raise unsupported(f"{param}.type", f"{given!r:.60} is not supported by this server; it takes {takes}")
    for depth, part in enumerate(parts):
        # After the name of a list comes the index of its invalid value, and a type it may have.
        after = parts[depth + 1 :]
        if part in expected and ("str" in after or not "".join(after[:1]).isdigit()):
            param = ".".join(parts[: depth + 1])
            raise invalid(param, f"{param} must be {expected[part]}")
    if kind == "extra_forbidden":
        raise ApiError(400, f"Unrecognized request argument supplied: {param}; leave it out", param, "unknown_parameter")
    if "unsupported" in kind:
        raise ApiError(400, f"{param} is not supported by this server; leave it out", param, kind)
    name = param or "the body"
    if kind in ("dict_type", "model_type"):
        raise invalid(param, f"{name} must be a JSON object")
    if kind == "too_short" and isinstance(error["input"], list):
        raise invalid(param, f"{name} has {len(error['input'])} items; send at least {error['ctx']['min_length']}")
    if (wanted := error["msg"].removeprefix("Input should be ")) != error["msg"]:
        raise invalid(param, f"{name} is {json.dumps(error['input'], default=str):.60}; it must be {wanted}")
    raise invalid(param, f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}")
