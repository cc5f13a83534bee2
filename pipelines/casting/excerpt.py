"""Parts of a lowered module as modules of their own: one function, one block of the model, one kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Op, Value, append, current_function, parameter, scope
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.verifier import LOWERED, check
from castiron.pipelines.errors import PipelineError

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def one_function(module: Module, name: str) -> Module:
    """The function of that name with the parameters that it reads; PipelineError for a name that is not there."""
    if name not in module.functions:
        raise PipelineError(f"the model has no function {name!r}; --function takes {', '.join(module.functions)}")
    into = Module(module.name)
    function = into.functions[name] = module.functions[name]
    for op in function.ops:
        if op.kind == "parameter":
            into.add_param(module.params[op.attrs["name"]])
    return into


def one_layer(module: Module, layer: int) -> Module:
    """Every function restricted to the operations of one block, those under the module path `layers.<layer>`.

    What comes in from outside is an argument: inputs of the function and states by their own names, any other value by
    the module path of what makes it. Parameters and constants stay what they are. The results are what the rest of the
    function reads, under the names by which another block takes them. PipelineError for a layer that is not there.
    """
    layers = {layer_of(op) for function in module.functions.values() for op in function.ops} - {None}
    if layer not in layers:
        raise PipelineError(f"the model has no layer {layer}; --layer takes 0 to {len(layers) - 1}")
    into = Module(module.name)
    for function in module.functions.values():
        _restrict(module, function, layer, into)
    check(into, LOWERED)
    return into


def layer_of(op: Op) -> int | None:
    """The number of the block that an operation belongs to, None for one outside of all."""
    found = LAYER.search(op.path)
    return int(found[1]) if found else None


def one_kernel(kernel: Kernel) -> Module:
    """A function `call` that dispatches the kernel once: its tensors by name, index operands (a layer's number) 0."""
    module = Module("kernel")
    with module.function("call", **kernel.tensors) as inputs:
        given = dict(zip(kernel.tensors, inputs, strict=True))
        results = ops.kernel_call(kernel, **given, **dict.fromkeys(kernel.indices, 0))
        storage = {i: given[kernel.in_place[name]] for i, name in enumerate(results) if name in kernel.in_place}
        current_function().returns(storage, **results)
    check(module, LOWERED)
    return module


def _restrict(module: Module, function: Function, layer: int, into: Module) -> None:
    """The operations of a block, and the parameters and constants that they read, as a function of `into`."""
    block = [op for op in function.ops if layer_of(op) == layer]
    read = {v for op in block for v in op.operands}
    # What needs nothing is no argument: the rotary tables are read once, by the first block.
    kept = [op for op in function.ops if layer_of(op) == layer or (not op.operands and read.intersection(op.results))]
    own = {v for op in kept for v in op.results}
    names = _names(function)
    arguments = {names[v]: v for op in block for v in op.operands if v not in own}
    results = {names[v]: v for op in block for v in op.results if v in names}
    with into.function(function.name, **{name: v.type for name, v in arguments.items()}) as inputs:
        mapped = dict(zip(arguments.values(), inputs))
        for op in kept:
            with scope(op.path):
                mapped.update(zip(op.results, _copied(module, op, mapped), strict=True))
        storage = {i: mapped[arguments[name]] for i, name in enumerate(results) if name in arguments}
        current_function().returns(storage, **{name: mapped[v] for name, v in results.items()})


def _copied(module: Module, op: Op, mapped: Mapping[Value, Value]) -> tuple[Value, ...]:
    """The operation once more, in the function being built."""
    if op.kind == "parameter":
        return (parameter(module.params[op.attrs["name"]]),)
    return append(op.kind, [mapped[v] for v in op.operands], [v.type for v in op.results], op.attrs)


def _names(function: Function) -> dict[Value, str]:
    """Names of the inputs, and of the values that go from one block to another or out of all.

    A state keeps the name of the input that it is an update of, others have their module path's.
    """
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
    """The operand in whose storage a result lives."""
    if op.kind == "kernel":
        kernel = op.attrs["kernel"]
        operand = kernel.in_place.get(list(kernel.results)[result])
        return dict(zip(kernel.tensors, op.operands, strict=True)).get(operand)
    return op.operands[0] if op.kind == "dynamic_update_slice" else None
