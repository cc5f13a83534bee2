"""Emit dot products of bf16 pairs: a lane with (a0, a1) and (c0, c1) adds a0 * c0 + a1 * c1 in f32.

An i32 stores a pair, with the first bf16 in its low half. `Isa.pairs` names one of three ways:

dpbf16  vdpbf16ps of AVX-512, which rounds each addition to nearest and takes denormals as zero
bfdot   NEON's instruction for the same sum, with different rounding
plain   shifts and two fma in f32, for any CPU
"""

from castiron.emitter.kernels.mlir.body import Body, Ssa
from castiron.emitter.kernels.mlir.isa import Isa

_DPBF16 = {8: "llvm.x86.avx512bf16.dpbf16ps.256", 16: "llvm.x86.avx512bf16.dpbf16ps.512"}
HIGH_HALF = -(1 << 16)
HALF_ULP = 1 << 15  # half a unit in the last place of bf16, in the bits of an f32


class Pairs:
    """Emits code that multiplies bf16 pairs and adds the products in f32, lane by lane."""

    def __init__(self, b: Body, isa: Isa):
        self.b, self.lanes, self.instruction = b, isa.lanes, isa.pairs

    def add(self, total: Ssa, a: Ssa, c: Ssa) -> Ssa:
        """Return total + a0 * c0 + a1 * c1 for each lane, as f32 [lanes].

        total: f32 [lanes].
        a, c: i32 [lanes]. A lane has two bf16, (a0, a1) or (c0, c1).
        """
        if self.instruction == "plain":
            for left, right in zip(halves(self.b, a), halves(self.b, c), strict=True):
                total = self.b.fma(left, right, total)
            return total
        name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16" if self.instruction == "bfdot" else _DPBF16[self.lanes]
        a, c = (self.b.bitcast(each, 2 * self.lanes, "bf16") for each in (a, c))
        return self.b.intrinsic(name, total.type, total, a, c)


def halves(b: Body, words: Ssa) -> tuple[Ssa, Ssa]:
    """Convert the bf16 in the low and in the high halves of i32 `words` to two f32 vectors."""
    width = words.width
    low = b.binary("shli", words, b.isplat(16, width))
    return b.bitcast(low, width, "f32"), b.bitcast(_high(b, words), width, "f32")


def cut(b: Body, low: Ssa, high: Ssa) -> Ssa:
    """Truncate two f32 vectors to bf16; pack them into the low and high halves of i32."""
    low, high = (b.bitcast(each, each.width, "i32") for each in (low, high))
    return b.binary("ori", b.binary("shrui", low, b.isplat(16, low.width)), _high(b, high))


def nearest(b: Body, low: Ssa, high: Ssa) -> Ssa:
    """Round two f32 vectors to bf16, ties away from zero; pack them as `cut` does."""
    return cut(b, *(_up(b, each) for each in (low, high)))


def pieces(b: Body, low: Ssa, high: Ssa, count: int) -> list[Ssa]:
    """Split each f32 into `count` bf16; return `count` i32 vectors with two bf16 in each lane.

    The bf16 in the low halves of the i32 add up to `low`, those in the high halves to `high`. The
    sum is exact for count 3 and approximate for count 2. For count 1, each f32 is rounded to the
    nearest bf16.
    """
    if count == 1:
        return [nearest(b, low, high)]
    found = [cut(b, low, high)]
    while len(found) < count:
        low, high = (b.subf(each, first) for each, first in zip((low, high), halves(b, found[-1]), strict=True))
        found.append(cut(b, low, high))
    return found


def _high(b: Body, words: Ssa) -> Ssa:
    return b.binary("andi", words, b.isplat(HIGH_HALF, words.width))


def _up(b: Body, x: Ssa) -> Ssa:
    bits = b.bitcast(x, x.width, "i32")
    return b.bitcast(b.binary("addi", bits, b.isplat(HALF_ULP, x.width)), x.width, "f32")
