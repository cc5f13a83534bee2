"""The table of operations: how each one is checked, and how it is printed as MLIR.

Semantics are those of the StableHLO specification (github.com/openxla/stablehlo, docs/spec.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Op, Value, append, current_path, fail
from castiron.emitter.graph.types import BF16, F32, I1, I32, DType, TensorType, to_f32

FLOAT_UNARY = "negate", "exponential", "log_plus_one", "sqrt", "rsqrt", "tanh", "logistic", "abs", "round_nearest_even"
ARITHMETIC = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
BITWISE = ("and", "or")
# Numbers of a constant above which its text has bytes instead of decimals.
_MAX_DECIMALS = 1024
COMPARISONS = ("EQ", "NE", "LT", "LE", "GT", "GE")


@dataclass(frozen=True)
class Operation:
    """A kind of operation: its check and its MLIR text.

    operands, results: their numbers; None if it varies.
    problem: returns an error message for an operation, or None if it is valid.
    text: gets an operation and the MLIR names of its operands; returns its MLIR text.
    """

    operands: int | None
    results: int | None
    problem: Callable[[Op], str | None]
    text: Callable[[Op, list[str]], str]

    def check(self, op: Op) -> str | None:
        if self.operands is not None and len(op.operands) != self.operands:
            return f"has {len(op.operands)} operands, needs {self.operands}"
        if self.results is not None and len(op.results) != self.results:
            return f"has {len(op.results)} results, needs {self.results}"
        try:
            return self.problem(op)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            return f"malformed attributes or shapes ({error!r})"


Table = Mapping[str, Operation]


def build(
    table: Table, kind: str, operands: Sequence[Value], results: Sequence[TensorType], attrs: Mapping[str, Any] | None = None
) -> tuple[Value, ...]:
    """Append an operation of a kind in `table`; raise EmitError if its check fails."""
    if all(isinstance(operand, Value) for operand in operands):
        op = Op(kind, tuple(operands), tuple(map(Value, results)), attrs or {}, current_path())
        if problem := table[kind].check(op):
            raise fail(kind, problem, operands)
    return append(kind, operands, results, attrs)


def _moves(rule: Callable[[Op], str | None]) -> Callable[[Op], str | None]:

    def with_dtype(op: Op) -> str | None:
        return "the element type changes" if op.operands[0].dtype is not op.results[0].dtype else rule(op)

    return with_dtype


def _distinct(dims, rank: int) -> bool:
    return len(set(dims)) == len(dims) and all(0 <= d < rank for d in dims)


def shapes_of(op: Op) -> tuple[tuple[int, ...], ...]:
    return tuple(v.shape for v in (*op.operands, op.results[0]))


def _same_types(dtypes: Callable[[str], bool]) -> Callable[[Op], str | None]:
    def rule(op: Op) -> str | None:
        if len({v.type for v in (*op.operands, *op.results)}) != 1:
            return "operands and result must have one type"
        return None if dtypes(op.results[0].dtype.kind) else "not defined for this element type"

    return rule


def _check_constant(op: Op) -> str | None:
    value, type_ = op.attrs["value"], op.results[0].type
    if value.dtype != type_.dtype.numpy:
        return f"the array is {value.dtype}; {type_.dtype} is stored as {type_.dtype.numpy}"
    return None if value.shape in ((), type_.shape) else "the array's shape is not the result's"


def _check_iota(op: Op) -> str | None:
    if op.results[0].dtype in (BF16, I1):
        return "not defined for this element type"
    return None if 0 <= op.attrs["dim"] < op.results[0].type.rank else "no such dimension"


def _check_compare(op: Op) -> str | None:
    a, b = op.operands
    if op.attrs["direction"] not in COMPARISONS:
        return f"unknown direction {op.attrs['direction']!r}"
    return None if a.type == b.type and op.results[0].type == TensorType(a.shape, I1) else "types disagree"


def _check_select(op: Op) -> str | None:
    pred, a, b = op.operands
    ok = a.type == b.type == op.results[0].type and pred.type == TensorType(a.shape, I1)
    return None if ok else "types disagree"


def _check_convert(op: Op) -> str | None:
    if op.results[0].dtype is BF16 and op.operands[0].dtype.kind != "float":
        return "integers do not convert to bf16"
    return None if op.operands[0].shape == op.results[0].shape else "shapes differ"


def _check_bitcast(op: Op) -> str | None:
    x, y = op.operands[0], op.results[0]
    narrow, wide = sorted((x, y), key=lambda v: v.dtype.bits)
    ratio = wide.dtype.bits // narrow.dtype.bits
    ok = I1 not in (x.dtype, y.dtype) and narrow.shape == wide.shape + ((ratio,) if ratio > 1 else ())
    return None if ok else "operand and result have different numbers of bits, or are i1"


def _check_broadcast(op: Op) -> str | None:
    (shape, result), dims = shapes_of(op), op.attrs["dims"]
    ok = len(dims) == len(shape) and sorted(dims) == list(dims) and _distinct(dims, len(result))
    ok = ok and all(n in (1, result[d]) for n, d in zip(shape, dims))
    return None if ok else f"dims {dims} do not fit"


def _check_reshape(op: Op) -> str | None:
    return None if prod(op.operands[0].shape) == prod(op.results[0].shape) else "element counts differ"


def _check_transpose(op: Op) -> str | None:
    (shape, result), dims = shapes_of(op), op.attrs["dims"]
    ok = len(dims) == len(shape) and _distinct(dims, len(shape)) and tuple(shape[d] for d in dims) == result
    return None if ok else f"dims {dims} do not fit"


def _check_slice(op: Op) -> str | None:
    (shape, result), starts = shapes_of(op), op.attrs["starts"]
    ok = len(shape) == len(result) == len(starts) and all(s >= 0 and s + r <= n for s, r, n in zip(starts, result, shape))
    return None if ok else "the slice exceeds the operand"


def _check_dynamic(op: Op) -> str | None:
    update = op.kind == "dynamic_update_slice"
    shape, window = op.operands[0].shape, (op.operands[1] if update else op.results[0]).shape
    starts = op.operands[2 if update else 1 :]
    if len(starts) != len(shape) or any(v.type != TensorType((), I32) for v in starts):
        return "needs one i32 start index per dimension"
    if update and (op.results[0].type != op.operands[0].type or op.operands[1].dtype is not op.results[0].dtype):
        return "the result and the update must have the operand's type"
    if not update and tuple(op.attrs["sizes"]) != window:
        return "the result's shape is not `sizes`"
    return None if len(window) == len(shape) and all(w <= n for w, n in zip(window, shape)) else "the slice is too large"


def _check_concatenate(op: Op) -> str | None:
    dim, shapes = op.attrs["dim"], [v.shape for v in op.operands]
    if len({v.dtype for v in op.operands}) != 1 or not 0 <= dim < len(shapes[0]):
        return "element types differ, or dim is out of range"
    result = list(shapes[0])
    result[dim] = sum(s[dim] for s in shapes)
    others = {s[:dim] + s[dim + 1 :] for s in shapes}
    return None if len(others) == 1 and tuple(result) == op.results[0].shape else "shapes do not add up to the result's"


def _check_dot(op: Op) -> str | None:
    (a, b, result), (ca, cb), (ba, bb) = shapes_of(op), op.attrs["contract"], op.attrs["batch"]
    if len({v.dtype for v in (*op.operands, *op.results)}) != 1:
        return "element types differ"
    if not (_distinct(ca + ba, len(a)) and _distinct(cb + bb, len(b)) and len(ca) == len(cb)):
        return "contracting and batching dimensions must be distinct and in range"
    if [a[i] for i in ca + ba] != [b[i] for i in cb + bb]:
        return "contracted or batched extents differ"
    free = [n for i, n in enumerate(a) if i not in ca + ba] + [n for i, n in enumerate(b) if i not in cb + bb]
    return None if tuple([a[i] for i in ba] + free) == result else "the result's shape is not [batch, free of a, free of b]"


def _check_reduce(op: Op) -> str | None:
    x, dims = op.operands[0], op.attrs["dims"]
    known = op.attrs["reducer"] in ("add", "maximum") and op.attrs["exact"] in (False, True)
    if x.dtype.kind != "float" or not known or not _distinct(dims, x.type.rank):
        return "needs a float operand, the reducer add or maximum, and dims in range"
    left = TensorType(tuple(n for i, n in enumerate(x.shape) if i not in dims), x.dtype)
    ok = op.results[0].type == left and op.operands[1].type == TensorType((), x.dtype)
    return None if ok else "the type of the result or of the initial value is wrong"


def _check_argmax(op: Op) -> str | None:
    n = op.operands[0].shape
    want = [TensorType(n, F32), TensorType(n, I32), TensorType((), F32), TensorType((), I32)]
    ok = [v.type for v in op.operands] == want and [v.type for v in op.results] == want[2:]
    return None if ok and len(n) == 1 else "needs f32 and i32 vectors"


def _check_gather(op: Op) -> str | None:
    (table, ids, result) = shapes_of(op)
    ok = len(table) == 2 and len(ids) == 1 and op.operands[1].dtype is I32
    return None if ok and result == (*ids, table[1]) else "needs a table [N, width], ids i32 [T] and a result [T, width]"


def _check_kernel(op: Op) -> str | None:
    kernel = op.attrs["kernel"]
    operands, results = ([v.type for v in values] for values in (op.operands, op.results))
    if operands != list(kernel.tensors.values()) or results != list(kernel.results.values()):
        return "the types of operands or results are not the kernel's"
    return None if list(op.attrs["indices"]) == kernel.indices else "an index operand is missing"


def quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def types_of(op: Op) -> str:
    result = ", ".join(str(v.type) for v in op.results)
    operands = ", ".join(str(v.type) for v in op.operands)
    return f"({operands}) -> {result if len(op.results) == 1 else f'({result})'}"


def number(value, dtype: DType) -> str:
    """Return the MLIR literal of one number, which MLIR's parser reads as the same bits."""
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


