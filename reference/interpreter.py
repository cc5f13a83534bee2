"""The NumPy interpreter of graphs: a table from operation kinds to functions on arrays.

Semantics are those of the StableHLO specification (github.com/openxla/stablehlo, docs/spec.md).
Where the specification leaves a choice: f16 and bf16 are computed in f32 and rounded once per
operation, also in sums and dot products; a float outside the range of an integer type converts to
the nearest integer of that type, and NaN to 0 (as in XLA). Arrays of bf16 have the dtype uint16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from castiron.emitter.graph.ir import Module, Op, Value, users
from castiron.emitter.graph.types import F32, I8, DType, EmitError, TensorType, from_f32, to_f32

Trace = Callable[[Op, tuple[np.ndarray, ...]], None]


def run(
    module: Module,
    function: str,
    inputs: Sequence[np.ndarray],
    params: Mapping[str, np.ndarray] | None = None,
    trace: Trace | None = None,
) -> list[np.ndarray]:
    """Run `function` on `inputs`, and return its outputs; bf16 is uint16, and i8 may be uint8.

    trace: called as `trace(op, results)` after every operation; it must not change the arrays. A
    kernel's NumPy reference is called as `kernel.reference(**operands)`, with read-only arrays.
    """
    try:
        body = module.functions[function]
    except KeyError:
        raise EmitError(f"module {module.name} has no function {function!r}; use {' or '.join(module.functions)}") from None
    if len(inputs) != len(body.inputs):
        raise EmitError(f"function {function} takes {len(body.inputs)} inputs, got {len(inputs)}; give an array for each")
    left = users(body)
    values = {v: _stored(a, v.type, f"input {v.name!r} of {function}") for v, a in zip(body.inputs, inputs)}
    with np.errstate(all="ignore"):
        for op in body.ops:
            results = _run_op(op, [values[v] for v in op.operands], params or {})
            for value, array in zip(op.results, results, strict=True):
                values[value] = _stored(array, value.type, f"{op.kind} in {op.path or function}")
            if trace:
                trace(op, tuple(values[v] for v in op.results))
            _forget(values, left, op)
    return [np.array(values[v]) for v in body.outputs]


def _run_op(op: Op, args: list[np.ndarray], params: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    if op.kind == "parameter":
        name, type_ = op.attrs["name"], op.results[0].type
        if name not in params:
            raise EmitError(f"no array for parameter {name!r}; add it to params")
        return (_stored(params[name], type_, f"parameter {name!r}"),)
    rule = _RULES.get(op.kind)
    if rule is None:
        raise EmitError(f"{op.kind} in {op.path or 'the module'} has no rule in the interpreter; lower the module first")
    results = rule(op, *args)
    return results if isinstance(results, tuple) else (results,)


def _stored(array: np.ndarray, type_: TensorType, what: str) -> np.ndarray:
    array = np.asarray(array)
    if type_.dtype is I8 and array.dtype == np.uint8:
        array = array.view(np.int8)
    if array.shape != type_.shape or array.dtype != type_.dtype.numpy:
        raise EmitError(f"{what} is an array of {array.dtype}{list(array.shape)}; it must be {type_}")
    return array


def _forget(values: dict[Value, np.ndarray], left: dict[Value, int], op: Op) -> None:
    """Delete arrays that no later operation uses, because all weights in f32 would not fit."""
    for value in op.operands:
        left[value] -= 1
    for value in (*op.operands, *op.results):
        if not left.get(value):
            values.pop(value, None)


def _float(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def rule(op: Op, *args: np.ndarray) -> np.ndarray:
        dtype = op.results[0].dtype
        if dtype.kind != "float" or dtype is F32:
            return np.asarray(compute(*args), dtype.numpy)
        return from_f32(compute(*(to_f32(a, dtype) for a in args)), dtype)

    return rule


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    quotient = a // np.where(b == 0, 1, b)
    # NumPy rounds towards minus infinity, StableHLO towards zero.
    quotient = quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _compare(op: Op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dtype = op.operands[0].dtype
    if dtype.kind == "float":
        a, b = to_f32(a, dtype), to_f32(b, dtype)
    functions = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater}
    return np.asarray(functions.get(op.attrs["direction"], np.greater_equal)(a, b))


def convert(array: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Convert an array to another element type.

    Floats round towards zero and saturate, NaN becomes 0, and integers wrap around.
    """
    if source.kind == "float":
        array = to_f32(array, source)
    if target.kind == "float":
        return from_f32(array.astype(np.float32), target)
    if target.kind == "bool" or source.kind != "float":
        return array.astype(target.numpy)
    limits = np.iinfo(target.numpy)
    # f32 cannot represent the limits of i32 exactly.
    wide = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.clip(wide, limits.min, limits.max).astype(target.numpy)


def _bitcast(op: Op, x: np.ndarray) -> np.ndarray:
    type_ = op.results[0].type
    return np.ascontiguousarray(x).reshape(-1).view(type_.dtype.numpy).reshape(type_.shape)


def _broadcast(op: Op, x: np.ndarray) -> np.ndarray:
    shape, dims = op.results[0].shape, op.attrs["dims"]
    aligned = [1] * len(shape)
    for extent, dim in zip(x.shape, dims):
        aligned[dim] = extent
    return np.broadcast_to(x.reshape(aligned), shape)


