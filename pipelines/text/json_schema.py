"""What a function's JSON schema allows, and the values that texts of arguments stand for."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import ge, gt, le, lt
from typing import Any
from urllib.parse import unquote

# A value of each JSON type. A number that is no integer tells the two types apart.
EXAMPLES = {"string": "", "integer": 0, "number": 0.5, "boolean": False, "null": None, "array": [], "object": {}}
# Names of Python's types, which schemas made from Python functions contain.
PYTHON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
# Keywords that don't constrain values.
ANNOTATIONS = ("description", "title", "examples", "default", "$comment", "$schema", "$id")
# Keywords whose value is an object of schemas for "$ref", and all keywords that a value need not match.
DEFINITIONS = ("$defs", "definitions")
UNENFORCED = {*ANNOTATIONS, *DEFINITIONS}
# Keywords from which `Schema.members` computes all that they require of an object.
OF_MEMBERS = {*UNENFORCED, "type", "properties", "required", "additionalProperties", "$ref"}
# The schemas that any value and no value match. Objects, because a recursion over schemas ends at those that it has seen.
ANY: dict[str, Any] = {}
NOTHING: dict[str, Any] = {"enum": []}
TYPES = {"string": str, "number": int | float, "boolean": bool, "null": type(None), "array": list, "object": dict}
# Keywords that limit a value of a type, or its length if it is not a number.
LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", ge), "exclusiveMinimum": ("number", gt), "minLength": ("string", ge), "minItems": ("array", ge),
    "maximum": ("number", le), "exclusiveMaximum": ("number", lt), "maxLength": ("string", le), "maxItems": ("array", le),
    "minProperties": ("object", ge), "maxProperties": ("object", le),
}  # fmt: skip
# Values as Python writes them, which some chat templates do too, and as models write them otherwise.
PYTHON_VALUES = {"True": True, "False": False, "None": None}
SPELLINGS = {"true": True, "1": True, "false": False, "0": False, "null": None, "none": None}


@dataclass(frozen=True)
class Members:
    """The properties of an object that matches a schema, and the items of such a list.

    rest: schema of values with other keys; None if the schema only lists properties. is_exact:
    whether nothing else in the schema constrains the object.
    """

    properties: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    rest: Any = True
    items: Any = True
    is_exact: bool = True

    def _joined(self, other: Members, keyword: str) -> dict[str, Any]:
        mine, others = self.properties, other.properties
        shared = {key: {keyword: [mine[key], others[key]]} for key in mine if key in others}
        return {**mine, **others, **shared}

    def _joined_items(self, other: Members, keyword: str) -> Any:
        items = [each for each in (self.items, other.items) if each is not True]
        return {keyword: items} if len(items) > 1 else next(iter(items), True)

    def with_all_of(self, other: Members) -> Members:
        rest = other.rest if self.rest in (None, True) else self.rest
        items, is_exact = self._joined_items(other, "allOf"), self.is_exact and other.is_exact
        return Members(self._joined(other, "allOf"), self.required | other.required, rest, items, is_exact)

    def or_any_of(self, other: Members) -> Members:
        rest = self.rest if self.rest == other.rest else None
        items = self._joined_items(other, "anyOf")
        return Members(self._joined(other, "anyOf"), self.required & other.required, rest, items, False)


class Schema:
    """The JSON schema of a function's parameters."""

    def __init__(self, root: Any):
        self.root = root if isinstance(root, dict) else ANY

    @cached_property
    def arguments(self) -> Members:
        """The function's arguments."""
        return self.members(self.root)

    def argument(self, key: str, part: Any = None) -> Any:
        """Return the schema of an argument, or of a value in an object of a `part`; else `ANY`."""
        members = self.arguments if part is None else self.members(part)
        value = members.properties.get(key, members.rest)
        return value if isinstance(value, dict) else ANY

    def target(self, ref: Any) -> Any:
        """Return the schema that a "$ref" leads to; None if it is not in this schema."""
        found: Any = self.root if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else None
        for part in unquote(ref).split("/")[1:] if found is not None else ():
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
            else:
                found = found.get(part) if isinstance(found, dict) else None
        return found

    def types(self, schema: Any) -> list[str]:
        """Return the JSON types that a part of this schema allows, keys of `EXAMPLES`."""
        return [kind for kind, value in EXAMPLES.items() if self.allows(value, schema, by_type=True)]

    def members(self, schema: Any) -> Members:
        """Return the keys and values of objects that match a part of this schema."""
        seen: set[int] = set()

        def walk(schema: Any) -> Members:
            if not isinstance(schema, dict) or id(schema) in seen:
                return Members(is_exact=False)
            seen.add(id(schema))
            own, required = schema.get("properties", {}), schema.get("required", [])
            valid = isinstance(own, dict) and isinstance(required, list)
            properties = dict(own) if isinstance(own, dict) else {}
            names = frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()
            rest = schema.get("additionalProperties", None if "properties" in schema else True)
            items = schema.get("items", True)
            found = Members(properties, names, rest, items, valid and not schema.keys() - OF_MEMBERS)
            every = [self.target(schema["$ref"])] if "$ref" in schema else []
            found = reduce(Members.with_all_of, map(walk, every + _list(schema.get("allOf"))), found)
            for options in filter(None, (_list(schema.get("anyOf")), _list(schema.get("oneOf")))):
                found = found.with_all_of(reduce(Members.or_any_of, map(walk, options)))
            return found

        found = walk(schema)
        unlisted = {name: ANY for name in sorted(found.required - found.properties.keys())}
        return replace(found, properties={**found.properties, **unlisted})

    def allows(self, value: Any, schema: Any, by_type: bool = False) -> bool:
        """Return whether a value, by_type only its JSON type, matches a part of this schema.

        Regular expressions and keywords such as `dependentRequired` are not checked.
        """
        # By schema and value. A "$ref" that leads back to itself for the same value matches nothing.
        found: dict[tuple[int, int], bool] = {}

        def matches(value: Any, schema: Any) -> bool:
            if not isinstance(schema, dict):
                return schema is not False
            key = id(schema), id(value)
            if key not in found:
                found[key] = False
                found[key] = all(holds(value, keyword, argument, schema) for keyword, argument in schema.items())
            return found[key]

        def holds(value: Any, keyword: str, argument: Any, schema: dict[str, Any]) -> bool:
            try:
                match keyword:
                    case "$ref":
                        target = self.target(argument)
                        return target is None or matches(value, target)
                    case "type":
                        return any(_is(value, kind) for kind in ([argument] if isinstance(argument, str) else argument))
                    case "enum" | "const":
                        values = argument if keyword == "enum" else [argument]
                        return any(type_of(each) == type_of(value) if by_type else _equal(each, value) for each in values)
                    case "allOf":
                        return all(matches(value, each) for each in argument)
                    case "anyOf" | "oneOf":
                        count = sum(matches(value, each) for each in argument)
                        return count == 1 if keyword == "oneOf" and not by_type else count > 0
                return by_type or _within(value, keyword, argument, schema, matches)
            except (TypeError, ValueError, AttributeError, ArithmeticError):
                return True

        try:
            return matches(value, schema)
        except RecursionError:
            return True

    def value_of(self, text: str, schema: Any, unquoted: bool = True, is_python: bool = False) -> Any:
        """Return the value for which a call's text of an argument stands.

        A text that is the JSON of another type that `schema` allows has that type; otherwise it is
        a string if `schema` allows one. is_python: lists and objects are Python's.
        """
        readings = [*_readings(text, unquoted, is_python)]
        for by_type in (False, True):
            for value in readings:
                if self.allows(value, schema, by_type):
                    return value
        return readings[0]


