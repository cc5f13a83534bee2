"""Rotary embedding of a chunk's queries and keys, and keys and values appended to the caches in place.

The input is the fused projection's row: all query heads, then the key heads, then the value heads. Optional RMS norms of
queries and keys (Qwen 3, Gemma 3: over a head; OLMo 2: over the whole row) come before the rotation, as in HF.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, executable, largest_width
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.rms import inverse_rms, rms_normed
from castiron.emitter.kernels.writing.symbols import number
from castiron.emitter.types import F32, I32, TensorType


@dataclass(frozen=True)
class HeadLayout:
    """How a fused row splits into heads, and what is done to a query or key head before attention.

    rotary_dim: leading elements of a head that are rotated, or None for a layer without rotary embedding.
    interleaved: pairs are (0, 1), (2, 3), ... (GPT-J) instead of first half and second half (`rotate_half` in HF).
    qk_norm: epsilon of the RMS norm of q and k, or None; over each head, or over the whole q and k rows (qk_norm_row).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int | None
    interleaved: bool = False
    qk_norm: float | None = None
    qk_norm_row: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv heads evenly; use a multiple")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim must be even and within 2..{self.head_dim}, got {self.rotary_dim}")

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def row(self) -> int:
        """Elements of a fused q, k, v row."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def suffix(self) -> str:
        """The part of a kernel's name that these options make."""
        parts = [f"{self.heads}x{self.kv_heads}x{self.head_dim}"]
        if self.rotary_dim is not None:
            parts.append(f"{'gptj' if self.interleaved else 'rope'}{self.rotary_dim}")
        if self.qk_norm is not None:
            parts.append(f"{'rownorm' if self.qk_norm_row else 'qknorm'}{number(self.qk_norm)}")
        return "_".join(parts)

    def operands(self, context: int) -> list[TensorType]:
        """cos, sin [context, rotary_dim/2] and the norms' weights, as far as the options call for them."""
        types = []
        if self.rotary_dim is not None:
            types += [TensorType((context, self.rotary_dim // 2), F32)] * 2
        if self.qk_norm is not None:
            heads = (self.heads, self.kv_heads) if self.qk_norm_row else (1, 1)
            types += [TensorType((n * self.head_dim,), F32) for n in heads]
        return types

    def split(self, arguments: list) -> tuple[list, list]:
        """The arguments that belong to `operands`, as ([cos, sin], [q_norm, k_norm]); absent ones are None."""
        rest = list(arguments)
        tables = [rest.pop(0), rest.pop(0)] if self.rotary_dim is not None else [None, None]
        norms = [rest.pop(0), rest.pop(0)] if self.qk_norm is not None else [None, None]
        return tables, norms


def prepare_head(
    b: Body,
    layout: HeadLayout,
    lanes: int,
    source: tuple[Ssa, list[Index], Index],
    target: tuple[Ssa, list[Index], Index],
    tables: list,
    position: Index,
    norm: Ssa | None,
    head: Index,
    row: tuple[Index, int],
    scale: float = 1.0,
) -> None:
    """Normalise, rotate and scale one head of `source` into `target`, both (buffer, leading indices, offset).

    `head` is its number among its kind (a row norm's weights differ by head); `row` is (offset, heads) of all heads of
    its kind in the source row, over which a row norm takes its mean.
    """
    from_buffer, from_lead, from_offset = source
    to_buffer, to_lead, to_offset = target
    hd = layout.head_dim
    inverse = None
    if layout.qk_norm is not None:
        offset, count = (row[0], row[1] * hd) if layout.qk_norm_row else (from_offset, hd)

        def raw(d: Index, width: int) -> Ssa:
            return b.vload(from_buffer, width, *from_lead, b.add(offset, d))

        inverse = inverse_rms(b, raw, count, layout.qk_norm, lanes)
    weight_offset = b.mul(head, hd) if layout.qk_norm_row else 0

    def read(d: int, width: int) -> Ssa:
        x = b.vload(from_buffer, width, *from_lead, b.add(from_offset, d))
        if inverse is not None:
            x = b.mulf(x, b.broadcast(inverse, width))
            x = b.mulf(x, b.vload(norm, width, b.add(weight_offset, d)))
        return x

    def write(x: Ssa, d: int, width: int) -> None:
        if scale != 1.0:
            x = b.mulf(x, b.splat(scale, width))
        b.vstore(x, to_buffer, *to_lead, b.add(to_offset, d))

    rotary = layout.rotary_dim or 0
    half = rotary // 2
    if rotary:
        width = largest_width(lanes, half)
        for d in range(0, half, width):
            cos, sin = (b.vload(table, width, position, d) for table in tables)
            if layout.interleaved:
                pair = read(2 * d, 2 * width)
                first = b.shuffle(pair, pair, range(0, 2 * width, 2))
                second = b.shuffle(pair, pair, range(1, 2 * width, 2))
            else:
                first, second = read(d, width), read(d + half, width)
            turned = b.subf(b.mulf(first, cos), b.mulf(second, sin))
            other = b.addf(b.mulf(second, cos), b.mulf(first, sin))
            if layout.interleaved:
                lanes_of_both = [i // 2 + (i % 2) * width for i in range(2 * width)]
                write(b.shuffle(turned, other, lanes_of_both), 2 * d, 2 * width)
            else:
                write(turned, d, width)
                write(other, d + half, width)
    if rotary < hd:
        width = largest_width(lanes, hd - rotary)
        for d in range(rotary, hd, width):
            write(read(d, width), d, width)


def prepared_heads(layout: HeadLayout, rows: np.ndarray, positions: np.ndarray, tables: list, norms: list) -> tuple:
    """NumPy definition of what happens to rows [T, row] before attention: q [T, heads, hd], k and v [T, kv_heads, hd].

    Float64 inside; the caller rounds.
    """
    hd = layout.head_dim
    borders = [layout.heads * hd, (layout.heads + layout.kv_heads) * hd]
    parts = np.split(rows.astype(np.float64), borders, axis=-1)
    turned = []
    for x, weight in zip(parts[:2], norms, strict=True):
        if layout.qk_norm is not None:
            x = x if layout.qk_norm_row else x.reshape(len(rows), -1, hd)
            x = rms_normed(x, weight, layout.qk_norm)
        x = x.reshape(len(rows), -1, hd)
        if layout.rotary_dim is not None:
            x = rotated(x, tables[0][positions], tables[1][positions], layout.rotary_dim, layout.interleaved)
        turned.append(x)
    return turned[0], turned[1], parts[2].reshape(len(rows), -1, hd)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """Rotary embedding of x [T, heads, head_dim] by cos and sin [T, rotary_dim/2] (Su et al. 2021; HF `rotate_half`)."""
    half = rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    cos, sin = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def rope_append(
    layers: int,
    context: int,
    T: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    isa: Isa,
    rope: int | None,
    interleaved: bool = False,
    qk_norm: float | None = None,
    qk_norm_row: bool = False,
    rows: int = 4,
) -> Kernel:
    """Queries rotated, keys and values of a chunk of T tokens written into the caches.

    qkv [T, row], (cos, sin [context, rotary_dim/2]), (q_norm, k_norm), start i32, length i32, k and v
    [layers, context, kv_heads, head_dim], layer -> q [T, heads*head_dim], k, v. Token t stands at position start + t; only
    rows t < length reach the caches. `rows` is the number of tokens a workgroup takes. The options of rotary embedding and
    norms are those of `HeadLayout`; `rope` is its rotary_dim.
    """
    hd = head_dim
    layout = HeadLayout(heads, kv_heads, head_dim, rope, interleaved, qk_norm, qk_norm_row)
    cache = TensorType((layers, context, layout.kv_heads, hd), F32)
    scalar = TensorType((), I32)
    options = layout.operands(context)
    operands = (TensorType((T, layout.row), F32), *options, scalar, scalar, cache, cache, INDEX)
    results = (TensorType((T, layout.heads * hd), F32), cache, cache)
    k_place = len(operands) - 3
    name = f"rope_append_{layers}x{context}_{T}_{layout.suffix}_{isa.name}_r{rows}"

    def write(b: Body, qkv: Ssa, *arguments: Ssa) -> None:
        *given, start, length, k_cache, v_cache, layer, out = arguments
        tables, norms = layout.split(given)
        first = b.to_index(b.load(start))
        real = b.to_index(b.load(length))
        low = b.mul(b.workgroup(), rows)
        width = largest_width(isa.lanes, hd)
        with b.loop(low, b.min(b.add(low, rows), T)) as token:
            t = token.index
            position = b.add(first, t)
            with b.loop(0, layout.heads) as head:
                offset = b.mul(head.index, hd)
                ends = (qkv, [t], offset), (out, [t], offset)
                prepare_head(b, layout, isa.lanes, *ends, tables, position, norms[0], head.index, (0, layout.heads))
            with b.when(b.less(t, real)), b.loop(0, layout.kv_heads) as head:
                h = head.index
                k_row = layout.heads * hd
                offset = b.add(b.mul(h, hd), k_row)
                place = [layer, position, h]
                ends = (qkv, [t], offset), (k_cache, place, 0)
                prepare_head(b, layout, isa.lanes, *ends, tables, position, norms[1], h, (k_row, layout.kv_heads))
                v_offset = b.add(offset, layout.kv_heads * hd)
                with b.loop(0, hd, width) as d:
                    v = b.vload(qkv, width, t, b.add(v_offset, d.index))
                    b.vstore(v, v_cache, *place, d.index)

    def reference(qkv: np.ndarray, *arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        *given, start, length, k_cache, v_cache, layer = arguments
        tables, norms = layout.split(given)
        positions = int(start) + np.arange(T)
        q, k, v = prepared_heads(layout, qkv, positions, tables, norms)
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        real = positions[: int(length)]
        k_cache[layer, real] = k[: int(length)]
        v_cache[layer, real] = v[: int(length)]
        return q.reshape(T, -1).astype(np.float32), k_cache, v_cache

    return Kernel(
        name=name,
        operands=operands,
        results=results,
        tied=(None, k_place, k_place + 1),
        text=executable(name, operands, results, (None, k_place, k_place + 1), -(-T // rows), write),
        reference=reference,
        flops=3 * T * (layout.heads + layout.kv_heads) * (layout.rotary_dim or 0),
        bytes=4 * T * 2 * layout.row,
    )
