"""Rows of an embedding out of the packed weight, which a tied head shares."""

from __future__ import annotations

import numpy as np

from castiron.emitter.codecs import codec_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.weights.packing import LANES, layout, packed_shape, unpack
from castiron.emitter.kernels.weights.panel import Panel, units
from castiron.emitter.kernels.writing.body import Body, Ssa, executable
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.symbols import number
from castiron.emitter.types import F32, I8, I32, TensorType

DEPTH = 256  # of k decoded at once; 16 KB on the stack
MOST_WORKGROUPS = 64


def embed(
    codec_name: str, vocab: int, hidden: int, T: int | None, *, isa: Isa, scale: float = 1.0, length: bool = False
) -> Kernel:
    """ids [T] i32, weight (`packed_shape`, i8), (length i32) -> weight[ids] * scale [T, hidden] f32.

    With T None the one id is a scalar and the result [1, hidden]. With `length` rows >= length are zero. An id outside
    the vocabulary gives the row of the nearest one inside. All 16 rows of a block are decoded for the one that is
    wanted, which costs less than a second copy of the weight. ValueError for an unknown codec or partial blocks.
    """
    codec = codec_of(codec_name)
    shape = packed_shape(codec_name, vocab, hidden)
    tokens = 1 if T is None else T
    operands = (
        TensorType(() if T is None else (T,), I32),
        TensorType(shape, I8),
        *[TensorType((), I32)] * length,
    )
    result = TensorType((tokens, hidden), F32)
    workgroups = min(tokens, MOST_WORKGROUPS)
    unit = units(codec_name)
    depth = min(DEPTH, -(-hidden // unit) * unit)

    def write(b: Body, ids: Ssa, weight: Ssa, *rest: Ssa) -> None:
        real, out = rest if length else (None, *rest)
        panel = Panel(b, codec, isa, weight, depth, 1)
        workgroup = b.workgroup()
        low = b.div(b.mul(workgroup, tokens), workgroups)
        high = b.div(b.mul(b.add(workgroup, 1), tokens), workgroups)
        end = high if real is None else b.max(b.min(b.to_index(b.load(real)), high), low)
        whole = hidden // depth * depth
        with b.loop(low, end) as token:
            id = b.to_index(b.load(ids, *[token.index] * (T is not None)))
            id = b.max(b.min(id, vocab - 1), 0)

            def copy(k: int | Ssa, count: int) -> None:
                panel.fill(b.div(id, LANES), k, count)
                with b.loop(0, count) as j:
                    x = b.load(panel.values, j.index, b.rem(id, LANES))
                    x = x if scale == 1.0 else b.mulf(x, b.f32(scale))
                    b.store(x, out, token.index, b.add(k, j.index))

            with b.loop(0, whole, depth) as k:
                copy(k.index, depth)
            if whole < hidden:
                copy(whole, hidden - whole)
        if real is not None:
            with b.loop(end, high) as token, b.loop(0, hidden) as k:
                b.store(b.f32(0.0), out, token.index, k.index)

    def reference(ids: np.ndarray, weight: np.ndarray, *rest: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.clip(np.asarray(ids).reshape(-1), 0, vocab - 1)
        blocks = unpack(codec_name, np.asarray(weight)[rows // LANES], LANES * tokens, hidden)
        y = blocks.reshape(tokens, LANES, hidden)[np.arange(tokens), rows % LANES] * np.float32(scale)
        if length:
            y[int(rest[0]) :] = 0
        return (y,)

    name = f"embed_{codec_name}_{'one' if T is None else T}_{vocab}x{hidden}"
    name += ("" if scale == 1.0 else f"_scale{number(scale)}") + "_length" * length + f"_{isa.name}"
    record_bytes = shape[1] * layout(codec).size
    return Kernel(
        name=name,
        operands=operands,
        results=(result,),
        tied=(None,),
        text=executable(name, operands, (result,), (None,), workgroups, write),
        reference=reference,
        flops=tokens * hidden,
        bytes=tokens * record_bytes + result.nbytes,
    )