def _bytes(array: np.ndarray) -> str:
    return f'"0x{np.ascontiguousarray(array).tobytes().hex().upper()}"'


def _dense(array: np.ndarray, dtype: DType) -> str:
    if array.ndim == 0:
        return number(array, dtype)
    return "[" + ", ".join(_dense(row, dtype) for row in array) + "]"


def _constant_text(op: Op, _args: list[str]) -> str:
    type_: TensorType = op.results[0].type
    value = op.attrs["value"]
    # Bytes are shorter than decimal numbers, and quicker to print.
    large = value.size > _MAX_DECIMALS and type_.dtype.kind != "bool"
    return f"stablehlo.constant dense<{_bytes(value) if large else _dense(value, type_.dtype)}> : {type_}"


def _elementwise_text(op: Op, args: list[str]) -> str:
    return f"stablehlo.{op.kind} {', '.join(args)} : {op.results[0].type}"


def _typed_text(op: Op, args: list[str]) -> str:
    return f"stablehlo.{op.kind} {', '.join(args)} : {types_of(op)}"


def _compare_text(op: Op, args: list[str]) -> str:
    sort = {"float": "FLOAT", "int": "SIGNED", "bool": "UNSIGNED"}[op.operands[0].dtype.kind]
    return f"stablehlo.compare {op.attrs['direction']}, {', '.join(args)}, {sort} : {types_of(op)}"


