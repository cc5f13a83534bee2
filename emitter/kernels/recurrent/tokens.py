"""What kernels of recurrences share: whose tokens a call has, where its rows stand, and the gates of decays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from castiron.emitter.kernels.writing.body import Body, Index, Ssa
from castiron.emitter.kernels.writing.vectors import exp
from castiron.emitter.types import F32, I32, TensorType

QUAD = 4  # lanes in which a number alone is computed


@dataclass(frozen=True)
class Columns:
    """Where the rows of an operand stand in the rows, `width` wide, of a tensor [T, width]: from column `first` on."""

    width: int
    first: int = 0

    def type(self, tokens: int) -> TensorType:
        return TensorType((tokens, self.width), F32)

    @property
    def name(self) -> str:
        return f"{self.first}of{self.width}"

    def of(self, x: np.ndarray, *sizes: int) -> np.ndarray:
        """Its part of x [T, width], in f64 as [T, *sizes]."""
        own = x[:, self.first : self.first + int(np.prod(sizes))]
        return own.reshape(len(x), *sizes).astype(np.float64)


@dataclass(frozen=True)
class Share:
    """What a workgroup does: item `unit` of those of a layer, over rows low .. end - 1; rows from there to `high` are padding.

    at: where the state of the layer stands in its tensor.
    """

    unit: Index
    at: Index
    low: Index
    end: Index
    high: Index


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call: `count` of one sequence, of which `length` are real where that is given, or of a batch one of each
    sequence, whose position is negative where it is left alone.

    layers: of the state, those of each sequence after another.
    """

    count: int
    layers: int
    batch: bool = False
    length: bool = False

    @property
    def in_turn(self) -> int:
        """How many a workgroup takes, one after another."""
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

    def share(self, b: Body, units: int, layer: Ssa, positions: Ssa | None, length: Ssa | None) -> Share:
        """That of this workgroup, of `units` for each sequence."""
        unit: Index = b.workgroup()
        if not self.batch:
            return Share(unit, layer, 0, b.real(length, 0, self.count), self.count)
        assert positions is not None, "a batch has positions"
        row, unit = b.div(unit, units), b.rem(unit, units)
        after = b.add(row, 1)
        end = b.choose(b.less(b.to_index(b.load(positions, row)), 0), row, after)
        return Share(unit, b.add(b.mul(row, self.layers // self.count), layer), row, end, after)

    def real(self, layer: int, given: dict[str, np.ndarray]) -> Iterator[tuple[int, range]]:
        """For NumPy definitions: of each sequence where its layer stands in the state, and its real tokens."""
        if not self.batch:
            yield layer, range(int(given.get("length", self.count)))
            return
        for i, position in enumerate(given["positions"].tolist()):
            if position >= 0:
                yield i * (self.layers // self.count) + layer, range(i, i + 1)


@contextmanager
def padding(b: Body, share: Share, low: Index, high: Index, step: int) -> Iterator[tuple[Ssa, Ssa]]:
    """Row and column of everything that padding has between two columns, `step` at a time."""
    with b.loop(share.end, share.high) as t, b.loop(low, high, step) as d:
        yield t.index, d.index


def alone(b: Body, x: Ssa) -> Ssa:
    """A scalar in a vector, for mathematics on vectors."""
    return b.broadcast(x, QUAD)


def softplus(b: Body, x: Ssa) -> Ssa:
    """log(1 + e^x) of a vector, as exactly as its value is."""
    size = b.let(f"math.absf {x} : {x.type}", x.type)
    small = exp(b, b.subf(b.splat(0.0, QUAD), size))
    return b.addf(b.maxf(x, b.splat(0.0, QUAD)), b.let(f"math.log1p {small} : {small.type}", small.type))


def sigmoid(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, QUAD)
    return b.divf(one, b.addf(one, exp(b, b.subf(b.splat(0.0, QUAD), x))))
