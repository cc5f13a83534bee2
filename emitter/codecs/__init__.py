"""Weight codecs: the formats in which checkpoints store a row of weights, such as f32 and q4_k.

A quantised row is a sequence of blocks of one or more groups, each with a scale and perhaps a
minimum; `Parts` has the formula. `CODECS` are those of floats and of GGUF files, `scaled.SCALED`
those of quantised HF checkpoints. Sources: the GGUF specification and ggml-common.h (`block_q*`).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from castiron.emitter.codecs.codec import Codec, Parts
from castiron.emitter.codecs.iq_blocks import SPLITTERS
from castiron.emitter.codecs.scaled import E4M3, SCALED, signed, splitter, translated, unpack_fields
from castiron.emitter.graph.types import BF16, DTYPES, to_f32

_ROWS_AT_ONCE_BYTES = 1 << 19  # limit for temporary arrays, without the result


def rows_at_once(bytes_of_a_row: int) -> int:
    """Return how many rows to convert at a time, so that temporary arrays stay below 512 KiB."""
    return max(1, _ROWS_AT_ONCE_BYTES // bytes_of_a_row)


def _f16(columns: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(columns).view("<f2")[:, 0]


def _split_32(bits: int, offset: int) -> Callable[[np.ndarray], Parts]:
    """Return a function that unpacks q4_0, q4_1, q5_0 or q5_1: an offset or a minimum."""

    def split(b: np.ndarray) -> Parts:
        start = 2 if offset else 4
        codes = unpack_fields(b[:, -16:], 16, 4)
        if bits == 5:  # bit k of a little-endian word is the fifth bit of code k
            codes |= unpack_fields(b[:, start : start + 4], 1, 1, 4)
        return Parts(signed(codes, offset), _f16(b[:, :2]), None if offset else _f16(b[:, 2:4]))

    return split


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack bytes [n, 12] to 6-bit scales [n, 8] and minima [n, 8] (ggml's get_scale_min_k4)."""
    low, middle, high = np.ascontiguousarray(packed).view("<u4").T  # four numbers of eight bits
    six, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    scales = np.stack([low & six, high & four | low >> 2 & two], axis=1)
    minima = np.stack([middle & six, high >> 4 & four | middle >> 2 & two], axis=1)
    return scales.view(np.uint8), minima.view(np.uint8)


def _split_q45_k(bits: int) -> Callable[[np.ndarray], Parts]:
    def split(b: np.ndarray) -> Parts:
        codes = unpack_fields(b[:, -128:], 32, 4)
        if bits == 5:
            codes |= unpack_fields(b[:, 16:48], 32, 1, 4)
        return Parts(signed(codes, 0), _f16(b[:, :2]), _f16(b[:, 2:4]), *_six_bit_scales(b[:, 4:16]))

    return split


def _split_q6_k(b: np.ndarray) -> Parts:
    codes = unpack_fields(b[:, :128], 64, 4)
    codes |= unpack_fields(b[:, 128:192], 32, 2, 4)
    return Parts(signed(codes, 32), _f16(b[:, 208:]), scales=b[:, 192:208].view(np.int8))


def _split_q2_k(b: np.ndarray) -> Parts:
    codes = signed(unpack_fields(b[:, 16:80], 32, 2), 0)
    return Parts(codes, _f16(b[:, 80:82]), _f16(b[:, 82:84]), b[:, :16] & 15, b[:, :16] >> 4)


def _split_q3_k(b: np.ndarray) -> Parts:
    codes = unpack_fields(b[:, 32:96], 32, 2) | unpack_fields(b[:, :32], 32, 1, 2)
    scales = unpack_fields(b[:, 96:104], 8, 4) | unpack_fields(b[:, 104:108], 4, 2, 4)
    return Parts(signed(codes, 4), _f16(b[:, 108:]), scales=signed(scales, 32))


