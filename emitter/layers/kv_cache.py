"""KV caches: buffers for full attention, ring buffers for sliding windows, formats of rows.

A row is the key or the value of one kv head at one position:

    f32, f16   [head_dim]
    q8_0       [groups, 4 + G] bytes: each group has a scale d (f32) and G signed bytes, d * byte

G is 32 as in ggml, or else the largest power of two that divides head_dim. ggml stores d as f16,
which takes 6 % less memory, but converting it took a fifth of the decode time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from castiron.emitter.abi import STORAGE, State, ring_rows
from castiron.emitter.codecs.fixed_point import GROUP, quantise
from castiron.emitter.graph.types import DTYPES, I8, DType, EmitError, TensorType

SCALE_BYTES = 4  # little-endian
MIN_GROUP = 8  # with fewer elements per scale, q8_0 would take at least as much memory as f16


@dataclass(frozen=True)
class Cache:
    """A format of KV cache rows: its name, a value of --kv-cache-type, and its element type."""

    name: str
    dtype: DType

    @property
    def grouped(self) -> bool:
        return self.dtype is I8

    def group(self, head_dim: int) -> int:
        """Return how many elements of a row share a scale, or 1 if the format has no scales."""
        if not self.grouped:
            return 1
        if head_dim % MIN_GROUP:
            raise EmitError(
                f"cache type {self.name} does not support head_dim {head_dim}, only multiples of {MIN_GROUP}; "
                "use cache type f16 or f32"
            )
        return np.gcd(head_dim, GROUP).item()

    def cuts(self, head_dim: int, size: int) -> bool:
        """Return whether a row can be cut into parts of `size` elements along its groups."""
        group = self.group(head_dim)
        return size % group == 0 or group % size == 0

    def row(self, head_dim: int) -> tuple[int, ...]:
        """Return the shape of a row: [head_dim], or [groups, 4 + G] with scales."""
        group = self.group(head_dim)
        return (head_dim // group, SCALE_BYTES + group) if self.grouped else (head_dim,)

    def row_bytes(self, head_dim: int) -> int:
        return prod(self.row(head_dim)) * self.dtype.bits // 8

    def type(self, layers: int, context: int, kv_heads: int, head_dim: int) -> TensorType:
        """Return the type of the buffer of keys or values: [layers, context, kv_heads, *row]."""
        return TensorType((layers, context, kv_heads, *self.row(head_dim)), self.dtype)

    def stored(self, x: np.ndarray) -> np.ndarray:
        """Convert x [..., head_dim] to [..., *row(head_dim)], rounded to nearest even."""
        if not self.grouped:
            return x.astype(self.dtype.numpy)
        groups, size = self.row(x.shape[-1])
        numbers, scales = quantise(x.astype(np.float32).reshape(*x.shape[:-1], groups, size - SCALE_BYTES))
        return np.concatenate([scales[..., None].view(np.int8), numbers.astype(np.int8)], axis=-1)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """Convert rows of this format, [..., *row(head_dim)], to f32 [..., head_dim]."""
        if not self.grouped:
            return rows.astype(np.float32)
        d, numbers = rows[..., :SCALE_BYTES], rows[..., SCALE_BYTES:].view(np.int8)
        x = np.ascontiguousarray(d).view(np.float32) * numbers.astype(np.float32)
        return x.reshape(*rows.shape[:-2], -1)


CACHES = {name: Cache(name, DTYPES[dtype]) for name, dtype in STORAGE.items()}
EXACT = CACHES["f32"]


def layer_caches(windows: Mapping[int, int | None], context: int, kv_heads: int, head_dim: int) -> tuple[State, ...]:
    """Return the KV caches of a model's layers: `k` and `v`, and `k_sliding` and `v_sliding`.

    windows: from a layer to its sliding window in tokens, or None; all windows are equal.
    """
    states: list[State] = []
    for window in sorted(set(windows.values()), key=bool):
        layers = tuple(layer for layer, own in windows.items() if own == window)
        suffix, kind = ("_sliding", "window") if window else ("", "positional")
        shape = len(layers), context, kv_heads, head_dim
        states += [State(f"{name}{suffix}", shape, kind, window or 0, layers=layers) for name in "kv"]
    return tuple(states)


def cut_to_rings(states: Sequence[State], tokens: int) -> tuple[State, ...]:
    """Return `states` with ring buffers of the rows that calls of `tokens` tokens need.

    A ring buffer that needs a row for every position of the context becomes positional.
    """

    def cut(state: State) -> State:
        if state.kind != "window":
            return state
        if (rows := ring_rows(state.window, tokens)) >= state.shape[1]:
            return replace(state, kind="positional", window=0)
        return replace(state, shape=(state.shape[0], rows, *state.shape[2:]))

    return tuple(map(cut, states))


def stored_as(states: Sequence[State], cache: str) -> tuple[State, ...]:
    """Return `states` with all KV caches in the storage format `cache`.

    Recurrent states stay f32, because their rounding errors would add up from token to token.
    """
    if cache not in STORAGE:
        raise EmitError(f"unknown cache type {cache!r}; use one of {', '.join(STORAGE)}")

    def stored(state: State) -> State:
        return replace(state, shape=(*state.shape[:-1], *CACHES[cache].row(state.shape[-1])), storage=cache)

    return tuple(state if state.kind == "recurrent" else stored(state) for state in states)
