"""Rewriting a module operation by operation: what both lowerings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from castiron.emitter.ir import Function, Module, Op, Value, append, building, scope

# A rule makes the replacement of one operation, a value or a tuple of them, out of its already replaced operands.
Rule = Callable[..., Any]


def rewrite(function: Function, rule_of: Callable[[Op], Rule | None], into: Module, mapped: dict | None = None) -> None:
    """Copy `function` into module `into`, replacing each operation that has a rule; dead operations are dropped.

    `mapped` is filled with what stands for each value of the original, for rules that look beyond their operands.
    """
    inputs = [Value(v.type, v.name) for v in function.inputs]
    copy = Function(function.name, inputs, role=function.role, width=function.width, states=function.states)
    mapped = {} if mapped is None else mapped
    mapped.update(zip(function.inputs, copy.inputs))
    with building(into, copy):
        for op in function.ops:
            with scope(op.path):
                rule = rule_of(op)
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
