"""What the attention kernels share: scores, their soft cap, and attention's NumPy definition."""

from __future__ import annotations

import numpy as np

from castiron.emitter.kernels.writing.body import Body, Ssa, width_of
from castiron.emitter.kernels.writing.vectors import tanh

NEVER = -1.0e30  # stands for no score: no real one falls below it, and differences to it are finite


def capped(b: Body, scores: Ssa, softcap: float | None) -> Ssa:
    """softcap * tanh(scores / softcap) (Gemma 2), or the scores themselves."""
    if softcap is None:
        return scores
    cap = b.splat(softcap, width_of(scores))
    return b.mulf(tanh(b, b.divf(scores, cap)), cap)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: list[int] | np.ndarray,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> np.ndarray:
    """Causal attention in float64: q [T, heads, head_dim] at `positions` over k and v [context, kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        low = 0 if window is None else max(0, position - window + 1)
        rows = slice(low, position + 1)
        queries = q[t].reshape(k.shape[1], group, -1)
        scores = np.einsum("hgd,shd->hgs", queries, k[rows].astype(np.float64)) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[t] = np.einsum("hgs,shd->hgd", weights, v[rows].astype(np.float64)).reshape(q.shape[1], -1)
    return out
