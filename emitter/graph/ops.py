"""Append StableHLO operations to the graph; an invalid operation raises EmitError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Value, fail
from castiron.emitter.graph.stablehlo import ARITHMETIC, BITWISE, FLOAT_UNARY, LOWERED, build
from castiron.emitter.graph.types import F32, I1, I32, DType, TensorType, from_f32


def _one(kind: str, operands: Sequence[Value], type_: TensorType, **attrs: Any) -> Value:
    return build(LOWERED, kind, operands, (type_,), attrs)[0]


def constant(value, dtype: DType, shape: Sequence[int] | None = None) -> Value:
    """Append a constant: an array, or a number that fills `shape`, rounded to `dtype`."""
    array = np.asarray(value)
    if shape is not None and array.ndim and array.shape != tuple(shape):
        raise fail("constant", f"the array has shape {array.shape}, but `shape` is {tuple(shape)}; make them equal")
    stored = from_f32(array.astype(np.float32), dtype) if dtype.kind == "float" else array.astype(dtype.numpy)
    if dtype.kind != "float" and not np.array_equal(stored, array):
        raise fail("constant", f"{dtype} cannot represent {array[stored != array][0]}; use another dtype or number")
    type_ = TensorType(tuple(shape) if shape is not None else stored.shape, dtype)
    return _one("constant", (), type_, value=stored)


def iota(shape: Sequence[int], dim: int, dtype: DType = I32) -> Value:
    """Append a tensor in which each element is its own index in dimension `dim`."""
    return _one("iota", (), TensorType(tuple(shape), dtype), dim=dim)


def _elementwise(kind: str) -> Callable[..., Value]:
    def elementwise(*operands: Value) -> Value:
        return _one(kind, operands, operands[0].type)

    elementwise.__name__ = kind
    return elementwise


negate, exponential, log_plus_one, sqrt, rsqrt, tanh, logistic, abs_, round_nearest_even = map(_elementwise, FLOAT_UNARY)
add, subtract, multiply, divide, maximum, minimum = map(_elementwise, ARITHMETIC)
and_, or_ = map(_elementwise, BITWISE)


def compare(direction: str, a: Value, b: Value) -> Value:
    """Compare a and b element by element; return i1. `direction`: EQ, NE, LT, LE, GT or GE."""
    return _one("compare", (a, b), TensorType(a.shape, I1), direction=direction)


def select(pred: Value, on_true: Value, on_false: Value) -> Value:
    """Select `on_true` where `pred` (i1) is true, else `on_false`; all three have equal shapes."""
    return _one("select", (pred, on_true, on_false), on_true.type)


def convert(x: Value, dtype: DType) -> Value:
    """Convert the elements of x to `dtype`; return x itself if they already have that type."""
    return x if x.dtype is dtype else _one("convert", (x,), TensorType(x.shape, dtype))


def bitcast_convert(x: Value, dtype: DType) -> Value:
    """Reinterpret the bits of x: i32 [T] as i8 is [T, 4], and i8 [T, 4] as i32 is [T]."""
    shape = x.shape
    if x.dtype.bits < dtype.bits:
        shape = shape[:-1]
    elif x.dtype.bits > dtype.bits:
        shape = (*shape, x.dtype.bits // dtype.bits)
    return _one("bitcast_convert", (x,), TensorType(shape, dtype))


def broadcast_in_dim(x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """Broadcast x to `shape`: dimension i of x becomes dimension `dims[i]`; sizes of 1 repeat.

    `dims` must ascend. StableHLO allows any order, but IREE miscompiles some descending ones.
    """
    return _one("broadcast_in_dim", (x,), TensorType(tuple(shape), x.dtype), dims=tuple(dims))


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """Reshape x to `shape` in row-major order; return x itself if it already has that shape."""
    return x if tuple(shape) == x.shape else _one("reshape", (x,), TensorType(tuple(shape), x.dtype))


def transpose(x: Value, dims: Sequence[int]) -> Value:
    """Transpose: dimension i of the result is dimension `dims[i]` of x."""
    return _one("transpose", (x,), TensorType(tuple(x.shape[d] for d in dims), x.dtype), dims=tuple(dims))


def concatenate(parts: Sequence[Value], dim: int) -> Value:
    """Concatenate `parts` along dimension `dim`; all other dimensions must have equal sizes."""
    if not parts:
        raise fail("concatenate", "there are no operands; give at least one")
    if not 0 <= dim < parts[0].type.rank:
        raise fail("concatenate", f"dim is {dim}; it must be at least 0 and below {parts[0].type.rank}", parts)
    first = parts[0]
    shape = (*first.shape[:dim], sum(v.shape[dim] for v in parts if dim < v.type.rank), *first.shape[dim + 1 :])
    return _one("concatenate", tuple(parts), TensorType(shape, first.dtype), dim=dim)


def slice_(x: Value, starts: Sequence[int], limits: Sequence[int]) -> Value:
    """Return the elements of x with `starts[i] <= index < limits[i]` in every dimension i."""
    if len(starts) != len(limits):
        raise fail("slice", f"there are {len(starts)} starts and {len(limits)} limits; give as many starts as limits", (x,))
    if any(s >= e for s, e in zip(starts, limits)):
        problem = f"the slice from {tuple(starts)} to {tuple(limits)} is empty; each limit must be above its start"
        raise fail("slice", problem, (x,))
    type_ = TensorType(tuple(e - s for s, e in zip(starts, limits)), x.dtype)
    return _one("slice", (x,), type_, starts=tuple(starts))


def dynamic_slice(x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
    """Return the slice of shape `sizes` at the i32 scalars `starts`, clamped to fit in x."""
    if not x.shape and not starts and not sizes:
        # IREE's compiler crashes on a slice without dimensions.
        return x
    return _one("dynamic_slice", (x, *starts), TensorType(tuple(sizes), x.dtype), sizes=tuple(sizes))


def dynamic_update_slice(x: Value, update: Value, starts: Sequence[Value]) -> Value:
    """Return x with `update` at the i32 scalars `starts`, clamped so that it fits in x."""
    return _one("dynamic_update_slice", (x, update, *starts), x.type)


def dot_general(
    a: Value,
    b: Value,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Value:
    """Multiply a and b, as StableHLO's `dot_general` does.

    contract, batch: (dimensions of a, dimensions of b) that are summed over, or common to both.
    """
    (ca, cb), (ba, bb) = (tuple(map(tuple, contract)), tuple(map(tuple, batch)))
    free_a = tuple(n for i, n in enumerate(a.shape) if i not in ca + ba)
    free_b = tuple(n for i, n in enumerate(b.shape) if i not in cb + bb)
    shape = tuple(a.shape[i] for i in ba) + free_a + free_b
    return _one("dot_general", (a, b), TensorType(shape, a.dtype), contract=(ca, cb), batch=(ba, bb))


def reduce(kind: str, x: Value, dims: Sequence[int], exact: bool = False) -> Value:
    """Return the sums ("add") or maxima ("maximum") of x over the dimensions `dims`.

    exact: whether every order of additions gives the same sum, so that a later pass may choose one.
    """
    init = constant(0.0 if kind == "add" else -np.inf, x.dtype, ())
    shape = tuple(n for i, n in enumerate(x.shape) if i not in dims)
    return _one("reduce", (x, init), TensorType(shape, x.dtype), reducer=kind, dims=tuple(dims), exact=exact)


def argmax(x: Value) -> Value:
    """Return the index of the largest of x f32 [N], the lowest on a tie, as an i32 scalar."""
    operands = (x, iota(x.shape, 0), constant(-np.inf, F32, ()), constant(0, I32, ()))
    return build(LOWERED, "argmax", operands, (TensorType((), F32), TensorType((), I32)))[1]


def gather_rows(table: Value, ids: Value) -> Value:
    """Return the rows of `table` [N, width] at the indices `ids` i32 [T], as [T, width]."""
    return _one("gather", (table, ids), TensorType((*ids.shape, *table.shape[1:]), table.dtype))
