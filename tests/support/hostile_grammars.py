"""Grammars of a few kilobytes on which llguidance overflows its stack or takes minutes."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from typing import Any

from castiron.pipelines.errors import PipelineError


def _chain(count: int, link: Callable[[str], dict], last: dict) -> dict[str, Any]:
    names = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(count)}
    return {"json_schema": {"$ref": "#/$defs/a0", "$defs": {**names, f"a{count}": last}}}


def references(count: int) -> dict[str, Any]:
    return _chain(count, lambda name: {"$ref": name}, {"type": "null"})


def nested_objects(count: int) -> dict[str, Any]:
    required = lambda name: {"type": "object", "properties": {"x": {"$ref": name}}, "required": ["x"]}
    return _chain(count, required, {"type": "null"})


def all_of(count: int) -> dict[str, Any]:
    return _chain(count, lambda name: {"allOf": [{"$ref": name}, {"type": "object"}]}, {"type": "object"})


def required(count: int) -> dict[str, Any]:
    return {"json_schema": {"type": "object", "required": [f"k{i}" for i in range(count)]}}


def pattern_properties(count: int) -> dict[str, Any]:
    return {"json_schema": {"type": "object", "patternProperties": {f"^k{i}x*$": {"type": "string"} for i in range(count)}}}


def patterns(count: int) -> dict[str, Any]:
    return {"json_schema": {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(count)]}}


def lark_rules(count: int) -> dict[str, Any]:
    return {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(count)) + f'a{count}: "x"\n'}


def lark_terminals(count: int) -> dict[str, Any]:
    """Return a grammar of `count` nested terminals; the mask of its third token takes long."""
    links = "".join(f'A{i}: (A{i + 1} "x{i % 7}")*\n' for i in range(count))
    return {"grammar": f'start: "q" /[ab]/ A0\n{links}A{count}: "y"\n'}


def gbnf_rules(count: int) -> dict[str, Any]:
    return {"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(count)) + f'a{count} ::= "x"\n'}


def gbnf_space(count: int) -> dict[str, Any]:
    return {"grammar": 'root ::= "x"' + "\n" * count}


HOSTILE: dict[str, dict[str, Any]] = {
    "references": references(2500),
    "more references": references(20_000),
    "nested objects": nested_objects(3000),
    "allOf": all_of(1375),
    "required": required(27_500),
    "patternProperties": pattern_properties(3000),
    "patterns": patterns(20),
    "Lark rules": lark_rules(2737),
    "more Lark rules": lark_rules(20_000),
    "Lark terminals": lark_terminals(1000),
    "GBNF rules": gbnf_rules(3000),
    "GBNF white space": gbnf_space(80_000),
    "a long regex": {"regex": "a" * 1_000_001},
}
# What is within the limits; the others are errors.
HONOURED = {"references", "nested objects", "allOf", "Lark rules"}


def fail(how: str):
    """Run in a child process: return a value or fail in the way that `how` names."""
    match how:
        case "value":
            return {"a": [1, None]}
        case "pipeline error":
            raise PipelineError("no such thing")
        case "time":
            while True:
                pass
        case "memory":
            return len(b"x" * (2 << 30))
        case "abort":
            os.abort()
        case "stack":
            faulthandler._sigsegv()
        case _:
            raise ValueError("another error")
