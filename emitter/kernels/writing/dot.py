"""Sums of products of bytes, by the instruction that the vector unit has for them.

A quad is four bytes in an i32, lowest first: codes of one output, or signed bytes of one row of x. The products are added to
an s32 for each row and output. That is exact, so every way gives the same numbers:

    vnni   vpdpbusd: u8 x s8, of each lane four products added to s32 at once
    sdot   NEON's sdot: s8 x s8, the same
    madd   vpmaddubsw: u8 x s8, two products to s16, which saturates: as many are added up in s16 as fit, then vpmaddwd with
           ones makes them s32. Codes of 8 bits are widened to s16 instead, and multiplied by vpmaddwd
    smmla  NEON's smmla: s8 x s8, two rows of eight bytes times two outputs, eight products added to each of four s32
    plain  multiplications of i32, for any CPU; `plain blocks` is smmla's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.weights.x_bytes import MOST
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.writing.isa import Isa

_DPBUSD = {8: "llvm.x86.avx512.vpdpbusd.256", 16: "llvm.x86.avx512.vpdpbusd.512"}
_MADD_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_MADD_WORDS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
_SDOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"
_SMMLA = "llvm.aarch64.neon.smmla.v4i32.v16i8"
_BLOCKS = ("smmla", "plain blocks")
# The first and the last two lanes of two vectors.
LOW, HIGH = (0, 1, 4, 5), (2, 3, 6, 7)


@dataclass(frozen=True)
class Total:
    """Sums so far: s32, a vector for each row of x, and, of `madd`, `pairs` additions in s16 that are not in it yet."""

    words: tuple[Ssa, ...]
    halves: Ssa | None = None
    pairs: int = 0


class Dot:
    """Sums of codes of `bits` bits times bytes of x between -MOST and MOST, for the vectors of `isa`, of which lane l is
    output l. An `add` takes `rows` rows of x and `quads` quads along k.
    """

    rows: ClassVar[int] = 1
    quads: ClassVar[int] = 1

    def __init__(self, b: Body, isa: Isa, bits: int):
        self.b, self.lanes, self.dot, self.bits = b, isa.lanes, isa.dot, bits
        # What is to be added to codes as they are stored: signed ones of 8 bits become unsigned.
        self.bias = 128 if bits == 8 and isa.dot not in ("sdot", *_BLOCKS) else 0

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """`quads` vectors of codes, a quad a lane, in the order in which `code` takes them."""
        return list(quads)

    def code(self, arranged: Sequence[Ssa]) -> tuple[Ssa, ...]:
        """Codes as `add` takes them."""
        (quad,) = arranged
        if self.dot == "plain":
            return tuple(self._byte(quad, j, "shrui") for j in range(4))
        if self._wide:
            low = self.b.isplat(0x00FF00FF, self.lanes)
            odd = self.b.binary("shrui", quad, self.b.isplat(8, self.lanes))
            return tuple(self._halves(self.b.binary("andi", each, low)) for each in (quad, odd))
        return (self.b.bitcast(quad, 4 * self.lanes, "i8"),)

    def x(self, x: Ssa, rows: Sequence[Index], quad: Index) -> tuple[Ssa, ...]:
        """Up to `rows` rows of the memref x [rows, quads] from a quad on, as `add` takes them."""
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
        """The total of up to `rows` rows before anything is added: i32 for all outputs of each."""
        (word,) = words
        return Total((self.b.broadcast(word, self.lanes),))

    def add(self, total: Total, code: tuple[Ssa, ...], x: tuple[Ssa, ...]) -> Total:
        """The total with another 4 * `quads` products for each row and output."""
        (words,) = total.words
        if self.dot == "plain" or self._wide:
            for pair in zip(code, x, strict=True):
                words = self.b.binary("addi", words, self._product(*pair))
            return Total((words,))
        if self.dot == "madd":
            pairs = self._call(_MADD_BYTES[self.lanes], "i16", 2, code[0], x[0])
            if total.halves is not None:
                pairs = self.b.binary("addi", total.halves, pairs)
            total = Total(total.words, pairs, total.pairs + 1)
            return total if total.pairs < self._most_pairs else Total(tuple(self.words(total)))
        name = _SDOT if self.dot == "sdot" else _DPBUSD[self.lanes]
        return Total((self._call(name, "i32", 1, words, code[0], x[0]),))

    def words(self, total: Total) -> list[Ssa]:
        """The sums, s32 [outputs], of each row."""
        (words,) = total.words
        if total.halves is None:
            return [words]
        ones = self.b.constant("dense<1>", total.halves.type)
        return [self.b.binary("addi", words, self._call(_MADD_WORDS[self.lanes], "i32", 1, total.halves, ones))]

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
        """Byte j of each lane as i32, signed with `shrsi`."""
        high = self.b.binary("shli", quad, self.b.isplat(24 - 8 * j, self.lanes)) if j < 3 else quad
        return self.b.binary(shift, high, self.b.isplat(24, self.lanes))

    def _halves(self, quad: Ssa) -> Ssa:
        return self.b.bitcast(quad, 2 * self.lanes, "i16")

    def _call(self, name: str, element: str, per_lane: int, *operands: Ssa) -> Ssa:
        type_ = vector_type(self.lanes * per_lane, element)
        listed, types = ", ".join(operands), ", ".join(operand.type for operand in operands)
        return self.b.let(f'llvm.call_intrinsic "{name}"({listed}) : ({types}) -> {type_}', type_)


class BlockDot(Dot):
    """`smmla`: lanes 2 i + j of the two vectors of a total are row i of x and outputs j, and 2 + j."""

    rows = quads = 2

    def arranged(self, quads: Sequence[Ssa]) -> list[Ssa]:
        """Eight codes of outputs 0 and 1, and of 2 and 3."""
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
                product = self._product(self._byte(of_outputs, j, "shrsi"), self._byte(of_rows, j, "shrsi"))
                words = self.b.binary("addi", words, product)
        return words


def dot_of(isa: Isa) -> type[Dot]:
    """How this vector unit sums products of bytes."""
    return BlockDot if isa.dot in _BLOCKS else Dot
