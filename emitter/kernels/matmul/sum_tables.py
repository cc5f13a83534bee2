"""Prepare x for a GEMV of codes of up to three bits, where table look-ups replace multiplications.

A code is a base plus the values of its bits that are set: a code of two bits may be -2 + 1 * bit 0
+ 2 * bit 1. Several codes are packed in a word of 16 or 32 bits. So the sum of x * code over a word is a sum
of one term for each bit of the word.

A word is cut into slices of four bits (for vectors of 16 lanes) or three bits (8 lanes). A slice
has a value n of 0 .. 15 or 0 .. 7. A table has the sum of the terms of its bits for each n:

    table[n] = sum over j of (bit j of n) * (value of this bit in its code) * (x of this code),
               plus base * x of each code that starts in the slice

The tables depend on x only, so they serve all rows of the weight. For each row, the kernel looks up
the slices of its words and adds the table entries. A look-up is a permutation of a vector, and
replaces up to four multiplications in each lane.
"""

from collections.abc import Mapping
from functools import cached_property

from castiron.emitter.codec import Codec
from castiron.emitter.kernels.matmul.prepared_x import PreparedX
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import layout

# Max bits of a code, by lanes of a vector; for more bits, a multiplication for each code is not slower.
MAX_BITS = {4: 0, 8: 1, 16: 3}


def is_summed_by_tables(codec: Codec, isa: Isa) -> bool:
    """Return whether the GEMV of a codec looks up sums of x in tables instead of multiplying."""
    has_bit_values = not codec.table or codec.bits == 1
    return 0 < codec.bits <= MAX_BITS[isa.lanes] and has_bit_values and not isa.canonical


def additions(matmul: Matmul, isa: Isa) -> int:
    """Return the number of additions of a GEMV that uses tables of sums of x (`SumTables`).

    The codes of a row are packed in words. A word is cut into `slices` of a few bits. Each slice
    takes one look-up and one addition.
    """
    codec = matmul.format
    groups = matmul.tokens * matmul.weight_rows * matmul.in_features // codec.group
    return groups * layout(codec).words * len(slices(codec, isa))


def slices(codec: Codec, isa: Isa) -> list[tuple[int, int]]:
    """Return the slices of a word of codes, each as (its first bit, number of bits).

    A word is cut into slices, and the value of a slice is an index in a table with one entry for
    each lane of a vector. So a slice has log2(lanes) bits; the last one may have fewer.
    """
    bits, word_bits = isa.lanes.bit_length() - 1, layout(codec).word_bits
    return [(shift, min(bits, word_bits - shift)) for shift in range(0, word_bits, bits)]


def table_bytes(codec: Codec, isa: Isa) -> int:
    """Return the size in bytes of the tables of sums for one codec group (see the module).

    The codes of a codec group (elements that share a scale) are packed in words. Each word is cut
    into slices of a few bits, and each slice has a table of f32, one for each lane.
    """
    return layout(codec).words * len(slices(codec, isa)) * 4 * isa.lanes


class SumTables(PreparedX):
    """Emits code that computes tables of sums of x, for a GEMV of codes of up to three bits.

    The GEMV looks up a few bits of a word of codes in a table. The entry is the sum of x times the
    codes of these bits, so the GEMV needs no multiplication. The tables belong to one row of x.

    The inherited buffer `values` stores the x of one codec group, while its tables are computed.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, buffers: Mapping[str, Ssa], capacity: int, row: Index = 0):
        codec = matmul.format
        super().__init__(b, matmul, isa.lanes, buffers, capacity, 1, row, kept=codec.group)
        if not codec.minimum:  # tables include the offset
            self.sums = None
        record = layout(codec)
        self.slices, self.words = slices(codec, isa), record.words
        # From (word, bit of the word) to (code, bit of the code).
        self.bits = {
            (word, shift + bit): (k, bit)
            for k in range(codec.group)
            for word, shift, mask in record.bit_fields(codec, k)
            for bit in range(codec.bits)
            if mask >> bit & 1
        }
        self.tables = b.stack(capacity // codec.group * self.words * len(self.slices), isa.lanes)

    def table(self, group: Index, word: int, number: int) -> Ssa:
        """Load the table for one slice of a word of codes, f32 [lanes].

        Entry i is the dot product of x and the codes of the slice, if the slice's bits are i.

        group: index of the codec group (elements that share a scale), counted from the start of the
            part of x that the last `fill` prepared.
        word: index of the word in the group.
        number: index of the slice in the word; a slice is a few bits (`slices`).
        """
        return self.b.vload(self.tables, self.lanes, self._row(group, word, number), 0)

    def _row(self, group: Index, word: int, number: int) -> Index:
        count = len(self.slices)
        return self.b.add(self.b.mul(group, self.words * count), word * count + number)

    @cached_property
    def _bit_values(self) -> tuple[float, tuple[float, ...]]:
        """Return (base, values), where a code is base + sum over i of (bit i) * values[i]."""
        table = self.codec.table
        if table:
            return float(table[0]), (float(table[1] - table[0]),)
        return -float(self.codec.offset), tuple(2.0**i for i in range(self.codec.bits))

    def _store(self, token: Index, start: Index, k: int, x: Ssa) -> None:
        self.b.vstore(x, self.values, 0, k)

    def _finish(self, group: Index) -> None:
        b = self.b
        for word in range(self.words):
            for n, (shift, width) in enumerate(self.slices):
                total: Ssa | None = None
                for j in range(width):
                    k, bit = self.bits[word, shift + j]
                    x = b.broadcast(b.load(self.values, 0, k), self.lanes)
                    factors = self._factors(j, bit)
                    total = b.mulf(factors, x) if total is None else b.fma(factors, x, total)
                assert total is not None, "a slice has bits"
                b.vstore(total, self.tables, self._row(group, word, n), 0)

    def _factors(self, j: int, bit: int) -> Ssa:
        """Return factors f32 [lanes]: a bit of a code adds factors[n] * x to entry n of a table.

        The table belongs to a slice, which is a few bits of a word of codes. Entry n is the sum of
        x * code over these bits if the value of the slice is n. x is the element that is multiplied
        by the code of the bit.

        j: index of the bit in the slice. bit: index of the bit in its code.
        """
        base, weights = self._bit_values
        listed = [(base if bit == 0 else 0.0) + (weights[bit] if n >> j & 1 else 0.0) for n in range(self.lanes)]
        return self.b.constant(f"dense<{listed}>", vector_type(self.lanes))
