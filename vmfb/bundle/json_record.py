"""Conversion of frozen dataclasses to JSON and back, with a check of every field.

An unknown, missing or mistyped field is a RecordError.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

Json = Any
_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
}  # fmt: skip


class RecordError(Exception):
    """Raised for JSON that does not match a dataclass; the message has the field and value."""


def to_json(value: Any) -> Json:
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: Any, value: Json, path: str = "") -> Any:
    """Convert a JSON value to a Python type; raise RecordError for the first wrong field.

    kind: a dataclass, tuple[X, ...], dict[str, X], X | None, a scalar type or Any.
    path: where `value` is in the document, for the error message.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path)
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return from_json(kind, value, path)
    if origin is tuple:
        items = _expect(list, value, path)
        return tuple(from_json(arguments[0], item, f"{path}[{n}]") for n, item in enumerate(items))
    if origin is dict:
        pairs = _expect(dict, value, path)
        return {key: from_json(arguments[1], item, f"{path}.{short(key)}") for key, item in pairs.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RecordError(f"{path} is too large for a 64-bit float; use a number below 1.8e308") from None
    return _expect(kind, value, path)


def _dataclass(kind: Any, value: Json, path: str) -> Any:
    pairs, hints, where = _expect(dict, value, path), typing.get_type_hints(kind), f"{path}." if path else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(pairs) - set(fields)):
        raise RecordError(f"unknown field: {where}{short(unknown[0])}")
    found = {}
    for name, field in fields.items():
        if name in pairs:
            found[name] = from_json(hints[name], pairs[name], f"{where}{name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise RecordError(f"missing field: {where}{name}")
    return kind(**found)


def _expect(kind: type, value: Json, path: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{path or 'the value'} is {short(repr(value))}; it must be {_JSON_NAMES[kind]}")
    return value


def short(text: str, limit: int = 60) -> str:
    """Cut `text` to `limit` characters for an error message, and escape unprintable characters."""
    cut = text if len(text) < limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
