"""Emit code for int8 dot products of rows of a quantised weight and rows of x.

The weight [out, in] consists of integer codes of up to 8 bits, and x [rows, in] of int8. The code
reads both in quads: a quad is an i32 with four int8 of one row, the first one in the lowest byte.
The instruction depends on the CPU. All of them give the same results, because their s32 sums are
exact:

    vnni   vpdpbusd: u8 x s8; adds four products to each s32
    sdot   NEON's sdot: s8 x s8; adds four products to each s32
    madd   vpmaddubsw: u8 x s8; adds two products to each s16. Before an s16 can saturate,
           vpmaddwd with ones adds them to s32. For codes of 8 bits, both operands are widened
           to s16, and vpmaddwd multiplies them
    smmla  NEON's smmla: s8 x s8; multiplies eight elements of two rows of x by those of two rows
           of the weight; adds eight products to each of four s32
    plain  multiplications of i32, for any CPU; "plain blocks" does the same with operands in the
           layout of smmla
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import Isa

_DPBUSD = {8: "llvm.x86.avx512.vpdpbusd.256", 16: "llvm.x86.avx512.vpdpbusd.512"}
_MADD_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_MADD_WORDS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
_SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"
_SMMLA = "llvm.aarch64.neon.smmla.v4i32.v16i8"
_BLOCKS = ("smmla", "plain blocks")
# Shuffles of two vectors of four lanes that return the first two lanes of each, and the last two lanes of each.
LOW, HIGH = (0, 1, 4, 5), (2, 3, 6, 7)


@dataclass(frozen=True)
class Accumulators:
    """The sums of an int8 dot product so far.

    words: s32 sums.
    halves: s16 sums that are not yet added to `words`; None unless the instruction is `madd`.
    pairs: number of times that two products were added to each s16; too many would saturate it.
    """

    words: tuple[Ssa, ...]
    halves: Ssa | None = None
    pairs: int = 0


class Dot:
    """A writer of code for int8 dot products of rows of a quantised weight and rows of x.

    A quad is an i32 with four int8 of one row. Callers use, in this order: `start`; `arranged`,
    `code`, `x` and `add` for each quad; `words`.

    rows, quads: rows of x, and quads of each row, that one call of `add` multiplies.
    codes: the smallest and the largest code of the weight.
    """

    rows: ClassVar[int] = 1
    quads: ClassVar[int] = 1

    def __init__(self, b: Body, isa: Isa, codes: tuple[int, int]):
        self.b, self.lanes, self.dot = b, isa.lanes, isa.dot
        # Callers add this bias to codes, to make negative codes unsigned.
        self.bias = 0 if isa.dot in ("sdot", *_BLOCKS) else max(0, -codes[0])
        self.max_code = codes[1] + self.bias

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """Put codes of the weight into the lane order that the method `code` expects.

        quads: `self.quads` vectors. Each lane is an i32 with four codes of one row of the weight.
        """
        return list(quads)

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        """Convert codes of the weight to operands of the CPU's dot product instruction."""
        (quad,) = arranged
        if self.dot == "plain":
            return tuple(self._byte(quad, j, "shrui") for j in range(4))
        if self._wide:
            low = self.b.isplat(0x00FF00FF, self.lanes)
            odd = self.b.binary("shrui", quad, self.b.isplat(8, self.lanes))
            return tuple(self._halves(self.b.binary("andi", each, low)) for each in (quad, odd))
        return (self.b.bitcast(quad, 4 * self.lanes, "i8"),)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        """Load elements of x, as operands of the CPU's dot product instruction.

        x: memref i32 [all rows, in / 4]; each i32 has four int8 elements of a row.
        quad: index of the first i32 to load from each row; `self.quads` of them are loaded.
        """
        (row,) = rows
        every = self.b.broadcast(self.b.load(x, row, quad), self.lanes)
        if self.dot == "plain":
            return tuple(self._byte(every, j, "shrsi") for j in range(4))
        if self._wide:
            halves = self._halves(every)
            eight = self.b.constant("dense<8>", halves.type)
            even = self.b.binary("shrsi", self.b.binary("shli", halves, eight), eight)
            return even, self.b.binary("shrsi", halves, eight)
        return (self.b.bitcast(every, 4 * self.lanes, "i8"),)

    def start(self, words: Sequence[Ssa]) -> Accumulators:
        """Create accumulators with initial sums."""
        (word,) = words
        return Accumulators((self.b.broadcast(word, self.lanes),))

    def add(self, sums: Accumulators, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Accumulators:
        """Return the accumulators `sums` plus products of the weight's codes and x."""
        (words,) = sums.words
        if self.dot == "plain" or self._wide:
            for pair in zip(code, x, strict=True):
                words = self.b.binary("addi", words, self._multiply(*pair))
            return Accumulators((words,))
        if self.dot == "madd":
            pairs = self._call(_MADD_BYTES[self.lanes], "i16", 2, code[0], x[0])
            if sums.halves is not None:
                pairs = self.b.binary("addi", sums.halves, pairs)
            sums = Accumulators(sums.words, pairs, sums.pairs + 1)
            max_pairs = (2**15 - 1) // (2 * 128 * self.max_code)  # pairs of products that fit s16
            return sums if sums.pairs < max_pairs else Accumulators(self._summed(sums))
        name = _SDOT if self.dot == "sdot" else _DPBUSD[self.lanes]
        return Accumulators((self._call(name, "i32", 1, words, code[0], x[0]),))

    def shifted(self, sums: Accumulators, words: Sequence[Ssa] | None = None) -> Accumulators:
        """Return the accumulators with 256 times the sums so far, plus `words` as in `start`."""
        up = [self.b.binary("shli", each, self.b.isplat(8, self.lanes)) for each in self._summed(sums)]
        if words is not None:
            up = [self.b.addi(each, more) for each, more in zip(up, self.start(words).words, strict=True)]
        return Accumulators(tuple(up))

    def joined(self, high: Accumulators, low: Accumulators) -> Accumulators:
        """Return accumulators with 256 * high + low."""
        pairs = zip(self._summed(self.shifted(high)), self._summed(low), strict=True)
        return Accumulators(tuple(self.b.addi(*pair) for pair in pairs))

    def words(self, sums: Accumulators) -> list[Ssa]:
        """Return the final s32 sums: one vector per row of x, one lane per row of the weight."""
        return list(self._summed(sums))

    def _summed(self, sums: Accumulators) -> tuple[Ssa, ...]:
        # The s32 sums, with the s16 sums.
        if sums.halves is None:
            return sums.words
        ones = self.b.constant("dense<1>", sums.halves.type)
        (words,) = sums.words
        return (self.b.addi(words, self._call(_MADD_WORDS[self.lanes], "i32", 1, sums.halves, ones)),)

    @property
    def _wide(self) -> bool:
        # Sums of two products of 8-bit codes would saturate s16, so codes are widened first.
        return self.dot == "madd" and self.max_code > 127

    def _multiply(self, code: Ssa, x: Ssa) -> Ssa:
        return self._call(_MADD_WORDS[self.lanes], "i32", 1, code, x) if self._wide else self.b.binary("muli", code, x)

    def _byte(self, quad: Ssa, j: int, shift: str) -> Ssa:
        high = self.b.binary("shli", quad, self.b.isplat(24 - 8 * j, self.lanes)) if j < 3 else quad
        return self.b.binary(shift, high, self.b.isplat(24, self.lanes))

    def _halves(self, quad: Ssa) -> Ssa:
        return self.b.bitcast(quad, 2 * self.lanes, "i16")

    def _call(self, name: str, element: str, per_lane: int, *operands: Ssa) -> Ssa:
        return self.b.intrinsic(name, vector_type(self.lanes * per_lane, element), *operands)


class BlockDot(Dot):
    """A `Dot` for NEON's `smmla`, which multiplies two rows of x by two rows of the weight.

    Two rows of x times four rows of the weight give eight sums, in two accumulators of four lanes:

    - lane 2 i + j of the first accumulator: row i of x, row j of the weight
    - lane 2 i + j of the second accumulator: row i of x, row 2 + j of the weight
    """

    rows = quads = 2

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        # From four codes of four outputs in each vector to eight codes of two outputs in each vector.
        first, second = quads
        return [self.b.shuffle(first, second, lanes) for lanes in ((0, 4, 1, 5), (2, 6, 3, 7))]

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        return tuple(arranged)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        words = [self.b.vload(x, self.quads, row, quad) for row in rows]
        return (self.b.shuffle(words[0], words[-1], range(4)),)

    def start(self, words: Sequence[Ssa]) -> Accumulators:
        rows = [self.b.broadcast(word, self.lanes) for word in words]
        both = self.b.shuffle(rows[0], rows[-1], LOW)
        return Accumulators((both, both))

    def add(self, sums: Accumulators, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Accumulators:
        return Accumulators(tuple(self._block(words, each, *x) for words, each in zip(sums.words, code, strict=True)))

    def words(self, sums: Accumulators) -> list[Ssa]:
        first, second = sums.words
        return [self.b.shuffle(first, second, lanes) for lanes in (LOW, HIGH)]

    def _block(self, words: Ssa, code: Ssa, x: Ssa) -> Ssa:
        if self.dot == "smmla":
            return self._call(_SMMLA, "i32", 1, words, *(self.b.bitcast(each, 16, "i8") for each in (x, code)))
        for q in range(self.quads):
            of_rows, of_outputs = self.b.shuffle(x, x, (q, q, 2 + q, 2 + q)), self.b.shuffle(code, code, (q, 2 + q, q, 2 + q))
            for j in range(4):
                partial = self._multiply(self._byte(of_outputs, j, "shrsi"), self._byte(of_rows, j, "shrsi"))
                words = self.b.binary("addi", words, partial)
        return words


def dot_of(isa: Isa) -> type[Dot]:
    """Return the class, `Dot` or `BlockDot`, for the int8 dot product instruction of `isa`."""
    return BlockDot if isa.dot in _BLOCKS else Dot
