"""Emit a workgroup of `attention_decode`: attention of one token to a range of cached positions.

The arithmetic is that of `attention_prefill`, operation by operation, so that both give the same
bits (`attention` describes it). For each query head that uses the workgroup's kv heads, the online
softmax of a chunk has a maximum, a sum of weights and a weighted sum of values on the stack:

    for block of KEYS positions of the chunk:
      for `rows` positions at a time, for kv head, for `heads` of its query heads at a time:
        scores [heads, rows] = q . k_cache[layer, positions, kv head], soft-capped      registers, then stack
      for kv head, for `heads` of its query heads at a time:
        raise maximum to the new scores; scale sum and values down
        weights = 2^(scores - maximum); sum += weights                                                  stack
        values [heads, head_dim] += weights . v_cache[layer, positions, kv head]        registers, then stack

Heads are in the inner loop over scores, so that the cache is read in memory order.

If the range is long, the kernel prefetches the next rows of the caches: it loads one word of each
of their cache lines, in memory order, which starts the hardware prefetchers. It uses no prefetch
instructions for this, because CPUs drop them when memory is busy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from castiron.emitter.kernels.attention.heads import HeadLayout, Span, prepare_head
from castiron.emitter.kernels.attention.rows import Caches, Rows
from castiron.emitter.kernels.attention.scores import KEYS, NEVER, Scores
from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa, batches, largest_width
from castiron.emitter.kernels.mlir.isa import SUM_LANES, Isa
from castiron.emitter.kernels.mlir.vector_math import exp2, lane_max, lane_sums, outer
from castiron.emitter.layers.kv_cache import Cache


class Shape:
    """How much a workgroup computes at a time, and its stack; per: max number of its kv heads."""

    def __init__(self, layout: HeadLayout, isa: Isa, per: int, cache: Cache):
        hd = layout.head_dim
        self.per = per
        self.width = largest_width(SUM_LANES, hd)
        accumulators = isa.sum_registers * 3 // 4
        chunks = hd // self.width
        # `rows` positions are scored at once, against `heads` query heads of a kv head.
        self.heads = min(layout.group, accumulators)
        self.rows = 1
        while self.rows * 2 * self.heads <= accumulators and self.rows * 2 <= self.width:
            self.rows *= 2
        # `columns`: vectors of weighted values in registers. `unroll`: vectors of a key in one iteration.
        cut = [n for n in range(1, chunks + 1) if chunks % n == 0 and cache.cuts(hd, n * self.width)]
        self.columns = max(n for n in cut if n == 1 or n * self.heads <= accumulators)
        self.unroll = max(n for n in cut if n <= 8)
        # Elements of a key that are multiplied before the next key's elements; in q8_0 they share a scale.
        self.together = min(max(cache.group(hd), self.width), self.unroll * self.width)
        self.stack_bytes = 4 * (per * layout.group * (2 * hd + KEYS + 4))


@dataclass(frozen=True)
class Token:
    """The token of a workgroup; row: in qkv; layer: index in dimension 0 of the caches."""

    given: Mapping[str, Ssa]
    row: Index
    position: Ssa
    layer: Index


class Workgroup:
    """Emits the code of a workgroup, which computes attention of one token for some kv heads.

    g: index of a query head in this workgroup. head: index of a kv head.
    heads: some of the query heads that use kv head `head`, as indices 0 .. group - 1.
    """

    def __init__(self, b: Body, layout: HeadLayout, isa: Isa, shape: Shape, how: Scores, caches: Caches):
        self.b, self.layout, self.how, self.caches = b, layout, how, caches
        self.row_bytes = caches.format.row_bytes(layout.head_dim)
        self.hd, self.group = layout.head_dim, layout.group
        self.shape, self.width, self.rows, self.columns = shape, shape.width, shape.rows, shape.columns
        heads = shape.heads
        self.head_chunks = [range(g, min(g + heads, self.group)) for g in range(0, self.group, heads)]
        own_heads = shape.per * self.group
        self.q = b.stack(own_heads, self.hd)
        self.scores = b.stack(own_heads, KEYS)
        # Of the online softmax of a chunk. `scaled_sums`: sums, scaled down to the maxima of the block.
        self.maxima, self.sums, self.scaled_sums, self.rescale = (b.stack(own_heads) for _ in range(4))
        self.values = b.stack(own_heads, self.hd)

    def begin(self, token: Token, first: Index, end: Index) -> None:
        """Emit code that stores the token's queries on the stack, normalised, rotated and scaled."""
        b, hd = self.b, self.hd
        self.token, self.first, self.end = token, first, end
        self.qkv, *buffers = (token.given[name] for name in ("qkv", "k_cache", "v_cache"))
        self.cached_keys, self.cached_values = (Rows(b, buffer, self.caches, hd, self.width) for buffer in buffers)
        self.bases = [b.address(buffer) for buffer in buffers]
        low = b.mul(first, self.group)
        with b.loop(low, b.mul(end, self.group)) as head:
            target = Span(self.q, [b.sub(head.index, low)], 0)
            self._prepare("q", head.index, b.mul(head.index, hd), target, self.how.query_scale)

    def _prepare(self, kind: str, head: Index, offset: Index, target: Span, scale: float = 1.0) -> None:
        source, token = Span(self.qkv, [self.token.row], offset), self.token
        prepare_head(self.b, self.layout, SUM_LANES, kind, head, source, target, token.given, token.position, scale)

    def append(self) -> None:
        """Emit code that appends the key, normalised and rotated, and the value to the caches."""
        b, layout, hd = self.b, self.layout, self.hd
        key = self.values  # not yet in use
        with b.loop(self.first, self.end) as head:
            offset = b.add(b.mul(head.index, hd), layout.keys)
            at = [self.token.layer, self.token.position, head.index]
            value = Span(self.qkv, [self.token.row], b.add(offset, layout.kv_heads * hd))
            self.cached_values.append(at, lambda d: value.load(b, d, self.width))
            self._prepare("k", head.index, offset, Span(key, [0], 0))
            self.cached_keys.append(at, lambda d: b.vload(key, self.width, 0, d))

    def attend(self, start: Index, end: Index, ahead: bool) -> None:
        """Emit code that computes attention to positions start .. end - 1 of the caches, in one chunk."""
        b = self.b
        with b.loop(0, b.mul(b.sub(self.end, self.first), self.group)) as g:
            b.store(b.f32(NEVER), self.maxima, g.index)
            b.store(b.f32(0.0), self.sums, g.index)
            with b.loop(0, self.hd, self.width) as d:
                b.vstore(b.splat(0.0, self.width), self.values, g.index, d.index)
        with b.loop(b.div(start, KEYS), b.ceildiv(end, KEYS)) as block:
            first = b.max(b.mul(block.index, KEYS), start)
            count = b.sub(b.min(b.mul(b.add(block.index, 1), KEYS), end), first)
            vectors = b.ceildiv(count, SUM_LANES)
            with b.when(b.less(count, KEYS)), b.loop(0, b.mul(b.sub(self.end, self.first), self.group)) as g:
                last = b.mul(b.sub(vectors, 1), SUM_LANES)
                b.vstore(b.splat(NEVER, SUM_LANES), self.scores, g.index, last)
            full = b.mul(b.div(count, self.rows), self.rows)
            # The inner loop is over heads, so that the cache is read in memory order.
            with b.loop(0, full, self.rows) as j, b.loop(self.first, self.end) as head:
                self.score_rows(head.index, b.add(first, j.index), j.index, self.rows, ahead)
            if self.rows > 1:
                with b.loop(full, count) as j, b.loop(self.first, self.end) as head:
                    self.score_rows(head.index, b.add(first, j.index), j.index, 1, ahead=False)
            with b.loop(self.first, self.end) as head:
                for heads in self.head_chunks:
                    self.softmax(head.index, heads, vectors)
                    with b.loop(0, self.hd, self.columns * self.width) as d:
                        self.add_values(head.index, heads, d.index, first, count)

    def own_heads(self, head: Ssa, heads: range) -> list[Index]:
        # The index `g` of each query head.
        low = self.b.mul(self.b.sub(head, self.first), self.group)
        return [self.b.add(low, g) for g in heads]

    def touch(self, base: Ssa, row: Index, at: Index, lines: range) -> None:
        """Emit code that prefetches cache lines of a KV cache by loading one word of each."""
        b, row_bytes = self.b, self.row_bytes
        segment, size = self.shape.per * row_bytes, self.layout.kv_heads * row_bytes
        start = b.mul(b.add(b.mul(self.token.layer, self.caches.positions), row), size)
        for line in lines:
            byte = b.add(at, line * CACHE_LINE)
            if segment < size:
                byte = b.add(b.mul(b.div(byte, segment), size), b.add(b.rem(byte, segment), b.mul(self.first, row_bytes)))
            b.touch(base, b.add(start, byte))

    def score_rows(self, head: Ssa, row: Index, j: Ssa, rows: int, ahead: bool) -> None:
        """Emit code that computes scores of a few positions, for all query heads of one kv head.

        The scores are stored in `self.scores` [query heads of the workgroup, positions of the
        tile].
        """
        b, shape = self.b, self.shape
        near, following = row, b.add(row, rows)
        if self.caches.ring:
            near, following = (b.min(self.cached_keys.row(at), self.caches.ring - rows) for at in (near, following))
        else:
            following = b.min(following, self.caches.positions - rows)
        # Bytes of this head and these rows that each iteration reads ahead.
        turn = rows * self.row_bytes * shape.unroll * self.width // self.hd
        lines = -(-turn // CACHE_LINE)
        for heads in self.head_chunks:
            own_heads = self.own_heads(head, heads)
            count = len(own_heads)
            with b.loop(0, self.hd, shape.unroll * self.width, carry=[b.splat(0.0, self.width)] * (count * rows)) as loop:
                sums = loop.values
                size = shape.unroll * self.width
                cached = [(self.token.layer, b.add(row, r), head) for r in range(rows)]
                keys = [self.cached_keys.part(at, loop.index, size) for at in cached]
                for low in range(0, size, shape.together):
                    if ahead and heads is self.head_chunks[0]:
                        share = b.mul(b.sub(head, self.first), rows * self.row_bytes)
                        share = b.add(share, b.mul(b.div(loop.index, size), turn))
                        now = range(lines * low // size, lines * (low + shape.together) // size)
                        for base, ahead_from in (self.bases[0], following), (self.bases[1], near):
                            self.touch(base, ahead_from, share, now)
                    offsets = range(low, low + shape.together, self.width)
                    queries = [[b.vload(self.q, self.width, g, b.add(loop.index, d)) for g in own_heads] for d in offsets]
                    totals: list[Ssa] = []
                    # Multiply row by row, so that a scale is in a register only while its group is used.
                    for key, total in zip(keys, batches(sums, count), strict=True):
                        for d, query in zip(offsets, queries, strict=True):
                            total = outer(b, [key(d)], query, total)
                        totals += total
                    sums = totals
                loop.give(*sums)
            for i, g in enumerate(own_heads):
                b.vstore(self.how.capped(b, lane_sums(b, loop.results[i::count])), self.scores, g, j)

    def softmax(self, head: Ssa, heads: range, blocks: Index) -> None:
        """Emit code that replaces the scores of a block by weights, 2^(score - maximum)."""
        b, lanes = self.b, SUM_LANES
        own_heads = self.own_heads(head, heads)
        high = b.mul(blocks, lanes)
        with b.loop(0, high, lanes, carry=[b.splat(NEVER, lanes)] * len(own_heads)) as j:
            j.give(*[b.maxf(b.vload(self.scores, lanes, g, j.index), m) for g, m in zip(own_heads, j.values, strict=True)])
        tops = []
        for g, top in zip(own_heads, j.results, strict=True):
            old = b.load(self.maxima, g)
            new = b.maxf(lane_max(b, top), old)
            rescale = b.extract(exp2(b, b.broadcast(b.subf(old, new), lanes)), 0)
            b.store(new, self.maxima, g)
            b.store(rescale, self.rescale, g)
            b.store(b.mulf(b.load(self.sums, g), rescale), self.scaled_sums, g)
            tops.append(b.broadcast(new, lanes))
        with b.loop(0, high, lanes) as j:
            for g, m in zip(own_heads, tops, strict=True):
                b.vstore(exp2(b, b.subf(b.vload(self.scores, lanes, g, j.index), m)), self.scores, g, j.index)

    def add_values(self, head: Ssa, heads: range, d: Index, first: Index, count: Index) -> None:
        """Emit code that adds weights to the sums, and weight * value to the weighted sums of values.

        The code computes only `self.columns` vectors of elements of head_dim, because more do not
        fit into registers. It computes the same sums of weights for each of them, which costs less
        than a loop of its own.
        """
        b, width = self.b, self.width
        own_heads = self.own_heads(head, heads)
        offsets = range(0, self.columns * width, width)
        columns = [b.add(d, offset) for offset in offsets]
        start = []
        for g in own_heads:
            rescale = b.broadcast(b.load(self.rescale, g), width)
            start += [b.mulf(b.vload(self.values, width, g, c), rescale) for c in columns]
        totals = [b.load(self.scaled_sums, g) for g in own_heads]
        with b.loop(0, count, carry=[*start, *totals]) as j:
            weights = [b.load(self.scores, g, j.index) for g in own_heads]
            sums = []
            # Load one value vector at a time, because all of them and the sums do not fit in the registers.
            part = self.cached_values.part((self.token.layer, b.add(first, j.index), head), d, self.columns * width)
            wide = [b.broadcast(w, width) for w in weights]
            for i, offset in enumerate(offsets):
                v = part(offset)
                sums.append([b.fma(w, v, j.values[g * len(columns) + i]) for g, w in enumerate(wide)])
            added = [b.addf(total, w) for total, w in zip(j.values[len(start) :], weights, strict=True)]
            j.give(*[sums[i][g] for g in range(len(own_heads)) for i in range(len(columns))], *added)
        for g, results in zip(own_heads, batches(j.results[: len(start)], len(columns)), strict=True):
            for c, total in zip(columns, results, strict=True):
                b.vstore(total, self.values, g, c)
        for g, total in zip(own_heads, j.results[len(start) :], strict=True):
            b.store(total, self.sums, g)
