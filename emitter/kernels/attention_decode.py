"""Attention of one new token over the cache: rotary embedding, append and online softmax in one dispatch a layer.

Flash attention's recurrence (Dao et al. 2022) over tiles of cached positions. The token's own key and value start the
recurrence from registers, so that the cache row that this dispatch writes is read by nobody in it and no barrier is
needed. The query heads of a group share every load of a key or value row.
"""

from __future__ import annotations

import numpy as np

from emitter.kernels.isa import Isa
from emitter.kernels.kernel import INDEX, Kernel
from emitter.kernels.rope_append import Heads, number, prepare_head, prepared_heads
from emitter.kernels.text import Body, Index, Value, batches, executable, largest_width, width_of
from emitter.kernels.vector_math import exp, lane_max, lane_sums, tanh
from emitter.types import F32, I32, TensorType

NEVER = -1.0e30  # a score that no real one falls below, and whose differences are finite


def attention_decode(
    layers: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    isa: Isa,
    rope: int | None,
    scale: float,
    interleaved: bool = False,
    qk_norm: float | None = None,
    qk_norm_row: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    tile: int = 32,
) -> Kernel:
    """One token's attention in one dispatch, at a cost that follows its position.

    qkv [1, row], (cos, sin [context, rotary_dim/2]), (q_norm, k_norm), pos i32, k and v
    [layers, context, kv_heads, head_dim], layer -> out [1, heads*head_dim], k, v. Row `pos` of the caches is written; of
    the others those in max(0, pos - window + 1) .. pos - 1 are read. Scores are (q . k) * scale, then
    softcap * tanh(score / softcap). `tile` positions share one rescaling of the sums. The options of rotary embedding and
    norms are those of `Heads`; `rope` is its rotary_dim.
    """
    hd = head_dim
    layout = Heads(heads, kv_heads, head_dim, rope, interleaved, qk_norm, qk_norm_row)
    cache = TensorType((layers, context, layout.kv_heads, hd), F32)
    operands = (TensorType((1, layout.row), F32), *layout.operands(context), TensorType((), I32), cache, cache, INDEX)
    results = (TensorType((1, layout.heads * hd), F32), cache, cache)
    k_place = len(operands) - 3
    tied = (None, k_place, k_place + 1)
    parts = [f"attention_decode_{layers}x{context}_{layout.suffix}_s{number(scale)}"]
    parts += [f"w{window}"] if window else []
    parts += [f"cap{number(softcap)}"] if softcap else []
    name = "_".join([*parts, isa.name, f"t{tile}"])

    def write(b: Body, qkv: Value, *arguments: Value) -> None:
        *given, pos, k_cache, v_cache, layer, out = arguments
        kernel = _Decode(b, layout, isa, tile, softcap, scale)
        kernel.begin(qkv, layout.split(given), b.to_index(b.load(pos)), (k_cache, v_cache, layer), b.workgroup())
        low = 0 if window is None else b.max(b.sub(kernel.position, window - 1), 0)
        with b.loop(low, kernel.position, tile) as first:
            kernel.tile(first.index, kernel.position)
        kernel.finish(out)

    def reference(qkv: np.ndarray, *arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        *given, pos, k_cache, v_cache, layer = arguments
        tables, norms = layout.split(given)
        position = int(pos)
        q, k, v = prepared_heads(layout, qkv, np.array([position]), tables, norms)
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        k_cache[layer, position], v_cache[layer, position] = k[0], v[0]
        out = attend(q, k_cache[layer], v_cache[layer], [position], scale, window, softcap)
        return out.reshape(1, -1).astype(np.float32), k_cache, v_cache

    def seen(position: int) -> int:
        return min(position + 1, window or context)

    return Kernel(
        name=name,
        operands=operands,
        results=results,
        tied=tied,
        text=executable(name, operands, results, tied, layout.kv_heads, write),
        reference=reference,
        flops=lambda position: 4 * layout.heads * hd * seen(position),
        bytes=lambda position: 4 * (2 * layout.kv_heads * hd * seen(position) + layout.row + layout.heads * hd),
    )


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: list[int] | np.ndarray,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> np.ndarray:
    """Causal attention in float64: q [T, heads, hd] at `positions` over k and v [context, kv_heads, hd]."""
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


def capped(b: Body, scores: Value, softcap: float | None) -> Value:
    """softcap * tanh(scores / softcap), or the scores themselves."""
    if softcap is None:
        return scores
    cap = b.splat(softcap, width_of(scores))
    return b.mulf(tanh(b, b.divf(scores, cap)), cap)


class _Decode:
    """The text of one workgroup: one kv head and its group of query heads.

    On the stack: queries [group, hd], the new key [hd], scores of a tile [group, tile], and the recurrence's maximum [group],
    sum [group, lanes] (lanes are added up at the end) and weighted values [group, hd].
    """

    def __init__(self, b: Body, layout: Heads, isa: Isa, tile: int, softcap: float | None, scale: float):
        self.b, self.layout, self.tile_size, self.softcap, self.scale = b, layout, tile, softcap, scale
        self.lanes = isa.lanes
        self.hd, self.group = layout.head_dim, layout.group
        self.width = largest_width(isa.lanes, self.hd)
        accumulators = isa.registers * 3 // 4
        chunks = self.hd // self.width
        heads = min(self.group, accumulators)
        self.head_chunks = [range(g, min(g + heads, self.group)) for g in range(0, self.group, heads)]
        self.rows = 1
        while self.rows * 2 * heads <= accumulators and self.rows * 2 <= self.width:
            self.rows *= 2
        columns = max(n for n in range(1, chunks + 1) if chunks % n == 0 and n * heads <= accumulators)
        self.columns = columns
        self.q = b.stack(self.group, self.hd)
        self.k = b.stack(self.hd)
        self.scores = b.stack(self.group, tile)
        self.maxima = b.stack(self.group)
        self.sums = b.stack(self.group, self.lanes)
        self.values = b.stack(self.group, self.hd)

    def begin(self, qkv: Value, options: tuple, position: Value, cache: tuple, head: Value) -> None:
        """Prepare queries and the new row, append it, and start the recurrence with it."""
        b, layout, hd = self.b, self.layout, self.hd
        tables, norms = options
        self.position = position
        self.k_cache, self.v_cache, self.layer = cache
        self.head = head
        first = b.mul(head, self.group)
        with b.loop(0, self.group) as g:
            number = b.add(first, g.index)
            ends = (qkv, [0], b.mul(number, hd)), (self.q, [g.index], 0)
            prepare_head(
                b, layout, self.lanes, *ends, tables, position, norms[0], number, (0, layout.heads), scale=self.scale
            )
        k_row = layout.heads * hd
        ends = (qkv, [0], b.add(b.mul(head, hd), k_row)), (self.k, [], 0)
        prepare_head(b, layout, self.lanes, *ends, tables, position, norms[1], head, (k_row, layout.kv_heads))
        v_row = b.add(b.mul(head, hd), k_row + layout.kv_heads * hd)
        place = [self.layer, position, head]
        with b.loop(0, hd, self.width) as d:
            v = b.vload(qkv, self.width, 0, b.add(v_row, d.index))
            b.vstore(v, self.v_cache, *place, d.index)
            b.vstore(b.vload(self.k, self.width, d.index), self.k_cache, *place, d.index)
            for g in range(self.group):
                b.vstore(v, self.values, g, d.index)
        one = b.constant(f"dense<[1.0{', 0.0' * (self.lanes - 1)}]>", f"vector<{self.lanes}xf32>")
        with b.loop(0, self.group) as g:
            with b.loop(0, hd, self.width, carry=[b.splat(0.0, self.width)]) as d:
                q = b.vload(self.q, self.width, g.index, d.index)
                d.give(b.fma(q, b.vload(self.k, self.width, d.index), d.values[0]))
            b.store(b.extract(capped(b, lane_sums(b, d.results), self.softcap), 0), self.maxima, g.index)
            b.vstore(one, self.sums, g.index, 0)

    def tile(self, first: Value, end: Value) -> None:
        """Add the positions first .. min(first + tile, end) - 1 to the recurrence."""
        b = self.b
        count = b.min(b.sub(end, first), self.tile_size)
        last = b.sub(end, 1)
        blocks = b.ceildiv(count, self.lanes)
        with b.loop(0, b.mul(blocks, self.lanes), self.rows) as j:
            rows = [b.min(b.add(first, b.add(j.index, i)), last) for i in range(self.rows)]
            for heads in self.head_chunks:
                self.score_rows(heads, rows, j.index, count)
        for heads in self.head_chunks:
            rescale = self.softmax(heads, blocks)
            for d in range(0, self.hd, self.columns * self.width):
                self.add_values(heads, d, rescale, first, count)

    def score_rows(self, heads: range, rows: list[Index], j: Value, count: Index) -> None:
        b = self.b
        zero = b.splat(0.0, self.width)
        with b.loop(0, self.hd, self.width, carry=[zero] * (len(heads) * len(rows))) as d:
            queries = [b.vload(self.q, self.width, g, d.index) for g in heads]
            sums = []
            for row, carried in zip(rows, batches(d.values, len(heads)), strict=True):
                k = b.vload(self.k_cache, self.width, self.layer, row, self.head, d.index)
                sums += [b.fma(k, q, total) for q, total in zip(queries, carried, strict=True)]
            d.give(*sums)
        numbers = b.binary("addi", b.broadcast(b.to_i32(j), len(rows)), b.steps(len(rows)))
        real = b.compare("slt", numbers, b.broadcast(b.to_i32(count), len(rows)))
        for i, g in enumerate(heads):
            scores = capped(b, lane_sums(b, d.results[i :: len(heads)]), self.softcap)
            b.vstore(b.select(real, scores, b.splat(NEVER, len(rows))), self.scores, g, j)

    def softmax(self, heads: range, blocks: Index) -> list[Value]:
        """Turn scores into weights, update maxima and sums; returns each head's rescaling of what was summed before."""
        b, lanes = self.b, self.lanes
        high = b.mul(blocks, lanes)
        with b.loop(0, high, lanes, carry=[b.splat(NEVER, lanes)] * len(heads)) as j:
            j.give(*[b.maxf(b.vload(self.scores, lanes, g, j.index), m) for g, m in zip(heads, j.values, strict=True)])
        rescale, tops = [], []
        for g, top in zip(heads, j.results, strict=True):
            old = b.load(self.maxima, g)
            new = b.maxf(lane_max(b, top), old)
            b.store(new, self.maxima, g)
            tops.append(b.broadcast(new, lanes))
            rescale.append(exp(b, b.subf(b.broadcast(old, lanes), tops[-1])))
        sums = [b.mulf(b.vload(self.sums, lanes, g, 0), r) for g, r in zip(heads, rescale, strict=True)]
        with b.loop(0, high, lanes, carry=sums) as j:
            weights = [exp(b, b.subf(b.vload(self.scores, lanes, g, j.index), m)) for g, m in zip(heads, tops, strict=True)]
            for g, w in zip(heads, weights, strict=True):
                b.vstore(w, self.scores, g, j.index)
            j.give(*[b.addf(total, w) for total, w in zip(j.values, weights, strict=True)])
        for g, total in zip(heads, j.results, strict=True):
            b.vstore(total, self.sums, g, 0)
        return [b.extract(r, 0) for r in rescale]

    def add_values(self, heads: range, d: int, rescale: list[Value], first: Value, count: Index) -> None:
        """values[heads, d:d+columns*width] = rescale * values + weights @ v rows."""
        b, width = self.b, self.width
        columns = [d + c * width for c in range(self.columns)]
        start = []
        for g, r in zip(heads, rescale, strict=True):
            factor = b.broadcast(r, width)
            start += [b.mulf(b.vload(self.values, width, g, c), factor) for c in columns]
        with b.loop(0, count, carry=start) as j:
            row = b.add(first, j.index)
            v = [b.vload(self.v_cache, width, self.layer, row, self.head, c) for c in columns]
            sums = []
            for g, carried in zip(heads, batches(j.values, len(columns)), strict=True):
                weight = b.broadcast(b.load(self.scores, g, j.index), width)
                sums += [b.fma(weight, x, total) for x, total in zip(v, carried, strict=True)]
            j.give(*sums)
        for g, results in zip(heads, batches(j.results, len(columns)), strict=True):
            for c, total in zip(columns, results, strict=True):
                b.vstore(total, self.values, g, c)

    def finish(self, out: Value) -> None:
        b = self.b
        first = b.mul(self.head, self.group)
        with b.loop(0, self.group) as g:
            total = b.extract(lane_sums(b, [b.vload(self.sums, self.lanes, g.index, 0)]), 0)
            inverse = b.broadcast(b.divf(b.f32(1.0), total), self.width)
            offset = b.mul(b.add(first, g.index), self.hd)
            with b.loop(0, self.hd, self.width) as d:
                value = b.mulf(b.vload(self.values, self.width, g.index, d.index), inverse)
                b.vstore(value, out, 0, b.add(offset, d.index))
