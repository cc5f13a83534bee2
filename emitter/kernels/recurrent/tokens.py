"""Helpers of the kernels of recurrent layers.

They describe which tokens a call has, which columns of an operand a kernel reads, and which part of
the work a workgroup does. Two functions emit softplus and sigmoid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import exp

QUAD = 4  # lanes of the vectors in which scalars are computed


@dataclass(frozen=True)
class Columns:
    """The columns from `first` on that a kernel reads from an operand f32 [tokens, width]."""

    width: int
    first: int = 0

    def type(self, tokens: int) -> TensorType:
        return TensorType((tokens, self.width), F32)

    @property
    def name(self) -> str:
        return f"{self.first}of{self.width}"

    def of(self, x: np.ndarray, *sizes: int) -> np.ndarray:
        """Return these columns of a NumPy array x [tokens, width], as f64 [tokens, *sizes]."""
        own = x[:, self.first : self.first + int(np.prod(sizes))]
        return own.reshape(len(x), *sizes).astype(np.float64)


@dataclass(frozen=True)
class Share:
    """The part of a recurrent kernel's work that one workgroup does.

    unit: index of the head (for a convolution, of the block of features) that it computes.
    at: index in dimension 0 of the state operand, for the workgroup's layer and sequence.
    low, end, high: rows low .. end - 1 of x are its tokens; rows end .. high - 1 are padding.
    """

    unit: Index
    at: Index
    low: Index
    end: Index
    high: Index


@dataclass(frozen=True)
class Tokens:
    """The tokens that a recurrent kernel computes in one call; count: their number, with padding.

    layers: size of dimension 0 of the state: layers times sequences, sequence by sequence.
    batch: one token of each of `count` sequences (idle if the position is negative), instead of
    consecutive tokens of one. length: whether the kernel has an operand `length`.
    """

    count: int
    layers: int
    batch: bool = False
    length: bool = False

    @property
    def in_turn(self) -> int:
        """Return how many tokens one workgroup computes: 1 in a batch, otherwise all of them."""
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
        """Emit code that finds which part of the kernel's work the running workgroup does."""
        unit: Index = b.workgroup()
        if not self.batch:
            return Share(unit, layer, 0, b.real(given.get("length"), 0, self.count), self.count)
        row, unit = b.div(unit, units), b.rem(unit, units)
        after = b.add(row, 1)
        end = b.select(b.less(b.to_index(b.load(given["positions"], row)), 0), row, after)
        return Share(unit, b.add(b.mul(row, self.layers // self.count), layer), row, end, after)

    def real(self, layer: int, given: dict[str, np.ndarray]) -> Iterator[tuple[int, range]]:
        """Yield (index in dimension 0 of the state, range of rows of x) for each sequence."""
        if not self.batch:
            yield layer, range(int(given.get("length", self.count)))
            return
        for i, position in enumerate(given["positions"].tolist()):
            if position >= 0:
                yield i * (self.layers // self.count) + layer, range(i, i + 1)


def zero_padding(b: Body, share: Share, y: Ssa, low: Index, high: Index, width: int) -> None:
    """Emit code that zeroes columns low .. high - 1 of the workgroup's rows of padding in y."""
    with b.loop(share.end, share.high) as t, b.loop(low, high, width) as d:
        b.vstore(b.splat(0.0, width), y, t.index, d.index)


def single_lane(b: Body, x: Ssa) -> Ssa:
    """Broadcast a scalar to a vector of four lanes, to use it in functions that take vectors."""
    return b.broadcast(x, QUAD)


def softplus(b: Body, x: Ssa) -> Ssa:
    """Return log(1 + e^x) of a vector of four lanes; results near zero are accurate too."""
    small = exp(b, b.subf(b.splat(0.0, QUAD), b.math("absf", x)))
    return b.addf(b.maxf(x, b.splat(0.0, QUAD)), b.math("log1p", small))


def sigmoid(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, QUAD)
    return b.divf(one, b.addf(one, exp(b, b.subf(b.splat(0.0, QUAD), x))))
