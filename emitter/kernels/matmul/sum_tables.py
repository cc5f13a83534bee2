"""Prepare x for a GEMV of codes of one bit, where table look-ups replace dot products.

A code is a base plus the values of its bits that are set: a code of two bits may be -2 + 1 * bit 0
+ 2 * bit 1. Several codes are packed in a word of 16 or 32 bits. So the sum of q * code over a word,
with the integers q of quantised x, is a sum of one term for each bit of the word.

A word is cut into slices of four bits (for vectors of 16 lanes) or three bits (8 lanes). A slice
has a value n of 0 .. 15 or 0 .. 7. A table of i32 has the sum of the terms of its bits for each n:

    table[n] = sum over j of (bit j of n) * (value of this bit in its code) * (q of this code),
               plus base * q of each code that starts in the slice

The tables depend on x only, so they serve all rows of the weight. For each row, the kernel looks up
the slices of its words and adds the table entries. A look-up is a permutation of a vector, and
replaces up to four products in each lane. The sums are exact, as those of dot products.
"""

from collections.abc import Mapping
from functools import cached_property

from castiron.emitter.codecs.codec import Codec
from castiron.emitter.kernels.matmul.prepared_x import QuantisedX
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import I32, Body, Index, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.lookup import permuted, shifted_index
from castiron.emitter.kernels.mlir.vector_math import tree
from castiron.emitter.kernels.quantise_x import integers_of, write_sums
from castiron.emitter.kernels.weights.packing import layout
from castiron.emitter.kernels.weights.records import GroupCodes

# Max bits of a code, by lanes of a vector; for more bits, dot products are not slower.
MAX_BITS = {4: 0, 8: 1, 16: 1}


def is_summed_by_tables(matmul: Matmul, isa: Isa) -> bool:
    """Return whether the GEMV of a matmul looks up sums of x in tables instead of multiplying."""
    codec = matmul.format
    has_bit_values = not codec.table or codec.bits == 1
    return matmul.digits == 3 and 0 < codec.bits <= MAX_BITS[isa.lanes] and has_bit_values


def _slices(codec: Codec, isa: Isa) -> list[tuple[int, int]]:
    # The slices of a word of codes, each as (its first bit, number of bits); the last one may have fewer bits.
    bits, word_bits = isa.lanes.bit_length() - 1, 32
    return [(shift, min(bits, word_bits - shift)) for shift in range(0, word_bits, bits)]


class SumTables(QuantisedX):
    """Stack buffers with tables of sums of one row of quantised x, and its scales and sums."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, buffers: Mapping[str, Ssa], capacity: int, row: Index = 0):
        super().__init__(b, matmul, isa.lanes, buffers, capacity, row, without=("x", "x_integer_sums"))
        self.isa, record = isa, layout(self.codec)
        self.slices, self.words = _slices(self.codec, isa), record.words
        # From (word, bit of the word) to (code, bit of the code).
        self.bits = {
            (word, shift + bit): (k, bit)
            for k in range(self.codec.group)
            for word, shift, mask in record.bit_fields(self.codec, k)
            for bit in range(self.codec.bits)
            if mask >> bit & 1
        }
        self.integers = b.stack(self.codec.unit(matmul.digits), element="i32")
        self.tables = b.stack(capacity // self.codec.group * self.words * len(self.slices), isa.lanes, element="i32")

    @staticmethod
    def bytes_per_element(matmul: Matmul, isa: Isa) -> float:
        codec = matmul.format
        return 8 / codec.group + layout(codec).words * len(_slices(codec, isa)) * 4 * isa.lanes / codec.group

    def dot(self, codes: GroupCodes, group: Index, v: int) -> Ssa:
        """Return the sum of q * code over a codec group, for the rows in vector `v`: i32 [lanes]."""
        b, found = self.b, []
        for word in range(self.words):
            for n, (shift, _) in enumerate(self.slices):
                table = b.bitcast(b.vload(self.tables, self.lanes, self._row(group, word, n), 0), self.lanes, "f32")
                entry = permuted(b, self.isa, table, shifted_index(b, self.isa, codes.word(word, v), shift))
                found.append(b.bitcast(entry, self.lanes, "i32"))
        return tree(b.addi, found)

    def _row(self, group: Index, word: int, number: int) -> Index:
        count = len(self.slices)
        return self.b.add(self.b.mul(group, self.words * count), word * count + number)

    @cached_property
    def _bit_values(self) -> tuple[int, tuple[int, ...]]:
        # (base, values), where a code is base + sum over i of (bit i) * values[i].
        table = self.codec.table
        if table:
            return int(table[0]), (int(table[1] - table[0]),)
        return -self.codec.offset, tuple(1 << i for i in range(self.codec.bits))

    def _write(self, x: list[Ssa], unit: Index) -> None:
        b, parts = self.b, self.codec.unit(self.matmul.digits) // self.codec.group
        integers, scale = integers_of(b, x, self.matmul.digits)
        b.store(scale, self.made["x_scales"], 0, unit)
        write_sums(b, self.codec, self.matmul.digits, integers, scale, self.made, 0, b.mul(unit, parts))
        for i, vector in enumerate(integers):
            b.vstore(vector, self.integers, i * self.lanes)
        for part in range(parts):
            self._write_tables(b.add(b.mul(unit, parts), part), part * self.codec.group)

    def _write_tables(self, group: Index, first: int) -> None:
        b = self.b
        for word in range(self.words):
            for n, (shift, width) in enumerate(self.slices):
                b.vstore(self._table(first, word, shift, width), self.tables, self._row(group, word, n), 0)

    def _table(self, first: int, word: int, shift: int, width: int) -> Ssa:
        # first: index of the group's first element in the unit.
        b, (base, weights) = self.b, self._bit_values
        offset: Ssa | None = None
        terms, zero = [], b.isplat(0, self.lanes)
        for j in range(width):
            k, bit = self.bits[word, shift + j]
            q = b.load(self.integers, first + k)
            if bit == 0 and base:
                term = b.binary("muli", q, b.constant(str(base), I32))
                offset = term if offset is None else b.addi(offset, term)
            entries = ", ".join("true" if n >> j & 1 else "false" for n in range(self.lanes))
            is_set = b.constant(f"dense<[{entries}]>", vector_type(self.lanes, "i1"))
            value = q if weights[bit] == 1 else b.binary("muli", q, b.constant(str(weights[bit]), I32))
            terms.append(b.select(is_set, b.broadcast(value, self.lanes), zero))
        return tree(b.addi, terms if offset is None else [*terms, b.broadcast(offset, self.lanes)])
