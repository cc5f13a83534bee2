"""Sums of products of pairs of bf16 in the lanes of a vector: each lane of i32 holds two, the lower half first.

dpbf16  vdpbf16ps of AVX-512: both products added to an f32, each rounded to nearest, denormals as zero
bfdot   NEON's, the same but for how it rounds
plain   shifts and two fma in f32, for any CPU
"""

from __future__ import annotations

from castiron.emitter.kernels.writing.body import Body, Ssa, width_of
from castiron.emitter.kernels.writing.isa import Isa

_DPBF16 = {8: "llvm.x86.avx512bf16.dpbf16ps.256", 16: "llvm.x86.avx512bf16.dpbf16ps.512"}
HIGH_HALF = -(1 << 16)
HALF_PLACE = 1 << 15  # of bf16's last place, in the bits of an f32


class Pairs:
    """Sums f32 of products of pairs, for the vectors of `isa`."""

    def __init__(self, b: Body, isa: Isa):
        self.b, self.lanes, self.instruction = b, isa.lanes, isa.pairs

    def add(self, total: Ssa, a: Ssa, c: Ssa) -> Ssa:
        """total f32 plus the products of the pairs of a and c, i32, lane by lane."""
        if self.instruction == "plain":
            for left, right in zip(halves(self.b, a), halves(self.b, c), strict=True):
                total = self.b.fma(left, right, total)
            return total
        name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16" if self.instruction == "bfdot" else _DPBF16[self.lanes]
        a, c = (self.b.bitcast(each, 2 * self.lanes, "bf16") for each in (a, c))
        types = ", ".join(each.type for each in (total, a, c))
        return self.b.let(f'llvm.call_intrinsic "{name}"({total}, {a}, {c}) : ({types}) -> {total.type}', total.type)


def halves(b: Body, words: Ssa) -> tuple[Ssa, Ssa]:
    """The two bf16 of each i32 as f32, the lower half first."""
    width = width_of(words)
    low = b.binary("shli", words, b.isplat(16, width))
    return b.bitcast(low, width, "f32"), b.bitcast(_high(b, words), width, "f32")


def cut(b: Body, low: Ssa, high: Ssa) -> Ssa:
    """Pairs of the bf16 that two vectors of f32 begin with, rounded towards zero: i32."""
    low, high = (b.bitcast(each, width_of(each), "i32") for each in (low, high))
    return b.binary("ori", b.binary("shrui", low, b.isplat(16, width_of(low))), _high(b, high))


def nearest(b: Body, low: Ssa, high: Ssa) -> Ssa:
    """Pairs of the bf16 that are nearest to two vectors of f32, ties away from zero: i32."""
    return cut(b, *(_up(b, each) for each in (low, high)))


def pieces(b: Body, low: Ssa, high: Ssa, count: int) -> list[Ssa]:
    """Pairs of bf16 whose sum is the f32, to 8 bits of it each, the largest first; of one piece the nearest."""
    if count == 1:
        return [nearest(b, low, high)]
    found = [cut(b, low, high)]
    while len(found) < count:
        low, high = (b.subf(each, first) for each, first in zip((low, high), halves(b, found[-1]), strict=True))
        found.append(cut(b, low, high))
    return found


def _high(b: Body, words: Ssa) -> Ssa:
    return b.binary("andi", words, b.isplat(HIGH_HALF, width_of(words)))


def _up(b: Body, x: Ssa) -> Ssa:
    bits = b.bitcast(x, width_of(x), "i32")
    return b.bitcast(b.binary("addi", bits, b.isplat(HALF_PLACE, width_of(x))), width_of(x), "f32")
