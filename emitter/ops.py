"""StableHLO operations: one function each, which checks its operands, infers the result type and appends.

Semantics are those of the StableHLO specification (github.com/openxla/stablehlo, docs/spec.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from castiron.emitter.ir import Value, append, fail
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.types import BF16, F32, I1, I32, DType, TensorType, from_f32

FLOAT_UNARY = (
    *("negate", "exponential", "log", "log_plus_one", "sqrt", "rsqrt", "tanh", "logistic", "cosine", "sine", "abs"),
    "round_nearest_even",
)
ARITHMETIC = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
BITWISE = ("and", "or")
COMPARISONS = ("EQ", "NE", "LT", "LE", "GT", "GE")


def _one(kind, operands, type_, **attrs) -> Value:
    return append(kind, operands, (type_,), attrs)[0]


def _same(kind: str, *operands: Value) -> TensorType:
    if any(v.type != operands[0].type for v in operands):
        raise fail(kind, "operands must have one type", operands)
    return operands[0].type


def constant(value, dtype: DType, shape: Sequence[int] | None = None) -> Value:
    """A constant: a number (splat over `shape`) or an array of that shape; floats are rounded to `dtype` once."""
    array = np.asarray(value)
    if shape is not None and array.ndim and array.shape != tuple(shape):
        raise fail("constant", f"an array of shape {array.shape} is not of shape {tuple(shape)}")
    stored = from_f32(array.astype(np.float32), dtype) if dtype.kind == "float" else array.astype(dtype.numpy)
    if dtype.kind != "float" and not np.array_equal(stored, array):
        raise fail("constant", f"a value is no {dtype}")
    type_ = TensorType(tuple(shape) if shape is not None else stored.shape, dtype)
    return _one("constant", (), type_, value=stored)


def iota(shape: Sequence[int], dim: int, dtype: DType = I32) -> Value:
    """Values 0, 1, 2, ... along `dim`."""
    if not 0 <= dim < len(shape):
        raise fail("iota", f"dimension {dim} is outside a shape of rank {len(shape)}")
    if dtype in (BF16, I1):
        raise fail("iota", f"there is none of {dtype}; count in i32 or f32")
    return _one("iota", (), TensorType(tuple(shape), dtype), dim=dim)


def _unary(kind: str) -> Callable[[Value], Value]:
    def unary(x: Value) -> Value:
        if x.dtype.kind != "float":
            raise fail(kind, "the operand must be of a float type", (x,))
        return _one(kind, (x,), x.type)

    unary.__name__ = kind
    return unary


def _binary(kind: str) -> Callable[[Value, Value], Value]:
    def binary(a: Value, b: Value) -> Value:
        type_ = _same(kind, a, b)
        if type_.dtype is I1:
            raise fail(kind, "booleans are not numbers", (a, b))
        return _one(kind, (a, b), type_)

    binary.__name__ = kind
    return binary


def _bitwise(kind: str) -> Callable[[Value, Value], Value]:
    def bitwise(a: Value, b: Value) -> Value:
        type_ = _same(kind, a, b)
        if type_.dtype.kind == "float":
            raise fail(kind, "operands must be integers or booleans", (a, b))
        return _one(kind, (a, b), type_)

    bitwise.__name__ = kind
    return bitwise


negate, exponential, log, log_plus_one, sqrt, rsqrt, tanh, logistic, cosine, sine, abs_, round_nearest_even = map(
    _unary, FLOAT_UNARY
)
add, subtract, multiply, divide, maximum, minimum, power = map(_binary, ARITHMETIC)
and_, or_ = map(_bitwise, BITWISE)


def compare(direction: str, a: Value, b: Value) -> Value:
    """Elementwise comparison, one of EQ NE LT LE GT GE; the result is i1."""
    type_ = _same("compare", a, b)
    if direction not in COMPARISONS:
        raise fail("compare", f"direction {direction!r} is not one of {', '.join(COMPARISONS)}", (a, b))
    return _one("compare", (a, b), TensorType(type_.shape, I1), direction=direction)


def select(pred: Value, on_true: Value, on_false: Value) -> Value:
    """`on_true` where `pred`, else `on_false`; all of one shape."""
    type_ = _same("select", on_true, on_false)
    if pred.type != TensorType(type_.shape, I1):
        raise fail("select", f"the predicate must be {TensorType(type_.shape, I1)}", (pred, on_true, on_false))
    return _one("select", (pred, on_true, on_false), type_)


def convert(x: Value, dtype: DType) -> Value:
    """Convert element by element; the value itself if it already has the type."""
    if dtype is BF16 and x.dtype.kind != "float":
        # IREE calls a runtime routine for it that it does not link, also by way of f32, which it folds.
        raise fail("convert", "integers do not convert to bf16; compute in f32", (x,))
    return x if x.dtype is dtype else _one("convert", (x,), TensorType(x.shape, dtype))


def bitcast_convert(x: Value, dtype: DType) -> Value:
    """The bits of `x` as another type: narrower elements stand along a new last dimension, wider ones take up all of it."""
    shape, ratio = x.shape, max(x.dtype.bits, dtype.bits) // min(x.dtype.bits, dtype.bits)
    if I1 in (x.dtype, dtype) or x.dtype.bits < dtype.bits and shape[-1:] != (ratio,):
        raise fail("bitcast_convert", f"its bits do not make elements of {dtype}", (x,))
    if x.dtype.bits < dtype.bits:
        shape = shape[:-1]
    elif x.dtype.bits > dtype.bits:
        shape = (*shape, ratio)
    return _one("bitcast_convert", (x,), TensorType(shape, dtype))


def broadcast_in_dim(x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """Dimension i of `x` becomes dimension `dims[i]` of the result, in rising order; extents of 1 are repeated.

    StableHLO allows any order, but IREE's simplification turns some falling ones into a wrong transpose.
    """
    shape, dims = tuple(shape), tuple(dims)
    if len(dims) != x.type.rank or sorted(set(dims)) != list(dims) or any(not 0 <= d < len(shape) for d in dims):
        raise fail("broadcast_in_dim", f"dims {dims} do not place the operand, in order, in shape {shape}", (x,))
    if any(n not in (1, shape[d]) for n, d in zip(x.shape, dims)):
        raise fail("broadcast_in_dim", f"extents do not fit shape {shape} at dims {dims}", (x,))
    return _one("broadcast_in_dim", (x,), TensorType(shape, x.dtype), dims=dims)


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order under another shape; the value itself if the shape is equal."""
    shape = tuple(shape)
    if shape == x.shape:
        return x
    if prod(shape) != x.type.elements:
        raise fail("reshape", f"{x.type.elements} elements do not fill shape {shape}", (x,))
    return _one("reshape", (x,), TensorType(shape, x.dtype))


