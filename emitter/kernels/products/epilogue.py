"""What a matrix product does to its output in the same dispatch: GLU, bias, residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import erf, pi, sqrt

import numpy as np

from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, width_of
from castiron.emitter.kernels.writing.vectors import exp, tanh


def _silu(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, width_of(x))
    return b.divf(x, b.addf(one, exp(b, b.subf(b.splat(0.0, width_of(x)), x))))


def _gelu_tanh(b: Body, x: Ssa) -> Ssa:
    width = width_of(x)
    cubic = b.fma(b.mulf(b.mulf(x, x), x), b.splat(0.044715, width), x)
    half = b.mulf(x, b.splat(0.5, width))
    return b.fma(half, tanh(b, b.mulf(cubic, b.splat(sqrt(2 / pi), width))), half)


def _gelu(b: Body, x: Ssa) -> Ssa:
    width = width_of(x)
    scaled = b.mulf(x, b.splat(sqrt(0.5), width))
    half = b.mulf(x, b.splat(0.5, width))
    return b.fma(half, b.let(f"math.erf {scaled} : {scaled.type}", scaled.type), half)


def _silu_of(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


ACTIVATIONS = {
    # name (HF `ACT2FN`, gelu_pytorch_tanh as gelu_tanh): (MLIR, NumPy)
    "silu": (_silu, _silu_of),
    "gelu_tanh": (_gelu_tanh, lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))),
    "gelu": (_gelu, lambda x: 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x * sqrt(0.5)))),
}


def each_block(b: Body, out_features: int, block: Index, store: Callable[[int], None]) -> None:
    """store(0) for 16 results from 16 * block on, or store(n) for the n that the last block has of them."""
    last, ragged = divmod(out_features, LANES)
    if not ragged:
        store(0)
        return
    with b.when(b.less(block, last)):
        store(0)
    with b.when(b.equal(block, last)):
        store(ragged)


@dataclass(frozen=True)
class Epilogue:
    """y = W x becomes act(gate) * up if `glu` names the activation, then + bias, then + residual.

    With a GLU row blocks of the weight alternate, gate first (`weights.packing.interleave_rows`).
    """

    bias: bool = False
    residual: bool = False
    glu: str | None = None

    def __post_init__(self) -> None:
        if self.glu is not None and self.glu not in ACTIVATIONS:
            raise ValueError(f"activation {self.glu!r} is unknown: use one of {', '.join(ACTIVATIONS)}")

    @property
    def name(self) -> str:
        return (f"_{self.glu}" if self.glu else "") + "_bias" * self.bias + "_residual" * self.residual

    @property
    def row_blocks(self) -> int:
        """Row blocks of the weight that make 16 results."""
        return 2 if self.glu else 1

    def weight_rows(self, out_features: int) -> int:
        """Rows of the packed weight that give `out_features` results."""
        return -(-out_features // LANES) * 2 * LANES if self.glu else out_features

    def combine(self, b: Body, products: list[list[Ssa]]) -> list[Ssa]:
        """[row blocks][vectors] products -> the 16 results as vectors, before bias and residual."""
        if self.glu is None:
            return products[0]
        activate = ACTIVATIONS[self.glu][0]
        return [b.mulf(activate(b, gate), up) for gate, up in zip(*products, strict=True)]

    def finish(self, b: Body, y: Ssa, buffers: Mapping[str, Ssa], row: Index, column: Index) -> Ssa:
        """One vector or scalar of results at [row, column] with what is added to it."""

        def read(buffer: Ssa, *at: Index) -> Ssa:
            return b.vload(buffer, width_of(y), *at) if y.type.startswith("vector") else b.load(buffer, *at)

        if self.bias:
            y = b.addf(y, read(buffers["bias"], column))
        return b.addf(y, read(buffers["residual"], row, column)) if self.residual else y

    def define(
        self, products: np.ndarray, out_features: int, bias: np.ndarray | None, residual: np.ndarray | None
    ) -> np.ndarray:
        """NumPy definition: products [T, weight rows] f64 -> [T, out_features] f32."""
        if self.glu is not None:
            pairs = products.reshape(len(products), -1, 2, LANES)
            activate = ACTIVATIONS[self.glu][1]
            products = (activate(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(products), -1)[:, :out_features]
        if bias is not None:
            products = products + bias
        return (products if residual is None else products + residual).astype(np.float32)