def _in_table(table: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    return translated(indices, np.array(table, np.int8))


def _split_iq4_nl(b: np.ndarray) -> Parts:
    return Parts(_in_table(IQ4, unpack_fields(b[:, 2:], 16, 4)), _f16(b[:, :2]))


def _split_iq4_xs(b: np.ndarray) -> Parts:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    scales = signed(low | high.astype(np.uint8) << 4, 32)
    return Parts(_in_table(IQ4, unpack_fields(b[:, 8:], 16, 4)), _f16(b[:, :2]), scales=scales)


def _split_mxfp4(b: np.ndarray) -> Parts:
    return Parts(_in_table(E2M1, unpack_fields(b[:, 1:], 16, 4)), np.ascontiguousarray(b[:, 0]))


@np.errstate(over="ignore", invalid="ignore")  # `finite.are_finite` finds such scales
def _split_nvfp4(b: np.ndarray) -> Parts:
    """Unpack nvfp4: u8 [n, 36], as in ggml, or [n, 40], where an f32 scale follows each block."""
    # ggml reads 0x7F as 0, and ignores the sign bit. Its E4M3 has an exponent bias of 7, f16 one of 15, and the table's
    # values are doubled: hence 2^(15 - 7 - 1).
    scales = np.where(b[:, :4] == 0x7F, 0, b[:, :4] & 0x7F).astype(np.uint8)
    d = np.full(len(b), 128, np.float32)
    if b.shape[1] > 36:
        d *= np.ascontiguousarray(b[:, 36:]).view("<f4")[:, 0]
    return Parts(_in_table(E2M1, unpack_fields(b[:, 4:36], 8, 4)), d, scales=scales)


def with_scale(raw: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Convert rows of nvfp4 to nvfp4_scaled, in which each block ends with an f32 scale.

    scale: f32 that can be broadcast to [..., blocks of a row].
    """
    blocks = raw.reshape(*raw.shape[:-1], -1, CODECS["nvfp4"].block_bytes)
    scales = np.ascontiguousarray(np.broadcast_to(scale, blocks.shape[:-1]), "<f4")[..., None].view(np.uint8)
    return np.concatenate([blocks, scales], axis=-1).reshape(*raw.shape[:-1], -1)


def _split_q1_0(b: np.ndarray) -> Parts:
    return Parts(_in_table(SIGNS, unpack_fields(b[:, 2:], 1, 1)), _f16(b[:, :2]))


def _split_q2_0(b: np.ndarray) -> Parts:
    return Parts(signed(unpack_fields(b[:, 2:], 1, 2), 1), _f16(b[:, :2]))


def _ternary(columns: np.ndarray, digits: int) -> np.ndarray:
    """Unpack the base-3 digits of u8 [n, b] (ggml's tq1_0), minus 1, all first digits first."""
    powers = (3 ** np.arange(digits)).astype(np.uint8)
    digit = (columns[:, None, :] * powers[:, None]).astype(np.uint16) * 3 >> 8
    return digit.astype(np.int8).reshape(len(columns), -1) - np.int8(1)


def _split_tq1_0(b: np.ndarray) -> Parts:
    parts = (_ternary(b[:, :32], 5), _ternary(b[:, 32:48], 5), _ternary(b[:, 48:52], 4))
    return Parts(np.concatenate(parts, axis=1), _f16(b[:, 52:]))


def _split_tq2_0(b: np.ndarray) -> Parts:
    return Parts(signed(unpack_fields(b[:, :64], 32, 2), 1), _f16(b[:, 64:]))


# Values of codes. 4 bits: ggml's kvalues_iq4nl, and 2 times OCP's E2M1. 1 bit: the signs.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SIGNS = (-1, 1)
# Values of the IQ types, in which a zero fills up the table: 8 times a grid's entry in IQ1, plus or minus 1.
IQ1 = (-9, -7, -1, 1, 7, 9, 0, 0)
IQ2 = (8, 25, 43, -8, -25, -43, 0, 0)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S = tuple(range(-15, 16, 2))

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("f32", 1, 4),
        Codec("f16", 1, 2),
        Codec("bf16", 1, 2),
        Codec("q4_0", 32, 18, _split_32(4, 8), bits=4, offset=8, group=32),
        Codec("q4_1", 32, 20, _split_32(4, 0), bits=4, group=32, minimum=+1),
        Codec("q5_0", 32, 22, _split_32(5, 16), bits=5, offset=16, group=32),
        Codec("q5_1", 32, 24, _split_32(5, 0), bits=5, group=32, minimum=+1),
        Codec("q8_0", 32, 34, splitter(8, 0, "f16", zeros=False), bits=8, group=32),
        Codec("q4_k", 256, 144, _split_q45_k(4), bits=4, group=32, minimum=-1),
        Codec("q5_k", 256, 176, _split_q45_k(5), bits=5, group=32, minimum=-1),
        Codec("q6_k", 256, 210, _split_q6_k, bits=6, offset=32, group=16),
        Codec("q2_k", 256, 84, _split_q2_k, bits=2, group=16, minimum=-1),
        Codec("q3_k", 256, 110, _split_q3_k, bits=3, offset=4, group=16),
        Codec("iq4_nl", 32, 18, _split_iq4_nl, bits=4, group=32, table=IQ4),
        Codec("iq4_xs", 256, 136, _split_iq4_xs, bits=4, group=32, table=IQ4),
        Codec("mxfp4", 32, 17, _split_mxfp4, bits=4, group=32, table=E2M1, exponents=True),
        Codec("nvfp4", 64, 36, _split_nvfp4, bits=4, group=16, table=E2M1, small_floats=True),
        # NVFP4 whose tensor has a scale too (`with_scale`); GGUF stores that scale as a tensor of its own.
        Codec("nvfp4_scaled", 64, 40, _split_nvfp4, bits=4, group=16, table=E2M1, small_floats=True),
        Codec("q1_0", 128, 18, _split_q1_0, bits=1, group=32, table=SIGNS),
        Codec("q2_0", 64, 18, _split_q2_0, bits=2, offset=1, group=32),
        # The codes of IQ types are stored as values, because looking up vectors of a grid would take longer than
        # reading the additional bits.
        Codec("iq1_s", 256, 50, SPLITTERS["iq1_s"], bits=3, group=32, table=IQ1),
        Codec("iq1_m", 256, 56, SPLITTERS["iq1_m"], bits=3, group=16, table=IQ1),
        Codec("iq2_xxs", 256, 66, SPLITTERS["iq2_xxs"], bits=3, group=32, table=IQ2),
        Codec("iq2_xs", 256, 74, SPLITTERS["iq2_xs"], bits=3, group=16, table=IQ2),
        Codec("iq2_s", 256, 82, SPLITTERS["iq2_s"], bits=3, group=16, table=IQ2),
        Codec("iq3_xxs", 256, 98, SPLITTERS["iq3_xxs"], bits=4, group=32, table=IQ3_XXS),
        Codec("iq3_s", 256, 110, SPLITTERS["iq3_s"], bits=4, group=32, table=IQ3_S),
        # Ternary codes, packed as 2 bits.
        Codec("tq1_0", 256, 54, _split_tq1_0, bits=2, offset=1, group=32),
        Codec("tq2_0", 256, 66, _split_tq2_0, bits=2, offset=1, group=32),
    )
}


def codec_of(name: str) -> Codec:
    """Return the codec called `name`; raise ValueError for an unknown name."""
    try:
        return CODECS.get(name) or SCALED[name]
    except KeyError:
        raise ValueError(f"unknown weight type: {name!r}; use one of {', '.join(CODECS)}") from None


def row_bytes(codec_name: str, in_features: int) -> int:
    """Return the bytes of a row of `in_features` elements; ValueError for a partial block."""
    codec = codec_of(codec_name)
    blocks, rest = divmod(in_features, codec.block)
    if rest:
        raise ValueError(
            f"row length is not a multiple of the {codec.name} block size: {in_features} elements; "
            f"use a multiple of {codec.block}, or another weight type"
        )
    return blocks * codec.block_bytes


def in_features_of(codec: Codec, raw: np.ndarray) -> int:
    """Return the elements of each row u8 [..., row_bytes]; ValueError for a partial block."""
    blocks, rest = divmod(raw.shape[-1], codec.block_bytes)
    if rest:
        raise ValueError(
            f"rows of {raw.shape[-1]} bytes do not consist of complete {codec.name} blocks; "
            f"use a multiple of {codec.block_bytes} bytes"
        )
    return blocks * codec.block


def _dequantise_rows(codec: Codec, raw: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(raw)
    if not codec.quantised:
        dtype = DTYPES[codec.name]
        return to_f32(raw.view(dtype.numpy.newbyteorder("<")), dtype)
    return values(codec, codec.split(raw.reshape(-1, codec.block_bytes))).reshape(len(raw), -1)


def numbers(codec: Codec, parts: Parts) -> Parts:
    """Decode the encoded arrays of `parts`, so that the formula of `Parts` can use them."""
    d, m, scales, codes = parts.d, parts.m, parts.scales, parts.codes
    if codec.exponents:
        d = np.ldexp(np.float32(1), d.astype(np.int32) - 128)
    elif d.dtype == BF16.numpy:
        d = to_f32(d, BF16)
    if codec.zeros and m is not None:
        m = d.astype(np.float32) * m.astype(np.float32)
    if codec.small_floats and scales is not None:
        scales = (scales.astype(np.uint16) << 7).view(np.float16)
    if codec.e4m3:
        codes = E4M3[codes.view(np.uint8)]
    elif not codec.has_integers:
        codes = np.array(codec.table, np.float32)[codes]
    return replace(parts, codes=codes, d=d, m=m, scales=scales)


def values(codec: Codec, parts: Parts) -> np.ndarray:
    """Dequantise n blocks with ggml's rounding; return their elements, f32 [n, block]."""
    parts = numbers(codec, parts)
    scale = parts.d.astype(np.float32)[:, None]
    if parts.scales is not None:
        scale = scale * parts.scales.astype(np.float32)
    # Column order, as of the codes, is faster.
    result = parts.codes.reshape(len(parts.codes), -1, codec.group).astype(np.float32)
    np.multiply(np.asfortranarray(scale)[:, :, None], result, out=result)
    if parts.m is not None:
        minimum = parts.m.astype(np.float32)[:, None]
        if parts.minima is not None:
            minimum = minimum * parts.minima.astype(np.float32)
        result += np.float32(codec.minimum) * np.asfortranarray(minimum)[:, :, None]
    return result.reshape(len(parts.codes), -1)


def dequantise(codec_name: str, raw: np.ndarray) -> np.ndarray:
    """Dequantise rows u8 [..., row_bytes] to f32, with the bits of `gguf.quants.dequantize`."""
    codec = codec_of(codec_name)
    result = np.empty((*raw.shape[:-1], in_features_of(codec, raw)), np.float32)
    if result.size:
        rows, out = raw.reshape(-1, raw.shape[-1]), result.reshape(-1, result.shape[-1])
        step = rows_at_once(raw.shape[-1])
        for start in range(0, len(rows), step):
            out[start : start + step] = _dequantise_rows(codec, rows[start : start + step])
    return result
