"""Compute the RMS norm or layer norm of each row of x on a GPU, and add a residual.

each workgroup: one row of x [T, hidden]
  layer norm: mean = sum of x / hidden; RMS norm: mean = 0                                   shared
  inverse = 1 / sqrt(sum of (x - mean)^2 / hidden + eps)                                     shared
  y[row, d] = (x - mean) * inverse * weight[d] (+ bias[d]) (+ residual[row, d])              memory
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Index, Ssa, number
from castiron.emitter.kernels.mlir.vector_math import rms_normed

THREADS = 128


@cache
def norm(kind: str, T: int, hidden: int, eps: float, bias: bool = False, residual: bool = False) -> Kernel:
    """Return the kernel of "rms_norm" or "layer_norm" over each row of x.

    Operands: x f32 [T, hidden], weight f32 [hidden], bias f32 [hidden] if `bias`, residual f32 [T,
        hidden] if `residual`. Result: y f32 [T, hidden].
    """
    rows, row = TensorType((T, hidden), F32), TensorType((hidden,), F32)
    operands = {"x": rows, "weight": row, **({"bias": row} if bias else {}), **({"residual": rows} if residual else {})}

    def read_row(b: GpuBody, t: Index, x: Ssa, weight: Ssa, **given: Ssa) -> Callable[[Index], Ssa]:
        thread = b.thread()

        def row_sum(value) -> Ssa:
            with b.strided(thread, hidden, [b.f32(0.0)]) as d:
                d.give(b.addf(d.values[0], value(b.load(x, t, d.index))))
            sums, at = b.sums(thread, d.results, b.threads)
            return b.load(sums, at)

        centred = lambda x: x
        if kind == "layer_norm":
            mean = b.divf(row_sum(lambda x: x), b.f32(hidden))
            centred = lambda x: b.subf(x, mean)
        variance = b.divf(row_sum(lambda x: b.mulf(centred(x), centred(x))), b.f32(hidden))
        inverse = b.divf(b.f32(1.0), b.math("sqrt", b.addf(variance, b.f32(eps))))

        def element(d: Index) -> Ssa:
            value = b.mulf(b.mulf(centred(b.load(x, t, d)), inverse), b.load(weight, d))
            if bias:
                value = b.addf(value, b.load(given["bias"], d))
            return b.addf(value, b.load(given["residual"], t, d)) if residual else value

        return element

    def write(b: GpuBody, y: Ssa, **given: Ssa) -> None:
        t = b.workgroup()
        element = read_row(b, t, **given)
        with b.strided(b.thread(), hidden) as d:
            b.store(element(d.index), y, t, d.index)

    def reference(x: np.ndarray, weight: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        wide = x.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if kind == "layer_norm" else wide
        y = rms_normed(wide, weight.astype(np.float64), eps) + given.get("bias", 0) + given.get("residual", 0)
        return {"y": y.astype(np.float32)}

    name = f"gpu_{kind}_{T}x{hidden}_{number(eps)}" + "_bias" * bias + "_residual" * residual
    return GpuKernel(
        name, operands, {"y": rows}, T, write, reference=reference, threads=THREADS, single_store=True, read_row=read_row
    )
