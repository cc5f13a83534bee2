"""KV caches: their states, ring buffers for sliding windows, and the row formats of `--cache`.

A row stores the key or value of one kv head at one position:

    f32, f16   [head_dim]
    q8_0       [groups, 4 + G]: per group, a scale d (f32) and G signed bytes; an element is d * byte

G is 32 as in ggml's q8_0; for heads that 32 does not divide, the largest power of two that does.
ggml stores d as f16, which takes 6 % less memory, but then each scale costs a conversion: a fifth
of decode's time, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from castiron.emitter.abi import STORAGE, State, ring_rows
from castiron.emitter.int8 import GROUP, as_bytes
from castiron.emitter.types import DTYPES, I8, DType, EmitError, TensorType

SCALE_BYTES = 4  # little-endian
MIN_GROUP = 8  # with fewer elements per scale, f16 takes no more memory


@dataclass(frozen=True)
class Cache:
    """A format of cache rows. name: its name in `--cache`. dtype: element type of the state."""

    name: str
    dtype: DType

    @property
    def grouped(self) -> bool:
        """Return whether elements are bytes with a scale for each group."""
        return self.dtype is I8

    def group(self, head_dim: int) -> int:
        """Return how many elements share a scale, or 1 if the format has no scales.

        Raise EmitError if the format has scales and `MIN_GROUP` does not divide head_dim.
        """
        if not self.grouped:
            return 1
        if head_dim % MIN_GROUP:
            raise EmitError(f"cache type {self.name} needs a head_dim that {MIN_GROUP} divides: {head_dim}; use f16 or f32")
        return np.gcd(head_dim, GROUP).item()

    def cuts(self, head_dim: int, size: int) -> bool:
        """Return whether parts of `size` elements divide heads at the borders of groups.

        A part is then a number of complete groups, or lies inside one group.
        """
        group = self.group(head_dim)
        return size % group == 0 or group % size == 0

    def row(self, head_dim: int) -> tuple[int, ...]:
        """Return the shape in which a state stores the key or value of one head at one position."""
        group = self.group(head_dim)
        return (head_dim // group, SCALE_BYTES + group) if self.grouped else (head_dim,)

    def row_bytes(self, head_dim: int) -> int:
        return prod(self.row(head_dim)) * self.dtype.bits // 8

    def type(self, layers: int, context: int, kv_heads: int, head_dim: int) -> TensorType:
        """Return the type of a state that stores keys, or values, in this format."""
        return TensorType((layers, context, kv_heads, *self.row(head_dim)), self.dtype)

    def stored(self, x: np.ndarray) -> np.ndarray:
        """Convert x [..., head_dim] to rows of this format, with rounding to nearest even."""
        if not self.grouped:
            return x.astype(self.dtype.numpy)
        groups, size = self.row(x.shape[-1])
        numbers, scales = as_bytes(x.astype(np.float32).reshape(*x.shape[:-1], groups, size - SCALE_BYTES))
        return np.concatenate([scales[..., None].view(np.int8), numbers.astype(np.int8)], axis=-1)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """Convert stored rows to f32 [..., head_dim]."""
        if not self.grouped:
            return rows.astype(np.float32)
        d, numbers = rows[..., :SCALE_BYTES], rows[..., SCALE_BYTES:].view(np.int8)
        x = np.ascontiguousarray(d).view(np.float32) * numbers.astype(np.float32)
        return x.reshape(*rows.shape[:-2], -1)


CACHES = {name: Cache(name, DTYPES[dtype]) for name, dtype in STORAGE.items()}
EXACT = CACHES["f32"]


def kv_cache(layers: int, context: int, kv_heads: int, head_dim: int) -> tuple[State, State]:
    """Return the states of keys and of values, each f32 [layers, context, kv_heads, head_dim]."""
    return State("k", shape := (layers, context, kv_heads, head_dim)), State("v", shape)


def layer_caches(windows: Sequence[int | None], context: int, kv_heads: int, head_dim: int) -> tuple[State, ...]:
    """Return caches for layers with full attention, and ring buffers for layers with a window.

    The caches are called `k` and `v`, the ring buffers `k_sliding` and `v_sliding`. windows: the
    sliding window of each layer in positions, None for full attention; all windows are equal.
    """
    found: list[State] = []
    for window in sorted(set(windows), key=bool):
        layers = tuple(layer for layer, own in enumerate(windows) if own == window)
        for state in kv_cache(len(layers), context, kv_heads, head_dim):
            found.append(replace(state, layers=layers) if window is None else ring(state, window, layers))
    return tuple(found)


def ring(state: State, window: int, layers: tuple[int, ...] = ()) -> State:
    """Return the ring buffer that replaces the cache `state` in layers with a sliding window.

    layers: the indices of these layers in the model.
    """
    return replace(state, name=f"{state.name}_sliding", kind="window", window=window, layers=layers)


def cut_to_rings(states: Sequence[State], tokens: int) -> tuple[State, ...]:
    """Reduce each ring buffer to the rows that calls of at most `tokens` tokens need.

    A ring buffer that would need a row for every position becomes a positional state.
    """

    def cut(state: State) -> State:
        if state.kind != "window":
            return state
        if (rows := ring_rows(state.window, tokens)) >= state.shape[1]:
            return replace(state, kind="positional", window=0)
        return replace(state, shape=(state.shape[0], rows, *state.shape[2:]))

    return tuple(map(cut, states))


def stored_as(states: Sequence[State], cache: str) -> tuple[State, ...]:
    """Return the states with caches in the row format `cache`, a key of `CACHES`.

    Recurrent states are always f32: their rounding errors would add up from token to token, and
    these states do not grow with the context.
    """
    if cache not in STORAGE:
        raise EmitError(f"unknown cache type {cache!r}; use one of {', '.join(STORAGE)}")

    def stored(state: State) -> State:
        return replace(state, shape=(*state.shape[:-1], *CACHES[cache].row(state.shape[-1])), storage=cache)

    return tuple(state if state.kind == "recurrent" else stored(state) for state in states)
