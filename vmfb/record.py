"""Frozen dataclasses to JSON and back, strictly.

A field too many, too few or of another type is refused by its path.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

Json = Any


class RecordError(Exception):
    """JSON that is not of the record's form: where, and what was there instead."""


def to_json(value: Any) -> Json:
    """Dataclasses, tuples and dicts as what `json.dumps` takes."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: Any, value: Json, path: str = "") -> Any:
    """`value` as a `kind`: a dataclass, `tuple[X, ...]`, `dict[str, X]`, `X | None`, str, int, float, bool or Any.

    A dataclass field without a default must be there; RecordError names the first field that does not fit.
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
        return _float(value, path)
    return _expect(kind, value, path)


def _float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RecordError(f"{path} is larger than any number of 64 bits") from None


def _dataclass(kind: Any, value: Json, path: str) -> Any:
    pairs = _expect(dict, value, path)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    where = f"{path}." if path else ""
    if unknown := sorted(set(pairs) - set(fields)):
        raise RecordError(f"{where}{short(unknown[0])} is not a field that this version knows")
    found = {}
    for name, field in fields.items():
        if name in pairs:
            found[name] = from_json(hints[name], pairs[name], f"{where}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}{name} is missing")
    return kind(**found)


_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _expect(kind: type, value: Json, path: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{path or 'the whole'} is {short(repr(value))}, not {_WORDS[kind]}")
    return value


def short(text: str, most: int = 60) -> str:
    """As much as an error quotes, what does not print as in a repr."""
    cut = text if len(text) < most else text[:most] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