def _select_text(op: Op, args: list[str]) -> str:
    return f"stablehlo.select {', '.join(args)} : {op.operands[0].type}, {op.results[0].type}"


def _text_with(attr: str) -> Callable[[Op, list[str]], str]:

    def text(op: Op, args: list[str]) -> str:
        value = op.attrs[attr]
        shown = value if isinstance(value, int) else list(value)
        return f"stablehlo.{op.kind} {', '.join(args)}, {attr} = {shown} : {types_of(op)}"

    return text


def _slice_text(op: Op, args: list[str]) -> str:
    bounds = ", ".join(f"{s}:{s + n}" for s, n in zip(op.attrs["starts"], op.results[0].shape))
    return f"stablehlo.slice {args[0]} [{bounds}] : {types_of(op)}"


def _dot_general_text(op: Op, args: list[str]) -> str:
    (ca, cb), (ba, bb) = op.attrs["contract"], op.attrs["batch"]
    batch = f"batching_dims = {list(ba)} x {list(bb)}, " if ba else ""
    return f"stablehlo.dot_general {', '.join(args)}, {batch}contracting_dims = {list(ca)} x {list(cb)} : {types_of(op)}"


def _reduce_text(op: Op, args: list[str]) -> str:
    dims = list(op.attrs["dims"])
    reducer = f"stablehlo.{op.attrs['reducer']}"
    return f"stablehlo.reduce({args[0]} init: {args[1]}) applies {reducer} across dimensions = {dims} : {types_of(op)}"