def transpose(x: Value, dims: Sequence[int]) -> Value:
    """Result dimension i is operand dimension `dims[i]`."""
    dims = tuple(dims)
    if sorted(dims) != list(range(x.type.rank)):
        raise fail("transpose", f"dims {dims} are not a permutation of the operand's dimensions", (x,))
    return _one("transpose", (x,), TensorType(tuple(x.shape[d] for d in dims), x.dtype), dims=dims)


def concatenate(parts: Sequence[Value], dim: int) -> Value:
    """Join along `dim`; the other extents are equal."""
    if not parts:
        raise fail("concatenate", "there is nothing to join")
    first = parts[0]
    if not 0 <= dim < first.type.rank:
        raise fail("concatenate", f"dimension {dim} does not exist", parts)
    rest = {(v.shape[:dim], v.shape[dim + 1 :], v.dtype) for v in parts}
    if len(rest) != 1:
        raise fail("concatenate", f"operands differ outside dimension {dim}", parts)
    shape = (*first.shape[:dim], sum(v.shape[dim] for v in parts), *first.shape[dim + 1 :])
    return _one("concatenate", tuple(parts), TensorType(shape, first.dtype), dim=dim)


def slice_(x: Value, starts: Sequence[int], limits: Sequence[int]) -> Value:
    """Elements `starts[i] <= index < limits[i]` in every dimension."""
    starts, limits = tuple(starts), tuple(limits)
    bounds = zip(starts, limits, x.shape)
    if len(starts) != x.type.rank or len(limits) != x.type.rank or any(not 0 <= s < e <= n for s, e, n in bounds):
        raise fail("slice", f"bounds {starts} to {limits} do not lie inside the operand", (x,))
    return _one("slice", (x,), TensorType(tuple(e - s for s, e in zip(starts, limits)), x.dtype), starts=starts)


def _scalars(kind: str, x: Value, starts: Sequence[Value], others: Sequence[Value] = ()) -> None:
    if len(starts) != x.type.rank or any(s.type != TensorType((), I32) for s in starts):
        raise fail(kind, "needs one tensor<i32> start index for every dimension", (x, *others, *starts))


