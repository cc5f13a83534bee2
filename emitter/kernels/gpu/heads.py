"""Emit GPU code for the RMS norm and the rotary embedding of attention heads before attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.mlir.body import Index, Ssa


@dataclass(frozen=True)
class Rows:
    """The operands of a GPU attention kernel that have the q, k and v projections of each token.

    One operand has all columns, or several operands, called rows0, rows1 and so on, have a part of
    the columns each. In this order, their columns are all heads of q, then of k, then of v.

    widths: number of columns of each operand, which is f32 [tokens, width].
    """

    widths: tuple[int, ...]

    def operands(self, tokens: int) -> dict[str, TensorType]:
        return {f"rows{i}": TensorType((tokens, width), F32) for i, width in enumerate(self.widths)}

    def find(self, layout: HeadLayout, kind: str) -> tuple[str, int]:
        """Return (name of an operand, column): where the heads of q, of k or of v begin.

        layout: has the number and the size of the heads.
        kind: "q", "k" or "v".
        """
        column = {"q": 0, "k": layout.keys, "v": layout.keys + layout.kv_heads * layout.head_dim}[kind]
        for i, width in enumerate(self.widths):
            if column < width:
                return f"rows{i}", column
            column -= width
        raise ValueError(f"Rows.widths has no columns for the {kind} heads: {self.widths}; pass the widths of q, k and v")


@dataclass(frozen=True)
class Head:
    """One attention head of one token, as an argument of `prepare`.

    kind: "q", "k" or "v".
    token: index of the token's row in the operands.
    index: index of the head among the heads of this kind.
    position: position of the token in its sequence, for the rotary embedding.
    """

    kind: str
    token: Index
    index: Index
    position: Index


def prepare(
    b: GpuBody, thread: Ssa, layout: HeadLayout, rows: Rows, heads: Sequence[tuple[Head, Ssa]], given: Mapping[str, Ssa]
) -> None:
    """Emit code that loads heads of q, k and v for attention, and writes them to shared memory.

    The code applies the RMS norms of `layout`, if it has them, and the rotary embedding to q and k.
    It ends with a barrier, so that all threads see the result.

    thread: index of the current thread.
    layout: size of the heads, epsilons of the norms, and size of the rotary embedding.
    rows: describes the operands that have the heads.
    heads: pairs (head, shared memref f32 [head_dim] for the result).
    given: memrefs of the kernel's operands by name.
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
    b: GpuBody, layout: HeadLayout, rows: Rows, head: Head, d: Ssa, inverse: Ssa | None, given: Mapping[str, Ssa]
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
