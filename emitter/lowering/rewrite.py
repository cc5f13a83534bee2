"""Copy the graph of a function into another module, with some operations replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castiron.emitter.graph.ir import Graph, Module, Value, append, building, scope

# rule(operation, *new operands) -> the value, or tuple of values, that replaces the results of the operation.
Rule = Callable[..., Any]


def rewrite(function: Graph, rules: Mapping[str, Rule], into: Module) -> None:
    """Add a copy of `function` to `into`, in which `rules` replace operations by kind.

    A rule gets the operation and its operands in the copy, and returns the new results.
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
    # Operations whose results are unused are dropped.
    live, live_ops = set(copy.outputs), []
    for op in reversed(copy.ops):
        if live.intersection(op.results):
            live.update(op.operands)
            live_ops.append(op)
    copy.ops = live_ops[::-1]
    into.functions[copy.name] = copy
