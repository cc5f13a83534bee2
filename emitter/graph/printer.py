"""Print modules as MLIR text; equal modules give equal bytes on every machine.

Weights are "arguments" of the functions that read them, which gives only StableHLO without kernels,
or "parameters" for IREE: globals of the scope "model". Then `iree.abi.output` ties states to their
buffers, and kernels are called with `flow.dispatch`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from castiron.emitter.graph.ir import Graph, Module, Op, Param, Value
from castiron.emitter.graph.stablehlo import LOWERED, Table, quoted
from castiron.emitter.graph.types import EmitError

SCOPE = "model"


def print_module(module: Module, weights: str = "parameters") -> str:
    """Return the MLIR text of a lowered module; `weights` is "parameters" or "arguments"."""
    if weights not in ("parameters", "arguments"):
        raise EmitError(f'unknown form of weights: {weights!r}; use "parameters" or "arguments"')
    lines = [f"module @{module.name} {{"]
    if weights == "parameters":
        for param in sorted(module.params.values(), key=lambda p: p.name):
            name = quoted(param.name)
            lines.append(f'util.global private @{name} = #flow.parameter.named<"{SCOPE}"::{name}> : {param.type}')
    else:
        for param in sorted(filter(_is_table, module.params.values()), key=lambda p: p.name):
            op = Op("constant", (), (Value(param.type),), {"value": param.source.pack().reshape(param.type.shape)}, "")
            body = [f"    %0 = {LOWERED[op.kind].text(op, [])}", f"    return %0 : {param.type}"]
            lines += [f"  func.func private @{quoted(param.name)}() -> {param.type} {{", *body, "  }"]
    lines += [kernel.text.rstrip() for _, kernel in sorted(_kernels(module).items())]
    for function in module.functions.values():
        lines += _function(module, function, weights)
    return "\n".join([*lines, "}", ""])


def _is_table(param: Param) -> bool:
    return not param.source.tensors


def print_operations(module: Module, table: Table) -> str:
    """Return the MLIR text of a module before lowering, with the table `layers.operations.LAYERS`.

    MLIR's tools read layer operations only with --allow-unregistered-dialect.
    """
    lines = [line for f in module.functions.values() for line in _function(module, f, "parameters", table)]
    return "\n".join([f"module @{module.name} {{", *lines, "}", ""])


def _kernels(module: Module) -> dict[str, Any]:
    kernels: dict[str, Any] = {}
    for function in module.functions.values():
        for op in function.ops:
            if op.kind == "kernel":
                kernel = op.attrs["kernel"]
                if kernels.setdefault(kernel.name, kernel).text != kernel.text:
                    raise EmitError(f"two different kernels are named {kernel.name!r}; rename one kernel")
    return kernels


def _function(module: Module, function: Graph, weights: str, table: Table = LOWERED) -> list[str]:
    # Inputs have their names, and the results of operation n are called %n, or %n#0, %n#1 and so on.
    names, count = {v: f"%{v.name}" for v in function.inputs}, 0
    taken = {value.name for value in function.inputs}
    arguments = []
    for value in function.inputs:
        tied = [i for i, v in function.storage.items() if v is value and weights == "parameters"]
        attr = f" {{iree.abi.output = {tied[0]} : index}}" if tied else ""
        arguments.append(f"%{value.name}: {value.type}{attr}")
    calls = [op for op in function.ops if op.kind == "kernel"]
    indices = sorted({(op.attrs["kernel"].index_type, i) for op in calls for i in op.attrs["indices"].values()})
    body = [f"    %{type_}_{i} = arith.constant {i} : {type_}" for type_, i in indices]
    for op in function.ops:
        if op.kind == "parameter" and weights == "arguments" and not _is_table(module.params[op.attrs["name"]]):
            name = argument_name(op.attrs["name"], taken)
            taken.add(name)
            names[op.results[0]] = f"%{name}"
            arguments.append(f"%{name}: {op.results[0].type}")
            continue
        if op.kind not in table:
            raise EmitError(f"{op.kind} in {op.path or 'the module'} is not a StableHLO operation; lower the module first")
        text = table[op.kind].text(op, [names[v] for v in op.operands])
        if op.kind == "parameter" and weights == "arguments":
            text = f"func.call @{quoted(op.attrs['name'])}() : () -> {op.results[0].type}"
        many = len(op.results) > 1
        names |= {value: f"%{count}#{i}" if many else f"%{count}" for i, value in enumerate(op.results)}
        results = f"%{count}:{len(op.results)}" if many else f"%{count}"
        count += 1
        body.append(f'    {results} = {text} loc("{op.path or function.name}")')
    types = ", ".join(str(v.type) for v in function.outputs)
    body.append(f"    return {', '.join(names[v] for v in function.outputs)} : {types}")
    return [f"  func.func public @{function.name}({', '.join(arguments)}) -> ({types}) {{", *body, "  }"]


def argument_name(param: str, taken: Collection[str] = ()) -> str:
    """Return an SSA name for the weight `param` that is valid in MLIR and is not in `taken`."""
    name = re.sub(r"[^\w.$-]", "_", param, flags=re.ASCII)
    # Other names begin with a digit (results), an underscore (values in regions), index_ or i32_ (operands of kernels).
    if not name[:1].isalpha() or name.startswith(("index_", "i32_")):
        name = f"weight.{name}"
    unlike, count = name, 1
    while unlike in taken:
        count += 1
        unlike = f"{name}-{count}"
    return unlike
