"""Emit int8 dot products of weight codes and x, with the CPU's instruction for them.

An output is the result for one row of the weight. A quad is four int8 in an i32, the first in the
lowest byte. It has four codes of one row of the weight, or four elements of one row of x. All
instructions below give the same results, because their s32 sums are exact:

    vnni   vpdpbusd: u8 x s8, adds four products of each lane to s32
    sdot   NEON's sdot: s8 x s8, adds four products of each lane to s32
    madd   vpmaddubsw: u8 x s8, adds two products to s16. Before the s16 sums can saturate, vpmaddwd with ones adds
           them to s32. Codes of 8 bits are widened to s16 and multiplied by vpmaddwd
    smmla  NEON's smmla: s8 x s8, two rows of eight bytes times two outputs, adds eight products to each of four s32
    plain  multiplications of i32, for any CPU; `plain blocks` is the same in the block layout of smmla
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
class Accumulators:
    """The sums of an int8 dot product so far.

    words: s32 sums.
    halves: s16 sums that are not yet added to `words`; None unless the instruction is `madd`.
    pairs: how many pairs of products each s16 sum of `halves` has; too many would saturate it.
    """

    words: tuple[Ssa, ...]
    halves: Ssa | None = None
    pairs: int = 0


class Dot:
    """A writer of code for int8 dot products of weight codes and x.

    A quad is four int8 in an i32. One call of `add` multiplies `quads` quads of each output (row of
    the weight) by the same quads of `rows` rows of x. Each lane of a vector belongs to one output.
    Callers use these methods in turn:

    - `arranged`, then `code`: convert codes to operands of the instruction
    - `x`: load x as operands of the instruction
    - `start`: return accumulators
    - `add`: add products to the accumulators; repeat for the next quads
    - `words`: return the sums

    bits: number of bits of a code.
    """

    rows: ClassVar[int] = 1
    quads: ClassVar[int] = 1

    def __init__(self, b: Body, isa: Isa, bits: int):
        self.b, self.lanes, self.dot, self.bits = b, isa.lanes, isa.dot, bits
        # Callers add this bias to stored codes, to make signed 8-bit codes unsigned.
        self.bias = 128 if bits == 8 and isa.dot not in ("sdot", *_BLOCKS) else 0

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """Return codes in the lane order that `code` needs, which differs between subclasses.

        quads: vectors that have in each lane four codes of the lane's output.
        """
        return list(quads)

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        """Convert codes, as `arranged` returns them, to operands of the dot product instruction."""
        (quad,) = arranged
        if self.dot == "plain":
            return tuple(self._byte(quad, j, "shrui") for j in range(4))
        if self._wide:
            low = self.b.isplat(0x00FF00FF, self.lanes)
            odd = self.b.binary("shrui", quad, self.b.isplat(8, self.lanes))
            return tuple(self._halves(self.b.binary("andi", each, low)) for each in (quad, odd))
        return (self.b.bitcast(quad, 4 * self.lanes, "i8"),)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        """Load `self.quads` quads of each row of x, as operands of the dot product instruction.

        x: memref i32 [rows, in / 4]. rows: indices in x. quad: index of the first quad in a row.
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
        """Return new accumulators with initial sums.

        words: a scalar s32 for each row of x, from which the sums of all outputs start.
        """
        (word,) = words
        return Accumulators((self.b.broadcast(word, self.lanes),))

    def add(self, sums: Accumulators, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Accumulators:
        """Return `sums` plus the products of codes and x.

        code, x: results of the methods `code` and `x`.
        """
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
            max_pairs = (2**15 - 1) // (2 * MAX_BYTE * (2**self.bits - 1))  # pairs of products that fit s16
            return sums if sums.pairs < max_pairs else Accumulators(tuple(self.words(sums)))
        name = _SDOT if self.dot == "sdot" else _DPBUSD[self.lanes]
        return Accumulators((self._call(name, "i32", 1, words, code[0], x[0]),))

    def words(self, sums: Accumulators) -> list[Ssa]:
        """Return the final s32 sums: one vector [outputs] for each row of x."""
        (words,) = sums.words
        if sums.halves is None:
            return [words]
        ones = self.b.constant("dense<1>", sums.halves.type)
        return [self.b.binary("addi", words, self._call(_MADD_WORDS[self.lanes], "i32", 1, sums.halves, ones))]

    @property
    def _wide(self) -> bool:
        # Sums of two products of 8-bit codes would saturate s16, so codes are widened first.
        return self.dot == "madd" and self.bits == 8

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
    """A `Dot` for `smmla`, which multiplies two rows of x by two outputs (rows of the weight).

    Two accumulators of four lanes have the sums of two rows and four outputs. Lane 2 i + j of the
    first accumulator belongs to row i and output j. Lane 2 i + j of the second accumulator belongs
    to row i and output 2 + j.
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
    """Return the class that emits int8 dot products for an instruction set."""
    return BlockDot if isa.dot in _BLOCKS else Dot