def is_schema(value: Any) -> bool:
    """Return whether a value is a Boolean, or an object whose `type` has known names."""
    types = value.get("type", []) if isinstance(value, dict) else value
    return isinstance(types, bool) or all(kind in EXAMPLES for kind in ([types] if isinstance(types, str) else types or ()))


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return next(kind for kind in EXAMPLES if _is(value, kind))


def _is(value: Any, kind: str) -> bool:
    kind = PYTHON_NAMES.get(kind, kind)
    if isinstance(value, bool):
        return kind == "boolean" or kind not in EXAMPLES
    if kind == "integer":
        return isinstance(value, int) or isinstance(value, float) and value.is_integer()
    return kind not in TYPES or isinstance(value, TYPES[kind])


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _within(value: Any, keyword: str, argument: Any, schema: dict[str, Any], matches: Callable[[Any, Any], bool]) -> bool:
    """Return whether a value matches a keyword of its schema that depends on more than its type."""
    if keyword == "not":
        return not matches(value, argument)
    if (limit := LIMITS.get(keyword)) and _is(value, limit[0]) and not isinstance(argument, bool):
        return limit[1](value if limit[0] == "number" else len(value), argument)
    match keyword:
        case "multipleOf" if _is(value, "number"):
            is_float = isinstance(value, float) or isinstance(argument, float)
            return (value / argument).is_integer() if is_float else value % argument == 0
        case "required" if isinstance(value, dict):
            return all(name in value for name in argument)
        case "properties" if isinstance(value, dict):
            return all(matches(value[key], each) for key, each in argument.items() if key in value)
        case "additionalProperties" if isinstance(value, dict) and "patternProperties" not in schema:
            return all(matches(value[key], argument) for key in value if key not in schema.get("properties", {}))
        case "prefixItems" if isinstance(value, list):
            return all(map(matches, value, argument))
        case "items" if isinstance(value, list) and not isinstance(argument, list):
            return all(matches(each, argument) for each in value[len(schema.get("prefixItems", ())) :])
    return True


def _readings(text: str, unquoted: bool, is_python: bool) -> Iterator[Any]:
    """Yield the values that a text may stand for, beginning with the most probable."""
    bare = text.strip()
    parsed, literal = [*_parsed(bare)], list[Any]()
    with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        literal = _parsed(json.dumps(ast.literal_eval(bare)))
    if text == bare:
        yield from (value for value in parsed if not isinstance(value, str))
        if text in PYTHON_VALUES:
            yield PYTHON_VALUES[text]
        yield from (value for value in literal if is_python and isinstance(value, list | dict))
    if unquoted:
        yield text
    yield from parsed
    yield from literal
    with contextlib.suppress(ValueError):
        # A number with leading zeros, which neither JSON nor Python allows.
        yield from _parsed(str(int(bare)))
    if bare.lower() in SPELLINGS:
        yield SPELLINGS[bare.lower()]
    yield text


def _parsed(text: str) -> list[Any]:
    """Return [the value of a JSON text]; [] if it is not JSON, or a number is not finite."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return [value]
    return []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
