"""Quantise f32 numbers to integers of 8, 16 or 24 bits; each group of 32 numbers shares a scale.

An integer has one to three signed bytes, its digits in base 256: 8 bits are ggml's Q8_0, and with
24 bits rounding is as small as that of f32 sums.
"""

from __future__ import annotations

import numpy as np

GROUP = 32  # elements that share a scale
# Largest integer by its number of bytes. For three bytes, it is less than 2^22, so that kernels can round in f32.
MAX_INTEGER = {1: 127, 2: 127 * 256 + 127, 3: 62 * 65536 + 127 * 256 + 127}
MIN_SCALED = np.float32(1e-30)  # a group whose max is smaller counts as 0, because its inverse could be infinite


def quantise(groups: np.ndarray, digits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Quantise f32 [..., n] with a scale for each n; return (integers f64 [..., n], scales f32 [...])."""
    largest = np.float32(MAX_INTEGER[digits])
    peak = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(peak < MIN_SCALED, np.float32(0), largest / peak).astype(np.float32)
    # The product is exact in f64, so that only the integer is rounded, as with an fma.
    integers = np.rint(groups.astype(np.float64) * inverse[..., None])
    return integers, (peak / largest).astype(np.float32)


def digits_of(integers: np.ndarray, digits: int) -> np.ndarray:
    """Return the signed base-256 digits of integers, highest first: i8 [digits, ...]."""
    rest, lowest_first = integers.astype(np.int64), []
    for _ in range(digits):
        lowest_first.append(rest.astype(np.int8))
        rest = (rest - lowest_first[-1]) >> 8
    return np.stack(lowest_first[::-1])
