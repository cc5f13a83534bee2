"""Extract a function or a layer of a model, for `castiron emit --function` and `--layer`."""

from __future__ import annotations

import re
from collections import Counter

from castiron.emitter.graph.ir import Graph, Module, Op, Value, append, current_function, parameter, scope
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.verifier import check
from castiron.pipelines.errors import PipelineError

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def extract_function(module: Module, name: str) -> Module:
    """Return a module with only the function `name` and the parameters that it reads."""
    if name not in module.functions:
        raise PipelineError(f"the model has no function {name!r}; --function takes {', '.join(module.functions)}")
    return module.part(name)


def extract_layer(module: Module, layer: int) -> Module:
    """Return a module with one layer's operations, and values from and to others as arguments."""
    layers = {layer_of(op) for function in module.functions.values() for op in function.ops} - {None}
    if layer not in layers:
        raise PipelineError(f"the model has no layer {layer}; --layer takes 0 to {len(layers) - 1}")
    into = Module(module.name)
    for function in module.functions.values():
        _restrict(module, function, layer, into)
    check(into, LOWERED)
    return into


def layer_of(op: Op) -> int | None:
    """Return the index of an operation's layer; None outside the layers."""
    match = LAYER.search(op.path)
    return int(match[1]) if match else None


def _restrict(module: Module, function: Graph, layer: int, into: Module) -> None:
    block = [op for op in function.ops if layer_of(op) == layer]
    read = {v for op in block for v in op.operands}
    # Operations without operands are copied if the layer reads them: rotary tables, for example, are in the first layer.
    copied = [op for op in function.ops if layer_of(op) == layer or (not op.operands and read.intersection(op.results))]
    defined = {v for op in copied for v in op.results}
    names = _names(function)
    arguments = {names[v]: v for op in block for v in op.operands if v not in defined}
    results = {names[v]: v for op in block for v in op.results if v in names}
    with into.function(function.name, **{name: v.type for name, v in arguments.items()}) as inputs:
        mapped = dict(zip(arguments.values(), inputs))
        for op in copied:
            with scope(op.path):
                if op.kind == "parameter":
                    made: tuple[Value, ...] = (parameter(module.params[op.attrs["name"]]),)
                else:
                    made = append(op.kind, [mapped[v] for v in op.operands], [v.type for v in op.results], op.attrs)
                mapped.update(zip(op.results, made, strict=True))
        storage = {i: mapped[arguments[name]] for i, name in enumerate(results) if name in arguments}
        current_function().returns(storage, **{name: mapped[v] for name, v in results.items()})


def _names(function: Graph) -> dict[Value, str]:
    """Return names for a function's inputs and the results that are used outside their layer."""
    readers: dict[Value, set[int | None]] = {value: {None} for value in function.outputs}
    for op in function.ops:
        for value in op.operands:
            readers.setdefault(value, set()).add(layer_of(op))
    names = {value: value.name for value in function.inputs}
    states, count = dict(names), Counter[str]()
    for op in function.ops:
        for i, value in enumerate(op.results):
            before = _updated(op, i)
            state = states.get(before) if before else None
            if state:
                states[value] = state
            if not op.operands or not readers.get(value, set()) - {layer_of(op)}:
                continue
            path = re.sub(r"\W", "_", op.path) or "value"
            count[path] += not state
            names[value] = state or (path if count[path] == 1 else f"{path}_{count[path]}")
    return names


def _updated(op: Op, result: int) -> Value | None:
    """Return the operand whose buffer `op` overwrites with a result, or None."""
    if op.kind == "kernel":
        kernel = op.attrs["kernel"]
        operand = kernel.in_place.get(list(kernel.results)[result])
        return dict(zip(kernel.tensors, op.operands, strict=True)).get(operand)
    return op.operands[0] if op.kind == "dynamic_update_slice" else None
