"""x as bytes, for products of bytes: each group of a row with a scale of its own, eight k in the order EVEN_ODD."""

from __future__ import annotations

import numpy as np

from castiron.emitter.types import F32, I32, TensorType

# In this order the fields of a word of 4-bit codes are bytes after one mask (`weights.code_bytes`).
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)
MOST = 127  # of a byte, either way
LEAST = np.float32(1e-30)  # x below it counts as 0, for its inverse would be infinite


def rounded_types(rows: int, in_features: int, group: int) -> dict[str, TensorType]:
    """What rounding makes of x [rows, in]: y, four bytes in an i32, and of each group scales and sums."""
    groups = TensorType((rows, in_features // group), F32)
    return {"y": TensorType((rows, in_features // 4), I32), "scales": groups, "sums": groups}


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NumPy definition of `kernels.round_x`: the bytes of x [rows, in] as i32 [rows, in / 4], scales and sums of groups."""
    groups = x.astype(np.float32).reshape(len(x), -1, group)
    most = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most < LEAST, np.float32(0), np.float32(MOST) / most).astype(np.float32)
    # As one fma rounds it.
    numbers = np.rint(groups.astype(np.float64) * inverse[..., None])
    scales = (most / np.float32(MOST)).astype(np.float32)
    ordered = numbers.reshape(-1, 8)[:, EVEN_ODD].astype(np.int8)
    words = ordered.reshape(len(x), -1).view("<i4")
    return words, scales, (scales * numbers.sum(axis=2)).astype(np.float32)


def of_bytes(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The f64 [rows, in] that bytes and scales stand for."""
    numbers = np.ascontiguousarray(words).view(np.int8).reshape(-1, 8)[:, np.argsort(EVEN_ODD)]
    groups = numbers.astype(np.float64).reshape(*scales.shape, -1)
    return (groups * scales[..., None]).reshape(len(words), -1)
