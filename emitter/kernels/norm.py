"""RMS norm and layer norm of rows."""

from __future__ import annotations

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, executable, largest_width
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.rms import inverse_rms, rms_normed
from castiron.emitter.kernels.writing.symbols import number
from castiron.emitter.kernels.writing.vectors import row_sum
from castiron.emitter.types import F32, I32, TensorType


def rms_norm(
    T: int, hidden: int, eps: float, *, isa: Isa, residual: bool = False, length: bool = False, rows: int = 4
) -> Kernel:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019; HF `LlamaRMSNorm`).

    x [T, hidden], (residual [T, hidden]), weight [hidden], (length i32) -> out [T, hidden]. With `residual` the norm is of
    x + residual, and that sum is the second result. With `length` only rows < length are computed, the others are zero.
    `rows` is the number of rows a workgroup takes.
    """

    def write_row(b: Body, read, write, weight: Ssa, bias: None) -> None:
        inverse = inverse_rms(b, read, hidden, eps, isa.lanes)
        width = largest_width(isa.lanes, hidden)
        scale = b.broadcast(inverse, width)
        with b.loop(0, hidden, width) as d:
            write(b.mulf(b.mulf(read(d.index, width), scale), b.vload(weight, width, d.index)), d.index)

    def reference(x: np.ndarray, weight: np.ndarray, bias: None) -> np.ndarray:
        return rms_normed(x, weight, eps)

    name = f"rms_norm_{T}x{hidden}_{number(eps)}"
    return _norm(name, T, hidden, False, residual, length, rows, isa, write_row, reference)


def layer_norm(
    T: int, hidden: int, eps: float, bias: bool = True, *, isa: Isa, residual: bool = False, length: bool = False, rows: int = 4
) -> Kernel:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016; torch `LayerNorm`).

    x [T, hidden], (residual [T, hidden]), weight [hidden], (bias [hidden]), (length i32) -> out [T, hidden]; options as in
    `rms_norm`. The variance is that of the centred row, in a second pass.
    """

    def write_row(b: Body, read, write, weight: Ssa, bias: Ssa | None) -> None:
        mean = b.divf(row_sum(b, hidden, isa.lanes, read), b.f32(hidden))

        def centred(d: Index, width: int) -> Ssa:
            return b.subf(read(d, width), b.broadcast(mean, width))

        inverse = inverse_rms(b, centred, hidden, eps, isa.lanes)
        width = largest_width(isa.lanes, hidden)
        scale = b.broadcast(inverse, width)
        with b.loop(0, hidden, width) as d:
            x = b.mulf(b.mulf(centred(d.index, width), scale), b.vload(weight, width, d.index))
            write(x if bias is None else b.addf(x, b.vload(bias, width, d.index)), d.index)

    def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        x = rms_normed(x - x.mean(axis=-1, keepdims=True), weight, eps)
        return x if bias is None else x + bias

    name = f"layer_norm_{T}x{hidden}_{number(eps)}" + ("_bias" if bias else "")
    return _norm(name, T, hidden, bias, residual, length, rows, isa, write_row, reference)


def _norm(name: str, T: int, hidden: int, bias: bool, residual: bool, length: bool, rows: int, isa: Isa, write_row, define):
    """The kernel around `write_row(body, read, write, weight, bias)`, which normalises one row."""
    x_type, weight_type = TensorType((T, hidden), F32), TensorType((hidden,), F32)
    operands = [x_type, *[x_type] * residual, weight_type, *[weight_type] * bias, *[TensorType((), I32)] * length]
    results = (x_type, *[x_type] * residual)
    tied = (None,) * len(results)
    name += "_add" * residual + "_length" * length + f"_{isa.name}_r{rows}"
    width = largest_width(isa.lanes, hidden)

    def named(arguments: tuple) -> tuple:
        """(x, residual, weight, bias, length, out, sum) of the arguments that there are; None for the others."""
        rest = iter(arguments)
        given = (True, residual, True, bias, length, True, residual)
        return tuple(next(rest, None) if there else None for there in given)

    def write(b: Body, *arguments: Ssa) -> None:
        x, other, weight, bias_row, real, out, added = named(arguments)
        low = b.mul(b.workgroup(), rows)
        high = b.min(b.add(low, rows), T)
        end = high if real is None else b.max(b.min(b.to_index(b.load(real)), high), low)
        with b.loop(low, end) as row:
            t, source = row.index, x
            if other is not None:
                with b.loop(0, hidden, width) as d:
                    total = b.addf(b.vload(x, width, t, d.index), b.vload(other, width, t, d.index))
                    b.vstore(total, added, t, d.index)
                source = added
            write_row(
                b,
                lambda d, width: b.vload(source, width, t, d),
                lambda value, d: b.vstore(value, out, t, d),
                weight,
                bias_row,
            )
        if real is not None:
            with b.loop(end, high) as row, b.loop(0, hidden, width) as d:
                for target in (out, added) if residual else (out,):
                    b.vstore(b.splat(0.0, width), target, row.index, d.index)

    def reference(*arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        x, other, weight, bias_row, real, *_ = named(arguments)
        n = T if real is None else int(real)
        total = x if other is None else (x + other).astype(np.float32)
        total = np.where(np.arange(T)[:, None] < n, total, np.float32(0))
        out = np.zeros((T, hidden), np.float32)
        out[:n] = define(total[:n].astype(np.float64), weight.astype(np.float64), bias_row)
        return (out, total) if residual else (out,)

    return Kernel(
        name=name,
        operands=tuple(operands),
        results=results,
        tied=tied,
        text=executable(name, operands, results, tied, -(-T // rows), write),
        reference=reference,
        flops=(4 + 4 * bias + residual) * T * hidden,
        bytes=4 * hidden * (T * (2 + 2 * residual) + 1 + bias),
    )
