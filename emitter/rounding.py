"""Numbers as signed bytes: each group has a scale, its largest magnitude over 127 (ggml's Q8_0)."""

from __future__ import annotations

import numpy as np

GROUP = 32  # elements that share a scale
MOST = 127  # of a byte, either way
LEAST = np.float32(1e-30)  # a group below it counts as 0, for its inverse would be infinite


def as_bytes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers f64 [..., n] of groups f32 [..., n], to nearest and ties to even, and the scales f32 [...]."""
    most = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most < LEAST, np.float32(0), np.float32(MOST) / most).astype(np.float32)
    # As one fma rounds it.
    numbers = np.rint(groups.astype(np.float64) * inverse[..., None])
    return numbers, (most / np.float32(MOST)).astype(np.float32)
