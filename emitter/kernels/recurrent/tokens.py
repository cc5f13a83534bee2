"""Tokens of a call, columns of operands, and gates, for the kernels of recurrent layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import exp
from castiron.emitter.types import F32, I32, TensorType

QUAD = 4  # lanes of a vector that computes a single number


@dataclass(frozen=True)
class Columns:
    """The columns of an operand [T, width] from `first` on."""

    width: int
    first: int = 0

    def type(self, tokens: int) -> TensorType:
        return TensorType((tokens, self.width), F32)

    @property
    def name(self) -> str:
        return f"{self.first}of{self.width}"

    def of(self, x: np.ndarray, *sizes: int) -> np.ndarray:
        """Return these columns of x [T, width], in f64, as [T, *sizes]."""
        own = x[:, self.first : self.first + int(np.prod(sizes))]
        return own.reshape(len(x), *sizes).astype(np.float64)


@dataclass(frozen=True)
class Share:
    """The work of a workgroup: item `unit`, such as a head, of rows low .. end - 1.

    at: index of the layer's state. Rows end .. high - 1 are padding.
    """

    unit: Index
    at: Index
    low: Index
    end: Index
    high: Index


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call: `count` tokens of one sequence, or in a batch one of `count` sequences.

    layers: first dimension of the state, all layers of one sequence after another. length: whether
    a run-time length gives the number of real tokens. Negative positions mark idle sequences.
    """

    count: int
    layers: int
    batch: bool = False
    length: bool = False

    @property
    def in_turn(self) -> int:
        """Return the number of tokens that a workgroup computes one after another."""
        return 1 if self.batch else self.count

    @property
    def sequences(self) -> int:
        return self.count if self.batch else 1

    @property
    def operands(self) -> dict[str, TensorType]:
        own = {"positions": TensorType((self.count,), I32)} if self.batch else {}
        return {**own, **({"length": TensorType((), I32)} if self.length else {})}

    @property
    def suffix(self) -> str:
        return f"{self.layers}_{'b' * self.batch}{self.count}" + "_length" * self.length

    def share(self, b: Body, units: int, layer: Ssa, given: Mapping[str, Ssa]) -> Share:
        """Return the share of this workgroup; each sequence has `units` workgroups."""
        unit: Index = b.workgroup()
        if not self.batch:
            return Share(unit, layer, 0, b.real(given.get("length"), 0, self.count), self.count)
        row, unit = b.div(unit, units), b.rem(unit, units)
        after = b.add(row, 1)
        end = b.select(b.less(b.to_index(b.load(given["positions"], row)), 0), row, after)
        return Share(unit, b.add(b.mul(row, self.layers // self.count), layer), row, end, after)

    def real(self, layer: int, given: dict[str, np.ndarray]) -> Iterator[tuple[int, range]]:
        """Yield each active sequence's index in the state and the rows of its real tokens."""
        if not self.batch:
            yield layer, range(int(given.get("length", self.count)))
            return
        for i, position in enumerate(given["positions"].tolist()):
            if position >= 0:
                yield i * (self.layers // self.count) + layer, range(i, i + 1)


def zero_padding(b: Body, share: Share, y: Ssa, low: Index, high: Index, width: int) -> None:
    """Store zeros in columns low .. high - 1 of the rows of y that are padding."""
    with b.loop(share.end, share.high) as t, b.loop(low, high, width) as d:
        b.vstore(b.splat(0.0, width), y, t.index, d.index)


def single_lane(b: Body, x: Ssa) -> Ssa:
    """Broadcast a scalar to a vector of QUAD lanes, of which one lane is used."""
    return b.broadcast(x, QUAD)


def softplus(b: Body, x: Ssa) -> Ssa:
    """Return log(1 + e^x) of a vector, accurate for small results too."""
    small = exp(b, b.subf(b.splat(0.0, QUAD), b.math("absf", x)))
    return b.addf(b.maxf(x, b.splat(0.0, QUAD)), b.math("log1p", small))


def sigmoid(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, QUAD)
    return b.divf(one, b.addf(one, exp(b, b.subf(b.splat(0.0, QUAD), x))))
