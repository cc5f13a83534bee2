"""The graph as MLIR text: one table of operations; equal graphs print equal bytes on every machine.

Two dialects of the surroundings, one of the operations. `weights="arguments"` is pure StableHLO: parameters are
trailing function arguments of their own names, and any StableHLO compiler takes it. `weights="parameters"` is for IREE:
parameters are globals read from the parameter scope "model", outputs with storage carry `iree.abi.output`, kernels are
dispatched. A graph that is not lowered yet prints too (`print_layers`), for people to read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from castiron.emitter.ir import Function, Module, Op
from castiron.emitter.ops import ARITHMETIC, BITWISE, FLOAT_UNARY
from castiron.emitter.step import Weight
from castiron.emitter.types import F32, I32, DType, EmitError, TensorType, to_f32

SCOPE = "model"


def print_module(module: Module, weights: str = "parameters") -> str:
    """The whole module as text. `weights` is "parameters" (for IREE) or "arguments" (pure StableHLO)."""
    if weights not in ("parameters", "arguments"):
        raise EmitError(f'weights are printed as "parameters" or "arguments", not {weights!r}')
    lines = [f"module @{module.name} {{"]
    if weights == "parameters":
        for param in sorted(module.params.values(), key=lambda p: p.name):
            name = _quoted(param.name)
            lines.append(f'util.global private @{name} = #flow.parameter.named<"{SCOPE}"::{name}> : {param.type}')
        lines += [kernel.text.rstrip() for _, kernel in sorted(_kernels(module).items())]
    for function in module.functions.values():
        lines += _function(module, function, weights)
    return "\n".join([*lines, "}", ""])


def print_layers(module: Module) -> str:
    """A module of layer operations as text: those are `"castiron.linear"(...) {...}`, MLIR's generic form of an operation.

    No compiler knows them; MLIR's own tools read them with --allow-unregistered-dialect.
    """
    lines = [line for f in module.functions.values() for line in _function(module, f, "parameters", _layer)]
    return "\n".join([f"module @{module.name} {{", *lines, "}", ""])


def argument_params(module: Module, function: Function) -> list[str]:
    """Names of the parameters that follow the inputs when weights are arguments, in order."""
    return [op.attrs["name"] for op in function.ops if op.kind == "parameter"]


def _kernels(module: Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for function in module.functions.values():
        for op in function.ops:
            if op.kind == "kernel":
                kernel = op.attrs["kernel"]
                if found.setdefault(kernel.name, kernel).text != kernel.text:
                    raise EmitError(f"two different kernels are called {kernel.name!r}; derive names from all parameters")
    return found


class _Names(dict):
    """SSA names of a function's values: inputs by name, results numbered in order."""

    def __init__(self, function: Function) -> None:
        super().__init__({v: f"%{v.name}" for v in function.inputs})
        self.count = 0

    def define(self, op: Op) -> str:
        """Name the results of `op`; returns the left-hand side of its line."""
        name, many = f"%{self.count}", len(op.results) > 1
        self.count += 1
        for i, value in enumerate(op.results):
            self[value] = f"{name}#{i}" if many else name
        return f"{name}:{len(op.results)}" if many else name


def _refuse(op: Op, _args: list[str]) -> str:
    raise EmitError(f"{op.kind} in {op.path or 'the module'} is no StableHLO operation; lower the module first")


def _function(module: Module, function: Function, weights: str, other: Callable[[Op, list[str]], str] = _refuse) -> list[str]:
    """The lines of a function; `other` prints operations that the table does not have."""
    names, taken = _Names(function), {value.name for value in function.inputs}
    arguments = []
    for value in function.inputs:
        tied = [i for i, v in function.storage.items() if v is value and weights == "parameters"]
        attr = f" {{iree.abi.output = {tied[0]} : index}}" if tied else ""
        arguments.append(f"%{value.name}: {value.type}{attr}")
    indices = sorted({i for op in function.ops if op.kind == "kernel" for i in op.attrs["indices"].values()})
    body = [f"    %index_{i} = arith.constant {i} : index" for i in indices]
    for op in function.ops:
        if op.kind == "parameter" and weights == "arguments":
            name = argument_name(op.attrs["name"], taken)
            taken.add(name)
            names[op.results[0]] = f"%{name}"
            arguments.append(f"%{name}: {op.results[0].type}")
            continue
        text = _PRINT.get(op.kind, other)(op, [names[v] for v in op.operands])
        body.append(f'    {names.define(op)} = {text} loc("{op.path or function.name}")')
    types = ", ".join(str(v.type) for v in function.outputs)
    body.append(f"    return {', '.join(names[v] for v in function.outputs)} : {types}")
    return [f"  func.func public @{function.name}({', '.join(arguments)}) -> ({types}) {{", *body, "  }"]


