"""Generated uses of every operation, the same ones in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Value, current_function, scope
from castiron.emitter.graph.stablehlo import COMPARISONS
from castiron.emitter.graph.types import BF16, DTYPES, F16, F32, I1, I8, I32, DType, TensorType, from_f32
from tests.emitter.drawing import draw

FLOATS, INTS = (F32, F16, BF16), (I8, I32)
NUMBERS = FLOATS + INTS
ALL = tuple(DTYPES.values())


@dataclass(frozen=True)
class Case:
    """One use of an operation; `build` makes the outputs from the input values.

    Floats may differ by `ulps` units in the last place, at the result's magnitude or at `floor`,
    whichever is larger; 0 means the same bits (all NaN are equal).
    """

    kind: str
    inputs: tuple[tuple[TensorType, np.ndarray], ...]
    build: Callable[..., Value | Sequence[Value]]
    ulps: float = 0
    floor: float = 0

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(str(t) for t, _ in self.inputs)})"

    def outputs(self, inputs: Sequence[Value]) -> list[Value]:
        built = self.build(*inputs)
        return [built] if isinstance(built, Value) else list(built)


def module_of(cases: Sequence[Case]) -> Module:
    """Return a module with case i as function `case_i`."""
    module = Module("cases")
    for i, case in enumerate(cases):
        types = {f"x{j}": type_ for j, (type_, _) in enumerate(case.inputs)}
        with module.function(f"case_{i}", **types) as inputs, scope(case.kind):
            current_function().returns(**{f"y{j}": v for j, v in enumerate(case.outputs(inputs))})
    return module


def joined(cases: Sequence[Case]) -> Module:
    """Return a module with one function of the inputs and outputs of all cases."""
    module = Module("cases")
    types = [type_ for case in cases for type_, _ in case.inputs]
    with module.function("joined", **{f"x{j}": type_ for j, type_ in enumerate(types)}) as inputs:
        left = iter(inputs)
        outputs = [v for case in cases for v in case.outputs([next(left) for _ in case.inputs])]
        current_function().returns(**{f"y{j}": v for j, v in enumerate(outputs)})
    return module


@cache
def all_cases() -> tuple[Case, ...]:
    # Hypothesis begins with the simplest case, a scalar, which is left out.
    return tuple(case for strategy, count in _strategies() for case in draw(strategy, count + 1)[1:])


shapes = st.lists(st.integers(1, 8), max_size=3).map(tuple)
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def filled(rng: np.random.Generator, type_: TensorType, low: float, high: float, special: Sequence[float] = ()) -> np.ndarray:
    """Return a stored array of values in [low, high], some of them replaced by `special`."""
    if type_.dtype is I1:
        return rng.integers(0, 2, type_.shape).astype(bool)
    values = np.asarray(rng.uniform(low, high, type_.shape))
    if special:
        values = np.where(rng.random(type_.shape) < 0.3, rng.choice(special, type_.shape), values)
    if type_.dtype.kind != "float":
        return values.astype(type_.dtype.numpy)
    with np.errstate(over="ignore"):
        return from_f32(values.astype(np.float32), type_.dtype)


def any_bits(rng: np.random.Generator, type_: TensorType) -> np.ndarray:
    """Return integers of their complete range, or floats with zeros, infinities and NaN."""
    if type_.dtype.kind == "float":
        return filled(rng, type_, -4, 4, (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0))
    if type_.dtype is I1:
        return filled(rng, type_, 0, 1)
    limits = np.iinfo(type_.dtype.numpy)
    values = rng.integers(limits.min, limits.max, type_.shape, dtype=type_.dtype.numpy, endpoint=True)
    return np.where(rng.random(type_.shape) < 0.2, rng.choice([0, 1, limits.min, limits.max], type_.shape), values).astype(
        values.dtype
    )


@st.composite
def elementwise(draw, kind: str, function, dtype: DType, arity: int, ulps=0.0, floor=0.0, low=None, high=None, special=()):
    """Draw a use of `function` with values of the complete type, or of [low, high] and `special`."""
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    fill = any_bits if low is None else lambda rng, t: filled(rng, t, low, high, special)
    return Case(kind, tuple((type_, fill(rng, type_)) for _ in range(arity)), function, ulps, floor)


@st.composite
def divide_integers(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    divisor = any_bits(rng, type_)
    # The specification leaves open the results of x / 0, and of the smallest number divided by -1.
    divisor = np.where(divisor == 0, 3, np.where(divisor == -1, 2, divisor)).astype(divisor.dtype)
    return Case("divide", ((type_, any_bits(rng, type_)), (type_, divisor)), ops.divide)


@st.composite
def compare(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    a, b = any_bits(rng, type_), any_bits(rng, type_)
    b = np.where(rng.random(type_.shape) < 0.4, a, b)
    directions = draw(st.permutations(COMPARISONS))[:3]
    return Case("compare", ((type_, a), (type_, b)), lambda x, y: [ops.compare(d, x, y) for d in directions])


@st.composite
def select(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    pred = TensorType(type_.shape, I1)
    inputs = (pred, any_bits(rng, pred)), (type_, any_bits(rng, type_)), (type_, any_bits(rng, type_))
    return Case("select", inputs, ops.select)


@st.composite
def convert(draw, source: DType):
    """Draw conversions to several types; floats are in the range of every integer type."""
    type_, rng = TensorType(draw(shapes), source), draw(generators)
    values = filled(rng, type_, 0, 127, (0.5, 1.5, 0.0)) if source.kind == "float" else any_bits(rng, type_)
    targets = [t for t in ALL if t is not source and (t is not BF16 or source.kind == "float")]
    targets = draw(st.permutations(targets))[:5]
    return Case("convert", ((type_, values),), lambda x: [ops.convert(x, t) for t in targets])


@st.composite
def convert_floats(draw, source: DType):
    """Draw conversions between floats, with rounding, overflow to infinity and NaN."""
    type_, rng = TensorType(draw(shapes), source), draw(generators)
    values = filled(rng, type_, -70000, 70000, (65519.0, 65520.0, 1e-3, 1.00390625, 1.01171875, -0.0, np.inf, np.nan))
    targets = [t for t in FLOATS if t is not source]
    return Case("convert", ((type_, values),), lambda x: [ops.convert(x, t) for t in targets])


@st.composite
def broadcast(draw, dtype: DType):
    result, rng = draw(shapes), draw(generators)
    dims = [d for d in range(len(result)) if draw(st.booleans())]
    shape = tuple(result[d] if draw(st.booleans()) else 1 for d in dims)
    type_ = TensorType(shape, dtype)
    return Case("broadcast_in_dim", ((type_, any_bits(rng, type_)),), lambda x: ops.broadcast_in_dim(x, result, dims))


@st.composite
def reshape(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    factors = [1, *type_.shape]
    order = draw(st.permutations(factors))
    return Case(
        "reshape", ((type_, any_bits(rng, type_)),), lambda x: [ops.reshape(x, order), ops.reshape(x, (type_.elements,))]
    )


@st.composite
def bitcast_convert(draw, dtype: DType, to: DType):
    shape, rng = draw(shapes), draw(generators)
    type_ = TensorType((*shape, to.bits // dtype.bits) if to.bits > dtype.bits else shape, dtype)
    # The specification does not define the bits of a NaN.
    values = any_bits(rng, type_) if dtype.kind == "float" else filled(rng, type_, 0, 60)
    return Case("bitcast_convert", ((type_, values),), lambda x: ops.bitcast_convert(x, to))


@st.composite
def transpose(draw, dtype: DType):
    """Draw rank 3 or 4, in which a permutation need not be its own inverse."""
    shape = draw(st.lists(st.integers(1, 6), min_size=3, max_size=4))
    type_, rng = TensorType(tuple(shape), dtype), draw(generators)
    dims = draw(st.permutations(range(type_.rank)))
    return Case("transpose", ((type_, any_bits(rng, type_)),), lambda x: ops.transpose(x, dims))


@st.composite
def constant(draw, dtype: DType):
    """Draw an array and a splat, which test how the printer prints numbers."""
    shape, rng = draw(shapes), draw(generators)
    array = any_bits(rng, TensorType(shape, dtype))
    widened = array if dtype is not BF16 else (array.astype(np.uint32) << 16).view(np.float32)
    return Case("constant", (), lambda: [ops.constant(widened, dtype), ops.constant(widened.flat[0], dtype, (2, 3))])


@st.composite
def iota(draw, dtype: DType):
    shape = draw(shapes.filter(len))
    dim = draw(st.integers(0, len(shape) - 1))
    return Case("iota", (), lambda: ops.iota(shape, dim, dtype))


@st.composite
def concatenate(draw, dtype: DType):
    shape, rng = draw(shapes.filter(len)), draw(generators)
    dim = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    types = [TensorType((*shape[:dim], n, *shape[dim + 1 :]), dtype) for n in extents]
    return Case("concatenate", tuple((t, any_bits(rng, t)) for t in types), lambda *xs: ops.concatenate(xs, dim))


@st.composite
def slice_(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    bounds = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in type_.shape]
    starts, limits = [s for s, _ in bounds], [e for _, e in bounds]
    return Case("slice", ((type_, any_bits(rng, type_)),), lambda x: ops.slice_(x, starts, limits))


def _starts(draw, shape) -> tuple[tuple[TensorType, np.ndarray], ...]:
    """Draw start indices, some of them far outside, which are clamped."""
    index = st.integers(-3, 12) | st.sampled_from([-(2**31), 2**31 - 1])
    return tuple((TensorType((), I32), np.array(draw(index), np.int32)) for _ in shape)


@st.composite
def dynamic_slice(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    sizes = tuple(draw(st.integers(1, n)) for n in type_.shape)
    inputs = ((type_, any_bits(rng, type_)), *_starts(draw, type_.shape))
    return Case("dynamic_slice", inputs, lambda x, *starts: ops.dynamic_slice(x, starts, sizes))


@st.composite
def dynamic_update_slice(draw, dtype: DType):
    type_, rng = TensorType(draw(shapes), dtype), draw(generators)
    update = TensorType(tuple(draw(st.integers(1, n)) for n in type_.shape), dtype)
    inputs = ((type_, any_bits(rng, type_)), (update, any_bits(rng, update)), *_starts(draw, type_.shape))
    return Case("dynamic_update_slice", inputs, lambda x, u, *starts: ops.dynamic_update_slice(x, u, starts))


@st.composite
def dot_general(draw, dtype: DType):
    """Draw batching, contracting and free dimensions in any number and order."""
    rng = draw(generators)
    extents = st.lists(st.integers(1, 6), max_size=2)
    batch, inner, free_a, free_b = draw(extents), draw(extents), draw(extents), draw(extents)

    def side(free):
        labels = [("b", i) for i in range(len(batch))] + [("c", i) for i in range(len(inner))]
        labels = draw(st.permutations(labels + [("f", i) for i in range(len(free))]))
        size = {"b": batch, "c": inner, "f": free}
        where = lambda kind, n: [labels.index((kind, i)) for i in range(n)]
        return tuple(size[k][i] for k, i in labels), where("c", len(inner)), where("b", len(batch))

    (shape_a, ca, ba), (shape_b, cb, bb) = side(free_a), side(free_b)
    a, b = TensorType(shape_a, dtype), TensorType(shape_b, dtype)
    fill = any_bits if dtype.kind != "float" else lambda rng, t: filled(rng, t, -2, 2)
    terms = float(np.prod(inner))
    return Case(
        "dot_general",
        ((a, fill(rng, a)), (b, fill(rng, b))),
        lambda x, y: ops.dot_general(x, y, (ca, cb), (ba, bb)),
        ulps=4 + terms,
        floor=4,
    )


@st.composite
def reduce(draw, reducer: str, dtype: DType):
    type_, rng = TensorType(draw(shapes.filter(len)), dtype), draw(generators)
    dims = draw(st.permutations(range(type_.rank)))[: draw(st.integers(1, type_.rank))]
    add = reducer == "add"
    values = filled(rng, type_, -2, 2) if add else filled(rng, type_, -9, -1, (-np.inf,))
    terms = float(np.prod([type_.shape[d] for d in dims]))
    return Case("reduce", ((type_, values),), lambda x: ops.reduce(reducer, x, dims), (4 + terms) if add else 0, 2)


@st.composite
def argmax(draw):
    """Draw few distinct values, so that ties are common, in vectors long enough to be split."""
    type_, rng = TensorType((draw(st.integers(1, 3000)),), F32), draw(generators)
    values = rng.integers(-3, 3, type_.shape).astype(np.float32)
    return Case("argmax", ((type_, np.where(draw(st.booleans()), values, -np.inf).astype(np.float32)),), ops.argmax)


@st.composite
def gather(draw, dtype: DType):
    """Draw row numbers, some of them outside the table, which are clamped."""
    rows, width, count = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    table, ids, rng = TensorType((rows, width), dtype), TensorType((count,), I32), draw(generators)
    wanted = np.array(draw(st.lists(st.integers(-2, 11), min_size=count, max_size=count)), np.int32)
    return Case("gather", ((table, any_bits(rng, table)), (ids, wanted)), ops.gather_rows)


def _strategies() -> list[tuple[st.SearchStrategy[Case], int]]:
    """Return the strategies with the number of cases to draw of each."""
    inf, nan = np.inf, np.nan
    unary = {  # function, ulps, floor, low, high, special values
        "negate": (ops.negate, 0, 0, None, None, ()),
        "abs": (ops.abs_, 0, 0, None, None, ()),
        "round_nearest_even": (ops.round_nearest_even, 0, 0, -4, 4, (0.5, 1.5, 2.5, -0.5, -2.5, 0.0, -0.0, inf, -inf, nan)),
        "sqrt": (ops.sqrt, 1, 0, 0, 100, (0.0, inf, nan, -1.0)),
        "rsqrt": (ops.rsqrt, 4, 0, 1e-3, 100, (inf, nan)),
        "exponential": (ops.exponential, 8, 0, -60, 60, (0.0, -0.0, -inf, inf, nan)),
        "log_plus_one": (ops.log_plus_one, 8, 0, -0.5, 2, (0.0, 1e-6, -1e-6, 1e3, inf, nan)),
        "tanh": (ops.tanh, 8, 0, -12, 12, (0.0, -inf, inf, nan, 1e-3)),
        "logistic": (ops.logistic, 8, 0, -10, 10, (0.0, -inf, inf, nan)),
    }
    binary = {kind: getattr(ops, kind) for kind in ("add", "subtract", "multiply", "maximum", "minimum")}
    moves = (broadcast, reshape, transpose, constant, concatenate, slice_, dynamic_slice, dynamic_update_slice, gather)
    found = [(elementwise(k, f, d, 1, u, fl, lo, hi, sp), 1) for k, (f, u, fl, lo, hi, sp) in unary.items() for d in FLOATS]
    found += [(elementwise(kind, f, d, 2), 1) for kind, f in binary.items() for d in NUMBERS]
    found += [(elementwise("divide", ops.divide, d, 2), 1) for d in FLOATS] + [(divide_integers(d), 1) for d in INTS]
    found += [(elementwise(k, f, d, 2), 1) for k, f in {"and": ops.and_, "or": ops.or_}.items() for d in (*INTS, I1)]
    found += [(strategy(d), 1) for strategy in (compare, select, convert) for d in ALL]
    bits = ((F32, I32), (I32, F32), (F16, I8), (I8, F16), (F32, I8), (I8, F32))
    found += [(bitcast_convert(d, to), 2) for d, to in bits]
    found += [(convert_floats(d), 1) for d in FLOATS] + [(iota(d), 1) for d in NUMBERS if d is not BF16]
    found += [(strategy(d), 1) for strategy in moves for d in (BF16, I1, I8, I32)] + [(strategy(F32), 2) for strategy in moves]
    found += [(dot_general(F32), 8)] + [(dot_general(d), 1) for d in NUMBERS[1:]]
    found += [(reduce(kind, d), 2) for kind in ("add", "maximum") for d in FLOATS]
    return [*found, (argmax(), 4)]
