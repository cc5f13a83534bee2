"""Sums of products of bytes in the lanes of a vector, by the instruction that the vector unit has for them.

Lane l of a code holds four of them, of x four signed bytes, lowest first, and the sum of the four products is added to lane l
of an s32. That is exact, so every way gives the same numbers:

    vnni   vpdpbusd: u8 x s8, four products added to s32 at once
    sdot   NEON's sdot: s8 x s8, the same
    madd   vpmaddubsw: u8 x s8, two products to s16, which saturates: as many are added up in s16 as fit, then vpmaddwd with
           ones makes them s32. Codes of 8 bits are widened to s16 instead, and multiplied by vpmaddwd
    plain  multiplications of i32, for any CPU
"""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.kernels.writing.body import Body, Ssa, vector_type
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.rounding import MOST

_DPBUSD = {8: "llvm.x86.avx512.vpdpbusd.256", 16: "llvm.x86.avx512.vpdpbusd.512"}
_MADD_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_MADD_WORDS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


@dataclass(frozen=True)
class Total:
    """A sum so far: s32 and, of `madd`, `pairs` additions in s16 that are not in it yet."""

    words: Ssa | None = None
    halves: Ssa | None = None
    pairs: int = 0


class Dot:
    """Sums of codes of `bits` bits times bytes of x between -MOST and MOST, for the vectors of `isa`."""

    def __init__(self, b: Body, isa: Isa, bits: int):
        self.b, self.lanes, self.dot, self.bits = b, isa.lanes, isa.dot, bits

    @staticmethod
    def bias(isa: Isa, bits: int) -> int:
        """What is to be added to codes of this width as they are stored: signed ones of 8 bits become unsigned."""
        return 128 if bits == 8 and isa.dot != "sdot" else 0

    def code(self, quad: Ssa) -> tuple[Ssa, ...]:
        """Four codes a lane, i32, as `add` takes them."""
        if self.dot == "plain":
            return tuple(self._byte(quad, j, "shrui") for j in range(4))
        if self._wide:
            low = self.b.isplat(0x00FF00FF, self.lanes)
            odd = self.b.binary("shrui", quad, self.b.isplat(8, self.lanes))
            return tuple(self._halves(self.b.binary("andi", each, low)) for each in (quad, odd))
        return (self.b.bitcast(quad, 4 * self.lanes, "i8"),)

    def x(self, word: Ssa) -> tuple[Ssa, ...]:
        """Four bytes of x, in one i32, for every lane, as `add` takes them."""
        every = self.b.broadcast(word, self.lanes)
        if self.dot == "plain":
            return tuple(self._byte(every, j, "shrsi") for j in range(4))
        if self._wide:
            halves = self._halves(every)
            eight = self.b.constant("dense<8>", halves.type)
            even = self.b.binary("shrsi", self.b.binary("shli", halves, eight), eight)
            return even, self.b.binary("shrsi", halves, eight)
        return (self.b.bitcast(every, 4 * self.lanes, "i8"),)

    def add(self, total: Total, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Total:
        """The total with another four products a lane."""
        if self.dot == "plain" or self._wide:
            products = [self._product(*pair) for pair in zip(code, x, strict=True)]
            if total.words is not None:
                products = [total.words, *products]
            while len(products) > 1:
                products = [self.b.binary("addi", *products[:2]), *products[2:]]
            return Total(products[0])
        if self.dot == "madd":
            pairs = self._call(_MADD_BYTES[self.lanes], "i16", 2, code[0], x[0])
            if total.halves is not None:
                pairs = self.b.binary("addi", total.halves, pairs)
            total = Total(total.words, pairs, total.pairs + 1)
            return total if total.pairs < self._most_pairs else Total(self.words(total))
        words = self.b.isplat(0, self.lanes) if total.words is None else total.words
        if self.dot == "sdot":
            return Total(self._call("llvm.aarch64.neon.sdot.v4i32.v16i8", "i32", 1, words, code[0], x[0]))
        return Total(self._call(_DPBUSD[self.lanes], "i32", 1, words, code[0], x[0]))

    def words(self, total: Total) -> Ssa:
        """The sums, s32."""
        if total.halves is None:
            assert total.words is not None, "nothing was added"
            return total.words
        ones = self.b.constant("dense<1>", total.halves.type)
        words = self._call(_MADD_WORDS[self.lanes], "i32", 1, total.halves, ones)
        return words if total.words is None else self.b.binary("addi", total.words, words)

    @property
    def _wide(self) -> bool:
        """Whether products are of s16, since u8 would saturate."""
        return self.dot == "madd" and self.bits == 8

    @property
    def _most_pairs(self) -> int:
        """How often two products fit s16."""
        return (2**15 - 1) // (2 * MOST * (2**self.bits - 1))

    def _product(self, code: Ssa, x: Ssa) -> Ssa:
        return self._call(_MADD_WORDS[self.lanes], "i32", 1, code, x) if self._wide else self.b.binary("muli", code, x)

    def _byte(self, quad: Ssa, j: int, shift: str) -> Ssa:
        """Byte j of each lane as i32, signed with `shrsi`; stored codes of `sdot`'s 8 bits are not met here."""
        high = self.b.binary("shli", quad, self.b.isplat(24 - 8 * j, self.lanes)) if j < 3 else quad
        return self.b.binary(shift, high, self.b.isplat(24, self.lanes))

    def _halves(self, quad: Ssa) -> Ssa:
        return self.b.bitcast(quad, 2 * self.lanes, "i16")

    def _call(self, name: str, element: str, per_lane: int, *operands: Ssa) -> Ssa:
        type_ = vector_type(self.lanes * per_lane, element)
        listed, types = ", ".join(operands), ", ".join(operand.type for operand in operands)
        return self.b.let(f'llvm.call_intrinsic "{name}"({listed}) : ({types}) -> {type_}', type_)
