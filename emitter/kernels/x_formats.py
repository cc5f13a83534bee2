"""Formats of the activations x of matmul kernels, and NumPy references of `round_x` and `split_x`.

int8 (`round_x`): 32 consecutive elements of a row share a scale. An i32 contains four bytes, and
each eight consecutive k have the order EVEN_ODD. There is also a sum for each codec group of a row:
the f32 sum of x if the codec has minima, otherwise the integer sum of the bytes.
bf16 (`split_x`): each element is split into three bf16 whose sum is x, or rounded to one bf16. Rows
are in tiles of up to 16, and k in steps of 32. An i32 contains a pair of k, the even k in the lower
half. Rows and k are padded with zeros. One of the bf16 parts of one step of a tile is contiguous.
"""

from __future__ import annotations

import numpy as np

from castiron.emitter import int8
from castiron.emitter.codecs import Codec
from castiron.emitter.int8 import GROUP
from castiron.emitter.types import F32, I32, TensorType

# Masking a word of eight 4-bit codes once gives four bytes: codes 0, 2, 4, 6; shifted, 1, 3, 5, 7 (`weights.int8_codes`).
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)
EXACT = 3  # number of bf16 that represent an f32 exactly
ROWS = 16  # maximum rows of a tile
DEPTH = 32  # k of a step
HALF = DEPTH // 2


def rounded_types(rows: int, in_features: int, codec: Codec) -> dict[str, TensorType]:
    """Return the types of the results of `round_x` for x [rows, in] and weights of a codec."""
    return {
        "y": TensorType((rows, in_features // 4), I32),
        "scales": TensorType((rows, in_features // GROUP), F32),
        "sums": TensorType((rows, in_features // codec.group), F32 if codec.minimum else I32),
    }


def rounded(x: np.ndarray, codec: Codec) -> dict[str, np.ndarray]:
    """Quantise x [rows, in] to int8 in NumPy: the reference of the kernel `round_x`."""
    numbers, scales = int8.as_bytes(x.astype(np.float32).reshape(len(x), -1, GROUP))
    ordered = numbers.reshape(-1, 8)[:, EVEN_ODD].astype(np.int8)
    sums = numbers.reshape(len(x), -1, codec.group).sum(axis=2)
    if codec.minimum:
        sums = sums * np.repeat(scales, GROUP // codec.group, axis=1)
    types = rounded_types(len(x), x.shape[1], codec)
    return {"y": ordered.reshape(len(x), -1).view("<i4"), "scales": scales, "sums": sums.astype(types["sums"].dtype.numpy)}


def of_bytes(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return int8 x as f64 [rows, in], from the results y (`words`) and `scales` of `round_x`."""
    numbers = np.ascontiguousarray(words).view(np.int8).reshape(-1, 8)[:, np.argsort(EVEN_ODD)]
    groups = numbers.astype(np.float64).reshape(*scales.shape, GROUP)
    return (groups * scales[..., None]).reshape(len(words), -1)


def tile_rows(rows: int) -> int:
    return min(ROWS, rows)


def split_type(rows: int, in_features: int, count: int) -> TensorType:
    """Return the type [count, tiles, steps of 32 k, rows of a tile, 16 pairs of k] of `split_x`."""
    tile = tile_rows(rows)
    return TensorType((count, -(-rows // tile), -(-in_features // DEPTH), tile, HALF), I32)


def _cut(x: np.ndarray) -> np.ndarray:
    """Truncate each f32 to bf16, its upper 16 bits; return the bf16 as f32."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest(x: np.ndarray) -> np.ndarray:
    """Return the bf16 nearest to each f32, ties away from zero, as f32."""
    return _cut((np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(0x8000)).view(np.float32))


def split(x: np.ndarray, count: int) -> np.ndarray:
    """Split x [rows, in] into `count` bf16 in NumPy: the reference of the kernel `split_x`."""
    parts, rest = [], x.astype(np.float32)
    for _ in range(count):
        parts.append(_cut(rest) if count > 1 else nearest(rest))
        rest = rest - parts[-1]
    _, tiles, steps, tile, _ = split_type(len(x), x.shape[1], count).shape
    filled = np.zeros((count, tiles * tile, steps * DEPTH), np.uint16)
    filled[:, : len(x), : x.shape[1]] = np.stack(parts).view(np.uint32) >> 16
    words = filled.view("<i4").reshape(count, tiles, tile, steps, HALF)
    return np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4))


def joined(words: np.ndarray, rows: int, in_features: int) -> np.ndarray:
    """Return x as f64 [rows, in] from the result of `split_x`: add the bf16 of each element."""
    count, tiles, steps, tile, _ = words.shape
    halves = np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4)).view(np.uint16).reshape(count, tiles * tile, steps * DEPTH)
    values = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64).sum(axis=0)
    return values[:rows, :in_features]
