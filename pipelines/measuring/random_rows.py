"""Random stored weights of any codec, of about the size that trained ones have: for tests, and for models made to be timed."""

from __future__ import annotations

import numpy as np

from castiron.emitter.codecs import CODECS, codec_of, row_bytes
from castiron.emitter.types import DTYPES, from_f32

# Of random blocks before they come again: more than a core's caches tell apart, and drawn in a moment.
TILE_BYTES = 1 << 22
# Of a block's scale, about what trained weights have, and its place, where that is not the first byte.
SCALES = {"q2_k": 0.002, "q3_k": 0.001, "tq1_0": 0.05, "tq2_0": 0.05, "iq4_nl": 0.001, "iq4_xs": 0.00003}
SCALE_AT = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}


def raw_rows(codec_name: str, rows: int, in_features: int, seed: int) -> np.ndarray:
    """[rows, row_bytes] of any codes, with scales and minima of about the size that trained weights have."""
    codec, rng = CODECS[codec_name], np.random.default_rng(seed)
    if not codec.quantised:
        values = (rng.standard_normal((rows, in_features)) * 0.05).astype(np.float32)
        return np.ascontiguousarray(from_f32(values, DTYPES[codec_name])).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, in_features // codec.block, codec.block_bytes), dtype=np.uint8)

    def put(at: int, size: float) -> None:
        halves = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)

    small, place = codec.block == 32, SCALE_AT.get(codec_name, 0)
    if codec.exponents:
        blocks[:, :, 0] = rng.integers(118, 124, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    put(place, SCALES.get(codec_name, 0.01 if small else 0.0002))
    if codec.minimum:
        put(place + 2, 0.05 if small else 0.005 if codec_name == "q2_k" else 0.0005)
    return blocks.reshape(rows, -1)


def random_tile(codec_name: str, seed: int = 0) -> np.ndarray:
    """About TILE_BYTES u8 of whole random blocks, an odd number of them, so that rows of a weight filled with it again and
    again differ."""
    codec = codec_of(codec_name)
    blocks = TILE_BYTES // codec.block_bytes | 1
    return raw_rows(codec_name, 1, blocks * codec.block, seed)[0]


def tiled_rows(codec_name: str, rows: int, in_features: int, seed: int = 0) -> np.ndarray:
    """[rows, row_bytes] filled with one tile again and again, as fast as memory is written. ValueError if a row is not whole
    blocks."""
    return np.resize(random_tile(codec_name, seed), (rows, row_bytes(codec_name, in_features)))
