"""The layout of weights for GPU kernels: each row is packed into 32-bit words.

A code is the stored number of one element, before it is multiplied by a scale. Codes of 4, 5, 6 and
8 bits are stored as unsigned numbers: the codec's signed code plus `WordLayout.offset`. Codes of 16 or
32 bits are floats. A thread decodes one unit at a time: 8 consecutive elements of a row.

A row has three parts, in this order:

    low codes    codes of 4, 8, 16 or 32 bits: 1, 2, 4 or 8 words for each unit;
                 codes of 5 or 6 bits: 1 word for each unit, with the lowest four bits of each code
    high codes   only for codes of 5 or 6 bits: the other 1 or 2 bits of each code
    scales       scales and minima of groups of elements, see `SCALES`

So consecutive threads read consecutive words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from castiron.emitter.codecs import codec_of, dequantise, numbers, rows_at_once
from castiron.emitter.codecs.codec import Codec, Parts
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import F32, Index, Ssa

UNIT = 8  # elements that a thread decodes at a time
# Words of scales, and the elements that they serve. half: the f16 scale of each of two groups of 32. pair: f16 scale and
# minimum of a group of 32. k: f32 d and m, 8 byte scales and 8 byte minima of 256 elements; f32 takes 2 % more memory than
# f16, and fewer instructions for every unit. k6: f32 d and 16 signed byte scales of 256. single, double: f32 scale, or
# scale and minimum, of a group.
SCALES = {"": (0, 0), "half": (1, 64), "pair": (1, 32), "k": (6, 256), "k6": (5, 256), "single": (1, 0), "double": (2, 0)}
NATIVE = {
    "f32": (32, ""),
    "f16": (16, ""),
    "bf16": (16, ""),
    "q8_0": (8, "half"),
    "q4_0": (4, "half"),
    "q4_1": (4, "pair"),
    "q4_k": (4, "k"),
    "q5_k": (5, "k"),
    "q6_k": (6, "k6"),
}


def widened(codec_name: str) -> str | None:
    """Return the format to which GPU kernels widen a codec, for users; None for its own size."""
    if codec_name in NATIVE:
        return None
    layout = layout_of(codec_name)
    if layout.bits == 32:
        return "f32"
    bits = f"{layout.bits}-bit {'floats' if layout.floats else 'codes'}"
    return f"{bits} with an f32 scale{' and minimum' * (layout.scales == 'double')} for each group of {layout.group}"


@dataclass(frozen=True)
class WordLayout:
    """How a row of weights is packed into 32-bit words for GPU kernels.

    bits: size of a code; codes of 16 bits or more are floats. scales: a key of `SCALES`.
    offset: what is added to a signed code. minimum: that of `Codec`.
    """

    codec: str
    bits: int
    scales: str
    group: int = 32
    offset: int = 0
    minimum: int = 0

    @property
    def floats(self) -> bool:
        return self.bits >= 16

    @property
    def low_words(self) -> int:
        return {4: 1, 5: 1, 6: 1, 8: 2, 16: 4, 32: 8}[self.bits]

    @property
    def high_bits(self) -> int:
        """Return how many bits the high codes of a unit take: 0, 8 or 16."""
        return {5: 8, 6: 16}.get(self.bits, 0)

    @cached_property
    def _scale_words(self) -> tuple[int, int]:
        words, elements = SCALES[self.scales]
        return words, elements or self.group

    def parts(self, inner: int) -> tuple[int, int, int]:
        """Return the words of the parts of a row: (low codes, high codes, scales)."""
        units = -(-inner // UNIT)
        words, elements = self._scale_words
        scales = -(-inner // elements) * words if words else 0
        return units * self.low_words, -(-units * self.high_bits // 32), scales

    def row_words(self, inner: int) -> int:
        """Return the words of a row of `inner` elements, a multiple of 4 (16 bytes)."""
        return -(-sum(self.parts(inner)) // 4) * 4

    def pack(self, raw: np.ndarray, inner: int) -> np.ndarray:
        """Convert rows u8 [rows, row_bytes] to this layout, i32 [rows, row_words(inner)]."""
        out = np.zeros((len(raw), self.row_words(inner)), np.uint32)
        step = max(1, rows_at_once(8 * inner))
        for start in range(0, len(raw), step):
            self._pack(np.ascontiguousarray(raw[start : start + step]), inner, out[start : start + step])
        return out.view(np.int32)

    def _pack(self, raw: np.ndarray, inner: int, out: np.ndarray) -> None:
        low, high, scales = self.parts(inner)
        if self.floats and self.codec in NATIVE:
            out.view(np.uint8)[:, : raw.shape[1]] = raw
            return
        if self.bits == 32:
            out.view(np.float32)[:, :inner] = dequantise(self.codec, raw)
            return
        codec, rows = codec_of(self.codec), len(raw)
        blocks = codec.split(raw.reshape(-1, codec.block_bytes))
        parts = numbers(codec, blocks) if self.scales in ("single", "double") else blocks
        if self.bits == 16:
            codes = parts.codes.reshape(rows, inner).astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            codes = (parts.codes.reshape(rows, inner).astype(np.int32) + self.offset).astype(np.uint32)
        first = 4 if self.high_bits else self.bits
        out[:, :low] = _joined(codes & (1 << first) - 1, first)
        if self.high_bits:
            out[:, low : low + high] = _joined(codes >> 4, self.bits - 4)
        out[:, low + high : low + high + scales] = self._packed_scales(codec, parts, rows)

    def _packed_scales(self, codec: Codec, parts: Parts, rows: int) -> np.ndarray:
        half = lambda x: np.ascontiguousarray(x).view(np.uint16).astype(np.uint32).reshape(rows, -1)
        if self.scales == "half":
            return _joined(half(parts.d), 16)
        if self.scales == "pair":
            return half(parts.d) | half(parts.m) << 16
        if self.scales in ("k", "k6"):
            of_blocks = [x.astype(np.float32).view(np.uint32).reshape(-1, 1) for x in (parts.d, parts.m) if x is not None]
            of_groups = [_joined(x.view(np.uint8), 8) for x in (parts.scales, parts.minima) if x is not None]
            return np.concatenate([*of_blocks, *of_groups], 1).reshape(rows, -1)
        groups = codec.block // codec.group

        def factors(of_block: np.ndarray, of_group: np.ndarray | None) -> np.ndarray:
            wide = np.repeat(of_block.astype(np.float32).reshape(-1, 1), groups, 1)
            wide = wide if of_group is None else wide * of_group.astype(np.float32)
            return np.ascontiguousarray(wide).view(np.uint32)

        packed = [factors(parts.d, parts.scales)]
        if self.scales == "double":
            assert parts.m is not None, f"{codec.name} has no minima"
            packed.append(factors(parts.m, parts.minima))
        return np.stack(packed, -1).reshape(rows, -1)


def layout_of(codec_name: str) -> WordLayout:
    codec = codec_of(codec_name)
    if codec_name in NATIVE:
        bits, scales = NATIVE[codec_name]
        offset = 128 if bits == 8 else codec.offset
        return WordLayout(codec_name, bits, scales, codec.group or 32, offset, codec.minimum)
    scales = "double" if codec.minimum else "single"
    if not codec.has_bf16_codes:
        return WordLayout(codec_name, 32, "")
    if not codec.has_integers:
        return WordLayout(codec_name, 16, scales, codec.group, 0, codec.minimum)
    if not codec.table and codec.bits <= 4:
        return WordLayout(codec_name, 4, scales, codec.group, codec.offset, codec.minimum)
    return WordLayout(codec_name, 8, scales, codec.group, 128, codec.minimum)


def _joined(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned codes [n, k] of `bits` bits into u32 words, the first in the lowest bits."""
    per_word = 32 // bits
    codes = codes.astype(np.uint32)
    if missing := -codes.shape[1] % per_word:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:per_word]
    return np.bitwise_or.reduce(codes.reshape(len(codes), -1, per_word) << shifts, -1)


