"""Epilogues of matmuls, applied to dot products before storing: GLU, bias and residual."""

from collections.abc import Mapping, Sequence
from math import erf, pi, sqrt

import numpy as np

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import exp


def _silu(b: Body, x: Ssa) -> Ssa:
    one = b.splat(1.0, x.width)
    return b.divf(x, b.addf(one, exp(b, b.subf(b.splat(0.0, x.width), x))))


def _gelu_tanh(b: Body, x: Ssa) -> Ssa:
    width = x.width
    cubic = b.fma(b.mulf(b.mulf(x, x), x), b.splat(0.044715, width), x)
    half = b.mulf(x, b.splat(0.5, width))
    return b.fma(half, b.math("tanh", b.mulf(cubic, b.splat(sqrt(2 / pi), width))), half)


def _gelu(b: Body, x: Ssa) -> Ssa:
    width = x.width
    scaled = b.mulf(x, b.splat(sqrt(0.5), width))
    half = b.mulf(x, b.splat(0.5, width))
    return b.fma(half, b.math("erf", scaled), half)


def _silu_of(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


ACTIVATIONS = {
    # name (HF `ACT2FN`, gelu_pytorch_tanh as gelu_tanh): (MLIR, NumPy)
    "silu": (_silu, _silu_of),
    "gelu_tanh": (_gelu_tanh, lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))),
    "gelu": (_gelu, lambda x: 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x * sqrt(0.5)))),
}


def combine(b: Body, glu: str | None, dots: Sequence[Sequence[Ssa]]) -> Sequence[Ssa]:
    """Return the results of a row block: act(gate) * up with a GLU, otherwise the dot products.

    dots: [dot products], or with a GLU [those of gate, those of up]; each of one row block.
    """
    if glu is None:
        return dots[0]
    activate = ACTIVATIONS[glu][0]
    return [b.mulf(activate(b, gate), up) for gate, up in zip(*dots, strict=True)]


def with_operands(b: Body, y: Ssa, buffers: Mapping[str, Ssa], row: Index, column: Index) -> Ssa:
    """Return y plus bias and residual, if `buffers` has them; y begins at (row, column)."""
    for name, at in (("bias", (column,)), ("residual", (row, column))):
        if name in buffers:
            y = b.addf(y, b.vload(buffers[name], y.width, *at) if y.type.kind else b.load(buffers[name], *at))
    return y
