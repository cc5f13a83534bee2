"""Read codes of a packed weight as bytes, four in a lane, for dot products of bytes (`mlir.dot`).

Each eight consecutive k have the order EVEN_ODD, because masking a word of 4-bit codes gives bytes
in this order. x has the same order.
"""

from __future__ import annotations

from functools import reduce

from castiron.emitter.kernels.mlir.body import Index, Ssa
from castiron.emitter.kernels.mlir.dot import dot_of
from castiron.emitter.kernels.mlir.lookup import byte_entries
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import GroupCodes, Records
from castiron.emitter.kernels.x_formats import EVEN_ODD


class Int8Codes(GroupCodes):
    """A reader of the codes of one group of a record, as bytes."""

    def __init__(self, records: Records, block: Index, record: Index, group: Index):
        self.dot = dot_of(records.isa)(records.b, records.isa, records.codec.code_bits)
        super().__init__(records, block, record, records.codes_at(group))

    def quads(self, q: int, v: Index) -> list[Ssa]:
        """Return quads of vector v from quad q on, plus `self.dot.bias`, for `Dot.code`."""
        return self.dot.arranged([self._quad(q + i, v) for i in range(self.dot.quads)])

    def _quad(self, q: int, v: Index) -> Ssa:
        """Return codes 4 q to 4 q + 3 of the order EVEN_ODD as an i32, lowest byte first."""
        r = self.records
        ks = [q // 2 * 8 + EVEN_ODD[q % 2 * 4 + j] for j in range(4)]
        if r.codec.bits == 8:
            parts = [self._up(self._widened(k, v), 8 * j) for j, k in enumerate(ks)]
        else:
            # For each word and right shift, the mask of the bits that are used.
            masks: dict[tuple[int, int], int] = {}
            for j, k in enumerate(ks):
                for word, shift, mask in self._pieces(k):
                    at = word, shift - 8 * j
                    masks[at] = masks.get(at, 0) | mask << 8 * j
            parts = [self._signed_mask(self._up(self._word(word, v), -shift), mask) for (word, shift), mask in masks.items()]
        quad = reduce(r.b.either, parts)
        if r.codec.table:
            return byte_entries(r.b, r.isa, [code + self.dot.bias for code in r.codec.table], quad)
        return r.b.binary("xori", quad, r.b.isplat(-0x7F7F7F80, r.lanes)) if self.dot.bias else quad

    def _widened(self, k: int, v: Index) -> Ssa:
        r = self.records
        return r.b.convert("extui", r.rows((self.block, self.record, r.b.add(self.offset, LANES * k)), v, "i8", 8), "i32")

    def _up(self, value: Ssa, by: int) -> Ssa:
        """Shift left by `by` bits, or right by -`by` bits if `by` is negative."""
        b, lanes = self.records.b, self.records.lanes
        return b.binary("shli" if by > 0 else "shrui", value, b.isplat(abs(by), lanes)) if by else value

    def _signed_mask(self, value: Ssa, mask: int) -> Ssa:
        return self._masked(value, mask - (mask >> 31 << 32))