def _argmax_text(op: Op, args: list[str]) -> str:
    f32, i32, i1 = TensorType((), F32), TensorType((), I32), "tensor<i1>"
    pair = f"({f32}, {f32}) -> {i1}", f"({i32}, {i32}) -> {i1}"
    # Names in the region begin with an underscore, so that they differ from all names outside.
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
        f"    }}) : {types_of(op)}"
    )


def _gather_text(op: Op, args: list[str]) -> str:
    numbers = "offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1"
    sizes = f"array<i64: 1, {op.operands[0].shape[1]}>"
    return (
        f'"stablehlo.gather"({", ".join(args)}) <{{dimension_numbers = #stablehlo.gather<{numbers}>, '
        f"slice_sizes = {sizes}, indices_are_sorted = false}}> : {types_of(op)}"
    )


def _parameter_text(op: Op, _args: list[str]) -> str:
    return f"util.global.load @{quoted(op.attrs['name'])} : {op.results[0].type}"


def _kernel_text(op: Op, args: list[str]) -> str:
    kernel = op.attrs["kernel"]
    given = dict(zip(kernel.tensors, args)) | {name: f"%{kernel.index_type}_{i}" for name, i in op.attrs["indices"].items()}
    operands = ", ".join(given[name] for name in kernel.operands)
    results = [given[kernel.in_place[name]] if name in kernel.in_place else str(t) for name, t in kernel.results.items()]
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    types = ", ".join(kernel.index_type if name in kernel.indices else str(t) for name, t in kernel.operands.items())
    return f"flow.dispatch @{kernel.name}::@{kernel.name}_fn({operands}) : ({types}) -> {result}"


STABLEHLO: dict[str, Operation] = {
    **dict.fromkeys(FLOAT_UNARY, Operation(1, 1, _same_types(lambda kind: kind == "float"), _elementwise_text)),
    **dict.fromkeys(ARITHMETIC, Operation(2, 1, _same_types(lambda kind: kind != "bool"), _elementwise_text)),
    **dict.fromkeys(BITWISE, Operation(2, 1, _same_types(lambda kind: kind != "float"), _elementwise_text)),
    "constant": Operation(0, 1, _check_constant, _constant_text),
    "iota": Operation(0, 1, _check_iota, lambda op, _: f"stablehlo.iota dim = {op.attrs['dim']} : {op.results[0].type}"),
    "compare": Operation(2, 1, _check_compare, _compare_text),
    "select": Operation(3, 1, _check_select, _select_text),
    "convert": Operation(1, 1, _check_convert, _typed_text),
    "bitcast_convert": Operation(1, 1, _check_bitcast, _typed_text),
    "broadcast_in_dim": Operation(1, 1, _moves(_check_broadcast), _text_with("dims")),
    "reshape": Operation(1, 1, _moves(_check_reshape), _typed_text),
    "transpose": Operation(1, 1, _moves(_check_transpose), _text_with("dims")),
    "slice": Operation(1, 1, _moves(_check_slice), _slice_text),
    "dynamic_slice": Operation(None, 1, _moves(_check_dynamic), _text_with("sizes")),
    "dynamic_update_slice": Operation(None, 1, _moves(_check_dynamic), _typed_text),
    "concatenate": Operation(None, 1, _moves(_check_concatenate), _text_with("dim")),
    "dot_general": Operation(2, 1, _check_dot, _dot_general_text),
    "reduce": Operation(2, 1, _check_reduce, _reduce_text),
    "argmax": Operation(4, 2, _check_argmax, _argmax_text),
    "gather": Operation(2, 1, _moves(_check_gather), _gather_text),
}

# Operations of a lowered module.
LOWERED: dict[str, Operation] = {
    **STABLEHLO,
    "parameter": Operation(0, 1, lambda op: None, _parameter_text),
    "kernel": Operation(None, None, _check_kernel, _kernel_text),
}
