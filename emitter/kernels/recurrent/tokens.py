"""Code that kernels of recurrent layers share: tokens of a call, columns of operands, softplus."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import exp
from castiron.emitter.types import F32, I32, TensorType

QUAD = 4  # lanes of the vectors in which scalars are computed


@dataclass(frozen=True)
class Columns:
    """The columns of an operand f32 [T, width] that a kernel reads, from column `first` on.

    The operand may be the result of a fused matmul, which has other columns for other kernels.
    """

    width: int
    first: int = 0

    def type(self, tokens: int) -> TensorType:
        return TensorType((tokens, self.width), F32)

    @property
    def name(self) -> str:
        return f"{self.first}of{self.width}"

    def of(self, x: np.ndarray, *sizes: int) -> np.ndarray:
        """Return these columns of the NumPy array `x` [T, width], as f64 [T, *sizes]."""
        own = x[:, self.first : self.first + int(np.prod(sizes))]
        return own.reshape(len(x), *sizes).astype(np.float64)


@dataclass(frozen=True)
class Share:
    """The part of a recurrent kernel that one workgroup computes.

    unit: index of a head, or of a block of features.
    at: index of the layer's state in dimension 0 of the state, which may have several sequences.
    low, end, high: rows low .. end - 1 of x are tokens, and rows end .. high - 1 are padding.
    """

    unit: Index
    at: Index
    low: Index
    end: Index
    high: Index


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call of a recurrent kernel.

    count: number of tokens.
    layers: size of dimension 0 of the state, which has all layers of the first sequence, then all
        layers of the second, and so on.
    batch: False for consecutive tokens of one sequence, True for one token of each of `count`
        sequences. A sequence with a negative position is idle, and its state does not change.
    length: whether an operand `length` gives the number of tokens that are not padding.
    """

    count: int
    layers: int
    batch: bool = False
    length: bool = False

    @property
    def in_turn(self) -> int:
        """Return how many tokens one workgroup computes, one after another; in a batch, it is 1."""
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
        """Return which head (or block of features) and which tokens this workgroup computes.

        units: number of workgroups for each sequence. layer: index of the layer. given: memrefs of
        the kernel's operands, by name.
        """
        unit: Index = b.workgroup()
        if not self.batch:
            return Share(unit, layer, 0, b.real(given.get("length"), 0, self.count), self.count)
        row, unit = b.div(unit, units), b.rem(unit, units)
        after = b.add(row, 1)
        end = b.select(b.less(b.to_index(b.load(given["positions"], row)), 0), row, after)
        return Share(unit, b.add(b.mul(row, self.layers // self.count), layer), row, end, after)

    def real(self, layer: int, given: dict[str, np.ndarray]) -> Iterator[tuple[int, range]]:
        """Yield which state and which rows of x belong to each sequence, for the NumPy references.

        An item is (index in dimension 0 of the state, range of the rows that are not padding). Idle
        sequences are left out. layer: index of the layer. given: the kernel's operands as NumPy
        arrays, by name.
        """
        if not self.batch:
            yield layer, range(int(given.get("length", self.count)))
            return
        for i, position in enumerate(given["positions"].tolist()):
            if position >= 0:
                yield i * (self.layers // self.count) + layer, range(i, i + 1)


def zero_padding(b: Body, share: Share, y: Ssa, low: Index, high: Index, width: int) -> None:
    """Emit code that sets columns low .. high - 1 of y to zero in rows of padding.

    width: number of elements of a vector.
    """
    with b.loop(share.end, share.high) as t, b.loop(low, high, width) as d:
        b.vstore(b.splat(0.0, width), y, t.index, d.index)


def single_lane(b: Body, x: Ssa) -> Ssa:
    """Return a vector with `x` in every lane, to compute a scalar with functions of vectors."""
    return b.broadcast(x, QUAD)


def softplus(b: Body, x: Ssa) -> Ssa:
    """Return log(1 + e^x) of a vector of four lanes (QUAD), accurate also for small results."""
    small = exp(b, b.subf(b.splat(0.0, QUAD), b.math("absf", x)))
    return b.addf(b.maxf(x, b.splat(0.0, QUAD)), b.math("log1p", small))


def sigmoid(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, QUAD)
    return b.divf(one, b.addf(one, exp(b, b.subf(b.splat(0.0, QUAD), x))))