def argument_name(param: str, taken: Collection[str] = ()) -> str:
    """The parameter's name as an SSA name (`model.layers.0.mlp.up_proj.weight` is one), unlike all of `taken`."""
    name = re.sub(r"[^\w.$-]", "_", param, flags=re.ASCII)
    # A name that begins with a digit would be a result's, one with an underscore a region's, index_N a kernel's.
    if not name[:1].isalpha() or name.startswith("index_"):
        name = f"weight.{name}"
    unlike, count = name, 1
    while unlike in taken:
        count += 1
        unlike = f"{name}-{count}"
    return unlike


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _types(op: Op) -> str:
    result = ", ".join(str(v.type) for v in op.results)
    operands = ", ".join(str(v.type) for v in op.operands)
    return f"({operands}) -> {result if len(op.results) == 1 else f'({result})'}"


def number(value, dtype: DType) -> str:
    """One element as MLIR reads it back to the same bits."""
    if dtype.kind == "bool":
        return "true" if value else "false"
    if dtype.kind != "float":
        return str(int(value))
    wide = float(to_f32(np.asarray(value), dtype))
    if not np.isfinite(wide):
        bits = np.asarray(value).view(np.uint32 if dtype is F32 else np.uint16)
        return f"0x{int(bits):0{dtype.bits // 4}X}"
    # 9 significant digits identify a float32; bf16 and f16 values are float32 values too.
    mantissa, exponent = f"{wide:.8e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _dense(array: np.ndarray, dtype: DType) -> str:
    if array.ndim == 0:
        return number(array, dtype)
    return "[" + ", ".join(_dense(row, dtype) for row in array) + "]"


def _constant(op: Op, _args: list[str]) -> str:
    type_: TensorType = op.results[0].type
    return f"stablehlo.constant dense<{_dense(op.attrs['value'], type_.dtype)}> : {type_}"


def _elementwise(op: Op, args: list[str]) -> str:
    return f"stablehlo.{op.kind} {', '.join(args)} : {op.results[0].type}"


def _typed(op: Op, args: list[str]) -> str:
    return f"stablehlo.{op.kind} {', '.join(args)} : {_types(op)}"


def _compare(op: Op, args: list[str]) -> str:
    sort = {"float": "FLOAT", "int": "SIGNED", "uint": "UNSIGNED", "bool": "UNSIGNED"}[op.operands[0].dtype.kind]
    return f"stablehlo.compare {op.attrs['direction']}, {', '.join(args)}, {sort} : {_types(op)}"


def _select(op: Op, args: list[str]) -> str:
    return f"stablehlo.select {', '.join(args)} : {op.operands[0].type}, {op.results[0].type}"


def _with(attr: str) -> Callable[[Op, list[str]], str]:
    """Of an operation whose one attribute is `attr`, a number or several."""

    def text(op: Op, args: list[str]) -> str:
        value = op.attrs[attr]
        shown = value if isinstance(value, int) else list(value)
        return f"stablehlo.{op.kind} {', '.join(args)}, {attr} = {shown} : {_types(op)}"

    return text


def _slice(op: Op, args: list[str]) -> str:
    bounds = ", ".join(f"{s}:{s + n}" for s, n in zip(op.attrs["starts"], op.results[0].shape))
    return f"stablehlo.slice {args[0]} [{bounds}] : {_types(op)}"


def _dot_general(op: Op, args: list[str]) -> str:
    (ca, cb), (ba, bb) = op.attrs["contract"], op.attrs["batch"]
    batch = f"batching_dims = {list(ba)} x {list(bb)}, " if ba else ""
    return f"stablehlo.dot_general {', '.join(args)}, {batch}contracting_dims = {list(ca)} x {list(cb)} : {_types(op)}"


def _reduce(op: Op, args: list[str]) -> str:
    dims = list(op.attrs["dims"])
    reducer = f"stablehlo.{op.attrs['reducer']}"
    return f"stablehlo.reduce({args[0]} init: {args[1]}) applies {reducer} across dimensions = {dims} : {_types(op)}"


