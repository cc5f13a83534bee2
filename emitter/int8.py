"""Quantise f32 numbers to int8, as in ggml's Q8_0.

Each group of 32 numbers shares a scale: the group's max |x| / 127.
"""

from __future__ import annotations

import numpy as np

GROUP = 32  # elements that share a scale
MAX_BYTE = 127  # largest magnitude of a quantised byte
MIN_SCALED = np.float32(1e-30)  # a group whose max is smaller counts as 0, because 127 / max could be infinite


def as_bytes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise groups of n numbers to int8; return (codes, scales).

    groups: f32 [..., n]; the n numbers of the last dimension share a scale.
    codes: integers from -127 to 127, stored as f64 [..., n].
    scales: f32 [...], max |x| / 127 of each group.
    """
    peak = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(peak < MIN_SCALED, np.float32(0), np.float32(MAX_BYTE) / peak).astype(np.float32)
    # The product is exact in f64, so that only the integer is rounded, as with an fma.
    numbers = np.rint(groups.astype(np.float64) * inverse[..., None])
    return numbers, (peak / np.float32(MAX_BYTE)).astype(np.float32)
