"""Epilogues of matmul kernels, computed in the same dispatch: GLU, bias and residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, pi, sqrt

import numpy as np

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import exp, tanh
from castiron.emitter.kernels.weights.packing import LANES


def _silu(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, x.width)
    return b.divf(x, b.addf(one, exp(b, b.subf(b.splat(0.0, x.width), x))))


def _gelu_tanh(b: Body, x: Ssa) -> Ssa:
    width = x.width
    cubic = b.fma(b.mulf(b.mulf(x, x), x), b.splat(0.044715, width), x)
    half = b.mulf(x, b.splat(0.5, width))
    return b.fma(half, tanh(b, b.mulf(cubic, b.splat(sqrt(2 / pi), width))), half)


def _gelu(b: Body, x: Ssa) -> Ssa:
    width = x.width
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


@dataclass(frozen=True)
class Epilogue:
    """The operations that a kernel applies to y = W x: a GLU, a bias and a residual.

    glu: name of the activation in act(gate) * up, or None. With a GLU, row blocks of gate and of up
    alternate in W, gate first (`weights.packing.interleave_rows`).
    """

    bias: bool = False
    residual: bool = False
    glu: str | None = None

    @property
    def name(self) -> str:
        return (f"_{self.glu}" if self.glu else "") + "_bias" * self.bias + "_residual" * self.residual

    @property
    def row_blocks(self) -> int:
        """Return how many row blocks of W are read for 16 results: 2 with a GLU, otherwise 1."""
        return 2 if self.glu else 1

    def weight_rows(self, out_features: int) -> int:
        """Return the number of rows of the packed weight that `out_features` results need."""
        return -(-out_features // LANES) * 2 * LANES if self.glu else out_features

    def combine(self, b: Body, dots: list[list[Ssa]]) -> list[Ssa]:
        """Return 16 results as vectors, after the GLU, from dot products [row blocks][vectors]."""
        if self.glu is None:
            return dots[0]
        activate = ACTIVATIONS[self.glu][0]
        return [b.mulf(activate(b, gate), up) for gate, up in zip(*dots, strict=True)]

    def finish(self, b: Body, y: Ssa, buffers: Mapping[str, Ssa], row: Index, column: Index) -> Ssa:
        """Return y, a vector or scalar of results at [row, column], plus bias and residual."""

        def read(buffer: Ssa, *at: Index) -> Ssa:
            return b.vload(buffer, y.width, *at) if y.type.kind == "vector" else b.load(buffer, *at)

        if self.bias:
            y = b.addf(y, read(buffers["bias"], column))
        return b.addf(y, read(buffers["residual"], row, column)) if self.residual else y

    def define(self, dots: np.ndarray, out_features: int, bias: np.ndarray | None, residual: np.ndarray | None) -> np.ndarray:
        """Apply the epilogue in NumPy: dots f64 [T, weight rows] -> y f32 [T, out_features]."""
        if self.glu is not None:
            pairs = dots.reshape(len(dots), -1, 2, LANES)
            activate = ACTIVATIONS[self.glu][1]
            dots = (activate(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(dots), -1)[:, :out_features]
        if bias is not None:
            dots = dots + bias
        return (dots if residual is None else dots + residual).astype(np.float32)
