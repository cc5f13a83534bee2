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
           [groups, words, 16] i16   the same for codes of 3 bits
           [elements, 16] i8         E4M3

Every quantised codec has d and codes; the other parts depend on the codec. A record of a float
codec has no such parts. It has one element of each of the 16 rows (for bf16, two elements in an
i32, the even one in the low half).

Codes are placed so that a shift and a mask of a word give four codes of a row in four bytes, as
instructions for int8 dot products read them: a quad. Quad q of a group has codes 8 (q / 2) + q % 2 +
(0, 2, 4, 6). The codes of quads q, q + 1, ... are next to each other in the bytes of a word. Codes of
5 or 6 bits are stored as two planes, the low four bits and the others (`PLANES`).

A word of 16 bits has five complete codes of 3 bits. The last one or two codes of a group are stored
in the bits that are left over (`TOP_CODES`).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product

import numpy as np

from castiron.emitter.codec import Codec, Parts
from castiron.emitter.codecs import codec_of, dequantise, in_features_of, row_bytes, values
from castiron.emitter.scaled_codecs import signed, translated

LANES = 16
_AT_ONCE_BYTES = 1 << 19  # bytes of rows packed at a time, so that intermediate arrays fit a CPU's caches
_REUSED_BYTES = 31 << 20  # just below glibc's DEFAULT_MMAP_THRESHOLD_MAX
_MAX_THREADS = 4  # more threads gain nothing, because memory bandwidth is the limit

