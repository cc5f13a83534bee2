"""Emit MLIR that reads packed weights: codes as f32 or int8, scales and minima.

`weights.packing` describes the format of packed weights. `Records` describes the arguments that
most methods have.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np

from castiron.emitter.codecs.codec import Codec
from castiron.emitter.kernels.mlir.bf16_pairs import cut
from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa
from castiron.emitter.kernels.mlir.dot import dot_of
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.lookup import bf16_entries, bit_pairs, byte_entries, entries, has_bf16_entries
from castiron.emitter.kernels.quantise_x import EVEN_ODD
from castiron.emitter.kernels.weights.packing import LANES, layout

# An E4M3 code shifted to the bits of an f16 is divided by this factor, because the exponents' biases are 7 and 15.
E4M3_FACTOR = 256.0
# By the NumPy type of d: a float type, and its bits.
_FLOATS = {"<f4": ("f32", 32), "<f2": ("f16", 16), "<u2": ("bf16", 16)}


def code_factors(codec: Codec) -> np.ndarray:
    """Return the factors f32 [group] that turn unshifted results of `GroupCodes.code` into codes."""
    record = layout(codec)
    if codec.e4m3:
        return np.full(codec.group, E4M3_FACTOR, np.float32)
    if not codec.quantised or codec.bits == 8 or codec.table:
        return np.ones(codec.group or 1, np.float32)
    top = 32 - codec.bits
    every = [record.bit_fields(codec, k) for k in range(codec.group)]
    shifts = [fields[0][1] if len(fields) == 1 else 0 for fields in every]
    return np.array([1.0 if shift == top else 2.0**-shift for shift in shifts], np.float32)


class Records:
    """A writer of code that reads a packed weight, i8 [row blocks, records, bytes].

    base: added to every index of a row block, such as the first block of an expert.

    group: index of a codec group in the record.
    v: index of a vector of rows: v * lanes .. (v + 1) * lanes - 1 of the row block.
    """

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, base: Index = 0):
        self.b, self.codec, self.isa, self.weight, self.base = b, codec, isa, weight, base
        self.layout = layout(codec)
        self.lanes = isa.lanes
        self.vectors = LANES // isa.lanes

    def rows(self, at: tuple[Index, Index, Index], v: Index, element: str, bits: int) -> Ssa:
        """Load one number, such as a scale or a word of codes, for each of `lanes` rows."""
        width = self.lanes * bits // 8
        block, record, offset = at
        data = self.b.vload(self.weight, width, self.b.add(block, self.base), record, self.b.add(offset, self.b.mul(v, width)))
        return data if element == "i8" else self.b.bitcast(data, self.lanes, element)

    def widened_rows(self, at: tuple[Index, Index, Index], v: Index) -> Ssa:
        """Load one u16 for each of `lanes` rows; return them zero-extended, as i32 [lanes]."""
        b, width = self.b, 2 * self.lanes
        data = self.rows(at, v, "i8", 16)
        # Two zero bytes after every two bytes. IREE 3.13 miscompiles `arith.extui` of a `vector.bitcast` to i16.
        lanes = [2 * lane + byte if byte < 2 else width for lane in range(self.lanes) for byte in range(4)]
        return b.bitcast(b.shuffle(data, b.constant("dense<0>", data.type), lanes), self.lanes, "i32")

    def _f16(self, at: tuple[Index, Index, Index], v: Index) -> Ssa:
        return self.b.widened(self.rows(at, v, "f16", 16))

    def prefetch(self, block: Index, record: Index, offset: Index, near: bool = True) -> None:
        """Emit a prefetch of one cache line of the packed weight: into L1 if `near`, else into L2."""
        self.b.prefetch(self.weight, self.b.add(block, self.base), record, offset, near=near)

    def prefetch_later(self, blocks: Iterable[Index], step: Index, record: Index, first: Index, nbytes: int) -> None:
        """Emit prefetches of a part of a record, for 16-row blocks that later code reads."""
        for block in dict.fromkeys(blocks):
            for line in range(0, nbytes, CACHE_LINE):
                self.prefetch(self.b.add(block, step), record, self.b.add(first, line))

    def extent(self, group: Index, count: int = 1) -> tuple[Index, int]:
        """Return where the codes of some groups are in a record: (byte offset, number of bytes)."""
        if self.layout.groups == 1:
            return 0, self.layout.size
        return self.codes_at(group), self.layout.group_bytes * count

    def d(self, block: Index, record: Index, v: Index) -> Ssa:
        at = (block, record, self.layout.d)
        if not self.codec.exponents:
            return self.b.widened(self.rows(at, v, *_FLOATS[self.layout.d_type]))
        # The scale is 2^(e - 128): shift e - 1 to the exponent bits of an f32. For e = 0 and 1 the result is 0.
        b, one = self.b, self.b.isplat(1, self.lanes)
        exponent = b.binary("subi", b.binary("maxui", b.convert("extui", self.rows(at, v, "i8", 8), "i32"), one), one)
        return b.bitcast(b.binary("shli", exponent, b.isplat(23, self.lanes)), self.lanes, "f32")

    def m(self, block: Index, record: Index, v: Index) -> Ssa | None:
        if self.layout.m is None:
            return None
        at = (block, record, self.layout.m)
        if not self.codec.zeros:
            return self._f16(at, v)
        zero = self.b.convert("sitofp", self.b.convert("extsi", self.rows(at, v, "i8", 8), "i32"), "f32")
        return self.b.mulf(zero, self.d(block, record, v))

    def _factor(self, start: int | None, signed: bool, block: Index, record: Index, group: Index, v: Index) -> Ssa | None:
        if start is None:
            return None
        at = (block, record, self.b.add(self.b.mul(group, LANES), start))
        wide = self.b.convert("extsi" if signed else "extui", self.rows(at, v, "i8", 8), "i32")
        return self.b.convert("sitofp", wide, "f32")

    def group_scale(self, block: Index, record: Index, group: Index, v: Index) -> Ssa | None:
        """Return the scale of a codec group for each row in vector `v`, f32 [lanes]; None is 1."""
        if self.codec.small_floats:
            b, at = self.b, (block, record, self.b.add(self.b.mul(group, LANES), self.layout.scales or 0))
            bits = b.convert("extui", self.rows(at, v, "i8", 8), "i16")
            up = b.binary("shli", bits, b.constant("dense<7>", bits.type))
            return b.widened(b.bitcast(up, self.lanes, "f16"))
        return self._factor(self.layout.scales, self.codec.minimum == 0, block, record, group, v)

    def group_minimum(self, block: Index, record: Index, group: Index, v: Index) -> Ssa | None:
        """Return the minimum of a codec group for each row in vector `v`, f32 [lanes]; None is 1."""
        return self._factor(self.layout.minima, False, block, record, group, v)

    def _times(self, x: Ssa, factor: Ssa | None) -> Ssa:
        return x if factor is None else self.b.mulf(x, factor)

    def scale_and_base(self, block: Index, record: Index, group: Index, v: Index) -> tuple[Ssa, Ssa | None]:
        """Return (scale, base) of a codec group for each row in vector `v`, as f32 [lanes]."""
        b, codec = self.b, self.codec
        scale, base = self.d(block, record, v), self.m(block, record, v)
        scale = self._times(scale, self.group_scale(block, record, group, v))
        if base is not None:
            base = self._times(base, self.group_minimum(block, record, group, v))
            return scale, base if codec.minimum > 0 else b.mulf(base, b.splat(-1.0, self.lanes))
        if codec.offset:
            base = b.mulf(scale, b.splat(-codec.offset, self.lanes))
        return scale, base

    def codes_at(self, group: Index) -> Index:
        """Return the byte offset in a record at which the codes of codec group `group` begin."""
        return self.b.add(self.b.mul(group, self.layout.group_bytes), self.layout.codes)

    def group_codes(self, block: Index, record: Index, group: Index) -> GroupCodes:
        return GroupCodes(self, block, record, self.codes_at(group))

    def elements(self, block: Index, record: Index, v: Index) -> list[Ssa]:
        """Load unquantised weights from a record, for each row in vector `v`; convert them to f32.

        Return one vector f32 [lanes] for f32 and f16 weights, which have one element of each row in
        a record. Return two vectors for bf16, with the even and the odd element. The class
        describes the arguments.
        """
        at = (block, record, 0)
        if self.codec.name == "f32":
            return [self.rows(at, v, "f32", 32)]
        if self.codec.name == "f16":
            return [self._f16(at, v)]
        pair = self.rows(at, v, "i32", 32)
        even = self.b.binary("shli", pair, self.b.isplat(16, self.lanes))
        odd = self.b.binary("andi", pair, self.b.isplat(-65536, self.lanes))
        return [self.b.bitcast(half, self.lanes, "f32") for half in (even, odd)]


class GroupCodes:
    """A writer of code that reads the codes of one codec group of a row block, each word once.

    offset: byte offset of the codes of the group in the record.
    """

    def __init__(self, records: Records, block: Index, record: Index, offset: Index):
        self.records, self.block, self.record, self.offset = records, block, record, offset
        self._words: dict[tuple[int, Index], Ssa] = {}

    def word(self, word: int, v: Index) -> Ssa:
        """Load a word, which has the bits of several codes, for each of `lanes` rows: i32 [lanes]."""
        if (word, v) not in self._words:
            r, nbytes = self.records, self.records.layout.word_bytes[word]
            at = (self.block, self.record, r.b.add(self.offset, r.layout.word_offset(word)))
            self._words[word, v] = r.rows(at, v, "i32", 32) if nbytes == 4 else r.widened_rows(at, v)
        return self._words[word, v]

    def _masked(self, value: Ssa, mask: int) -> Ssa:
        return self.records.b.binary("andi", value, self.records.b.isplat(mask, value.width))

    def _shifted(self, value: Ssa, shift: int) -> Ssa:
        # To the right; to the left if `shift` is negative.
        b = self.records.b
        return b.binary("shrui" if shift > 0 else "shli", value, b.isplat(abs(shift), value.width)) if shift else value

    def _byte(self, k: int, v: Index) -> Ssa:
        r = self.records
        return r.rows((self.block, self.record, r.b.add(self.offset, LANES * k)), v, "i8", 8)

    def _stored(self, k: int, v: Index) -> Ssa:
        # For a codec with a table, bits above the code may be set; `lookup.entries` ignores them.
        r, bits = self.records, self.records.codec.bits
        fields = r.layout.bit_fields(r.codec, k)
        if bits == 8:
            ((word, shift, _),) = fields
            up = self._shifted(self.word(word, v), shift - 24)
            return r.b.binary("shrsi", up, r.b.isplat(24, up.width))
        if len(fields) > 1:
            return reduce(r.b.either, [self._masked(self._shifted(self.word(w, v), shift), mask) for w, shift, mask in fields])
        ((word, shift, mask),) = fields
        if shift == 32 - bits or r.codec.table:
            return self._shifted(self.word(word, v), shift)
        return self._masked(self.word(word, v), mask << shift)

    def code(self, k: int, v: Index) -> Ssa:
        """Load one code for each row in vector `v`, as f32 [lanes]."""
        r = self.records
        if r.codec.e4m3:
            return self._e4m3(k, v)
        if r.codec.table:
            return entries(r.b, r.isa, r.codec.table, self._stored(k, v))
        return r.b.convert("sitofp", self._stored(k, v), "f32")

    def bf16_pair(self, k: int, v: Index) -> Ssa:
        """Load codes k and k + 1 for each row in vector `v` as bf16, which must represent them.

        The result is i32 [lanes]; code k is in the lower halves. `Codec.offset` is subtracted from
        codes that are stored with an offset.
        """
        r = self.records
        b, codec = r.b, r.codec
        if has_bf16_entries(r.isa) and codec.bits <= 5:
            table = codec.table or [code - codec.offset for code in range(1 << codec.bits)]
            return bf16_entries(b, table, bit_pairs(b, *(self._position(k + n, v) for n in range(2))))
        factors, offset = code_factors(codec), b.splat(-float(codec.offset), r.lanes)
        codes = []
        for n in range(2):
            code, factor = self.code(k + n, v), float(factors[k + n])
            if codec.offset:
                code = b.fma(code, b.splat(factor, r.lanes), offset)
            elif factor != 1:
                code = b.mulf(code, b.splat(factor, r.lanes))
            codes.append(code)
        return cut(b, *codes)

    def _position(self, k: int, v: Index) -> tuple[Ssa, int]:
        # (a word that has code k, the position of the code's lowest bit)
        fields = self.records.layout.bit_fields(self.records.codec, k)
        return (self.word(fields[0][0], v), fields[0][1]) if len(fields) == 1 else (self._stored(k, v), 0)

    def _e4m3(self, k: int, v: Index) -> Ssa:
        # Shift the bits of E4M3 to the positions of the same bits in f16. This is right for subnormal numbers too.
        r = self.records
        wide = r.b.convert("extsi", self._byte(k, v), "i16")
        seven, sign_and_code = (r.b.constant(f"dense<{n}>", wide.type) for n in (7, ~0x4000))
        bits = r.b.binary("andi", r.b.binary("shli", wide, seven), sign_and_code)
        return r.b.widened(r.b.bitcast(bits, r.lanes, "f16"))


class Int8Codes(GroupCodes):
    """A writer of code that reads the codes of one codec group as int8, four in each i32.

    A codec group is the elements of a row that share a scale. Every eight codes are in the order 0,
    2, 4, 6, 1, 3, 5, 7 (`EVEN_ODD`). The kernel `quantise_x` returns x in the same order.
    """

    def __init__(self, records: Records, block: Index, record: Index, group: Index):
        self.dot = dot_of(records.isa)(records.b, records.isa, records.codec.integers)
        super().__init__(records, block, record, records.codes_at(group))
        self.group = group

    def scale_and_base(self, v: Index) -> tuple[Ssa, Ssa | None]:
        """Return (scale, base) of the codec group for each row in vector `v`, as f32 [lanes].

        They turn a code, as `quads` returns it, into a weight. If the codec has minima, the weight
        is scale * code + base. Otherwise it is scale * (code - codec.offset - self.dot.bias), and
        the caller does not need `base`. A base of None means 0.
        """
        b, codec, lanes = self.records.b, self.records.codec, self.records.lanes
        scale, base = self.records.scale_and_base(self.block, self.record, self.group, v)
        if codec.int8_scale != 1:
            scale = b.mulf(scale, b.splat(1 / codec.int8_scale, lanes))
        return scale, base if codec.minimum else None

    def quads(self, q: int, v: Index) -> list[Ssa]:
        """Load codes for each row in vector `v` as operands of `Dot.code`: four codes in each i32."""
        return self.dot.arranged([self._quad(q + i, v) for i in range(self.dot.quads)])

    def _quad(self, q: int, v: Index) -> Ssa:
        # The codes are 4 q .. 4 q + 3 of the group in the order `EVEN_ODD`, the first one in the lowest byte.
        r = self.records
        ks = [q // 2 * 8 + EVEN_ODD[q % 2 * 4 + j] for j in range(4)]
        # From (word, right shift) to the mask of the bits that the quad takes from that word.
        masks: dict[tuple[int, int], int] = {}
        for j, k in enumerate(ks):
            for word, shift, mask in r.layout.bit_fields(r.codec, k):
                at = word, shift - 8 * j
                masks[at] = masks.get(at, 0) | mask << 8 * j
        parts = []
        for (word, shift), mask in masks.items():
            part = self._shifted(self.word(word, v), shift)
            parts.append(part if mask == 0xFFFFFFFF else self._masked(part, mask - (mask >> 31 << 32)))
        quad = reduce(r.b.either, parts)
        if r.codec.table:
            entries = [round(r.codec.int8_scale * code) + self.dot.bias for code in r.codec.table]
            if entries == [0, 2]:  # LLVM merges this shift with that of the word
                return r.b.binary("shli", quad, r.b.isplat(1, r.lanes))
            return byte_entries(r.b, r.isa, entries, quad)
        return r.b.binary("xori", quad, r.b.isplat(-0x7F7F7F80, r.lanes)) if self.dot.bias else quad
