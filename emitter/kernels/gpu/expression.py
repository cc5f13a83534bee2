"""Fuse StableHLO operations into a GPU kernel, which computes them where it loads or stores.

An object replaces a memref of the kernel: a `Computed` an operand, whose elements are computed
instead of loaded, a `Finished` a result, to whose elements the expression is applied first. So
activations, gates, multipliers and slices need no dispatch and no memory of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from castiron.emitter.graph.ir import Op, Value
from castiron.emitter.graph.types import I32, to_f32
from castiron.emitter.kernels.gpu.activations import sigmoid
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import Index, Ssa, Type, memref_type

# Functions of f32: MLIR and NumPy.
_UNARY: dict[str, tuple[Callable[..., Ssa], Callable[..., np.ndarray]]] = {
    "negate": (lambda b, x: b.subf(b.f32(0.0), x), np.negative),
    "exponential": (lambda b, x: b.math("exp", x), np.exp),
    "log_plus_one": (lambda b, x: b.math("log1p", x), np.log1p),
    "sqrt": (lambda b, x: b.math("sqrt", x), np.sqrt),
    "rsqrt": (lambda b, x: b.divf(b.f32(1.0), b.math("sqrt", x)), lambda x: 1 / np.sqrt(x)),
    "tanh": (lambda b, x: b.math("tanh", x), np.tanh),
    "logistic": (sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "abs": (lambda b, x: b.math("absf", x), np.abs),
}
_BINARY: dict[str, tuple[Callable[..., Ssa], Callable[..., np.ndarray]]] = {
    "add": (lambda b, x, y: b.addf(x, y), np.add),
    "subtract": (lambda b, x, y: b.subf(x, y), np.subtract),
    "multiply": (lambda b, x, y: b.mulf(x, y), np.multiply),
    "divide": (lambda b, x, y: b.divf(x, y), np.divide),
    "maximum": (lambda b, x, y: b.maxf(x, y), np.maximum),
    "minimum": (lambda b, x, y: b.select(b.compare("olt", x, y), x, y), np.minimum),
}
ELEMENTWISE = {**_UNARY, **_BINARY}
_MOVES = ("reshape", "transpose", "slice", "concatenate", "broadcast_in_dim", "dynamic_slice", "gather", "convert")
# The operations in an expression; all but `dot_general` and `reduce` cost little.
KINDS = (*ELEMENTWISE, *_MOVES, "constant", "reduce", "dot_general")
_NARROW = {"f16": 2, "bf16": 2, "i8": 4}  # elements in a word


def is_supported(op: Op) -> bool:
    """Return whether `op` can be part of an expression that is fused into a GPU kernel."""
    per_word = {"f32": 1, "i32": 1, **_NARROW}
    numbers = all(v.type.elements % per_word.get(v.dtype.name, v.type.elements + 1) == 0 for v in (*op.operands, *op.results))
    if op.kind == "convert":
        return numbers and op.results[0].dtype.name == "f32"
    if op.kind == "constant" and op.attrs["value"].ndim:
        return False
    floats = all(v.dtype.name == "f32" for v in op.results) or op.kind in _MOVES
    return op.kind in KINDS and numbers and floats


@dataclass(frozen=True, eq=False)
class Expression:
    """A graph of operations that a kernel computes where it loads or stores an element.

    producers: from each computed value to its operation. names: from each input to a kernel
        operand.
    hole: the value that stands for the kernel's result, such as y in gate * y, or None.
    """

    root: Value
    producers: Mapping[Value, Op]
    names: Mapping[Value, str]
    hole: Value | None = None

    def key(self) -> str:
        digest = hashlib.sha256(self._text(self.root).encode())
        return digest.hexdigest()[:10]

    def _text(self, value: Value) -> str:
        if value is self.hole:
            return "hole"
        if value in self.names:
            return f"{self.names[value]}:{value.type}"
        op = self.producers[value]
        attrs = {key: part.tobytes() if isinstance(part, np.ndarray) else part for key, part in op.attrs.items()}
        return f"{op.kind}{sorted(attrs.items())}:{value.type}({', '.join(map(self._text, op.operands))})"

    def element(
        self, b: GpuBody, given: Mapping[str, Any], index: Sequence[Index], hole: Ssa | FinishedHead | None = None
    ) -> Ssa:
        """Emit code that computes the element at `index` of the expression's result."""
        return _Elements(b, self, given, hole).at(self.root, index)

    def array(self, given: Mapping[str, np.ndarray], hole: np.ndarray | None = None) -> np.ndarray:
        """Compute the expression in NumPy, in f64."""
        return _array(self, self.root, given, hole)


