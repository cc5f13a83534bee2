"""Emit int8 dot products of weight codes and x, with the CPU's instruction for them.

A quad is four int8 in an i32, the first in the lowest byte: four codes of one output (a row of the
weight), or four elements of one row of x. The s32 sums of all instructions are exact, so their
results are the same:

    vnni   vpdpbusd: u8 x s8, adds four products of each lane to s32
    sdot   NEON's sdot: s8 x s8, adds four products of each lane to s32
    madd   vpmaddubsw: u8 x s8, adds two products to s16. Before the s16 sums can saturate, vpmaddwd with ones adds
           them to s32. Codes of 8 bits are widened to s16 and multiplied by vpmaddwd
    smmla  NEON's smmla: s8 x s8, two rows of eight bytes times two outputs, adds eight products to each of four s32
    plain  multiplications of i32, for any CPU; `plain blocks` is the plain form of smmla
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.int8 import MAX_BYTE
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
class Total:
    """The accumulators of an int8 dot product.

    words: s32 sums. halves: for the instruction `madd`, s16 sums that are not yet added to `words`,
    or None. pairs: number of pairs of products that each sum in `halves` contains so far.
    """

    words: tuple[Ssa, ...]
    halves: Ssa | None = None
    pairs: int = 0


class Dot:
    """A writer of code for int8 dot products of weight codes and x.

    A lane of a vector belongs to one output (a row of the weight). A quad is four int8 in an i32. A
    call of `add` multiplies `self.quads` quads of codes by as many quads of x. It does so for each
    of `self.rows` rows of x.

    A caller passes codes through `arranged` and then `code`, and x through `x`. It passes the
    results of `code` and `x` to `add`. bits: bits of a code.
    """

    rows: ClassVar[int] = 1
    quads: ClassVar[int] = 1

    def __init__(self, b: Body, isa: Isa, bits: int):
        self.b, self.lanes, self.dot, self.bits = b, isa.lanes, isa.dot, bits
        # Callers add this bias to stored codes, to make signed 8-bit codes unsigned.
        self.bias = 128 if bits == 8 and isa.dot not in ("sdot", *_BLOCKS) else 0

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """Return `self.quads` vectors of codes, reordered for the method `code`.

        quads: vectors i32 with four codes of an output in each lane.
        """
        return list(quads)

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        """Return the results of `arranged`, converted to the operand type of the instruction."""
        (quad,) = arranged
        if self.dot == "plain":
            return tuple(self._byte(quad, j, "shrui") for j in range(4))
        if self._wide:
            low = self.b.isplat(0x00FF00FF, self.lanes)
            odd = self.b.binary("shrui", quad, self.b.isplat(8, self.lanes))
            return tuple(self._halves(self.b.binary("andi", each, low)) for each in (quad, odd))
        return (self.b.bitcast(quad, 4 * self.lanes, "i8"),)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        """Return elements of some rows of x, converted to the operand type of the instruction.

        From each row, the code loads 4 * `self.quads` consecutive elements. x: memref i32 [rows, in
        / 4], with four int8 in each i32. rows: indices of the rows. quad: index of the first i32 in
        a row.
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

    def start(self, words: Sequence[Ssa]) -> Total:
        """Return new accumulators; words: initial s32 sums of up to `self.rows` rows of x."""
        (word,) = words
        return Total((self.b.broadcast(word, self.lanes),))

    def add(self, total: Total, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Total:
        """Return `total` plus the products of 4 * `self.quads` codes with as many elements of x.

        code, x: results of the methods `code` and `x`.
        """
        (words,) = total.words
        if self.dot == "plain" or self._wide:
            for pair in zip(code, x, strict=True):
                words = self.b.binary("addi", words, self._multiply(*pair))
            return Total((words,))
        if self.dot == "madd":
            pairs = self._call(_MADD_BYTES[self.lanes], "i16", 2, code[0], x[0])
            if total.halves is not None:
                pairs = self.b.binary("addi", total.halves, pairs)
            total = Total(total.words, pairs, total.pairs + 1)
            max_pairs = (2**15 - 1) // (2 * MAX_BYTE * (2**self.bits - 1))  # pairs of products that fit s16
            return total if total.pairs < max_pairs else Total(tuple(self.words(total)))
        name = _SDOT if self.dot == "sdot" else _DPBUSD[self.lanes]
        return Total((self._call(name, "i32", 1, words, code[0], x[0]),))

    def words(self, total: Total) -> list[Ssa]:
        """Return the final s32 sums of a total: one vector [outputs] for each row of x."""
        (words,) = total.words
        if total.halves is None:
            return [words]
        ones = self.b.constant("dense<1>", total.halves.type)
        return [self.b.binary("addi", words, self._call(_MADD_WORDS[self.lanes], "i32", 1, total.halves, ones))]

    @property
    def _wide(self) -> bool:
        """Return whether codes must be widened to s16.

        If so, the instruction is vpmaddubsw and codes have 8 bits: s16 sums of two products would
        saturate.
        """
        return self.dot == "madd" and self.bits == 8

    def _multiply(self, code: Ssa, x: Ssa) -> Ssa:
        return self._call(_MADD_WORDS[self.lanes], "i32", 1, code, x) if self._wide else self.b.binary("muli", code, x)

    def _byte(self, quad: Ssa, j: int, shift: str) -> Ssa:
        """Return byte j of each lane as i32; shift: "shrsi" for signed bytes, else "shrui"."""
        high = self.b.binary("shli", quad, self.b.isplat(24 - 8 * j, self.lanes)) if j < 3 else quad
        return self.b.binary(shift, high, self.b.isplat(24, self.lanes))

    def _halves(self, quad: Ssa) -> Ssa:
        return self.b.bitcast(quad, 2 * self.lanes, "i16")

    def _call(self, name: str, element: str, per_lane: int, *operands: Ssa) -> Ssa:
        return self.b.intrinsic(name, vector_type(self.lanes * per_lane, element), *operands)


class BlockDot(Dot):
    """A `Dot` with the layout of the instruction `smmla`: two rows of x and four outputs.

    There are two accumulators of four lanes. Lane 2 i + j of both belongs to row i of x. In the
    first accumulator, the lane belongs to output j, in the second one to output 2 + j.
    """

    rows = quads = 2

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """Return a vector with the codes of outputs 0 and 1, and one with those of outputs 2 and 3.

        Each of these vectors has eight codes of each of two outputs. quads: two vectors, each with
        four codes of each of the four outputs.
        """
        first, second = quads
        return [self.b.shuffle(first, second, lanes) for lanes in ((0, 4, 1, 5), (2, 6, 3, 7))]

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        return tuple(arranged)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        words = [self.b.vload(x, self.quads, row, quad) for row in rows]
        return (self.b.shuffle(words[0], words[-1], range(4)),)

    def start(self, words: Sequence[Ssa]) -> Total:
        rows = [self.b.broadcast(word, self.lanes) for word in words]
        both = self.b.shuffle(rows[0], rows[-1], LOW)
        return Total((both, both))

    def add(self, total: Total, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Total:
        return Total(tuple(self._block(words, each, *x) for words, each in zip(total.words, code, strict=True)))

    def words(self, total: Total) -> list[Ssa]:
        first, second = total.words
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
    """Return the class that emits int8 dot products for an instruction set."""
    return BlockDot if isa.dot in _BLOCKS else Dot
