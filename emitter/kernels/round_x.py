"""Rounds x to bytes (`weights.x_bytes`), once for all products that take it.

each workgroup: `ROWS` rows of x [T, in]
  for row, for each group:
    scale = max |x| / 127
    n = round(x / scale)                         to nearest, ties to even; 0 where the scale is next to 0
    y = four n in an i32, eight k in the order EVEN_ODD
    scales = scale, sums = scale * sum(n)
"""

from __future__ import annotations

from functools import cache

from castiron.emitter.codecs import Codec
from castiron.emitter.kernels.kernel import Kernel, write_kernel
from castiron.emitter.kernels.weights.x_bytes import EVEN_ODD, GROUP, LEAST, MOST, rounded, rounded_types
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, batches, vector_type, width_of
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import ROUND, lane_max, lane_sums, tree
from castiron.emitter.types import F32, TensorType

ROWS = 4  # that a workgroup takes


@cache
def round_x(rows: int, in_features: int, codec: Codec, *, isa: Isa) -> Kernel:
    """x [rows, in], whole GROUPs, -> `rounded_types` for weights of this codec."""
    lanes = isa.lanes

    def write(b: Body, x: Ssa, y: Ssa, scales: Ssa, sums: Ssa) -> None:
        low = b.mul(b.workgroup(), ROWS)
        with b.loop(low, b.min(b.add(low, ROWS), rows)) as t, b.loop(0, in_features // GROUP) as g:
            start = b.mul(g.index, GROUP)
            parts = [b.vload(x, lanes, t.index, b.add(start, k)) for k in range(0, GROUP, lanes)]
            most = lane_max(b, tree(b.maxf, [b.let(f"math.absf {part} : {part.type}", part.type) for part in parts]))
            zero = b.compare("olt", most, b.f32(float(LEAST)))
            inverse = b.broadcast(b.select(zero, b.f32(0.0), b.divf(b.f32(MOST), most)), lanes)
            # In the low bits of the sum stands the integer, in the low byte of these its byte.
            shifted = [b.fma(part, inverse, b.splat(ROUND, lanes)) for part in parts]
            scale = b.divf(most, b.f32(MOST))
            b.store(scale, scales, t.index, g.index)
            numbers = [b.subf(s, b.splat(ROUND, lanes)) for s in shifted]
            summed = batches(numbers, codec.group // lanes)
            for i, group in enumerate(summed):
                total = b.extract(lane_sums(b, [tree(b.addf, group)]), 0)
                value = b.mulf(total, scale) if codec.minimum else b.let(f"arith.fptosi {total} : f32 to i32", "i32")
                b.store(value, sums, t.index, b.add(b.mul(g.index, len(summed)), i))
            _store_bytes(b, shifted, y, t.index, b.div(start, 4))

    kind = f"by{codec.group}{'f32' if codec.minimum else 'i32'}"
    return write_kernel(
        f"round_x_{rows}x{in_features}_{kind}_{isa.name}",
        {"x": TensorType((rows, in_features), F32)},
        rounded_types(rows, in_features, codec),
        -(-rows // ROWS),
        write,
        reference=lambda x: rounded(x, codec),
        flops=4 * rows * in_features,
        nbytes=5 * rows * in_features,
    )


def _store_bytes(b: Body, shifted: list[Ssa], y: Ssa, row: Index, start: Index) -> None:
    """The low bytes of the lanes, every eight in the order EVEN_ODD, four in each i32 of y[row, start:]."""
    while len(shifted) > 1 and width_of(shifted[0]) < 8:
        pairs = zip(shifted[::2], shifted[1::2], strict=True)
        shifted = [b.shuffle(low, high, range(2 * width_of(low))) for low, high in pairs]
    width = width_of(shifted[0])
    order = [start + k for start in range(0, width, 8) for k in EVEN_ODD]
    for i, lanes in enumerate(shifted):
        words, bytes_ = vector_type(width, "i32"), vector_type(width, "i8")
        bits = b.let(f"vector.bitcast {lanes} : {lanes.type} to {words}", words)
        low = b.let(f"arith.trunci {bits} : {words} to {bytes_}", bytes_)
        ordered, quads = b.shuffle(low, low, order), vector_type(width // 4, "i32")
        b.vstore(b.let(f"vector.bitcast {ordered} : {bytes_} to {quads}", quads), y, row, b.add(start, i * width // 4))
