"""Codes of the packed weight as bytes, four in a lane, for sums of products of bytes (`writing.dot`).

Every eight k stand in the order EVEN_ODD, in which the fields of a word of 4-bit codes are bytes after one mask. x is stored
in that order as well.
"""

from __future__ import annotations

from castiron.emitter.kernels.weights.packing import LANES, TOP_CODES
from castiron.emitter.kernels.weights.records import Records
from castiron.emitter.kernels.weights.x_bytes import EVEN_ODD
from castiron.emitter.kernels.writing.body import Index, Ssa
from castiron.emitter.kernels.writing.dot import dot_of
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.table import byte_entries


class CodeBytes:
    """The codes of one group of a record."""

    def __init__(self, records: Records, isa: Isa, block: Index, record: Index, group: Index):
        self.records, self.block, self.record = records, block, record
        self.dot, self.isa = dot_of(isa)(records.b, isa, records.codec.code_bits), isa
        self.offset = records.codes_at(group)
        self._words: dict[tuple[int, Index], Ssa] = {}

    def quads(self, q: int, v: Index) -> list[Ssa]:
        """Quads q and on of the rows of vector v, as many as are multiplied at once, with the bias added, as `Dot.code` takes
        them.
        """
        return self.dot.arranged([self._quad(q + i, v) for i in range(self.dot.quads)])

    def _quad(self, q: int, v: Index) -> Ssa:
        """Codes EVEN_ODD of 4 q to 4 q + 3, lowest first: i32."""
        r = self.records
        ks = [q // 2 * 8 + EVEN_ODD[q % 2 * 4 + j] for j in range(4)]
        if r.codec.bits == 8:
            parts = [self._up(self._widened(k, v), 8 * j) for j, k in enumerate(ks)]
        else:
            # By word and shift to the right, the bits that stay.
            masks: dict[tuple[int, int], int] = {}
            for j, k in enumerate(ks):
                for word, shift, mask in self._pieces(k):
                    at = word, shift - 8 * j
                    masks[at] = masks.get(at, 0) | mask << 8 * j
            parts = [self._masked(self._up(self._word(word, v), -shift), mask) for (word, shift), mask in masks.items()]
        quad = parts[0]
        for part in parts[1:]:
            quad = r.b.binary("ori", quad, part)
        if r.codec.table:
            return byte_entries(r.b, self.isa, [code + self.dot.bias for code in r.codec.table], quad)
        return r.b.binary("xori", quad, r.b.isplat(-0x7F7F7F80, r.lanes)) if self.dot.bias else quad

    def _pieces(self, k: int) -> tuple[tuple[int, int, int], ...]:
        """Words, and by how much to shift them to the right and what of that to keep, that or-ed are stored code k."""
        r, bits = self.records, self.records.codec.bits
        beyond = k - r.layout.in_fields
        if beyond >= 0:
            return TOP_CODES[bits][beyond]
        word, field = r.layout.field(k)
        return ((word, bits * field, (1 << bits) - 1),)

    def _word(self, word: int, v: Index) -> Ssa:
        if (word, v) not in self._words:
            at = (self.block, self.record, self.records.b.add(self.offset, 4 * LANES * word))
            self._words[word, v] = self.records.rows(at, v, "i32", 32)
        return self._words[word, v]

    def _widened(self, k: int, v: Index) -> Ssa:
        r = self.records
        return r.widened("extui", r.rows((self.block, self.record, r.b.add(self.offset, LANES * k)), v, "i8", 8), "i32")

    def _up(self, value: Ssa, by: int) -> Ssa:
        """Shifted to the left, or to the right by a negative number."""
        b, lanes = self.records.b, self.records.lanes
        return b.binary("shli" if by > 0 else "shrui", value, b.isplat(abs(by), lanes)) if by else value

    def _masked(self, value: Ssa, mask: int) -> Ssa:
        b, lanes = self.records.b, self.records.lanes
        return b.binary("andi", value, b.isplat(mask - (mask >> 31 << 32), lanes))
