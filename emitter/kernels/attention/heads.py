"""Prepare query and key heads for attention: RMS norm and rotary embedding.

A row of the fused qkv projection has all query heads, then the key heads, then the value heads.
Optional RMS norms of queries and keys come before the rotation, as in HF. A norm is computed over
each head (Qwen 3, Gemma 3), or over all query heads or all key heads of a row (OLMo 2).

    prepared(x [head_dim]), vector by vector in registers:
      x = x / sqrt(mean(x^2) + eps) * weight                        with a norm; a first pass computes the mean
      for d in 0 .. rotary_dim / 2 - 1: first, second = x[d], x[d + rotary_dim / 2]
        y[d], y[d + rotary_dim / 2] = first * cos[d] - second * sin[d], second * cos[d] + first * sin[d]
      y[rotary_dim :] = x[rotary_dim :]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, largest_width, number
from castiron.emitter.kernels.mlir.vector_math import inverse_rms, rms_normed


@dataclass(frozen=True)
class HeadLayout:
    """The heads in a row of the fused qkv projection, and how q and k are normalised and rotated.

    rotary_dim: number of leading elements of a head that get rotary embedding; None for no rotary
        embedding. Element i is rotated together with element i + rotary_dim / 2 (`rotate_half` in
        HF).
    qk_norm: epsilon of the RMS norm of q and k; None for no norm.
    qk_norm_row: True for one norm over all heads of q and one over all heads of k, False for a
        separate norm of each head.
    v_norm: epsilon of the RMS norm of each head of v, on GPUs only (Gemma 4); None for no norm.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int | None
    qk_norm: float | None = None
    qk_norm_row: bool = False
    v_norm: float | None = None

    @property
    def group(self) -> int:
        """Return the number of query heads that use one kv head."""
        return self.heads // self.kv_heads

    @property
    def row(self) -> int:
        """Return the number of elements in a row of the fused qkv projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def keys(self) -> int:
        """Return the index of the first element of the key heads in a row of the qkv projection."""
        return self.heads * self.head_dim

    @property
    def suffix(self) -> str:
        parts = [f"{self.heads}x{self.kv_heads}x{self.head_dim}"]
        if self.rotary_dim is not None:
            parts.append(f"rope{self.rotary_dim}")
        if self.qk_norm is not None:
            parts.append(f"{'rownorm' if self.qk_norm_row else 'qknorm'}{number(self.qk_norm)}")
        if self.v_norm is not None:
            parts.append(f"vnorm{number(self.v_norm)}")
        return "_".join(parts)

    def operands(self, context: int) -> dict[str, TensorType]:
        """Return the types of the operands for norms and rotary embedding, by name.

        cos, sin: f32 [context, rotary_dim / 2]. q_norm, k_norm, v_norm: f32 [head_dim], or [all
        heads * head_dim] for a norm over all heads. Those that are not used are left out.
        """
        types: dict[str, TensorType] = {}
        if self.rotary_dim is not None:
            types |= dict.fromkeys(("cos", "sin"), TensorType((context, self.rotary_dim // 2), F32))
        if self.qk_norm is not None:
            heads = (self.heads, self.kv_heads) if self.qk_norm_row else (1, 1)
            types |= {f"{kind}_norm": TensorType((n * self.head_dim,), F32) for kind, n in zip("qk", heads, strict=True)}
        if self.v_norm is not None:
            types["v_norm"] = TensorType((self.head_dim,), F32)
        return types


@dataclass(frozen=True)
class Span:
    """A range of elements in the last dimension of a memref; lead: the other indices."""

    buffer: Ssa
    lead: Sequence[Index]
    offset: Index

    def load(self, b: Body, d: Index, width: int) -> Ssa:
        return b.vload(self.buffer, width, *self.lead, b.add(self.offset, d))

    def store(self, b: Body, x: Ssa, d: Index) -> None:
        b.vstore(x, self.buffer, *self.lead, b.add(self.offset, d))


def prepare_head(
    b: Body,
    layout: HeadLayout,
    lanes: int,
    kind: str,
    head: Index,
    source: Span,
    target: Span,
    given: Mapping[str, Ssa],
    position: Index,
    scale: float = 1.0,
) -> None:
    """Emit code that normalises and rotates one query or key head, and multiplies it by `scale`.

    kind: "q" or "k". given: memrefs of the kernel's operands (`HeadLayout.operands`).
    position: selects a row of cos and of sin.
    """
    hd = layout.head_dim
    inverse = None
    if layout.qk_norm is not None:
        normed, count = source, hd
        if layout.qk_norm_row:
            start, heads = (0, layout.heads) if kind == "q" else (layout.keys, layout.kv_heads)
            normed, count = Span(source.buffer, source.lead, start), heads * hd
        inverse = inverse_rms(b, lambda d, width: normed.load(b, d, width), count, layout.qk_norm)
    weight_offset = b.mul(head, hd) if layout.qk_norm_row else 0

    def read(d: int, width: int) -> Ssa:
        x = source.load(b, d, width)
        if inverse is not None:
            x = b.mulf(x, b.broadcast(inverse, width))
            x = b.mulf(x, b.vload(given[f"{kind}_norm"], width, b.add(weight_offset, d)))
        return x

    def write(x: Ssa, d: int, width: int) -> None:
        target.store(b, x if scale == 1.0 else b.mulf(x, b.splat(scale, width)), d)

    rotary = layout.rotary_dim or 0
    half = rotary // 2
    if rotary:
        width = largest_width(lanes, half)
        for d in range(0, half, width):
            cos, sin = (b.vload(given[table], width, position, d) for table in ("cos", "sin"))
            first, second = read(d, width), read(d + half, width)
            turned = b.subf(b.mulf(first, cos), b.mulf(second, sin))
            other = b.addf(b.mulf(second, cos), b.mulf(first, sin))
            write(turned, d, width)
            write(other, d + half, width)
    if rotary < hd:
        width = largest_width(lanes, hd - rotary)
        for d in range(rotary, hd, width):
            write(read(d, width), d, width)


def prepared_heads(
    layout: HeadLayout, qkv: np.ndarray, positions: np.ndarray, given: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalise and rotate heads in NumPy; return (q, k, v), f64 [T, heads, head_dim].

    qkv: [T, layout.row]. positions: [T].
    """
    T, hd = len(qkv), layout.head_dim
    q, k, v = np.split(qkv.astype(np.float64), [layout.keys, layout.keys + layout.kv_heads * hd], axis=-1)

    def prepared(kind: str, x: np.ndarray) -> np.ndarray:
        if layout.qk_norm is not None:
            x = x if layout.qk_norm_row else x.reshape(T, -1, hd)
            x = rms_normed(x, given[f"{kind}_norm"], layout.qk_norm)
        x = x.reshape(T, -1, hd)
        if layout.rotary_dim is None:
            return x
        return rotated(x, given["cos"][positions], given["sin"][positions], layout.rotary_dim)

    v = v.reshape(T, -1, hd)
    return prepared("q", q), prepared("k", k), v if layout.v_norm is None else rms_normed(v, given["v_norm"], layout.v_norm)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rotary_dim: int) -> np.ndarray:
    """Apply rotary embedding to x [T, heads, head_dim] in NumPy; cos, sin: [T, rotary_dim / 2]."""
    first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    cos, sin = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result