@dataclass(frozen=True, eq=False)
class Computed:
    """An operand that is not in memory: the kernel computes each element that it loads."""

    expression: Expression
    given: Mapping[str, Any]

    @property
    def type(self) -> Type:
        root = self.expression.root
        return memref_type(root.shape, root.dtype.name)

    def load(self, b: GpuBody, *index: Index) -> Ssa:
        return self.expression.element(b, self.given, index)


@dataclass(frozen=True, eq=False)
class Finished:
    """A result of a kernel that applies an expression to each element before it stores it."""

    expression: Expression
    given: Mapping[str, Any]
    target: Ssa

    @property
    def type(self) -> Type:
        return self.target.type

    def store(self, b: GpuBody, value: Ssa, *index: Index) -> None:
        b.store(self.expression.element(b, self.given, index, value), self.target, *index)


@dataclass(frozen=True, eq=False)
class FinishedHead:
    """One head of an attention result, to which the kernel applies an expression before storing it.

    An element may depend on all elements of the head, so `row`, shared f32 [head_dim], has it
    first.
    target: [tokens, heads * n]; n may differ from head_dim.
    """

    expression: Expression
    given: Mapping[str, Any]
    target: Ssa
    row: Ssa
    token: Index
    head: Index

    def store(self, b: GpuBody, value: Ssa, *index: Index) -> None:
        b.store(value, self.row, self._element(b, index[-1]))

    def load(self, b: GpuBody, *index: Index) -> Ssa:
        return b.load(self.row, self._element(b, index[-1]))

    def _element(self, b: GpuBody, column: Index) -> Index:
        return b.sub(column, b.mul(self.head, self.row.type.shape[0]))

    def finish(self, b: GpuBody, heads: int) -> None:
        b.barrier()
        root = self.expression.root
        with b.strided(b.thread(), root.shape[1] // heads) as item:
            index = self.token, b.add(b.mul(self.head, root.shape[1] // heads), item.index)
            b.store(self.expression.element(b, self.given, index, self), self.target, *index)


@dataclass(frozen=True)
class ComputedRows:
    """An operand [rows, n] that is not in memory; rows[i](j) emits code for element (i, j)."""

    type: Type
    rows: Sequence[Callable[[Index], Ssa]]

    def load(self, b: GpuBody, *index: Index) -> Ssa:
        row, element = index
        assert isinstance(row, int), "the operand is in `reads_rows`"
        return self.rows[row](element)


@dataclass(frozen=True, eq=False)
class _Elements:
    b: GpuBody
    expression: Expression
    given: Mapping[str, Any]
    hole: Ssa | FinishedHead | None = None

    def at(self, value: Value, index: Sequence[Index]) -> Ssa:
        if value is self.expression.hole:
            assert self.hole is not None, "only a result of a kernel is continued"
            return self.hole if isinstance(self.hole, Ssa) else self.b.load(self.hole, *index)
        if value in self.expression.names:
            return self._loaded(self.given[self.expression.names[value]], value, index)
        op = self.expression.producers[value]
        if op.kind in ELEMENTWISE:
            return ELEMENTWISE[op.kind][0](self.b, *(self.at(x, index) for x in op.operands))
        return getattr(self, f"_{op.kind}")(op, index)

    def _loaded(self, buffer: Any, value: Value, index: Sequence[Index]) -> Ssa:
        per_word = _NARROW.get(value.dtype.name)
        if per_word is None:
            return self.b.load(buffer, *index)
        b, linear = self.b, self._linear(value.shape, index)
        word, part = b.load(b.words(buffer), b.div(linear, per_word)), b.rem(linear, per_word)
        shift = b.to_i32(b.mul(part, 32 // per_word))
        bits = b.binary("shrui", word, shift)
        if value.dtype.name == "i8":
            return b.number(b.bits("xori", b.bits("andi", bits, 0xFF), 0x80), 0x80)
        if value.dtype.name == "bf16":
            return b.bf16s(bits)[0]
        return b.half(b.bits("andi", bits, 0xFFFF))

    def _linear(self, shape: Sequence[int], index: Sequence[Index]) -> Index:
        linear: Index = 0
        for n, i in zip(shape, index, strict=True):
            linear = self.b.add(self.b.mul(linear, n), i) if n > 1 else linear
        return linear

    def _constant(self, op: Op, index: Sequence[Index]) -> Ssa:
        return self.b.f32(float(op.attrs["value"]))

    def _convert(self, op: Op, index: Sequence[Index]) -> Ssa:
        x = self.at(op.operands[0], index)
        return self.b.convert("sitofp", x, "f32") if op.operands[0].dtype is I32 else x

    def _reshape(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, shape = self.b, op.operands[0].shape
        linear, source_index = self._linear(op.results[0].shape, index), list[Index]()
        for i in reversed(range(len(shape))):
            rest = prod(shape[:i])
            source_index.insert(0, 0 if shape[i] == 1 else linear if rest == 1 else b.rem(linear, shape[i]))
            linear = b.div(linear, shape[i]) if rest > 1 else 0
        return self.at(op.operands[0], source_index)

    def _transpose(self, op: Op, index: Sequence[Index]) -> Ssa:
        index_of = dict(zip(op.attrs["dims"], index, strict=True))
        return self.at(op.operands[0], [index_of[d] for d in range(len(index_of))])

    def _slice(self, op: Op, index: Sequence[Index]) -> Ssa:
        return self.at(op.operands[0], [self.b.add(i, first) for i, first in zip(index, op.attrs["starts"], strict=True)])

    def _broadcast_in_dim(self, op: Op, index: Sequence[Index]) -> Ssa:
        shape = op.operands[0].shape
        return self.at(op.operands[0], [0 if n == 1 else index[d] for n, d in zip(shape, op.attrs["dims"], strict=True)])

    def _concatenate(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, dim, first, element = self.b, op.attrs["dim"], 0, None
        for part in op.operands:
            n, part_index = part.shape[dim], list(index)
            # An index outside this part is moved into it; its element is not selected.
            part_index[dim] = b.min(b.max(b.sub(index[dim], first), 0), n - 1)
            x = self.at(part, part_index)
            element = x if element is None else b.select(b.less(index[dim], first), element, x)
            first += n
        assert element is not None
        return element

    def _dynamic_slice(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, (x, *starts), source_index = self.b, op.operands, list[Index]()
        for i, start, n, size in zip(index, starts, x.shape, op.results[0].shape, strict=True):
            first = 0 if n == size else b.max(b.min(b.to_index(self.at(start, ())), n - size), 0)
            source_index.append(b.add(first, i))
        return self.at(x, source_index)

    def _gather(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, (table, ids) = self.b, op.operands
        row = b.max(b.min(b.to_index(self.at(ids, index[:1])), table.shape[0] - 1), 0)
        return self.at(table, (row, index[1]))

    def _reduce(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, x, dims = self.b, op.operands[0], op.attrs["dims"]
        extents = [x.shape[d] for d in dims]
        is_sum = op.attrs["reducer"] == "add"
        with b.loop(0, prod(extents), carry=[b.f32(0.0 if is_sum else -np.inf)]) as loop:
            rest, reduced = iter(index), self._split(loop.index, dims, extents)
            element = self.at(x, [reduced[d] if d in reduced else next(rest) for d in range(x.type.rank)])
            loop.give((b.addf if is_sum else b.maxf)(loop.values[0], element))
        return loop.results[0]

    def _split(self, linear: Index, dims: Sequence[int], extents: Sequence[int]) -> dict[int, Index]:
        """Emit code that splits a row-major linear index; return {dimension: index in it}."""
        index_of: dict[int, Index] = {}
        for i in reversed(range(len(dims))):
            index_of[dims[i]] = self.b.rem(linear, extents[i]) if i else linear
            linear = self.b.div(linear, extents[i]) if i else 0
        return index_of

    def _dot_general(self, op: Op, index: Sequence[Index]) -> Ssa:
        b, (x, y), contract, batch = self.b, op.operands, op.attrs["contract"], op.attrs["batch"]
        extents = [x.shape[d] for d in contract[0]]
        with b.loop(0, prod(extents), carry=[b.f32(0.0)]) as loop:
            free, factors = list(index[len(batch[0]) :]), []
            for side, tensor in enumerate((x, y)):
                fixed = self._split(loop.index, contract[side], extents) | dict(zip(batch[side], index))
                factors.append(self.at(tensor, [fixed[d] if d in fixed else free.pop(0) for d in range(tensor.type.rank)]))
            loop.give(b.fma(factors[0], factors[1], loop.values[0]))
        return loop.results[0]


def _array(e: Expression, value: Value, given: Mapping[str, np.ndarray], hole: np.ndarray | None) -> np.ndarray:
    if value is e.hole and hole is not None:
        return np.asarray(hole, np.float64)
    if value in e.names:
        array = given[e.names[value]]
        return array if value.dtype is I32 else to_f32(array, value.dtype).astype(np.float64)
    op = e.producers[value]
    args = [_array(e, x, given, hole) for x in op.operands]
    if op.kind in ELEMENTWISE:
        return ELEMENTWISE[op.kind][1](*args)
    return _NUMPY[op.kind](op, *args)


def _broadcast(op: Op, x: np.ndarray) -> np.ndarray:
    shape = [1] * op.results[0].type.rank
    for n, d in zip(x.shape, op.attrs["dims"]):
        shape[d] = n
    return np.broadcast_to(x.reshape(shape), op.results[0].shape)


def _dynamic(op: Op, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    at = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, op.results[0].shape)]
    return x[tuple(slice(s, s + size) for s, size in zip(at, op.results[0].shape))]


def _dot(op: Op, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (cx, cy), (bx, by) = op.attrs["contract"], op.attrs["batch"]
    labels = "abcdefghijklmnop"
    of_x = list(labels[: x.ndim])
    of_y = list(labels[x.ndim : x.ndim + y.ndim])
    for i, j in zip((*cx, *bx), (*cy, *by)):
        of_y[j] = of_x[i]
    free = [of_x[i] for i in range(x.ndim) if i not in (*cx, *bx)] + [of_y[i] for i in range(y.ndim) if i not in (*cy, *by)]
    return np.einsum(f"{''.join(of_x)},{''.join(of_y)}->{''.join([of_x[i] for i in bx] + free)}", x, y)


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "constant": lambda op: np.asarray(op.attrs["value"], np.float64),
    "convert": lambda op, x: x.astype(np.float64),
    "reshape": lambda op, x: np.broadcast_to(x, op.operands[0].shape).reshape(op.results[0].shape),
    "transpose": lambda op, x: x.transpose(op.attrs["dims"]),
    "slice": lambda op, x: x[tuple(slice(s, s + n) for s, n in zip(op.attrs["starts"], op.results[0].shape))],
    "concatenate": lambda op, *parts: np.concatenate(parts, op.attrs["dim"]),
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic,
    "gather": lambda op, table, ids: table[np.clip(ids, 0, len(table) - 1)],
    "reduce": lambda op, x, init: (np.sum if op.attrs["reducer"] == "add" else np.max)(x, axis=tuple(op.attrs["dims"])),
    "dot_general": _dot,
}