def _argmax(op: Op, args: list[str]) -> str:
    f32, i32, i1 = TensorType((), F32), TensorType((), I32), "tensor<i1>"
    pair = f"({f32}, {f32}) -> {i1}", f"({i32}, {i32}) -> {i1}"
    # Names inside begin with an underscore, as no input's may: a region sees the names around it.
    return (
        f'"stablehlo.reduce"({", ".join(args)}) <{{dimensions = array<i64: 0>}}> ({{\n'
        f"    ^bb0(%_xv: {f32}, %_xi: {i32}, %_yv: {f32}, %_yi: {i32}):\n"
        f"      %_greater = stablehlo.compare GT, %_xv, %_yv, FLOAT : {pair[0]}\n"
        f"      %_equal = stablehlo.compare EQ, %_xv, %_yv, FLOAT : {pair[0]}\n"
        f"      %_first = stablehlo.compare LT, %_xi, %_yi, SIGNED : {pair[1]}\n"
        f"      %_tie = stablehlo.and %_equal, %_first : {i1}\n"
        f"      %_keep = stablehlo.or %_greater, %_tie : {i1}\n"
        f"      %_value = stablehlo.select %_keep, %_xv, %_yv : {i1}, {f32}\n"
        f"      %_index = stablehlo.select %_keep, %_xi, %_yi : {i1}, {i32}\n"
        f"      stablehlo.return %_value, %_index : {f32}, {i32}\n"
        f"    }}) : {_types(op)}"
    )


def _gather(op: Op, args: list[str]) -> str:
    numbers = "offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1"
    sizes = f"array<i64: 1, {op.operands[0].shape[1]}>"
    return (
        f'"stablehlo.gather"({", ".join(args)}) <{{dimension_numbers = #stablehlo.gather<{numbers}>, '
        f"slice_sizes = {sizes}, indices_are_sorted = false}}> : {_types(op)}"
    )


def _parameter(op: Op, _args: list[str]) -> str:
    return f"util.global.load @{_quoted(op.attrs['name'])} : {op.results[0].type}"


def _kernel(op: Op, args: list[str]) -> str:
    kernel = op.attrs["kernel"]
    given = dict(zip(kernel.tensors, args)) | {name: f"%index_{i}" for name, i in op.attrs["indices"].items()}
    operands = ", ".join(given[name] for name in kernel.operands)
    results = [given[kernel.in_place[name]] if name in kernel.in_place else str(t) for name, t in kernel.results.items()]
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    types = ", ".join(map(str, kernel.operands.values()))
    return f"flow.dispatch @{kernel.name}::@{kernel.name}_fn({operands}) : ({types}) -> {result}"


def _layer(op: Op, args: list[str]) -> str:
    attrs = {key: value for key, value in op.attrs.items() if value is not None}
    facts = ", ".join(f"{key} = {_attribute(value)}" for key, value in attrs.items())
    return f'"castiron.{op.kind}"({", ".join(args)}){f" {{{facts}}}" if facts else ""} : {_types(op)}'


def _attribute(value: Any) -> str:
    """A fact of a layer operation; of a weight its name and codec, as its type stands beside it."""
    if isinstance(value, Weight):
        return f"{{name = {_quoted(value.name)}, codec = {_quoted(value.codec)}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{number(np.float64(value), F32)} : f32"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_attribute, value))}]"
    return str(value) if isinstance(value, int) else _quoted(str(value))


_PRINT: dict[str, Callable[[Op, list[str]], str]] = {
    **dict.fromkeys((*FLOAT_UNARY, *ARITHMETIC, *BITWISE), _elementwise),
    **dict.fromkeys(("convert", "bitcast_convert", "reshape", "dynamic_update_slice"), _typed),
    **dict.fromkeys(("broadcast_in_dim", "transpose"), _with("dims")),
    "constant": _constant,
    "iota": lambda op, _args: f"stablehlo.iota dim = {op.attrs['dim']} : {op.results[0].type}",
    "compare": _compare,
    "select": _select,
    "slice": _slice,
    "dynamic_slice": _with("sizes"),
    "concatenate": _with("dim"),
    "dot_general": _dot_general,
    "reduce": _reduce,
    "argmax": _argmax,
    "gather": _gather,
    "parameter": _parameter,
    "kernel": _kernel,
}
