"""Emit GPU code for the RMS norm and the rotary embedding of attention heads before attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import Index, Ssa


@dataclass(frozen=True)
class QkvRows:
    """The operands rows0, rows1, ... of an attention kernel, with the columns of q, then k, then v.

    widths: number of columns of each operand, which is f32 [tokens, width].
    """

    widths: tuple[int, ...]

    def operands(self, tokens: int) -> dict[str, TensorType]:
        return {f"rows{i}": TensorType((tokens, width), F32) for i, width in enumerate(self.widths)}

    def find(self, layout: HeadLayout, kind: str) -> tuple[str, int]:
        """Return (name of an operand, column): where the heads of "q", "k" or "v" begin."""
        column = {"q": 0, "k": layout.keys, "v": layout.keys + layout.kv_heads * layout.head_dim}[kind]
        for i, width in enumerate(self.widths):
            if column < width:
                return f"rows{i}", column
            column -= width
        raise ValueError(f"QkvRows.widths has no columns for the {kind} heads: {self.widths}; pass the widths of q, k and v")


@dataclass(frozen=True)
class TokenHead:
    """One attention head of one token: `index` among those of its kind, "q", "k" or "v"."""

    kind: str
    token: Index
    index: Index
    position: Index


def prepare(
    b: GpuBody, thread: Ssa, layout: HeadLayout, rows: QkvRows, heads: Sequence[tuple[TokenHead, Ssa]], given: Mapping[str, Ssa]
) -> None:
    """Emit code that loads heads, applies norms and rotary embedding, and ends with a barrier.

    heads: pairs (head, shared memref f32 [head_dim] for the result).
    """
    hd, inverses = layout.head_dim, {}
    epsilons = {"q": layout.qk_norm, "k": layout.qk_norm, "v": layout.v_norm}
    normed = [head for head, _ in heads if epsilons[head.kind] is not None]
    if normed:
        totals = []
        for head in normed:
            name, first = rows.find(layout, head.kind)
            is_row = layout.qk_norm_row and head.kind != "v"
            count = (layout.heads if head.kind == "q" else layout.kv_heads) * hd if is_row else hd
            start = first if is_row else b.add(b.mul(head.index, hd), first)
            with b.strided(thread, count, [b.f32(0.0)]) as d:
                x = b.load(given[name], head.token, b.add(start, d.index))
                d.give(b.fma(x, x, d.values[0]))
            totals.append((d.results[0], count))
        sums, low = b.sums(thread, [total for total, _ in totals], b.threads)
        for i, (head, (_, count)) in enumerate(zip(normed, totals)):
            mean = b.divf(b.load(sums, low + i), b.f32(count))
            inverses[head] = b.divf(b.f32(1.0), b.math("sqrt", b.addf(mean, b.f32(epsilons[head.kind] or 0.0))))
    with b.strided(thread, hd) as d:
        for head, target in heads:
            b.store(_element(b, layout, rows, head, d.index, inverses.get(head), given), target, d.index)
    b.barrier()


def _element(
    b: GpuBody, layout: HeadLayout, rows: QkvRows, head: TokenHead, d: Ssa, inverse: Ssa | None, given: Mapping[str, Ssa]
) -> Ssa:
    name, first = rows.find(layout, head.kind)
    start = b.mul(head.index, layout.head_dim)

    def read(d: Index) -> Ssa:
        x = b.load(given[name], head.token, b.add(b.add(start, d), first))
        if inverse is None:
            return x
        is_row = layout.qk_norm_row and head.kind != "v"
        weight = b.load(given[f"{head.kind}_norm"], b.add(start, d) if is_row else d)
        return b.mulf(b.mulf(x, inverse), weight)

    x = read(d)
    if head.kind == "v" or not layout.rotary_dim:
        return x
    half = layout.rotary_dim // 2
    in_first = b.less(d, half)
    # Elements from rotary_dim on are not rotated; for them, any valid index will do.
    turned = b.less(d, layout.rotary_dim)
    pair = b.select(turned, b.select(in_first, b.at(b.add(d, half)), b.at(b.sub(d, half))), d)
    angle = b.select(turned, b.select(in_first, d, b.at(b.sub(d, half))), 0)
    cos, sin = (b.load(given[table], head.position, angle) for table in ("cos", "sin"))
    other = b.mulf(read(pair), sin)
    rotated = b.addf(b.mulf(x, cos), b.select(in_first, b.subf(b.f32(0.0), other), other))
    return b.select(turned, rotated, x)
