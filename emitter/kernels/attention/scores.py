"""What the attention kernels share: scores, their soft cap, and attention's NumPy definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.kernels.writing.body import Body, Ssa, number, width_of
from castiron.emitter.kernels.writing.vectors import tanh
from castiron.emitter.types import F32, TensorType

NEVER = -1.0e30  # stands for no score: no real one falls below it, and differences to it are finite


@dataclass(frozen=True)
class Scores:
    """(q . k) * scale, then softcap * tanh(score / softcap) (Gemma 2), of keys less than `window` positions back.

    bidirectional: and of keys less than `window` positions ahead, or of all of the text.

    sinks: each head has one score more, of nothing (gpt-oss): an operand `sinks` f32 [heads] of the kernels.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bidirectional: bool = False

    @property
    def suffix(self) -> str:
        """The part of a kernel's name that these make."""
        parts = {"s": self.scale, "w": self.window, "cap": self.softcap}
        flags = "_sinks" * self.sinks + "_both" * self.bidirectional
        return "_".join(f"{letter}{number(value)}" for letter, value in parts.items() if value is not None) + flags

    def operands(self, heads: int) -> dict[str, TensorType]:
        """What the scores take besides queries and keys."""
        return {"sinks": TensorType((heads,), F32)} if self.sinks else {}

    def capped(self, b: Body, scores: Ssa) -> Ssa:
        """The scores, softly capped where they are."""
        if self.softcap is None:
            return scores
        cap = b.splat(self.softcap, width_of(scores))
        return b.mulf(tanh(b, b.divf(scores, cap)), cap)


def by_position(rows: np.ndarray, end: int) -> np.ndarray:
    """Of a cache or a ring [rows, ...] the row of each position below `end`, [end, ...]."""
    return rows[np.arange(end) % len(rows)]


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: list[int] | np.ndarray,
    how: Scores,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention in float64: q [T, heads, head_dim] at `positions` over k and v [context, kv_heads, head_dim], and over sinks
    [heads]; causal, or both ways where the last position is a text's end."""
    nothing = np.full(q.shape[1], -np.inf) if sinks is None else sinks.astype(np.float64)
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        low = 0 if how.window is None else max(0, position - how.window + 1)
        high = position + 1
        if how.bidirectional:
            high = positions[-1] + 1 if how.window is None else min(positions[-1] + 1, position + how.window)
        rows = slice(low, high)
        queries = q[t].reshape(k.shape[1], group, -1)
        scores = np.einsum("hgd,shd->hgs", queries, k[rows].astype(np.float64)) * how.scale
        if how.softcap:
            scores = how.softcap * np.tanh(scores / how.softcap)
        sink = nothing.reshape(*scores.shape[:2], 1)
        top = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
        out[t] = np.einsum("hgs,shd->hgd", weights, v[rows].astype(np.float64)).reshape(q.shape[1], -1)
    return out