def dynamic_slice(x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
    """A window of static size at run-time start indices (clamped into the operand); a scalar is its own window."""
    if not x.shape and not starts and not sizes:
        # IREE's compiler crashes on a slice without dimensions.
        return x
    _scalars("dynamic_slice", x, starts)
    sizes = tuple(sizes)
    if len(sizes) != x.type.rank or any(not 0 < s <= n for s, n in zip(sizes, x.shape)):
        raise fail("dynamic_slice", f"sizes {sizes} do not lie inside the operand", (x,))
    return _one("dynamic_slice", (x, *starts), TensorType(sizes, x.dtype), sizes=sizes)


def dynamic_update_slice(x: Value, update: Value, starts: Sequence[Value]) -> Value:
    """`x` with `update` written at run-time start indices (clamped into the operand)."""
    _scalars("dynamic_update_slice", x, starts, (update,))
    fits = update.type.rank == x.type.rank and all(u <= n for u, n in zip(update.shape, x.shape))
    if not fits or update.dtype is not x.dtype:
        raise fail("dynamic_update_slice", "the update must be of the operand's type and no larger", (x, update))
    return _one("dynamic_update_slice", (x, update, *starts), x.type)


def dot_general(
    a: Value,
    b: Value,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Value:
    """Contract dimensions of `a` with those of `b`; result is [batch, free of a, free of b]."""
    (ca, cb), (ba, bb) = (tuple(map(tuple, contract)), tuple(map(tuple, batch)))
    if len(ca) != len(cb) or len(ba) != len(bb):
        raise fail("dot_general", "both operands need as many contracting and batching dimensions", (a, b))
    for x, dims in ((a, ca + ba), (b, cb + bb)):
        if len(set(dims)) != len(dims) or any(not 0 <= d < x.type.rank for d in dims):
            raise fail("dot_general", f"dimensions {dims} are not distinct dimensions of {x.type}", (a, b))
    if any(a.shape[i] != b.shape[j] for i, j in zip(ca + ba, cb + bb)) or a.dtype is not b.dtype:
        raise fail("dot_general", f"extents or types differ over contract {ca} x {cb}, batch {ba} x {bb}", (a, b))
    free_a = tuple(n for i, n in enumerate(a.shape) if i not in ca + ba)
    free_b = tuple(n for i, n in enumerate(b.shape) if i not in cb + bb)
    shape = tuple(a.shape[i] for i in ba) + free_a + free_b
    return _one("dot_general", (a, b), TensorType(shape, a.dtype), contract=(ca, cb), batch=(ba, bb))


def reduce(kind: str, x: Value, dims: Sequence[int], exact: bool = False) -> Value:
    """Sum (`add`) or maximum (`maximum`) over `dims`, which disappear; `exact`: nothing is rounded, in whatever order."""
    dims = tuple(dims)
    if kind not in ("add", "maximum"):
        raise fail("reduce", f"reducer {kind!r} is not add or maximum", (x,))
    if x.dtype.kind != "float" or any(not 0 <= d < x.type.rank for d in dims) or len(set(dims)) != len(dims):
        raise fail("reduce", f"cannot reduce dimensions {dims}", (x,))
    init = constant(0.0 if kind == "add" else -np.inf, x.dtype, ())
    shape = tuple(n for i, n in enumerate(x.shape) if i not in dims)
    return _one("reduce", (x, init), TensorType(shape, x.dtype), reducer=kind, dims=dims, exact=exact)


def argmax(x: Value) -> Value:
    """Index (i32) of the largest element of a vector, the lowest index on a tie: a two-operand StableHLO reduce."""
    if x.type.rank != 1 or x.dtype is not F32:
        raise fail("argmax", "needs a vector of f32", (x,))
    operands = (x, iota(x.shape, 0), constant(-np.inf, F32, ()), constant(0, I32, ()))
    return append("argmax", operands, (TensorType((), F32), TensorType((), I32)))[1]


def gather_rows(table: Value, ids: Value) -> Value:
    """Rows `ids` ([T] i32) of a matrix [N, width] as [T, width]: a StableHLO gather."""
    if table.type.rank != 2 or ids.type.rank != 1 or ids.dtype is not I32:
        raise fail("gather", "needs a matrix and a vector of i32 row numbers", (table, ids))
    return _one("gather", (table, ids), TensorType((ids.shape[0], table.shape[1]), table.dtype))


def kernel_call(kernel: Kernel, /, **operands: Value | int) -> dict[str, Value]:
    """Call one of our own kernels with operands by name, integers for its "index" ones; its results by name."""
    tensors = {name: v for name, v in operands.items() if isinstance(v, Value)}
    if {name: tensors[name].type if name in tensors else INDEX for name in operands} != kernel.operands:
        expected = ", ".join(f"{name}: {t}" for name, t in kernel.operands.items())
        raise fail(kernel.name, f"expects {expected}", list(tensors.values()))
    attrs = {"kernel": kernel, "indices": {name: operands[name] for name in kernel.indices}}
    results = append("kernel", [tensors[name] for name in kernel.tensors], tuple(kernel.results.values()), attrs)
    return dict(zip(kernel.results, results, strict=True))
