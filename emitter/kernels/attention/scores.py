"""How attention scales, soft-caps and masks its scores; a reference of attention in NumPy."""

from dataclasses import dataclass

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.mlir.body import Body, Ssa, number
from castiron.emitter.kernels.mlir.vector_math import LOG2_E, exp2

NEVER = -1.0e30  # score of masked positions: below all others; finite, so that differences are not NaN
KEYS = 48  # keys of a block, whose softmax is computed at a time; speed differs by a few percent from 32 to 96
CHUNK = 4 * KEYS  # keys of a chunk, whose sums are independent of other chunks


@dataclass(frozen=True)
class Scores:
    """How attention computes scores and which positions it masks.

    scale: the score of q and k is s = scale * (q . k).
    window: number of positions that a token attends to, its own included; None for no limit.
    softcap: if not None, the score is softcap * tanh(s / softcap) instead, as in Gemma 2.
    sinks: whether each head has a learned score without a key and a value, as in gpt-oss.
    bidirectional: whether a token also attends to later positions: to window - 1 of them, or to all
        if `window` is None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bidirectional: bool = False

    @property
    def suffix(self) -> str:
        parts = {"s": self.scale, "w": self.window, "cap": self.softcap}
        flags = "_sinks" * self.sinks + "_both" * self.bidirectional
        return "_".join(f"{letter}{number(value)}" for letter, value in parts.items() if value is not None) + flags

    def operands(self, heads: int) -> dict[str, TensorType]:
        return {"sinks": TensorType((heads,), F32)} if self.sinks else {}

    @property
    def query_scale(self) -> float:
        """Return by what queries are multiplied: scores are for exp2, unless a soft cap comes first."""
        return self.scale * (LOG2_E if self.softcap is None else 1.0)

    def capped(self, b: Body, scores: Ssa) -> Ssa:
        """Emit code that applies the soft cap, if any, to scores; return them times log2(e)."""
        if self.softcap is None:
            return scores
        cap = b.splat(self.softcap, scores.width)
        return b.mulf(b.mulf(b.math("tanh", b.divf(scores, cap)), cap), b.splat(LOG2_E, scores.width))


def merging(b: Body, top: Ssa, maximum: Ssa) -> tuple[Ssa, Ssa, Ssa]:
    """Return (new max score, factor of the sums before, factor of a chunk's sums), to merge a chunk.

    top: max score of the chunks before. maximum: that of the chunk. Both are vectors.
    """
    new = b.maxf(maximum, top)
    return new, exp2(b, b.subf(top, new)), exp2(b, b.subf(maximum, new))


def merged(b: Body, total: Ssa, added: Ssa, before: Ssa, own: Ssa) -> Ssa:
    """Return the sum of the chunks before and of one more chunk, with the factors of `merging`."""
    return b.fma(added, own, b.mulf(total, before))


def by_position(rows: np.ndarray, end: int) -> np.ndarray:
    """Return the keys or values of positions 0 .. end - 1, in this order: [end, ...].

    rows: one layer of a KV cache, [n, ...]. It may be a ring buffer, which has position p in row p
        modulo n. Then only the last n positions of the result are right, because older positions
        have been overwritten.
    """
    return rows[np.arange(end) % len(rows)]


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, how: Scores, sinks: np.ndarray | None = None
) -> np.ndarray:
    """Compute attention in NumPy; return f64 [T, heads, head_dim].

    q: [T, heads, head_dim], rotated. k, v: by position, [positions, kv_heads, head_dim].
    positions: those of the T tokens, ascending. sinks: [heads], or None.
    """
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
