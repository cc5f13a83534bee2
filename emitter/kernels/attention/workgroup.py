"""Emit a workgroup of `attention_decode`: attention of one token to a range of cached positions.

This is the online softmax of flash attention (Dao et al. 2022) with one change. In flash attention,
a weight is exp(score - max), and each new max score requires scaling the sums down. Here, a weight
is exp(score - reference). The reference of a head is raised to the max score only if a score
exceeds it by more than SLACK, which is rare. The result is the same, because exp(-reference)
cancels:

    for tile of TILE positions:
      for `rows` positions at a time, for kv head, for `heads` of its query heads at a time:
        scores [heads, rows] = q . k_cache[layer, positions, kv head], soft-capped      registers, then stack
      for kv head, for `heads` of its query heads at a time:
        if max(scores) > reference + SLACK: reference = max(scores); scale `sum` and `values` down
        weights = exp(scores - reference); sum += weights                                               stack
        values [heads, head_dim] += weights . v_cache[layer, positions, kv head]        registers, then stack
    result of a query head = values / sum

Heads are in the inner loop over scores, so that the cache is read in memory order.

If the range is long, the kernel prefetches the next rows of the caches: it loads one word of each
of their cache lines, in memory order, which starts the hardware prefetchers. It uses no prefetch
instructions for this, because CPUs drop them when memory is busy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from castiron.emitter.kernels.attention.heads import HeadLayout, Span, prepare_head
from castiron.emitter.kernels.attention.rows import Caches, Rows
from castiron.emitter.kernels.attention.scores import NEVER, Scores
from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa, batches, largest_width, vector_type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import exp, lane_max, lane_sums, outer
from castiron.emitter.layers.kv_cache import Cache

TILE = 48  # positions of a tile, a multiple of every vector's width; speed differs by a few percent from 32 to 96
SLACK = 30.0  # max difference of a score and its head's reference; e^30 is far from overflow


class Shape:
    """How many positions, heads and vectors a workgroup computes at a time, and its stack size.

    per: max number of kv heads that the workgroup computes.
    """

    def __init__(self, layout: HeadLayout, isa: Isa, per: int, cache: Cache):
        hd = layout.head_dim
        self.per = per
        self.width = largest_width(isa.lanes, hd)
        accumulators = isa.registers * 3 // 4
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
        self.stack_bytes = 4 * (per * layout.group * (2 * hd + TILE + isa.lanes + 1) + hd)


@dataclass(frozen=True)
class Token:
    """The token that a workgroup computes attention for.

    given: memrefs of the kernel's operands, by name.
    row: row of the token in the operand qkv and in the result.
    position: position of the token in its sequence.
    layer: index in dimension 0 of the KV caches.
    """

    given: Mapping[str, Ssa]
    row: Index
    position: Ssa
    layer: Index


class Workgroup:
    """Emits the code of a workgroup, which computes attention of one token for some kv heads.

    For each query head that uses these kv heads, the online softmax has three variables on the
    stack: a reference (close to the max score), a sum of weights, and a weighted sum of values.

    Common arguments of the methods:
    g: index of a query head among all query heads of this workgroup.
    head: index of a kv head.
    heads: some of the query heads that use kv head `head`, as a range of indices 0 .. n - 1, where
        n is the number of query heads that use one kv head.
    """

    def __init__(self, b: Body, layout: HeadLayout, isa: Isa, shape: Shape, how: Scores, caches: Caches):
        self.b, self.layout, self.how, self.caches = b, layout, how, caches
        self.row_bytes = caches.format.row_bytes(layout.head_dim)
        self.lanes, self.hd, self.group = isa.lanes, layout.head_dim, layout.group
        self.shape, self.width, self.rows, self.columns = shape, shape.width, shape.rows, shape.columns
        heads = shape.heads
        self.head_chunks = [range(g, min(g + heads, self.group)) for g in range(0, self.group, heads)]
        own_heads = shape.per * self.group
        self.q = b.stack(own_heads, self.hd)
        self.k = b.stack(self.hd)
        self.scores = b.stack(own_heads, TILE)
        self.references = b.stack(own_heads)
        self.sums = b.stack(own_heads, self.lanes)  # lanes are added at the end
        self.values = b.stack(own_heads, self.hd)  # weighted values

    def begin(self, token: Token, first: Index, end: Index) -> None:
        """Emit code that starts attention for a token, with an empty softmax.

        The code also stores the queries on the stack, normalised, rotated and scaled.

        first, end: the workgroup computes kv heads first .. end - 1.
        """
        b, hd = self.b, self.hd
        self.token, self.first, self.end = token, first, end
        self.qkv, *buffers = (token.given[name] for name in ("qkv", "k_cache", "v_cache"))
        self.cached_keys, self.cached_values = (Rows(b, buffer, self.caches, hd, self.width) for buffer in buffers)
        self.bases = [b.address(buffer) for buffer in buffers]
        low = b.mul(first, self.group)
        with b.loop(low, b.mul(end, self.group)) as head:
            g = b.sub(head.index, low)
            self._prepare("q", head.index, b.mul(head.index, hd), Span(self.q, [g], 0), self.how.scale)
            b.store(b.f32(NEVER), self.references, g)
            b.vstore(b.splat(0.0, self.lanes), self.sums, g, 0)
            with b.loop(0, hd, self.width) as d:
                b.vstore(b.splat(0.0, self.width), self.values, g, d.index)

    def _prepare(self, kind: str, head: Index, offset: Index, target: Span, scale: float = 1.0) -> None:
        source, token = Span(self.qkv, [self.token.row], offset), self.token
        prepare_head(self.b, self.layout, self.lanes, kind, head, source, target, token.given, token.position, scale)

    def own(self, appended: bool = False) -> None:
        """Emit code that starts the online softmax with the key and value of the token itself.

        appended: whether the caches already have this key and value. If not, the code appends them.
        """
        b, layout, hd = self.b, self.layout, self.hd
        with b.loop(self.first, self.end) as head:
            offset = b.add(b.mul(head.index, hd), layout.keys)
            cached = [self.token.layer, self.token.position, head.index]
            low = b.mul(b.sub(head.index, self.first), self.group)
            heads = [b.add(low, i) for i in range(self.group)]
            value = Span(self.qkv, [self.token.row], b.add(offset, layout.kv_heads * hd))

            def begin(d: Index, v: Ssa) -> None:
                for g in heads:
                    b.vstore(v, self.values, g, d)

            if appended:
                with b.loop(0, hd, self.width) as d:
                    begin(d.index, self.cached_values.part(cached, d.index, self.width)(0))
                    b.vstore(self.cached_keys.part(cached, d.index, self.width)(0), self.k, d.index)
            else:
                self._prepare("k", head.index, offset, Span(self.k, [], 0))
                self.cached_values.append(cached, lambda d: value.load(b, d, self.width), begin)
                self.cached_keys.append(cached, lambda d: b.vload(self.k, self.width, d), lambda d, k: b.vstore(k, self.k, d))
            one = b.constant(f"dense<[1.0{', 0.0' * (self.lanes - 1)}]>", vector_type(self.lanes))
            with b.loop(low, b.add(low, self.group)) as g:
                with b.loop(0, hd, self.width, carry=[b.splat(0.0, self.width)]) as d:
                    q = b.vload(self.q, self.width, g.index, d.index)
                    d.give(b.fma(q, b.vload(self.k, self.width, d.index), d.values[0]))
                score = self.how.capped(b, lane_sums(b, d.results))
                b.store(b.extract(score, 0), self.references, g.index)
                b.vstore(one, self.sums, g.index, 0)
                if self.how.sinks:
                    self.sink(g.index, b.add(b.mul(self.first, self.group), g.index), b.extract(score, 0), one)

    def sink(self, g: Index, head: Index, score: Ssa, one: Ssa) -> None:
        """Emit code that adds the attention sink of a query head to the online softmax.

        A sink is a learned score without a key and a value, so only the sum of weights gets a term
        for it. When the code runs, the softmax must have the token's own key and value, and no
        other positions.

        g: index of the query head in this workgroup.
        head: index of the same query head in the model.
        score: the score of the token's own key, a scalar.
        one: the vector [1, 0, 0, ...]. The sum of weights is a vector whose lanes are added later,
            so the weight of the sink is added to its first lane only.
        """
        b, lanes = self.b, self.lanes
        score, sink = (b.broadcast(x, lanes) for x in (score, b.load(self.token.given["sinks"], head)))
        top = b.maxf(score, sink)
        self.scale_down(g, b.extract(exp(b, b.subf(score, top)), 0))
        total = b.fma(one, exp(b, b.subf(sink, top)), b.vload(self.sums, lanes, g, 0))
        b.vstore(total, self.sums, g, 0)
        b.store(b.extract(top, 0), self.references, g)

    def attend(self, start: Index, end: Index, ahead: bool) -> None:
        """Emit code that adds positions start .. end - 1 of the caches to the online softmax.

        ahead: whether the code also prefetches the rows of the caches that it needs next.
        """
        b = self.b
        with b.loop(start, end, TILE) as tile:
            first = tile.index
            count = b.min(b.sub(end, first), TILE)
            vectors = b.ceildiv(count, self.lanes)
            with b.when(b.less(count, TILE)), b.loop(0, b.mul(b.sub(self.end, self.first), self.group)) as g:
                last = b.mul(b.sub(vectors, 1), self.lanes)
                b.vstore(b.splat(NEVER, self.lanes), self.scores, g.index, last)
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
        """Emit code that prefetches cache lines of a KV cache by loading one word of each.

        At each position, the rows of all kv heads are adjacent in memory, but this workgroup needs
        only some of these heads. Offsets are counted as if only the rows of these heads were in
        memory.

        base: address of the KV cache.
        row: index of a position in the cache, from which offsets are counted.
        at: offset of cache line 0 from there, in bytes.
        lines: indices of the cache lines to load.
        """
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

        head: index of the kv head.
        row: the first position.
        j: index of this position in the tile.
        rows: number of positions.
        ahead: whether the code also prefetches the values of these positions and the keys of the
            next ones.
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
        """Emit code that replaces the scores of a tile by softmax weights, exp(score - reference).

        If a score exceeds the reference of its query head by more than SLACK, the code first raises
        the reference to the max score. It also adds the weights to the query head's sum of weights.

        head, heads: the kv head and some of its query heads, see the class.
        blocks: number of vectors of scores in the tile.
        """
        b, lanes = self.b, self.lanes
        own_heads = self.own_heads(head, heads)
        high = b.mul(blocks, lanes)
        with b.loop(0, high, lanes, carry=[b.splat(NEVER, lanes)] * len(own_heads)) as j:
            j.give(*[b.maxf(b.vload(self.scores, lanes, g, j.index), m) for g, m in zip(own_heads, j.values, strict=True)])
        for g, top in zip(own_heads, j.results, strict=True):
            top, old = lane_max(b, top), b.load(self.references, g)
            # The branch is rarely taken and well predicted, so that the code below need not wait for the maximum.
            with b.when(b.compare("ogt", b.subf(top, old), b.f32(SLACK))):
                b.store(top, self.references, g)
                self.scale_down(g, b.extract(exp(b, b.broadcast(b.subf(old, top), lanes)), 0))
        sums = [b.vload(self.sums, lanes, g, 0) for g in own_heads]
        tops = [b.broadcast(b.load(self.references, g), lanes) for g in own_heads]
        with b.loop(0, high, lanes, carry=sums) as j:
            weights = [exp(b, b.subf(b.vload(self.scores, lanes, g, j.index), m)) for g, m in zip(own_heads, tops, strict=True)]
            for g, w in zip(own_heads, weights, strict=True):
                b.vstore(w, self.scores, g, j.index)
            j.give(*[b.addf(total, w) for total, w in zip(j.values, weights, strict=True)])
        for g, total in zip(own_heads, j.results, strict=True):
            b.vstore(total, self.sums, g, 0)

    def scale_down(self, g: Index, factor: Ssa) -> None:
        """Emit code that multiplies a head's sum of weights and its weighted values by `factor`.

        g: index of the query head in this workgroup.
        factor: an f32 scalar.
        """
        b = self.b
        total = b.vload(self.sums, self.lanes, g, 0)
        b.vstore(b.mulf(total, b.broadcast(factor, self.lanes)), self.sums, g, 0)
        with b.loop(0, self.hd, self.width) as d:
            value = b.vload(self.values, self.width, g, d.index)
            b.vstore(b.mulf(value, b.broadcast(factor, self.width)), self.values, g, d.index)

    def add_values(self, head: Ssa, heads: range, d: Index, first: Ssa, count: Index) -> None:
        """Emit code that adds weight * value of a tile's positions to the weighted sums of values.

        The code computes only `self.columns` vectors of elements of head_dim, because more do not
        fit into registers.

        head, heads: the kv head and some of its query heads, see the class.
        d: index of the first of these elements.
        first, count: the first position, and the number of positions.
        """
        b, width = self.b, self.width
        own_heads = self.own_heads(head, heads)
        offsets = range(0, self.columns * width, width)
        columns = [b.add(d, offset) for offset in offsets]
        start = [b.vload(self.values, width, g, c) for g in own_heads for c in columns]
        with b.loop(0, count, carry=start) as j:
            weights = [b.broadcast(b.load(self.scores, g, j.index), width) for g in own_heads]
            sums = []
            # Load one value vector at a time, because all of them and the sums do not fit in the registers.
            part = self.cached_values.part((self.token.layer, b.add(first, j.index), head), d, self.columns * width)
            for i, offset in enumerate(offsets):
                v = part(offset)
                sums.append([b.fma(w, v, j.values[g * len(columns) + i]) for g, w in enumerate(weights)])
            j.give(*[sums[i][g] for g in range(len(own_heads)) for i in range(len(columns))])
        for g, results in zip(own_heads, batches(j.results, len(columns)), strict=True):
            for c, total in zip(columns, results, strict=True):
                b.vstore(total, self.values, g, c)

    def total(self, g: Index) -> Ssa:
        return self.b.extract(lane_sums(self.b, [self.b.vload(self.sums, self.lanes, g, 0)]), 0)

    def finish(self, out: Ssa) -> None:
        """Emit code that stores the result: weighted sum of values / sum of weights.

        out: memref of the result, f32 [rows, heads * head_dim].
        """
        b = self.b
        low = b.mul(self.first, self.group)
        with b.loop(low, b.mul(self.end, self.group)) as head:
            g = b.sub(head.index, low)
            inverse = b.broadcast(b.divf(b.f32(1.0), self.total(g)), self.width)
            with b.loop(0, self.hd, self.width) as d:
                value = b.mulf(b.vload(self.values, self.width, g, d.index), inverse)
                b.vstore(value, out, self.token.row, b.add(b.mul(head.index, self.hd), d.index))
