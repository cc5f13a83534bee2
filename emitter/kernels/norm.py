"""Compute the RMS norm or layer norm of each row of x.

A workgroup computes a few rows of x [T, hidden]. Rows from `length` on are padding.

    for row < length:
      layer norm only: x = x - mean(x)               a separate pass over the row computes the mean
      inverse = 1 / sqrt(mean(x^2) + eps)
      for d in hidden: y[row, d] = x[d] * inverse * weight[d]          + bias[d] if there is one
    for row >= length: y[row] = 0                                      if `length` is given
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Ssa, largest_width, number
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import inverse_rms, rms_normed, row_sum

ROWS = 4  # rows of a workgroup


@cache
def norm(kind: str, T: int, hidden: int, eps: float, *, isa: Isa, length: bool = False, bias: bool = False) -> Kernel:
    """Return the kernel of a norm over each row of x.

    kind: "rms_norm" (as HF's `LlamaRMSNorm`) or "layer_norm" (as in torch).
    bias, length: whether the kernel has these operands.
    Operands: x f32 [T, hidden]; weight f32 [hidden]; bias f32 [hidden]; length i32, the number of
        rows that are not padding.
    Result: y f32 [T, hidden]; rows of padding are zero.
    """
    centred = kind == "layer_norm"
    rows, row = TensorType((T, hidden), F32), TensorType((hidden,), F32)
    operands = {"x": rows, "weight": row}
    if bias:
        operands["bias"] = row
    if length:
        operands["length"] = TensorType((), I32)
    width = largest_width(isa.lanes, hidden)

    def write_row(b: Body, t: Ssa, x: Ssa, weight: Ssa, y: Ssa, added: Ssa | None) -> None:
        read = lambda d, width: b.vload(x, width, t, d)
        element = read
        if centred:
            mean = b.divf(row_sum(b, hidden, read), b.f32(hidden))
            element = lambda d, width: b.subf(read(d, width), b.broadcast(mean, width))
        scale = b.broadcast(inverse_rms(b, element, hidden, eps), width)
        with b.loop(0, hidden, width) as d:
            value = b.mulf(b.mulf(element(d.index, width), scale), b.vload(weight, width, d.index))
            b.vstore(value if added is None else b.addf(value, b.vload(added, width, d.index)), y, t, d.index)

    def write(b: Body, x: Ssa, weight: Ssa, y: Ssa, **given: Ssa) -> None:
        low = b.mul(b.workgroup(), ROWS)
        high = b.min(b.add(low, ROWS), T)
        end = b.real(given.get("length"), low, high)
        with b.loop(low, end) as loop:
            write_row(b, loop.index, x, weight, y, given.get("bias"))
        if length:
            with b.loop(end, high) as loop, b.loop(0, hidden, width) as d:
                b.vstore(b.splat(0.0, width), y, loop.index, d.index)

    def reference(x: np.ndarray, weight: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        y, real = np.zeros((T, hidden), np.float32), int(given.get("length", T))
        wide = x[:real].astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if centred else wide
        y[:real] = rms_normed(wide, weight.astype(np.float64), eps) + given.get("bias", 0)
        return {"y": y}

    return Kernel(
        f"{kind}_{T}x{hidden}_{number(eps)}" + "_bias" * bias + "_length" * length + f"_{isa.name}_r{ROWS}",
        operands,
        {"y": rows},
        -(-T // ROWS),
        write,
        reference=reference,
        flops=(4 + 4 * bias) * T * hidden,
        nbytes=4 * hidden * (2 * T + 1 + bias),
    )