@dataclass(frozen=True)
class Units:
    """A writer of code that decodes units of the weight i32 [rows, layout.row_words(inner)]."""

    b: GpuBody
    layout: WordLayout
    weight: Ssa
    inner: int

    def codes(self, row: Index, unit: Index) -> list[Ssa]:
        """Emit code that loads the signed codes of a unit of a row as f32, without their scale."""
        b, layout = self.b, self.layout
        if layout.bits >= 16:
            return self._floats(row, unit)
        first = b.mul(unit, layout.low_words)
        words = [b.load(self.weight, row, b.add(first, i)) for i in range(layout.low_words)]
        size = 8 if layout.bits == 8 else 4
        per_word, signed_codes = 32 // size, []
        above = self._high(row, unit) if layout.high_bits else None
        for j in range(UNIT):
            code = b.bits("andi", b.bits("shrui", words[j // per_word], j % per_word * size), (1 << size) - 1)
            if above is not None:
                more = layout.bits - 4
                part = b.bits("andi", b.bits("shrui", above, j * more), (1 << more) - 1)
                code = b.either(code, b.bits("shli", part, 4))
            signed_codes.append(b.number(code, layout.offset))
        return signed_codes

    def _floats(self, row: Index, unit: Index) -> list[Ssa]:
        b, wide = self.b, _fours(self.b, self.weight)
        fours = [
            b.four(wide, row, b.add(b.mul(unit, self.layout.low_words // 4), i)) for i in range(self.layout.low_words // 4)
        ]
        words = [word for four in fours for word in four]
        if self.layout.bits == 32:
            return [b.as_type(word, F32) for word in words]
        return [x for word in words for x in (b.bf16s(word) if self.layout.codec == "bf16" else b.halves(word))]

    def _high(self, row: Index, unit: Index) -> Ssa:
        b, bits = self.b, self.layout.high_bits
        per_word, low = 32 // bits, self.layout.parts(self.inner)[0]
        word = b.load(self.weight, row, b.add(b.div(unit, per_word), low))
        return b.binary("shrui", word, b.to_i32(b.mul(b.rem(unit, per_word), bits)))

    def scale(self, row: Index, unit: Index) -> tuple[Ssa | None, Ssa | None]:
        """Emit code that loads (scale, minimum) of a unit as f32; None for a missing one."""
        b, layout = self.b, self.layout
        if not layout.scales:
            return None, None
        low, high, _ = layout.parts(self.inner)
        words, elements = layout._scale_words
        base = b.add(b.mul(b.div(unit, elements // UNIT), words), low + high)
        load = lambda i: b.load(self.weight, row, b.add(base, i))
        if layout.scales == "single":
            return b.as_type(load(0), F32), None
        if layout.scales == "double":
            return b.as_type(load(0), F32), self._signed(b.as_type(load(1), F32))
        if layout.scales == "half":
            shift = b.to_i32(b.mul(b.rem(b.div(unit, 32 // UNIT), 2), 16))
            return b.half(b.binary("shrui", load(0), shift)), None
        if layout.scales == "pair":
            d, m = b.halves(load(0))
            return d, self._signed(m)
        group = b.rem(b.div(unit, layout.group // UNIT), 256 // layout.group)
        shift = b.to_i32(b.mul(b.rem(group, 4), 8))
        byte = lambda i: b.bits("andi", b.binary("shrui", load(b.add(b.div(group, 4), i)), shift), 0xFF)
        if layout.scales == "k6":
            signed = b.number(b.bits("xori", byte(1), 0x80), 128)
            return b.mulf(b.as_type(load(0), F32), signed), None
        d, m = (b.as_type(load(i), F32) for i in range(2))
        return b.mulf(d, b.number(byte(2))), self._signed(b.mulf(m, b.number(byte(4))))

    def _signed(self, minimum: Ssa) -> Ssa:
        return minimum if self.layout.minimum > 0 else self.b.subf(self.b.f32(0.0), minimum)

    def values(self, row: Index, unit: Index) -> list[Ssa]:
        """Emit code that decodes elements 8 * unit .. 8 * unit + 7 of a row; return them as f32."""
        codes, (scale, minimum) = self.codes(row, unit), self.scale(row, unit)
        if scale is None:
            return codes
        if minimum is None:
            return [self.b.mulf(code, scale) for code in codes]
        return [self.b.fma(code, scale, minimum) for code in codes]


def _fours(b: GpuBody, weight: Ssa) -> Ssa:
    rows, words = weight.type.shape
    return b.view(weight, (rows, words // 4), "vector<4xi32>")


def weight_values(layout: WordLayout, words: np.ndarray, inner: int) -> np.ndarray:
    """Decode rows of this layout with NumPy to f32 [rows, inner]."""
    low, high, scales = layout.parts(inner)
    rows, words = len(words), np.ascontiguousarray(words).view(np.uint32)
    if layout.bits == 32:
        return words[:, :low].view(np.float32)[:, :inner]
    if layout.codec == "bf16":
        bits = np.ascontiguousarray(words[:, :low]).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)[:, :inner]
    first = 4 if layout.high_bits else layout.bits
    codes = _apart(words[:, :low], first)[:, :inner]
    if layout.bits == 16:
        values = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    else:
        if layout.high_bits:
            codes = codes | _apart(words[:, low : low + high], layout.bits - 4)[:, :inner] << 4
        values = codes.astype(np.int32).astype(np.float32) - layout.offset
    if not layout.scales:
        return values
    scale, minimum = _scale_values(layout, np.ascontiguousarray(words[:, low + high : low + high + scales]), inner)
    values = values.reshape(rows, -1, layout.group) * scale[:, :, None]
    if minimum is not None:
        values = values + np.float32(layout.minimum) * minimum[:, :, None]
    return values.reshape(rows, inner)


def _apart(words: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).reshape(len(words), -1)


def _scale_values(layout: WordLayout, words: np.ndarray, inner: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (scales, minima) of all groups, f32 [rows, groups]; no minima if there are none."""
    rows, groups = len(words), inner // layout.group
    halves = lambda x: np.ascontiguousarray(x).view(np.float16).astype(np.float32)
    if layout.scales in ("single", "double"):
        by_group = words.view(np.float32).reshape(rows, groups, -1)
        return by_group[..., 0], by_group[..., 1] if layout.scales == "double" else None
    if layout.scales == "half":
        return halves(words)[:, :groups], None
    if layout.scales == "pair":
        both = halves(words).reshape(rows, groups, 2)
        return both[..., 0], both[..., 1]
    blocks = words.reshape(-1, SCALES[layout.scales][0])
    if layout.scales == "k6":
        d = np.ascontiguousarray(blocks[:, :1]).view(np.float32)
        return (d * np.ascontiguousarray(blocks[:, 1:]).view(np.int8)).reshape(rows, groups), None
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float32)
    factors = np.ascontiguousarray(blocks[:, 2:]).view(np.uint8).astype(np.float32).reshape(-1, 2, 8)
    return (d[:, :1] * factors[:, 0]).reshape(rows, groups), (d[:, 1:] * factors[:, 1]).reshape(rows, groups)
