"""Rewrite a function operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castiron.emitter.ir import Graph, Module, Value, append, building, scope

# A rule: from an operation and its new operands to the values that replace its results, one or a tuple.
Rule = Callable[..., Any]


def rewrite(function: Graph, rules: Mapping[str, Rule], into: Module) -> None:
    """Copy `function` into module `into`, without unused operations.

    rules: by kind of operation, the rule that replaces it; other operations are copied.
    """
    inputs = [Value(v.type, v.name) for v in function.inputs]
    mapped: dict[Value, Any] = dict(zip(function.inputs, inputs))
    length = None if function.length is None else mapped[function.length]
    copy = Graph(function.name, inputs, entry=function.entry, states=function.states, length=length)
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


def drop_dead(function: Graph) -> None:
    """Remove operations whose results are unused."""
    live = set(function.outputs)
    live_ops = []
    for op in reversed(function.ops):
        if live.intersection(op.results):
            live.update(op.operands)
            live_ops.append(op)
    function.ops = live_ops[::-1]
