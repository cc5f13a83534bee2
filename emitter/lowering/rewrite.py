"""Rewriting a function operation by operation: what all lowerings share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castiron.emitter.ir import Function, Module, Value, append, building, scope

# A rule makes the replacement of one operation, a value or a tuple of them, out of its already replaced operands.
Rule = Callable[..., Any]


def rewrite(function: Function, rules: Mapping[str, Rule], into: Module) -> None:
    """Copy `function` into module `into`, replacing each kind of operation that has a rule; dead operations are dropped."""
    inputs = [Value(v.type, v.name) for v in function.inputs]
    mapped: dict[Value, Any] = dict(zip(function.inputs, inputs))
    length = None if function.length is None else mapped[function.length]
    copy = Function(function.name, inputs, role=function.role, width=function.width, states=function.states, length=length)
    with building(into, copy):
        for op in function.ops:
            with scope(op.path):
                rule = rules.get(op.kind)
                operands = [mapped[v] for v in op.operands]
                results = rule(op, *operands) if rule else append(op.kind, operands, [v.type for v in op.results], op.attrs)
            mapped.update(zip(op.results, results if isinstance(results, tuple) else (results,), strict=True))
    outputs = {name: mapped[v] for name, v in zip(function.output_names, function.outputs)}
    copy.returns({i: mapped[v] for i, v in function.storage.items()}, **outputs)
    drop_dead(copy)
    into.functions[copy.name] = copy


def drop_dead(function: Function) -> None:
    """Remove operations whose results nobody uses."""
    live = set(function.outputs)
    kept = []
    for op in reversed(function.ops):
        if live.intersection(op.results):
            live.update(op.operands)
            kept.append(op)
    function.ops = kept[::-1]
