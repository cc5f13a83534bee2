"""Numbers as signed bytes (`emitter.rounding`) in a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from castiron.emitter.kernels.writing.body import Body, Ssa, vector_type, width_of
from castiron.emitter.kernels.writing.vectors import ROUND, lane_max, tree
from castiron.emitter.rounding import LEAST, MOST


def as_bytes(b: Body, parts: Sequence[Ssa]) -> tuple[list[Ssa], Ssa]:
    """Of one group, the vectors `parts`: each + ROUND, so that the byte stands in a lane's low bits, and the scale."""
    width = width_of(parts[0])
    most = lane_max(b, tree(b.maxf, [b.let(f"math.absf {part} : {part.type}", part.type) for part in parts]))
    zero = b.compare("olt", most, b.f32(float(LEAST)))
    inverse = b.broadcast(b.select(zero, b.f32(0.0), b.divf(b.f32(MOST), most)), width)
    return [b.fma(part, inverse, b.splat(ROUND, width)) for part in parts], b.divf(most, b.f32(MOST))


def numbers_of(b: Body, shifted: Ssa) -> Ssa:
    """The whole numbers of what `as_bytes` gave, as f32."""
    return b.subf(shifted, b.splat(ROUND, width_of(shifted)))


def low_bytes(b: Body, shifted: Ssa) -> Ssa:
    """The bytes of what `as_bytes` gave, in the order of the lanes."""
    width = width_of(shifted)
    words, bytes_ = vector_type(width, "i32"), vector_type(width, "i8")
    bits = b.let(f"vector.bitcast {shifted} : {shifted.type} to {words}", words)
    return b.let(f"arith.trunci {bits} : {words} to {bytes_}", bytes_)
