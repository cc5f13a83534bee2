"""Sums over groups of x, once for all canonical products of many tokens that take it.

each workgroup: up to 16 rows of x [T, in]
  for row, for group: sums = sum(x of the group) * the sign of the codec's minimum, or minus its offset       memory

To the last bit what products of one and of a few tokens make of x for themselves (`weights.prepared_x`).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from castiron.emitter.codecs import Codec
from castiron.emitter.kernels.kernel import Kernel, write_kernel
from castiron.emitter.kernels.weights.prepared_x import group_sum
from castiron.emitter.kernels.writing.body import Body, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.types import F32, TensorType

ROWS = 16  # that a workgroup takes


@cache
def group_sums(rows: int, in_features: int, codec: Codec, *, isa: Isa) -> Kernel:
    """x [rows, in] -> sums f32 [rows, in / group], with the factor that the codec's products want."""
    count, factor = in_features // codec.group, codec.minimum or -codec.offset

    def write(b: Body, x: Ssa, sums: Ssa) -> None:
        low = b.mul(b.workgroup(), ROWS)
        with b.loop(low, b.min(b.add(low, ROWS), rows)) as row, b.loop(0, count) as g:
            start = b.mul(g.index, codec.group)
            parts = [b.vload(x, isa.lanes, row.index, b.add(start, k)) for k in range(0, codec.group, isa.lanes)]
            b.store(group_sum(b, codec, parts), sums, row.index, g.index)

    def reference(x: np.ndarray) -> dict[str, np.ndarray]:
        return {"sums": (factor * x.reshape(rows, count, -1).sum(axis=2, dtype=np.float64)).astype(np.float32)}

    return write_kernel(
        f"group_sums_{rows}x{in_features}_{codec.group}_{'m' * (factor < 0)}{abs(factor)}_{isa.name}",
        {"x": TensorType((rows, in_features), F32)},
        {"sums": TensorType((rows, count), F32)},
        -(-rows // ROWS),
        write,
        reference=reference,
        flops=rows * in_features,
        nbytes=4 * rows * (in_features + count),
        fenced=isa.canonical,
    )
