"""RMS norm and layer norm of rows.

    each workgroup: `rows` rows of x [T, hidden]
      for row < length:
        RMS norm:   inverse = 1 / sqrt(mean(x^2) + eps)                                            registers
        layer norm: mean = mean(x), a pass of its own; then the inverse of x - mean
        for d in hidden: out[row, d] = x * inverse * weight[d]      layer norm: (x - mean) and + bias[d]; memory
      for row >= length: out[row] = 0                               with `length` alone

Sums run along the row in up to four vectors side by side, which are added up across lanes at its end. The row is read again
for the result: it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from castiron.emitter.kernels.kernel import Kernel, write_kernel
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, largest_width
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.rms import inverse_rms, rms_normed
from castiron.emitter.kernels.writing.symbols import number
from castiron.emitter.kernels.writing.vectors import row_sum
from castiron.emitter.types import F32, I32, TensorType

ROWS = 4  # that a workgroup takes

Read = Callable[[Index, int], Ssa]
Store = Callable[[Ssa, Index], None]


def rms_norm(T: int, hidden: int, eps: float, *, isa: Isa, length: bool = False) -> Kernel:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019; HF `LlamaRMSNorm`).

    x [T, hidden], weight [hidden], (length i32) -> y [T, hidden]. With `length` only rows < length are computed, the
    others are zero.
    """

    def write_row(b: Body, read: Read, store: Store, weight: Ssa, bias: Ssa | None) -> None:
        inverse = inverse_rms(b, read, hidden, eps, isa.lanes)
        width = largest_width(isa.lanes, hidden)
        scale = b.broadcast(inverse, width)
        with b.loop(0, hidden, width) as d:
            store(b.mulf(b.mulf(read(d.index, width), scale), b.vload(weight, width, d.index)), d.index)

    def define(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return rms_normed(x, weight, eps)

    return _norm(f"rms_norm_{T}x{hidden}_{number(eps)}", T, hidden, False, length, isa, write_row, define)


def layer_norm(T: int, hidden: int, eps: float, bias: bool = True, *, isa: Isa, length: bool = False) -> Kernel:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016; torch `LayerNorm`).

    x [T, hidden], weight [hidden], (bias [hidden]), (length i32) -> y [T, hidden]; `length` as in `rms_norm`. The
    variance is that of the centred row, in a second pass.
    """

    def write_row(b: Body, read: Read, store: Store, weight: Ssa, bias: Ssa | None) -> None:
        mean = b.divf(row_sum(b, hidden, isa.lanes, read), b.f32(hidden))

        def centred(d: Index, width: int) -> Ssa:
            return b.subf(read(d, width), b.broadcast(mean, width))

        inverse = inverse_rms(b, centred, hidden, eps, isa.lanes)
        width = largest_width(isa.lanes, hidden)
        scale = b.broadcast(inverse, width)
        with b.loop(0, hidden, width) as d:
            y = b.mulf(b.mulf(centred(d.index, width), scale), b.vload(weight, width, d.index))
            store(y if bias is None else b.addf(y, b.vload(bias, width, d.index)), d.index)

    def define(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        y = rms_normed(x - x.mean(axis=-1, keepdims=True), weight, eps)
        return y if bias is None else y + bias

    name = f"layer_norm_{T}x{hidden}_{number(eps)}" + "_bias" * bias
    return _norm(name, T, hidden, bias, length, isa, write_row, define)


def _norm(
    name: str,
    T: int,
    hidden: int,
    with_bias: bool,
    with_length: bool,
    isa: Isa,
    write_row: Callable[[Body, Read, Store, Ssa, Ssa | None], None],
    define: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray],
) -> Kernel:
    """The kernel around `write_row`, which normalises one row, and its definition in f64."""
    rows, row = TensorType((T, hidden), F32), TensorType((hidden,), F32)
    operands = {"x": rows, "weight": row}
    if with_bias:
        operands["bias"] = row
    if with_length:
        operands["length"] = TensorType((), I32)

    def write(b: Body, x: Ssa, weight: Ssa, y: Ssa, bias: Ssa | None = None, length: Ssa | None = None) -> None:
        width = largest_width(isa.lanes, hidden)
        low = b.mul(b.workgroup(), ROWS)
        high = b.min(b.add(low, ROWS), T)
        end = high if length is None else b.max(b.min(b.to_index(b.load(length)), high), low)
        with b.loop(low, end) as loop:
            t = loop.index
            read = lambda d, width: b.vload(x, width, t, d)
            store = lambda value, d: b.vstore(value, y, t, d)
            write_row(b, read, store, weight, bias)
        if length is not None:
            with b.loop(end, high) as loop, b.loop(0, hidden, width) as d:
                b.vstore(b.splat(0.0, width), y, loop.index, d.index)

    def reference(
        x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, length: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        y, real = np.zeros((T, hidden), np.float32), T if length is None else int(length)
        y[:real] = define(x[:real].astype(np.float64), weight.astype(np.float64), bias)
        return {"y": y}

    return write_kernel(
        name + "_length" * with_length + f"_{isa.name}_r{ROWS}",
        operands,
        {"y": rows},
        -(-T // ROWS),
        write,
        reference=reference,
        flops=(4 + 4 * with_bias) * T * hidden,
        nbytes=4 * hidden * (2 * T + 1 + with_bias),
    )
