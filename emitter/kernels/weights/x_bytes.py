"""x as bytes, for products of bytes: every 32 of a row with a scale of their own, eight k in the order EVEN_ODD.

Beside them stand the sums over the groups of a codec that its minima or its offset need: f32 of x for minima, whole numbers of
bytes for an offset.
"""

from __future__ import annotations

import numpy as np

from castiron.emitter.codecs import Codec
from castiron.emitter.rounding import GROUP, as_bytes
from castiron.emitter.types import F32, I32, TensorType

# In this order the fields of a word of 4-bit codes are bytes after one mask (`weights.code_bytes`).
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded_types(rows: int, in_features: int, codec: Codec) -> dict[str, TensorType]:
    """What rounding makes of x [rows, in] for a weight of this codec: y, four bytes in an i32, scales and sums."""
    return {
        "y": TensorType((rows, in_features // 4), I32),
        "scales": TensorType((rows, in_features // GROUP), F32),
        "sums": TensorType((rows, in_features // codec.group), F32 if codec.minimum else I32),
    }


def rounded(x: np.ndarray, codec: Codec) -> dict[str, np.ndarray]:
    """NumPy definition of `kernels.round_x`."""
    numbers, scales = as_bytes(x.astype(np.float32).reshape(len(x), -1, GROUP))
    ordered = numbers.reshape(-1, 8)[:, EVEN_ODD].astype(np.int8)
    sums = numbers.reshape(len(x), -1, codec.group).sum(axis=2)
    if codec.minimum:
        sums = sums * np.repeat(scales, GROUP // codec.group, axis=1)
    types = rounded_types(len(x), x.shape[1], codec)
    return {"y": ordered.reshape(len(x), -1).view("<i4"), "scales": scales, "sums": sums.astype(types["sums"].dtype.numpy)}


def of_bytes(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The f64 [rows, in] that bytes and scales stand for."""
    numbers = np.ascontiguousarray(words).view(np.int8).reshape(-1, 8)[:, np.argsort(EVEN_ODD)]
    groups = numbers.astype(np.float64).reshape(*scales.shape, GROUP)
    return (groups * scales[..., None]).reshape(len(words), -1)
