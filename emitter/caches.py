"""How a KV cache stores what is appended to it: one row for each kv head at each position.

    f32, f16   [head_dim]
    q8_0       [groups, 4 + G]: of each G elements their scale d as f32, then G signed bytes; an element is d * byte

G is 32 as in ggml's q8_0, of heads that 32 does not divide the largest power of two that does. ggml keeps d as f16,
which takes 6 % less memory; but then each scale costs a conversion where attention is bound by arithmetic as much as by
memory: a fifth of decode's time, measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from castiron.emitter.rounding import GROUP, as_bytes
from castiron.emitter.types import F16, F32, I8, DType, EmitError, TensorType

SCALE_BYTES = 4  # little-endian
LEAST_GROUP = 8  # with fewer elements to a scale f16 is no larger


@dataclass(frozen=True)
class Cache:
    """A way to store rows; `name` is what `--cache` calls it, `dtype` the type of its state's elements."""

    name: str
    dtype: DType

    @property
    def grouped(self) -> bool:
        """Whether elements are bytes and groups of them have a scale."""
        return self.dtype is I8

    def group(self, head_dim: int) -> int:
        """Elements that share a scale, 1 where there is none. EmitError for a head that has no such groups."""
        if not self.grouped:
            return 1
        if head_dim % LEAST_GROUP:
            whole = f"groups of {LEAST_GROUP} or more, each with a scale"
            raise EmitError(f"a cache of {self.name} cannot cut heads of {head_dim} elements into {whole}; use f16 or f32")
        return np.gcd(head_dim, GROUP).item()

    def cuts(self, head_dim: int, size: int) -> bool:
        """Whether a row falls into parts of `size` elements that are whole groups, or of which each lies within one."""
        group = self.group(head_dim)
        return size % group == 0 or group % size == 0

    def row(self, head_dim: int) -> tuple[int, ...]:
        """The extents of a row."""
        group = self.group(head_dim)
        return (head_dim // group, SCALE_BYTES + group) if self.grouped else (head_dim,)

    def row_bytes(self, head_dim: int) -> int:
        return prod(self.row(head_dim)) * self.dtype.bits // 8

    def type(self, layers: int, context: int, kv_heads: int, head_dim: int) -> TensorType:
        """A cache of keys or of values."""
        return TensorType((layers, context, kv_heads, *self.row(head_dim)), self.dtype)

    def stored(self, x: np.ndarray) -> np.ndarray:
        """x [..., head_dim] as rows: floats to nearest even, bytes and scales as `rounding.as_bytes` has them."""
        if not self.grouped:
            return x.astype(self.dtype.numpy)
        groups, size = self.row(x.shape[-1])
        numbers, scales = as_bytes(x.astype(np.float32).reshape(*x.shape[:-1], groups, size - SCALE_BYTES))
        return np.concatenate([scales[..., None].view(np.int8), numbers.astype(np.int8)], axis=-1)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The f32 [..., head_dim] that rows stand for."""
        if not self.grouped:
            return rows.astype(np.float32)
        d, numbers = rows[..., :SCALE_BYTES], rows[..., SCALE_BYTES:].view(np.int8)
        x = np.ascontiguousarray(d).view(np.float32) * numbers.astype(np.float32)
        return x.reshape(*rows.shape[:-2], -1)


CACHES = {cache.name: cache for cache in (Cache("f32", F32), Cache("f16", F16), Cache("q8_0", I8))}
EXACT = CACHES["f32"]


def cache_of(dtype: DType) -> Cache | None:
    """The cache whose states have elements of this type."""
    return next((cache for cache in CACHES.values() if cache.dtype is dtype), None)
