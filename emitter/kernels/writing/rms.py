"""The root mean square that norms divide by, as a kernel computes it and as NumPy defines it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from castiron.emitter.kernels.writing.body import Body, Index, Ssa
from castiron.emitter.kernels.writing.vectors import row_sum


def inverse_rms(b: Body, read: Callable[[Index, int], Ssa], count: int, eps: float, lanes: int) -> Ssa:
    """1 / sqrt(mean(x^2) + eps) over the `count` elements that `read(index, width)` gives, as a scalar."""

    def square(d: Index, width: int) -> Ssa:
        x = read(d, width)
        return b.mulf(x, x)

    mean = b.divf(row_sum(b, count, lanes, square), b.f32(count))
    return b.divf(b.f32(1.0), b.sqrt(b.addf(mean, b.f32(eps))))


def rms_normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of rows (Zhang and Sennrich 2019; HF `LlamaRMSNorm`) in f64: x / sqrt(mean(x^2) + eps) * weight."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
