"""Pack weights into the layout that kernels read sequentially.

A codec is a weight format, such as Q4_K or bf16. A codec block is a block of this format, as in a
GGUF file: 32 to 256 elements of a row. A codec group is the elements of a block that share a scale.

A packed weight is a u8 array [ceil(out / 16), records, record_bytes]. Each index of the first
dimension is 16 rows of the weight, one for each lane of a vector; zero rows fill up the last 16. A
record interleaves one codec block of each of the 16 rows. Most records are as large as these blocks
in a GGUF file. Those of K-quants are slightly larger, because six-bit scales are stored as bytes.

An element of the weight is d * scale * code plus or minus m * minimum (see `codec.Parts`). These
values are the parts of a record:

    d      [16] f16                  scale of the codec block; u8 if it is an exponent, f32 or bf16
                                     for some codecs
    m      [16] f16                  factor of the minima; i8 if it is a zero point
    scales [groups, 16] u8 or i8     factors of d, one for each codec group
    minima [groups, 16] u8           factors of m, one for each codec group
    codes  [groups, words, 16] i32   words with bit fields; `Layout.bit_fields` locates a code
           [elements, 16] i8         E4M3

Every quantised codec has d and codes; the other parts depend on the codec. A record of a float
codec has no such parts. It has one element of each of the 16 rows (for bf16, two elements in an
i32, the even one in the low half).

Codes are placed so that a shift and a mask of a word give four codes of a row in four bytes, as
instructions for int8 dot products read them: a quad. Quad q of a group has codes 8 (q / 2) + q % 2 +
(0, 2, 4, 6). The codes of quads q, q + 1, ... are next to each other in the bytes of a word. Codes of
3, 5 or 6 bits are stored as two planes, the low two or four bits and the others (`PLANES`). If a
group has 16 codes of 3 bits, its second plane is a word of 16 bits, which is widened to 32 bits.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product

import numpy as np

from castiron.emitter.codecs import codec_of, dequantise, in_features_of, row_bytes, values
from castiron.emitter.codecs.codec import Codec, Parts
from castiron.emitter.codecs.scaled import signed, translated

LANES = 16
_AT_ONCE_BYTES = 1 << 19  # bytes of rows packed at a time, so that intermediate arrays fit a CPU's caches
_REUSED_BYTES = 31 << 20  # just below glibc's DEFAULT_MMAP_THRESHOLD_MAX
_MAX_THREADS = 4  # more threads gain nothing, because memory bandwidth is the limit

BitField = tuple[int, int, int]  # (word, right shift, mask): the bits word >> shift & mask; left if the shift is negative
# By bits of a code: the bits that each plane of words has, from the lowest on.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


def field_of(quad: int, per_word: int) -> int:
    """Return which of the fields in each byte of a word has the codes of a quad."""
    return quad % per_word


@dataclass(frozen=True)
class Layout:
    """The layout of a record of a packed weight.

    size: bytes of a record. elements, groups: of each row in a record.
    word_bytes: of each word with the codes of a group of a row; empty for E4M3 and floats.
    d, m, scales, minima, codes: byte offset of each part (an element is d * scale * code +- m *
    minimum); None if the format has no such part.
    """

    size: int
    elements: int
    groups: int = 1
    word_bytes: tuple[int, ...] = ()
    d: int = 0
    d_type: str = ""
    m: int | None = None
    scales: int | None = None
    minima: int | None = None
    codes: int = 0

    def bit_fields(self, codec: Codec, k: int) -> tuple[BitField, ...]:
        """Return the bit fields of code k of a group; the code is their OR."""
        quad, byte = k // 8 * 2 + k % 2, k % 8 // 2
        found: list[BitField] = []
        first, low = 0, 0
        for bits in PLANES[codec.bits]:
            per_word = 8 // bits
            position = 8 * byte + bits * field_of(quad, per_word)
            if self.word_bytes[first] == 2:
                position = 8 * (byte % 2) + 4 * (byte // 2) + field_of(quad, 4)
            found.append((first + quad // per_word, position - low, ((1 << bits) - 1) << low))
            first, low = first + max(1, codec.group // 4 // per_word), low + bits
        return tuple(found)

    @property
    def words(self) -> int:
        return len(self.word_bytes)

    def word_offset(self, word: int) -> int:
        """Return the byte offset of a word of 16 rows in the codes of their group."""
        return LANES * sum(self.word_bytes[:word])

    @property
    def group_bytes(self) -> int:
        return (self.size - self.codes) // self.groups


@cache
def layout(codec: Codec) -> Layout:
    if not codec.quantised:
        elements = 2 if codec.name == "bf16" else 1
        return Layout(elements * codec.block_bytes * LANES, elements)
    groups = codec.block // codec.group
    parts = codec.split(np.zeros((1, codec.block_bytes), np.uint8))
    offset, offsets = parts.d.itemsize * LANES, {}
    for part in ("m", "scales", "minima"):
        if (of_block := getattr(parts, part)) is not None:
            offsets[part] = offset
            offset += of_block.nbytes * LANES
    # The last word has 16 bits if the codes of a group do not fill 32.
    code_bytes = 0 if codec.e4m3 else codec.group * codec.bits // 8
    word_bytes = (4,) * (code_bytes // 4) + (2,) * (code_bytes % 4 // 2)
    size = offset + codec.block * codec.bits * LANES // 8
    return Layout(size, codec.block, groups, word_bytes, d_type=parts.d.dtype.str, codes=offset, **offsets)


def packed_shape(codec_name: str, out_features: int, in_features: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight: (ceil(out / 16), records, bytes of a record).

    A record has, from each of 16 rows, one block of a quantised format (such as 256 elements of
    Q4_K), one f32, one f16, or two bf16. `records` is the number of records that these rows fill.
    """
    row_bytes(codec_name, in_features)
    record = layout(codec_of(codec_name))
    return -(-out_features // LANES), -(-in_features // record.elements), record.size


def _words(codec: Codec, record: Layout, codes: np.ndarray) -> list[np.ndarray]:
    # Return each word of a group, [groups, n] of n blocks. codes: i8 [n, block].
    groups = _stored(codec, codes).T.reshape(record.groups, codec.group, -1)
    n = groups.shape[2]
    # Element (octet, byte, odd) of a group is byte `byte` of quad 2 * octet + odd.
    quads = groups.reshape(record.groups, -1, 4, 2, n).swapaxes(2, 3).reshape(record.groups, -1, 4, n)
    found: list[np.ndarray] = []
    low = 0
    for bits in PLANES[codec.bits]:
        plane = quads if len(PLANES[codec.bits]) == 1 else quads >> np.uint8(low) & np.uint8((1 << bits) - 1)
        per_word, low = min(8 // bits, plane.shape[1]), low + bits
        for first in range(0, plane.shape[1], per_word):
            # NumPy multiplies bytes faster than it shifts them.
            fields = (plane[:, first + i] * np.uint8(1 << bits * field_of(i, per_word)) for i in range(per_word))
            of_bytes = reduce(np.bitwise_or, fields)  # [groups, 4, n]
            if record.word_bytes[len(found)] == 2:
                of_bytes = of_bytes[:, :2] | of_bytes[:, 2:] << np.uint8(4)
            word = np.empty((record.groups, n, of_bytes.shape[1]), np.uint8)
            for byte in range(of_bytes.shape[1]):
                word[:, :, byte] = of_bytes[:, byte]
            found.append(word.view(f"<u{of_bytes.shape[1]}")[:, :, 0])
    return found


def _stored(codec: Codec, codes: np.ndarray) -> np.ndarray:
    # The stored form of a code is a u8: code + offset, or the index of the code in a table of integers. `codes` may be
    # overwritten.
    if not codec.table or not codec.has_integers:
        return signed(codes, -codec.offset).view(np.uint8)
    indices = np.zeros(256, np.uint8)
    # Some codes are in the table twice; take the first index.
    indices[np.array(codec.table[::-1], np.int8).view(np.uint8)] = np.arange(len(codec.table))[::-1]
    return translated(codes.view(np.uint8), indices)


def _codes(codec: Codec, record: Layout, words: np.ndarray) -> np.ndarray:
    moved = lambda word, shift: word >> np.uint32(shift) if shift >= 0 else word << np.uint32(-shift)
    bits = lambda field: moved(words[..., field[0]], field[1]) & np.uint32(field[2])
    stored = np.stack([reduce(np.bitwise_or, map(bits, record.bit_fields(codec, k))) for k in range(codec.group)], axis=-1)
    if codec.table and codec.has_integers:
        return np.array(codec.table, np.int8)[stored]
    return (stored.astype(np.int16) - codec.offset).astype(np.int8)


def _pack_row_blocks(codec: Codec, record: Layout, raw: np.ndarray, packed: np.ndarray) -> None:
    # raw: u8 [16 * row_blocks, row_bytes]. packed: the result, u8 [row_blocks, count, record.size].
    row_blocks, count, _ = packed.shape
    if not codec.quantised:
        element = codec.block_bytes
        raw = _filled(raw, 1, record.elements * element)
        item = f"<u{record.size // LANES}"
        packed.view(item)[...] = raw.view(item).reshape(row_blocks, LANES, count).transpose(0, 2, 1)
        return
    # Blocks are sorted as in `packed`: by row block, record and lane.
    blocks = raw.view(f"V{codec.block_bytes}").reshape(row_blocks, LANES, count).transpose(0, 2, 1).ravel()
    parts = codec.split(blocks.view(np.uint8).reshape(len(blocks), -1))

    def put(offset: int, part: np.ndarray) -> None:
        # part: a part of a record, such as the scales, [..., row_blocks * count * 16]
        lanes = np.ascontiguousarray(part).view(f"V{LANES * part.itemsize}").reshape(-1, row_blocks, count)
        data = packed[:, :, offset : offset + len(lanes) * lanes.itemsize]
        data.view(lanes.dtype)[...] = lanes.transpose(1, 2, 0)

    put(record.d, parts.d)
    for part in ("m", "scales", "minima"):
        if getattr(parts, part) is not None:
            put(getattr(record, part), getattr(parts, part).T)
    if codec.e4m3:
        put(record.codes, parts.codes.T)
        return
    words = _words(codec, record, parts.codes)
    if set(record.word_bytes) == {4}:
        put(record.codes, np.stack(words, axis=1).reshape(-1, len(blocks)))
        return
    for word, of_groups in enumerate(words):
        for group, of_group in enumerate(of_groups):
            put(record.codes + group * record.group_bytes + record.word_offset(word), of_group[None])


def _filled(raw: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    # Add zeros along `axis` up to a multiple of `multiple`.
    if rest := -raw.shape[axis] % multiple:
        raw = np.pad(raw, [(0, rest if axis == at else 0) for at in (0, 1)])
    return np.ascontiguousarray(raw)


def pack(codec_name: str, *raws: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Pack a weight into the layout that kernels read, u8 of shape `packed_shape`.

    raws: u8 [out, row_bytes] in the codec's format; of several, such as gate and up of a GLU, row
    blocks alternate. out: the array to write and return; None for a new one.
    """
    codec = codec_of(codec_name)
    record, of_each = layout(codec), len(raws)
    blocks, *rest = packed_shape(codec_name, len(raws[0]), in_features_of(codec, raws[0]))
    packed = np.empty((of_each * blocks, *rest), np.uint8) if out is None else out
    step = max(1, _AT_ONCE_BYTES // (LANES * max(1, raws[0].shape[1])))
    # After an array of this size was freed, glibc reuses freed memory instead of returning it to the system.
    np.empty(_REUSED_BYTES, np.uint8)

    def some(at: int, start: int) -> None:
        rows = _filled(raws[at][start * LANES : (start + step) * LANES], 0, LANES)
        _pack_row_blocks(codec, record, rows, packed[at::of_each][start : start + step])

    # Threads run in parallel, because NumPy releases the GIL.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(some, *zip(*product(range(of_each), range(0, blocks, step)))):
            pass
    return packed


def unpack(codec_name: str, packed: np.ndarray, out_features: int, in_features: int, in_int8: bool = False) -> np.ndarray:
    """Dequantise a packed weight to f32 [out, in], with the same bits as if it were not packed.

    codec_name: format of the weight, such as "q4_k".
    in_int8: whether to round a format's table of floats to int8, as `Codec.in_int8` does.
    """
    codec = codec_of(codec_name).in_int8 if in_int8 else codec_of(codec_name)
    record = layout(codec)
    packed = np.ascontiguousarray(packed).view(np.uint8)
    row_blocks, count, _ = packed.shape
    if not codec.quantised:
        lanes = packed.reshape(row_blocks, count, LANES, -1).transpose(0, 2, 1, 3)
        return dequantise(codec_name, lanes.reshape(row_blocks * LANES, -1))[:out_features, :in_features]

    def take(offset: int, dtype: str, *shape: int) -> np.ndarray:
        # The result is an array of `Parts`, such as the scales, [16 * row_blocks * count, *shape].
        size = int(np.prod(shape, dtype=np.int64)) * LANES * np.dtype(dtype).itemsize
        data = np.ascontiguousarray(packed[:, :, offset : offset + size]).view(dtype)
        lanes = np.moveaxis(data.reshape(row_blocks, count, *shape, LANES), -1, 1)
        return lanes.reshape(row_blocks * LANES * count, *shape)

    groups = record.groups
    if codec.e4m3:
        codes = take(record.codes, "i1", groups, codec.group)
    else:
        at = lambda group, word: record.codes + group * record.group_bytes + record.word_offset(word)
        words = np.stack(
            [[take(at(g, w), f"<u{size}").astype(np.uint32) for w, size in enumerate(record.word_bytes)] for g in range(groups)]
        ).transpose(2, 0, 1)
        codes = _codes(codec, record, words)
    scales = "i1" if codec.minimum == 0 else "u1"
    parts = Parts(
        codes.reshape(len(codes), -1),
        take(record.d, record.d_type),
        None if record.m is None else take(record.m, "|i1" if codec.zeros else "<f2"),
        None if record.scales is None else take(record.scales, scales, groups),
        None if record.minima is None else take(record.minima, "u1", groups),
    )
    return values(codec, parts).reshape(row_blocks * LANES, -1)[:out_features, :in_features]
