"""Packed weights: the layout that the kernels read, one sequential stream of records for every codec.

Rows stand in row blocks of 16, row = lane of a vector; a partial last one is filled with zero rows. A packed weight is

    [ceil(out / 16), records, record_bytes] bytes

and a record holds 16 rows of one codec block (32 or 256 elements) in the file's own size, but for the six-bit scales of
K-quants, which become bytes (3 % of the whole):

    d      [16] f16                  scale of the codec block; u8 where it is an exponent
    m      [16] f16                  minimum, where the codec has one
    scales [groups, 16] u8 or i8     factors of d, where the codec has them
    minima [groups, 16] u8           factors of m, where the codec has them
    codes  [groups, words, 16] i32   fields of 2, 4, 5 or 6 bits, code k of a group where `Layout.field` says;
                                     for 8 bits: [group, 16] i8

A kernel that takes `word & mask` has the code times a power of two, which it multiplies into x beforehand: no shift
and no widening per weight. What fields leave free at the top of the words (5 and 6 bits) holds the remaining codes of
the group, see `TOP_CODES`. Floats have no codec blocks: a record is one k of 16 rows, for bf16 two (even k in the low half).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from castiron.emitter.codecs import Codec, Parts, codec_of, dequantise, in_features_of, row_bytes, values

LANES = 16
_AT_ONCE_BYTES = 1 << 20  # of rows: what is made of them on the way stays in a CPU's caches
_MOST_THREADS = 4  # memory keeps up with so many

# bits -> for every code beyond the fields, the pieces (word, right shift, mask) that are or-ed to give it
TOP_CODES: dict[int, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    2: (),
    4: (),
    5: (((0, 30, 3), (1, 28, 12), (2, 26, 16)), ((3, 30, 3), (4, 28, 12), (2, 27, 16))),
    6: (((0, 30, 3), (1, 28, 12), (2, 26, 48)),),
}


@dataclass(frozen=True)
class Layout:
    """Byte offsets in a record; None for a part that the codec lacks. `elements` of k per record."""

    size: int
    elements: int
    groups: int = 1
    words: int = 0  # per group; 0 for 8-bit codes and floats
    fields: int = 0  # codes per word
    d: int = 0
    m: int | None = None
    scales: int | None = None
    minima: int | None = None
    codes: int = 0

    def field(self, k: int) -> tuple[int, int]:
        """Word and field of code k of a group, of those `in_fields`."""
        return k // self.fields, k % self.fields

    @property
    def in_fields(self) -> int:
        """Codes of a group that stand in fields; the others are TOP_CODES."""
        return self.words * self.fields

    @property
    def group_bytes(self) -> int:
        return (self.size - self.codes) // self.groups


def layout(codec: Codec) -> Layout:
    """Where the parts of a record stand."""
    if not codec.quantised:
        elements = 2 if codec.name == "bf16" else 1
        return Layout(elements * codec.block_bytes * LANES, elements)
    groups = codec.block // codec.group
    parts = codec.split(np.zeros((1, codec.block_bytes), np.uint8))
    offset, offsets = parts.d.itemsize * LANES, {}
    for part, per_lane in (("m", 2), ("scales", groups), ("minima", groups)):
        if getattr(parts, part) is not None:
            offsets[part] = offset
            offset += per_lane * LANES
    fields = 0 if codec.bits == 8 else 32 // codec.bits
    words = 0 if codec.bits == 8 else codec.group * codec.bits // 32
    size = offset + codec.block * codec.bits * LANES // 8
    return Layout(size, codec.block, groups, words, fields, codes=offset, **offsets)


def packed_shape(codec_name: str, out_features: int, in_features: int) -> tuple[int, int, int]:
    """Shape in bytes of the packed weight [out, in]. ValueError if a row is not whole codec blocks."""
    row_bytes(codec_name, in_features)
    record = layout(codec_of(codec_name))
    return -(-out_features // LANES), -(-in_features // record.elements), record.size


def _words(codec: Codec, record: Layout, codes: np.ndarray) -> np.ndarray:
    """codes [n, group] i8 -> words [n, words] u32."""
    # By code, so that each step goes through memory in one stride.
    stored = np.ascontiguousarray(_stored(codec, codes).T)
    words = np.zeros((record.words, len(codes)), "<u4")

    def put(code: np.ndarray, word: int, shift: int) -> None:
        words[word] |= code.astype("<u4") << np.uint32(shift)

    for k in range(record.in_fields):
        word, field = record.field(k)
        put(stored[k], word, field * codec.bits)
    for k, pieces in enumerate(TOP_CODES[codec.bits], record.in_fields):
        for word, shift, mask in pieces:
            put(stored[k] & np.uint8(mask), word, shift)
    return words.T


def _stored(codec: Codec, codes: np.ndarray) -> np.ndarray:
    """What stands for codes i8 in their fields, u8."""
    if not codec.table:
        return codes.view(np.uint8) + np.uint8(codec.offset)
    places = np.zeros(256, np.uint8)
    # The first place of a code that has two.
    places[np.array(codec.table[::-1], np.int8).view(np.uint8)] = np.arange(len(codec.table))[::-1]
    return places[codes.view(np.uint8)]


def _codes(codec: Codec, record: Layout, words: np.ndarray) -> np.ndarray:
    """The inverse of `_words`, as i8."""
    mask = np.uint32((1 << codec.bits) - 1)
    of_words, of_fields = np.array([record.field(k) for k in range(record.in_fields)], np.uint32).T
    fields = words[..., of_words] >> of_fields * np.uint32(codec.bits) & mask
    tops = [
        np.bitwise_or.reduce([words[..., word] >> np.uint32(shift) & np.uint32(piece) for word, shift, piece in pieces])
        for pieces in TOP_CODES[codec.bits]
    ]
    stored = np.concatenate([fields, *(top[..., None] for top in tops)], axis=-1)
    if codec.table:
        return np.array(codec.table, np.int8)[stored]
    return (stored.astype(np.int16) - codec.offset).astype(np.int8)


def _pack_row_blocks(codec: Codec, record: Layout, raw: np.ndarray, packed: np.ndarray) -> None:
    """raw [16 n, row_bytes] into `packed`, records [n, records, size]."""
    row_blocks, count, _ = packed.shape
    if not codec.quantised:
        element = codec.block_bytes
        raw = _filled(raw, 1, record.elements * element)
        item = f"<u{record.size // LANES}"
        packed.view(item)[...] = raw.view(item).reshape(row_blocks, LANES, count).transpose(0, 2, 1)
        return
    parts = codec.split(raw.reshape(-1, codec.block_bytes))

    def put(offset: int, part: np.ndarray) -> None:
        """part [16 * row_blocks * count, ...] goes to [row_blocks, count, ..., 16] at the offset."""
        by_lane = part.reshape(row_blocks, LANES, count, *part.shape[1:])
        data = np.empty((row_blocks, count, *part.shape[1:], LANES), part.dtype)
        if part.itemsize == 4:
            data[...] = np.moveaxis(by_lane, 1, -1)
        else:
            for lane in range(LANES):
                data[..., lane] = by_lane[:, lane]
        data = data.view(np.uint8).reshape(row_blocks, count, -1)
        packed[:, :, offset : offset + data.shape[2]] = data

    put(record.d, parts.d)
    for part in ("m", "scales", "minima"):
        if getattr(parts, part) is not None:
            put(getattr(record, part), getattr(parts, part))
    if codec.bits == 8:
        put(record.codes, parts.codes)
    else:
        words = _words(codec, record, parts.codes.reshape(-1, codec.group))
        put(record.codes, words.reshape(len(parts.codes), -1))


def _filled(raw: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    """raw [rows, bytes], contiguous, with zeros up to a multiple along an axis."""
    if rest := -raw.shape[axis] % multiple:
        raw = np.pad(raw, [(0, rest if axis == at else 0) for at in (0, 1)])
    return np.ascontiguousarray(raw)


def pack(codec_name: str, raw: np.ndarray) -> np.ndarray:
    """raw [out, row_bytes] u8 -> packed weight u8 of `packed_shape`. ValueError if a row is not whole codec blocks."""
    codec = codec_of(codec_name)
    record = layout(codec)
    packed = np.empty(packed_shape(codec_name, len(raw), in_features_of(codec, raw)), np.uint8)
    step = max(1, _AT_ONCE_BYTES // (LANES * max(1, raw.shape[1])))

    def some(start: int) -> None:
        rows = _filled(raw[start * LANES : (start + step) * LANES], 0, LANES)
        _pack_row_blocks(codec, record, rows, packed[start : start + step])

    starts = range(0, len(packed), step)
    if len(starts) < 2:
        for start in starts:
            some(start)
        return packed
    # NumPy lets go of the interpreter while it works.
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(some, starts):
            pass
    return packed


def unpack(codec_name: str, packed: np.ndarray, out_features: int, in_features: int) -> np.ndarray:
    """packed weight -> [out, in] f32, bit for bit what `dequantise` gives for the rows that were packed."""
    codec = codec_of(codec_name)
    record = layout(codec)
    packed = np.ascontiguousarray(packed).view(np.uint8)
    row_blocks, count, _ = packed.shape
    if not codec.quantised:
        lanes = packed.reshape(row_blocks, count, LANES, -1).transpose(0, 2, 1, 3)
        return dequantise(codec_name, lanes.reshape(row_blocks * LANES, -1))[:out_features, :in_features]

    def take(offset: int, dtype: str, *shape: int) -> np.ndarray:
        """The part at the offset as [16 * row_blocks * count, ...]."""
        size = int(np.prod(shape, dtype=np.int64)) * LANES * np.dtype(dtype).itemsize
        data = np.ascontiguousarray(packed[:, :, offset : offset + size]).view(dtype)
        lanes = np.moveaxis(data.reshape(row_blocks, count, *shape, LANES), -1, 1)
        return lanes.reshape(row_blocks * LANES * count, *shape)

    groups = record.groups
    if codec.bits == 8:
        codes = take(record.codes, "i1", groups, codec.group)
    else:
        codes = _codes(codec, record, take(record.codes, "<u4", groups, record.words))
    scales = "i1" if codec.minimum == 0 else "u1"
    parts = Parts(
        codes.reshape(len(codes), -1),
        take(record.d, "u1" if codec.exponents else "<f2"),
        None if record.m is None else take(record.m, "<f2"),
        None if record.scales is None else take(record.scales, scales, groups),
        None if record.minima is None else take(record.minima, "u1", groups),
    )
    return values(codec, parts).reshape(row_blocks * LANES, -1)[:out_features, :in_features]


def interleave_rows(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate, up [n, row_bytes] -> raw rows in which row blocks alternate, gate first, for a kernel with a GLU.

    Both are filled with zero rows to whole row blocks, so the result has 2 * 16 * ceil(n / 16) rows.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has the shape {gate.shape} and up {up.shape}: a GLU takes two of one shape")
    fill = ((0, -len(gate) % LANES), (0, 0))
    row_blocks = [np.pad(rows, fill).reshape(-1, 1, LANES, rows.shape[1]) for rows in (gate, up)]
    return np.concatenate(row_blocks, axis=1).reshape(-1, gate.shape[1])
