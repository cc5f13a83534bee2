"""x as bf16, for products of pairs of them: in three pieces of 8 bits, whose sum is x, or in one, the nearest.

Rows stand in tiles of up to 16, k in steps of 32, pairs of k in an i32, the even one in the lower half; rows and k that x
does not have are zeros. A piece of a tile's step is one block of memory.
"""

from __future__ import annotations

import numpy as np

from castiron.emitter.types import I32, TensorType

EXACT = 3  # pieces that hold an f32
ROWS = 16  # most of a tile
DEPTH = 32  # k of a step


def tile_rows(rows: int) -> int:
    """Rows of a tile."""
    return min(ROWS, rows)


def pieces_type(rows: int, in_features: int, count: int) -> TensorType:
    """[pieces, tiles, steps, rows of a tile, 16] of x [rows, in]."""
    tile = tile_rows(rows)
    return TensorType((count, -(-rows // tile), -(-in_features // DEPTH), tile, DEPTH // 2), I32)


def cut(x: np.ndarray) -> np.ndarray:
    """The bf16 that each f32 begins with, as f32."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest(x: np.ndarray) -> np.ndarray:
    """The bf16 nearest to each f32, ties away from zero, as f32."""
    return cut((np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(0x8000)).view(np.float32))


def split(x: np.ndarray, count: int) -> np.ndarray:
    """NumPy definition of the pieces of x [rows, in], as `pieces_type` has them."""
    parts, rest = [], x.astype(np.float32)
    for _ in range(count):
        parts.append(cut(rest) if count > 1 else nearest(rest))
        rest = rest - parts[-1]
    _, tiles, steps, tile, _ = pieces_type(len(x), x.shape[1], count).shape
    filled = np.zeros((count, tiles * tile, steps * DEPTH), np.uint16)
    filled[:, : len(x), : x.shape[1]] = np.stack(parts).view(np.uint32) >> 16
    words = filled.view("<i4").reshape(count, tiles, tile, steps, DEPTH // 2)
    return np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4))


def joined(words: np.ndarray, rows: int, in_features: int) -> np.ndarray:
    """The f64 [rows, in] that pieces stand for."""
    count, tiles, steps, tile, _ = words.shape
    halves = np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4)).view(np.uint16).reshape(count, tiles * tile, steps * DEPTH)
    values = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64).sum(axis=0)
    return values[:rows, :in_features]