def _iota(op: Op) -> np.ndarray:
    type_, dim = op.results[0].type, op.attrs["dim"]
    line = np.arange(type_.shape[dim])
    line = from_f32(line.astype(np.float32), type_.dtype) if type_.dtype.kind == "float" else line.astype(type_.dtype.numpy)
    return np.broadcast_to(line.reshape([-1 if i == dim else 1 for i in range(type_.rank)]), type_.shape)


def _window(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[np.ndarray]) -> tuple[slice, ...]:
    clamped = (min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes))
    return tuple(slice(start, start + size) for start, size in zip(clamped, sizes))


def _dynamic_update_slice(op: Op, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x[_window(x.shape, update.shape, starts)] = update
    return x


def _slice(op: Op, x: np.ndarray) -> np.ndarray:
    return x[tuple(slice(s, s + n) for s, n in zip(op.attrs["starts"], op.results[0].shape))]


def _dot_general(op: Op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dtype = op.results[0].dtype
    (ca, cb), (ba, bb) = op.attrs["contract"], op.attrs["batch"]
    if dtype.kind == "float":
        a, b = to_f32(a, dtype), to_f32(b, dtype)
    free_a = [i for i in range(a.ndim) if i not in ca + ba]
    free_b = [i for i in range(b.ndim) if i not in cb + bb]
    batch = [a.shape[i] for i in ba]
    inner = int(np.prod([a.shape[i] for i in ca], dtype=np.int64))
    rows = a.transpose([*ba, *free_a, *ca]).reshape([*batch, -1, inner] if a.size else [*batch, 0, inner])
    columns = b.transpose([*bb, *cb, *free_b]).reshape([*batch, inner, -1] if b.size else [*batch, inner, 0])
    result = np.matmul(rows, columns).reshape(op.results[0].shape)
    return from_f32(result, dtype) if dtype.kind == "float" else result.astype(dtype.numpy)


def _reduce(op: Op, x: np.ndarray, init: np.ndarray) -> np.ndarray:
    dtype, add = op.results[0].dtype, op.attrs["reducer"] == "add"
    x, init = to_f32(x, dtype), to_f32(init, dtype)
    total = np.sum(x, axis=op.attrs["dims"]) if add else np.max(x, axis=op.attrs["dims"], initial=-np.inf)
    return from_f32(np.asarray(total + init if add else np.maximum(total, init), np.float32), dtype)


def _argmax(op: Op, values: np.ndarray, indices: np.ndarray, *_start: np.ndarray) -> tuple[np.ndarray, ...]:
    nans = np.flatnonzero(np.isnan(values))
    first = min(int(nans[-1]) + 1, len(values) - 1) if len(nans) else 0
    best = first + int(np.argmax(values[first:]))
    return np.asarray(values[best]), np.asarray(indices[best])


def _gather(op: Op, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return table[np.clip(ids, 0, len(table) - 1)]


def _kernel(op: Op, *args: np.ndarray) -> tuple[np.ndarray, ...]:
    kernel = op.attrs["kernel"]
    arrays = {name: _packed(array, t) for (name, t), array in zip(kernel.tensors.items(), args, strict=True)}
    results = kernel.reference(**arrays, **op.attrs["indices"])
    if not isinstance(results, dict) or set(results) != set(kernel.results):
        what = f"results {', '.join(results)}" if isinstance(results, dict) else type(results).__name__
        raise EmitError(
            f"the reference of kernel {kernel.name} returns {what}; it must return a dict of {', '.join(kernel.results)}"
        )
    return tuple(results[name] for name in kernel.results)


def _packed(array: np.ndarray, type_: TensorType) -> np.ndarray:
    view = array.view(np.uint8) if type_.dtype is I8 else array.view()
    # An operand may be read again later: a reference that writes into it must fail, not corrupt.
    view.flags.writeable = False
    return view


_RULES: dict[str, Callable[..., np.ndarray | tuple[np.ndarray, ...]]] = {
    "negate": _float(np.negative),
    "exponential": _float(np.exp),
    "log_plus_one": _float(np.log1p),
    "sqrt": _float(np.sqrt),
    "rsqrt": _float(lambda x: np.float32(1) / np.sqrt(x)),
    "tanh": _float(np.tanh),
    "logistic": _float(lambda x: np.float32(1) / (np.float32(1) + np.exp(-x))),
    "abs": _float(np.abs),
    "round_nearest_even": _float(np.rint),
    "add": _float(np.add),
    "subtract": _float(np.subtract),
    "multiply": _float(np.multiply),
    "divide": _float(_divide),
    "maximum": _float(np.maximum),
    "minimum": _float(np.minimum),
    "and": lambda op, a, b: np.asarray(a & b),
    "or": lambda op, a, b: np.asarray(a | b),
    "constant": lambda op: np.broadcast_to(op.attrs["value"], op.results[0].shape),
    "iota": _iota,
    "compare": _compare,
    "select": lambda op, pred, a, b: np.asarray(np.where(pred, a, b)),
    "convert": lambda op, x: convert(x, op.operands[0].dtype, op.results[0].dtype),
    "bitcast_convert": _bitcast,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda op, x: x.reshape(op.results[0].shape),
    "transpose": lambda op, x: x.transpose(op.attrs["dims"]),
    "slice": _slice,
    "dynamic_slice": lambda op, x, *starts: x[_window(x.shape, op.attrs["sizes"], starts)],
    "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": lambda op, *parts: np.concatenate(parts, op.attrs["dim"]),
    "dot_general": _dot_general,
    "reduce": _reduce,
    "argmax": _argmax,
    "gather": _gather,
    "kernel": _kernel,
}