BitField = tuple[int, int, int]  # (word, right shift, mask): the bits word >> shift & mask; left if the shift is negative
# By bits of a code: the bits that each plane of words has, from the lowest on.
PLANES = {1: (1,), 2: (2,), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
# The last codes of a group of 32 codes of 3 bits: each is the OR of bit fields. A group of 16 codes has only the first.
TOP_CODES: tuple[tuple[BitField, ...], ...] = (
    ((0, 15, 1), (1, 14, 2), (2, 13, 4)),
    ((3, 15, 1), (4, 14, 2), (5, 13, 4)),
)


@dataclass(frozen=True)
class Layout:
    """The layout of a record of a packed weight, which has one codec block of each of 16 rows.

    A codec block is a block of the weight's format, such as 256 elements of Q4_K. A group is the
    elements of a block that share a scale. Codes are packed in words, integers of 16 or 32 bits.

    size: bytes of a record.
    elements: number of elements of each row in a record.
    groups: number of groups of each row in a record.
    words: number of words with the codes of one group of one row; 0 for E4M3 and floats.
    word_bits: bits of a word.
    d, m, scales, minima, codes: byte offset of each part of the record (an element is
        d * scale * code +- m * minimum); None if the format has no such part.
    d_type: NumPy type of d.
    """

    size: int
    elements: int
    groups: int = 1
    words: int = 0
    word_bits: int = 32
    d: int = 0
    d_type: str = ""
    m: int | None = None
    scales: int | None = None
    minima: int | None = None
    codes: int = 0

    def bit_fields(self, codec: Codec, k: int) -> tuple[BitField, ...]:
        """Return where the bits of code k of a group are: the code is the OR of (words[word] >> shift) & mask."""
        if codec.bits == 3:
            fields = self.word_bits // 3
            in_fields = self.words * fields
            return TOP_CODES[k - in_fields] if k >= in_fields else ((k // fields, k % fields * 3, 7),)
        quad, byte = k // 8 * 2 + k % 2, k % 8 // 2
        found, first, low = [], 0, 0
        for bits in PLANES[codec.bits]:
            per_word = 8 // bits
            shift = 8 * byte + bits * (quad % per_word) - low
            found.append((first + quad // per_word, shift, ((1 << bits) - 1) << low))
            first, low = first + codec.group // 4 // per_word, low + bits
        return tuple(found)

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
    word_bits = 16 if codec.bits == 3 else 32  # so that 16 codes of 3 bits are a whole number of words
    words = 0 if codec.e4m3 else codec.group * codec.bits // word_bits
    size = offset + codec.block * codec.bits * LANES // 8
    return Layout(size, codec.block, groups, words, word_bits, d_type=parts.d.dtype.str, codes=offset, **offsets)


def packed_shape(codec_name: str, out_features: int, in_features: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight: (ceil(out / 16), records, bytes of a record).

    A record has, from each of 16 rows, one block of a quantised format (such as 256 elements of
    Q4_K), one f32, one f16, or two bf16. `records` is the number of records that these rows fill.
    """
    row_bytes(codec_name, in_features)
    record = layout(codec_of(codec_name))
    return -(-out_features // LANES), -(-in_features // record.elements), record.size


def _words(codec: Codec, record: Layout, codes: np.ndarray) -> np.ndarray:
    # Return the words of n blocks, [groups * words, n]. codes: i8 [n, block].
    groups = _stored(codec, codes).T.reshape(record.groups, codec.group, -1)
    if codec.bits == 3:
        words = np.zeros((record.groups, record.words, groups.shape[2]), np.uint16)
        for k in range(codec.group):
            for word, shift, mask in record.bit_fields(codec, k):
                words[:, word] |= (groups[:, k] & np.uint8(mask)).astype(np.uint16) << np.uint16(shift)
        return words.reshape(-1, groups.shape[2])
    # Element (octet, byte, odd) of a group is byte `byte` of quad 2 * octet + odd.
    quads = groups.reshape(record.groups, -1, 4, 2, groups.shape[2]).swapaxes(2, 3).reshape(record.groups, -1, 4, groups.shape[2])
    found = np.empty((record.groups, record.words, groups.shape[2], 4), np.uint8)
    first, low = 0, 0
    for bits in PLANES[codec.bits]:
        per_word, mask = 8 // bits, (1 << bits) - 1
        of_word = quads.reshape(record.groups, -1, per_word, 4, quads.shape[3])
        words = of_word.shape[1]
        for byte in range(4):
            total = np.zeros((record.groups, words, quads.shape[3]), np.uint8)
            for i in range(per_word):
                part = of_word[:, :, i, byte]
                part = part if len(PLANES[codec.bits]) == 1 else part >> np.uint8(low) & np.uint8(mask)
                total |= part * np.uint8(1 << bits * i) if i else part  # NumPy multiplies bytes faster than it shifts them
            found[:, first : first + words, :, byte] = total
        first, low = first + words, low + bits
    return found.view("<u4").reshape(-1, groups.shape[2])


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
    put(record.codes, parts.codes.T if codec.e4m3 else _words(codec, record, parts.codes))


def _filled(raw: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    # Add zeros along `axis` up to a multiple of `multiple`.
    if rest := -raw.shape[axis] % multiple:
        raw = np.pad(raw, [(0, rest if axis == at else 0) for at in (0, 1)])
    return np.ascontiguousarray(raw)


def pack(codec_name: str, *raws: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Pack a weight into the layout that kernels read, u8 of shape `packed_shape`.

    codec_name: format of the weight, such as "q4_k".
    raws: the weight, u8 [out, row_bytes] in this format. Several weights of one shape, such as
        gate and up of a GLU, are packed into one array: 16 rows of the first, 16 rows of the
        second, and so on.
    out: the array to write and return; None for a new one.
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
        words = take(record.codes, f"<u{record.word_bits // 8}", groups, record.words)
        codes = _codes(codec, record, words.astype(np.uint32))
    scales = "i1" if codec.minimum == 0 else "u1"
    parts = Parts(
        codes.reshape(len(codes), -1),
        take(record.d, record.d_type),
        None if record.m is None else take(record.m, "|i1" if codec.zeros else "<f2"),
        None if record.scales is None else take(record.scales, scales, groups),
        None if record.minima is None else take(record.minima, "u1", groups),
    )
    return values(codec, parts).reshape(row_blocks * LANES, -1)[:out_features, :in_features]
