"""The text of one workgroup of `attention_decode`: one token against a range of cached positions.

Flash attention's recurrence (Dao et al. 2022) over tiles of positions, with one change: weights are relative to a reference
that need not be the maximum and rises only when a score is far above it. Scaling by a power of e costs no precision, and so
almost every tile goes without the maximum and without touching what was summed before.

    for tile of `tile` positions:
      for `rows` positions: for kv head: for `heads` of its query heads:
        acc [rows, heads] = 0                                                                      registers
        for d in head_dim:                                          `unroll` vectors at a time
          acc += k_cache[layer, position, kv head, d] * q[head, d]  the caches' rows as they lie
        scores[heads, rows] = lane sums of acc                      soft-capped; stack [per * group, tile]
      for kv head: for `heads` of its query heads:
        if max(scores) > reference + SLACK: reference = max(scores); scale values and sums down
        scores = exp(scores - reference); sums += scores                                               stack
        for `columns` vectors of head_dim:
          acc [heads, columns] = values                                                            registers
          for position in tile: acc += scores[head, position] * v_cache[layer, position, kv head, d]
          values = acc                                                                                 stack

Long ranges are read ahead: between the arithmetic on some rows, one load a cache line goes through the rows that come next, in
the order in which they lie in memory. Grouped heads against blocks of rows, and values after keys, are a pattern that hardware
prefetchers lose; they follow those loads. Prefetch instructions do not do: CPUs drop them when memory is busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from castiron.emitter.caches import Cache
from castiron.emitter.kernels.attention.heads import HeadLayout, Span, prepare_head
from castiron.emitter.kernels.attention.rows import Rows
from castiron.emitter.kernels.attention.scores import NEVER, Scores
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, batches, largest_width
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import exp, lane_max, lane_sums, outer

TILE = 48  # positions, whole vectors of every instruction set; from 32 to 96 the time differs by a few percent
LINE_BYTES = 64
SLACK = 30.0  # how far a score may rise above its head's reference: e^30 is far from overflow


class Shape:
    """Sizes of the tiles of a workgroup that holds `per` kv heads.

    TILE positions, of which `rows` are scored at once, against `heads` query heads of a group; values of `heads` heads
    are added up in `columns` vectors of `width` elements. `together` elements of a key have one scale, if any.
    """

    def __init__(self, layout: HeadLayout, isa: Isa, per: int, cache: Cache):
        hd = layout.head_dim
        self.per = per
        self.width = largest_width(isa.lanes, hd)
        accumulators = isa.registers * 3 // 4
        chunks = hd // self.width
        self.heads = min(layout.group, accumulators)
        self.rows = 1
        while self.rows * 2 * self.heads <= accumulators and self.rows * 2 <= self.width:
            self.rows *= 2
        cut = [n for n in range(1, chunks + 1) if chunks % n == 0 and cache.cuts(hd, n * self.width)]
        self.columns = max(n for n in cut if n == 1 or n * self.heads <= accumulators)
        self.unroll = max(n for n in cut if n <= 8)
        self.together = min(max(cache.group(hd), self.width), self.unroll * self.width)
        self.stack_bytes = 4 * (per * layout.group * (2 * hd + TILE + isa.lanes + 1) + hd)


@dataclass(frozen=True)
class Token:
    """The token of one sequence: row `row` of qkv and of the result, at `position`, over `layer` of the caches.

    `given` are the kernel's buffers by name.
    """

    given: Mapping[str, Ssa]
    row: Index
    position: Ssa
    layer: Index


class Workgroup:
    """The recurrence of up to `per` kv heads, with their groups of query heads, over a range of positions.

    On the stack, for the query heads of `per` kv heads: queries [heads, head_dim], scores of a tile [heads, tile], and the
    recurrence's references [heads], sums [heads, lanes] (lanes are added up at the end) and weighted values
    [heads, head_dim]; and the new key [head_dim]. `first` is the kv head that comes first in them, `end` is past the last.
    """

    def __init__(self, b: Body, layout: HeadLayout, isa: Isa, held: int, shape: Shape, how: Scores, cache: Cache, turns: bool):
        self.b, self.layout, self.held_rows, self.how, self.cache = b, layout, held, how, cache
        self.ring = held if turns else None
        self.lanes, self.hd, self.group = isa.lanes, layout.head_dim, layout.group
        self.shape, self.width, self.rows, self.columns = shape, shape.width, shape.rows, shape.columns
        heads = shape.heads
        self.head_chunks = [range(g, min(g + heads, self.group)) for g in range(0, self.group, heads)]
        held = shape.per * self.group
        self.q = b.stack(held, self.hd)
        self.k = b.stack(self.hd)
        self.scores = b.stack(held, TILE)
        self.references = b.stack(held)
        self.sums = b.stack(held, self.lanes)
        self.values = b.stack(held, self.hd)

    def begin(self, token: Token, first: Index, end: Index) -> None:
        """Prepare the token's queries of the kv heads first .. end - 1; the recurrence is empty."""
        b, hd = self.b, self.hd
        self.token, self.first, self.end = token, first, end
        self.qkv, *caches = (token.given[name] for name in ("qkv", "k_cache", "v_cache"))
        self.cached_keys, self.cached_values = (Rows(b, buffer, self.cache, hd, self.width, self.ring) for buffer in caches)
        self.bases = [b.address(buffer) for buffer in caches]
        low = b.mul(first, self.group)
        with b.loop(low, b.mul(end, self.group)) as head:
            g = b.sub(head.index, low)
            self._prepare("q", head.index, b.mul(head.index, hd), Span(self.q, [g], 0), self.how.scale)
            b.store(b.f32(NEVER), self.references, g)
            b.vstore(b.splat(0.0, self.lanes), self.sums, g, 0)
            with b.loop(0, hd, self.width) as d:
                b.vstore(b.splat(0.0, self.width), self.values, g, d.index)

    def _prepare(self, kind: str, head: Index, offset: Index, target: Span, scale: float = 1.0) -> None:
        """A head at `offset` of the token's row into `target`."""
        source, token = Span(self.qkv, [self.token.row], offset), self.token
        prepare_head(self.b, self.layout, self.lanes, kind, head, source, target, token.given, token.position, scale)

    def own(self, appended: bool = False) -> None:
        """Prepare the token's own keys and values, append them, and let the recurrence begin with them; `appended`: they
        stand in the caches."""
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
            one = b.constant(f"dense<[1.0{', 0.0' * (self.lanes - 1)}]>", f"vector<{self.lanes}xf32>")
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
        """Add query head `head`'s sink to the recurrence of head `g` on the stack, which has one position, of this score."""
        b, lanes = self.b, self.lanes
        score, sink = (b.broadcast(x, lanes) for x in (score, b.load(self.token.given["sinks"], head)))
        top = b.maxf(score, sink)
        self.scale_down(g, b.extract(exp(b, b.subf(score, top)), 0))
        total = b.fma(one, exp(b, b.subf(sink, top)), b.vload(self.sums, lanes, g, 0))
        b.vstore(total, self.sums, g, 0)
        b.store(b.extract(top, 0), self.references, g)

    def attend(self, start: Index, end: Index, ahead: bool) -> None:
        """Add the positions start .. end - 1 to the recurrence, reading ahead or not."""
        with self.b.loop(start, end, TILE) as tile:
            self.tile(tile.index, end, ahead)

    def tile(self, first: Ssa, end: Index, ahead: bool) -> None:
        """Add the positions first .. min(first + tile, end) - 1 to the recurrence."""
        b = self.b
        count = b.min(b.sub(end, first), TILE)
        vectors = b.ceildiv(count, self.lanes)
        with b.when(b.less(count, TILE)), b.loop(0, b.mul(b.sub(self.end, self.first), self.group)) as g:
            last = b.mul(b.sub(vectors, 1), self.lanes)
            b.vstore(b.splat(NEVER, self.lanes), self.scores, g.index, last)
        whole = b.mul(b.div(count, self.rows), self.rows)
        # Rows outside, heads inside: the cache is walked as it lies, in blocks.
        with b.loop(0, whole, self.rows) as j, b.loop(self.first, self.end) as head:
            self.score_rows(head.index, b.add(first, j.index), j.index, self.rows, ahead)
        if self.rows > 1:
            with b.loop(whole, count) as j, b.loop(self.first, self.end) as head:
                self.score_rows(head.index, b.add(first, j.index), j.index, 1, ahead=False)
        with b.loop(self.first, self.end) as head:
            for heads in self.head_chunks:
                self.softmax(head.index, heads, vectors)
                with b.loop(0, self.hd, self.columns * self.width) as d:
                    self.add_values(head.index, heads, d.index, first, count)

    def held(self, head: Ssa, heads: range) -> list[Index]:
        """Where query heads of a kv head's group stand on the stack."""
        low = self.b.mul(self.b.sub(head, self.first), self.group)
        return [self.b.add(low, g) for g in heads]

    def touch(self, base: Ssa, row: Index, at: Index, lines: range) -> None:
        """Load a word of each of these lines from byte `at` on of the segments of the rows from `row` on."""
        b, row_bytes = self.b, self.cache.row_bytes(self.hd)
        segment, size = self.shape.per * row_bytes, self.layout.kv_heads * row_bytes
        start = b.mul(b.add(b.mul(self.token.layer, self.held_rows), row), size)
        for line in lines:
            byte = b.add(at, line * LINE_BYTES)
            if segment < size:
                byte = b.add(b.mul(b.div(byte, segment), size), b.add(b.rem(byte, segment), b.mul(self.first, row_bytes)))
            b.touch(base, b.add(start, byte))

    def score_rows(self, head: Ssa, row: Index, j: Ssa, rows: int, ahead: bool) -> None:
        """Scores of `rows` positions from `row` on, as those of the tile from j on.

        With `ahead`, this head's share of the values of these positions and of the keys of the next is read ahead.
        """
        b, shape = self.b, self.shape
        near, following = row, b.add(row, rows)
        if self.ring:
            near, following = (b.min(self.cached_keys.row(at), self.ring - rows) for at in (near, following))
        else:
            following = b.min(following, self.held_rows - rows)
        # Of these rows' bytes of this head, those that one turn of the loop stands for.
        turn = rows * self.cache.row_bytes(self.hd) * shape.unroll * self.width // self.hd
        lines = -(-turn // LINE_BYTES)
        for heads in self.head_chunks:
            held = self.held(head, heads)
            count = len(held)
            with b.loop(0, self.hd, shape.unroll * self.width, carry=[b.splat(0.0, self.width)] * (count * rows)) as loop:
                sums = loop.values
                size = shape.unroll * self.width
                places = [(self.token.layer, b.add(row, r), head) for r in range(rows)]
                keys = [self.cached_keys.part(at, loop.index, size) for at in places]
                for low in range(0, size, shape.together):
                    if ahead and heads is self.head_chunks[0]:
                        share = b.mul(b.sub(head, self.first), rows * self.cache.row_bytes(self.hd))
                        share = b.add(share, b.mul(b.div(loop.index, size), turn))
                        now = range(lines * low // size, lines * (low + shape.together) // size)
                        for base, ahead_from in (self.bases[0], following), (self.bases[1], near):
                            self.touch(base, ahead_from, share, now)
                    offsets = range(low, low + shape.together, self.width)
                    queries = [[b.vload(self.q, self.width, g, b.add(loop.index, d)) for g in held] for d in offsets]
                    totals: list[Ssa] = []
                    # Row by row, so that a scale is in a register for no longer than its group.
                    for key, total in zip(keys, batches(sums, count), strict=True):
                        for d, query in zip(offsets, queries, strict=True):
                            total = outer(b, [key(d)], query, total)
                        totals += total
                    sums = totals
                loop.give(*sums)
            for i, g in enumerate(held):
                b.vstore(self.how.capped(b, lane_sums(b, loop.results[i::count])), self.scores, g, j)

    def softmax(self, head: Ssa, heads: range, blocks: Index) -> None:
        """Turn scores into weights relative to the references, which rise where a score is far above them; add up the sums."""
        b, lanes = self.b, self.lanes
        held = self.held(head, heads)
        high = b.mul(blocks, lanes)
        with b.loop(0, high, lanes, carry=[b.splat(NEVER, lanes)] * len(held)) as j:
            j.give(*[b.maxf(b.vload(self.scores, lanes, g, j.index), m) for g, m in zip(held, j.values, strict=True)])
        for g, top in zip(held, j.results, strict=True):
            top, old = lane_max(b, top), b.load(self.references, g)
            # Rare, so that it is predicted and nothing below waits for the maximum.
            with b.when(b.compare("ogt", b.subf(top, old), b.f32(SLACK))):
                b.store(top, self.references, g)
                self.scale_down(g, b.extract(exp(b, b.broadcast(b.subf(old, top), lanes)), 0))
        sums = [b.vload(self.sums, lanes, g, 0) for g in held]
        tops = [b.broadcast(b.load(self.references, g), lanes) for g in held]
        with b.loop(0, high, lanes, carry=sums) as j:
            weights = [exp(b, b.subf(b.vload(self.scores, lanes, g, j.index), m)) for g, m in zip(held, tops, strict=True)]
            for g, w in zip(held, weights, strict=True):
                b.vstore(w, self.scores, g, j.index)
            j.give(*[b.addf(total, w) for total, w in zip(j.values, weights, strict=True)])
        for g, total in zip(held, j.results, strict=True):
            b.vstore(total, self.sums, g, 0)

    def scale_down(self, g: Index, factor: Ssa) -> None:
        """Multiply what was summed so far by a factor."""
        b = self.b
        total = b.vload(self.sums, self.lanes, g, 0)
        b.vstore(b.mulf(total, b.broadcast(factor, self.lanes)), self.sums, g, 0)
        with b.loop(0, self.hd, self.width) as d:
            value = b.vload(self.values, self.width, g, d.index)
            b.vstore(b.mulf(value, b.broadcast(factor, self.width)), self.values, g, d.index)

    def add_values(self, head: Ssa, heads: range, d: Index, first: Ssa, count: Index) -> None:
        """values[heads, d:d+columns*width] += weights @ value rows."""
        b, width = self.b, self.width
        held = self.held(head, heads)
        offsets = range(0, self.columns * width, width)
        columns = [b.add(d, offset) for offset in offsets]
        start = [b.vload(self.values, width, g, c) for g in held for c in columns]
        with b.loop(0, count, carry=start) as j:
            weights = [b.broadcast(b.load(self.scores, g, j.index), width) for g in held]
            sums = []
            # One value vector at a time: all of them and the sums would not fit the registers.
            part = self.cached_values.part((self.token.layer, b.add(first, j.index), head), d, self.columns * width)
            for i, offset in enumerate(offsets):
                v = part(offset)
                sums.append([b.fma(w, v, j.values[g * len(columns) + i]) for g, w in enumerate(weights)])
            j.give(*[sums[i][g] for g in range(len(held)) for i in range(len(columns))])
        for g, results in zip(held, batches(j.results, len(columns)), strict=True):
            for c, total in zip(columns, results, strict=True):
                b.vstore(total, self.values, g, c)

    def total(self, g: Index) -> Ssa:
        """The sum of a head's weights."""
        return self.b.extract(lane_sums(self.b, [self.b.vload(self.sums, self.lanes, g, 0)]), 0)

    def finish(self, out: Ssa) -> None:
        """The weighted means of the heads, as attention's result."""
        b = self.b
        low = b.mul(self.first, self.group)
        with b.loop(low, b.mul(self.end, self.group)) as head:
            g = b.sub(head.index, low)
            inverse = b.broadcast(b.divf(b.f32(1.0), self.total(g)), self.width)
            with b.loop(0, self.hd, self.width) as d:
                value = b.mulf(b.vload(self.values, self.width, g, d.index), inverse)
                b.vstore(value, out, self.token.row, b.add(b.mul(head.index, self.hd), d.index))
