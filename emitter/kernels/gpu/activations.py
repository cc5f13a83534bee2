"""Scalar functions of GPU kernels: activations, softplus and the logistic function."""

from collections.abc import Callable
from math import pi, sqrt

from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import Ssa


def sigmoid(b: GpuBody, x: Ssa) -> Ssa:
    return b.divf(b.f32(1.0), b.addf(b.f32(1.0), b.math("exp", b.subf(b.f32(0.0), x))))


def softplus(b: GpuBody, x: Ssa) -> Ssa:
    """Emit code that computes log(1 + e^x) without overflow; small results are accurate."""
    small = b.math("exp", b.subf(b.f32(0.0), b.math("absf", x)))
    return b.addf(b.maxf(x, b.f32(0.0)), b.math("log1p", small))


def _silu(b: GpuBody, x: Ssa) -> Ssa:
    return b.mulf(x, sigmoid(b, x))


def _gelu_tanh(b: GpuBody, x: Ssa) -> Ssa:
    cubic = b.fma(b.mulf(b.mulf(x, x), x), b.f32(0.044715), x)
    half = b.mulf(x, b.f32(0.5))
    return b.fma(half, tanh(b, b.mulf(cubic, b.f32(sqrt(2 / pi)))), half)


def _gelu(b: GpuBody, x: Ssa) -> Ssa:
    half = b.mulf(x, b.f32(0.5))
    return b.fma(half, b.math("erf", b.mulf(x, b.f32(sqrt(0.5)))), half)


def tanh(b: GpuBody, x: Ssa) -> Ssa:
    return b.math("tanh", x)


ACTIVATIONS: dict[str, Callable[[GpuBody, Ssa], Ssa]] = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu}
