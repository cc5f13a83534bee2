"""Compute attention of a chunk of tokens, causal or bidirectional, in tiles in registers.

A workgroup computes a few tiles, one after the other. The columns of a tile are (token, query head)
pairs; all these query heads use the same kv head. Each pair is in one lane of a vector, so the
softmax needs no sums across lanes:

    for tile:
      q^T [head_dim, columns] = scale * q                                                          stack
      top maxima, top sums [columns]; merged [columns, head_dim] = 0                               stack, memory
      for chunk of keys, up to the last that the tile attends to:
        maxima [columns] = -inf; sums [columns], out [columns, head_dim] = 0
        for block of `KEYS` keys:
          scores [keys, columns] = k_cache[layer, keys, kv head] @ q^T, soft-capped and masked     stack
          raise maxima to the new scores; scale sums and out down
          scores = 2^(scores - maxima); sums += scores over the keys
          out += scores^T @ v_cache[layer, keys, kv head]                                          memory
        merge maxima, sums and out into top maxima, top sums and merged
      out = merged / top sums; zeros in the rows of padding

Each of the two matmuls computes one part of its result at a time, with the sums in registers. A
part of the scores is `rows` keys x `columns` pairs. A part of out is `out_columns` pairs x
`out_vectors` vectors. An f32 cache is read in place. The keys of other caches are converted to f32
on the stack.

A score is the sum that `attention_decode` computes, in the same order: it adds the products of
elements of head_dim in vectors of `SUM_LANES`, and then halves of a vector. So there are as
many partial sums as lanes; `_Tile.dots` computes them one after the other.

Tiles of later tokens attend to more keys. They are computed first, and each workgroup gets long and
short tiles, so that all threads finish at about the same time.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.rows import Caches, Rows
from castiron.emitter.kernels.attention.scores import CHUNK, KEYS, NEVER, Scores, attend, by_position, merged, merging
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.kernels.mlir.body import PARTS, STACK_BYTES, Body, Index, Ssa, batches, largest_width
from castiron.emitter.kernels.mlir.isa import SUM_LANES, Isa
from castiron.emitter.kernels.mlir.vector_math import LOG2_E, exp2, outer, transpose
from castiron.emitter.layers.kv_cache import EXACT, Cache

ROWS = (1, 2, 3, 4, 6)  # possible numbers of keys that are scored together; `KEYS` is a multiple of each


@cache
def attention_prefill(caches: Caches, T: int, layout: HeadLayout, scores: Scores, *, isa: Isa, threads: int = 2) -> Kernel:
    """Return the kernel that computes attention for a chunk of T tokens of one sequence.

    The keys and values of these tokens must already be in the caches, so the kernel `rope_append`
    must run first. threads: number of threads that will run the workgroups.

    Operands:
        q: f32 [T, heads * head_dim], rotated
        start: i32, the position of the first token
        length: i32, the number of tokens that are not padding
        sinks: f32 [heads], extra scores of the softmax, if `scores.sinks`
        k_cache, v_cache: the caches of all layers
        layer: index of the layer
    Results:
        out: f32 [T, heads * head_dim]; rows from `length` on are zero
        merged: scratch memory
    """
    heads, kv_heads, hd, group, window = layout.heads, layout.kv_heads, layout.head_dim, layout.group, scores.window
    context, cache = caches.context, caches.format
    shape = _Shape(T * group, hd, isa, cache)
    scalar, rows = TensorType((), I32), TensorType((T, heads * hd), F32)
    chunk = {"q": rows, "start": scalar, "length": scalar, **scores.operands(heads)}
    read = caches.types(kv_heads, hd)
    name = f"attention_prefill_{caches.layers}x{context}_{T}_{heads}x{kv_heads}x{hd}_{scores.suffix}_{isa.name}_k{KEYS}"
    items = kv_heads * (T * group // shape.columns)
    workgroups = min(items, PARTS * threads)

    def write(
        b: Body,
        q: Ssa,
        start: Ssa,
        length: Ssa,
        k_cache: Ssa,
        v_cache: Ssa,
        layer: Ssa,
        out: Ssa,
        merged: Ssa,
        sinks: Ssa | None = None,
    ) -> None:
        keys, values = (Rows(b, buffer, caches, hd, shape.out_width) for buffer in (k_cache, v_cache))
        work = _Tile(b, shape, group, scores, layer, keys, values, out, merged)
        chunk = b.to_index(b.load(start)), b.to_index(b.load(length))
        workgroup = b.workgroup()
        with b.loop(0, -(-items // workgroups)) as turn:
            # Every second turn assigns items in reverse order, so that a workgroup with a long tile next gets a short one.
            low = b.mul(turn.index, workgroups)
            count = b.min(b.sub(items, low), workgroups)
            odd = b.equal(b.rem(turn.index, 2), 1)
            item = b.add(low, b.select(odd, b.sub(b.sub(count, 1), workgroup), workgroup))
            with b.when(b.less(workgroup, count)):
                attend_item(work, item, *chunk, q, sinks)

    def attend_item(work: _Tile, item: Index, first: Index, real: Index, q: Ssa, sinks: Ssa | None) -> None:
        b = work.b
        # The last tokens attend to the most keys, so their tiles come first: no thread then ends with a long tile.
        tile = b.sub(items // kv_heads - 1, b.div(item, kv_heads))
        work.begin(b.mul(tile, shape.columns), b.rem(item, kv_heads), q, first, real, sinks)
        last_token = b.div(b.add(work.column, shape.columns - 1), group)
        ahead = 1 if not scores.bidirectional else T if window is None else window
        end = b.add(first, b.min(b.add(last_token, ahead), real))
        low: Index = 0
        if window is not None:
            low = b.max(b.sub(b.add(first, work.token), window - 1), 0)
        # A tile with only padding attends to no keys.
        end = b.select(b.less(work.token, real), end, low)
        with b.loop(b.div(low, CHUNK), b.ceildiv(end, CHUNK)) as chunk:
            at = b.mul(chunk.index, CHUNK)
            stop = b.min(b.add(at, CHUNK), end)
            work.begin_chunk()
            # All tiles have the same blocks of keys.
            with b.loop(b.max(at, b.mul(b.div(low, KEYS), KEYS)), stop, KEYS) as block:
                work.block(block.index, stop)
            work.merge()
        work.finish(real)

    def reference(layer: int, **given: np.ndarray) -> dict[str, np.ndarray]:
        length = int(given["length"])
        positions = int(given["start"]) + np.arange(length)
        queries = given["q"][:length].reshape(-1, heads, hd).astype(np.float64)
        out = np.zeros((T, heads * hd), np.float32)
        k, v = (cache.values(by_position(given[name][layer], int(given["start"]) + length)) for name in read)
        seen = attend(queries, k, v, positions, scores, given.get("sinks"))
        out[:length] = seen.reshape(-1, heads * hd)
        return {"out": out, "merged": np.zeros_like(out)}

    def pairs(start: int) -> int:
        ahead = lambda t: min(T - 1 - t, (window or T) - 1) if scores.bidirectional else 0
        return sum(min(start + t + 1, window or context) + ahead(t) for t in range(T))

    return Kernel(
        f"{name}_g{workgroups}{caches.suffix}",
        {**chunk, **read, "layer": INDEX},
        {"out": rows, "merged": rows},
        workgroups,
        write,
        reference=reference,
        flops=lambda start: 4 * heads * hd * pairs(start),
        nbytes=lambda start: 8 * T * heads * hd + 2 * kv_heads * cache.row_bytes(hd) * min(start + T, T + (window or context)),
    )


class _Shape:
    """The tile sizes of `attention_prefill`, such that a tile fits in registers and on the stack.

    columns: number of all (token, query head) pairs of a kv head; `self.columns`: of a tile.
    """

    def __init__(self, columns: int, hd: int, isa: Isa, cache: Cache):
        accumulators = isa.registers * 3 // 4
        self.hd = hd
        self.width = largest_width(isa.lanes, columns)
        self.leaves = largest_width(SUM_LANES, hd)  # partial sums of a score
        self.converts = cache is not EXACT
        stack = STACK_BYTES - 4 * ROWS[-1] * hd * self.converts
        per_column = 4 * (hd + KEYS + 8 + max(1, self.leaves // 2) * ROWS[-1])
        while self.width > 1 and self.width * per_column > stack:
            self.width //= 2
        # Three vectors by four keys need the fewest loads per fma with 16 registers.
        wanted = (3, 2, 1) if isa.registers == 16 else (4, 3, 2, 1)
        sizes = [n * self.width for n in wanted]
        self.columns = next((n for n in sizes if columns % n == 0 and n * per_column <= stack), self.width)
        self.vectors = self.columns // self.width
        # Half of the accumulators have the partial sums before.
        self.rows = max(n for n in ROWS if n == 1 or n * self.vectors <= accumulators // 2)
        self.square = largest_width(self.width, hd)  # side of the blocks in which queries are transposed
        self.out_width = largest_width(isa.lanes, hd)
        chunks = hd // self.out_width
        shapes = [
            (c, n)
            for n in range(1, min(chunks, 8) + 1)
            for c in range(1, self.columns + 1)
            if chunks % n == 0 and self.columns % c == 0 and c * n <= accumulators and cache.cuts(hd, n * self.out_width)
        ]
        # Use at least 60 % of the accumulators, then as few loads as possible; a q8_0 vector costs as much as six loads.
        cost = 6 if cache.grouped else 1
        self.out_columns, self.out_vectors = max(
            shapes, key=lambda s: (s[0] * s[1] / accumulators >= 0.6, s[0] * s[1] / (s[0] + cost * s[1]))
        )


class _Tile:
    """Emits the code of a tile: attention of (token, query head) pairs of one kv head.

    On the stack, by column: maxima and sums of the softmax of a chunk; top and top_sums, of the
    chunks before; limits, the position of the token (of the last real one for padding); tokens and
    offsets, the row and first element of its result in `out`.
    """

    def __init__(
        self, b: Body, shape: _Shape, group: int, how: Scores, layer: Ssa, keys: Rows, values: Rows, out: Ssa, merged: Ssa
    ):
        self.b, self.shape, self.group, self.how = b, shape, group, how
        self.layer, self.cached_keys, self.cached_values, self.out, self.merged = layer, keys, values, out, merged
        self.q = b.stack(shape.hd, shape.columns)
        self.scores = b.stack(KEYS, shape.columns)
        self.maxima, self.sums, self.rescale, self.top, self.top_sums = (b.stack(shape.columns) for _ in range(5))
        self.limits, self.tokens, self.offsets = (b.stack(shape.columns, element="i32") for _ in range(3))
        self.lanes = range(0, shape.columns, shape.width)
        self.parts = b.stack(max(1, shape.leaves // 2), shape.rows, shape.columns)
        if shape.converts:
            self.keys = b.stack(shape.rows, shape.hd)

    def begin(self, column: Index, head: Index, q: Ssa, start: Index, real: Index, sinks: Ssa | None) -> None:
        """Emit code that starts a tile: it stores the queries on the stack, scaled and transposed."""
        b, shape = self.b, self.shape
        self.column, self.head, self.token = column, head, b.div(column, self.group)
        last = b.sub(b.add(start, real), 1)
        with b.loop(0, shape.columns) as c:
            pair = b.add(self.column, c.index)
            token = b.div(pair, self.group)
            head = b.add(b.mul(self.head, self.group), b.rem(pair, self.group))
            offset = b.mul(head, shape.hd)
            if sinks is not None:
                b.store(b.mulf(b.load(sinks, head), b.f32(LOG2_E)), self.top, c.index)
            b.store(b.to_i32(token), self.tokens, c.index)
            b.store(b.to_i32(offset), self.offsets, c.index)
            b.store(b.to_i32(b.min(b.add(start, token), last)), self.limits, c.index)
            self._clear(self.merged, token, offset)
        side = shape.square
        with b.loop(0, shape.columns, side) as c:
            targets = [self.target(b.add(c.index, i)) for i in range(side)]
            with b.loop(0, shape.hd, side) as d:
                rows = [b.vload(q, side, token, b.add(offset, d.index)) for token, offset in targets]
                for i, x in enumerate(transpose(b, rows)):
                    x = b.mulf(x, b.splat(self.how.query_scale, side))
                    b.vstore(x, self.q, b.add(d.index, i), c.index)
        for column in self.lanes:
            if sinks is None:
                b.vstore(b.splat(NEVER, shape.width), self.top, column)
            b.vstore(b.splat(0.0 if sinks is None else 1.0, shape.width), self.top_sums, column)

    def _clear(self, rows: Ssa, token: Index, offset: Index) -> None:
        b, shape = self.b, self.shape
        with b.loop(0, shape.hd, shape.out_width) as d:
            b.vstore(b.splat(0.0, shape.out_width), rows, token, b.add(offset, d.index))

    def begin_chunk(self) -> None:
        b, shape = self.b, self.shape
        for column in self.lanes:
            b.vstore(b.splat(NEVER, shape.width), self.maxima, column)
            b.vstore(b.splat(0.0, shape.width), self.sums, column)
        with b.loop(0, shape.columns) as c:
            self._clear(self.out, *self.target(c.index))

    def merge(self) -> None:
        """Emit code that adds the sums of the chunk to those of the chunks before it."""
        b, shape = self.b, self.shape
        for column in self.lanes:
            old, top_sums, maxima, sums = (
                b.vload(rows, shape.width, column) for rows in (self.top, self.top_sums, self.maxima, self.sums)
            )
            top, *factors = merging(b, old, maxima)
            b.vstore(top, self.top, column)
            b.vstore(merged(b, top_sums, sums, *factors), self.top_sums, column)
            for factor, rows in zip(factors, (self.maxima, self.rescale), strict=True):
                b.vstore(factor, rows, column)
        with b.loop(0, shape.columns) as c:
            token, offset = self.target(c.index)
            factors = [b.broadcast(b.load(rows, c.index), shape.out_width) for rows in (self.maxima, self.rescale)]
            with b.loop(0, shape.hd, shape.out_width) as d:
                at = token, b.add(offset, d.index)
                total, added = (b.vload(rows, shape.out_width, *at) for rows in (self.merged, self.out))
                b.vstore(merged(b, total, added, *factors), self.merged, *at)

    def target(self, c: Index) -> tuple[Ssa, Ssa]:
        b = self.b
        return b.to_index(b.load(self.tokens, c)), b.to_index(b.load(self.offsets, c))

    def block(self, first: Ssa, end: Index) -> None:
        """Emit code that adds a block of keys and their values to the online softmax of the tile."""
        b, shape = self.b, self.shape
        count = b.min(b.sub(end, first), KEYS)
        last = b.sub(end, 1)
        with b.loop(0, count, shape.rows) as j:
            self.score_rows(b.add(first, j.index), last, j.index)
        self.softmax(count)
        with b.loop(0, shape.columns, shape.out_columns) as c, b.loop(0, shape.hd, shape.out_vectors * shape.out_width) as d:
            self.add_values(c.index, d.index, first, count)

    def score_rows(self, first: Index, last: Index, j: Index) -> None:
        """Emit code that computes the scores of `shape.rows` keys with all queries of the tile."""
        b, shape = self.b, self.shape
        rows = [b.min(b.add(first, i), last) for i in range(shape.rows)]
        following = [b.min(b.add(first, shape.rows + i), last) for i in range(shape.rows)]
        # Prefetch explicitly, because hardware prefetchers do not detect such short rows.
        for row, next_row in zip(rows, following, strict=True):
            self.cached_keys.prefetch((self.layer, next_row, self.head))
            self.cached_values.prefetch((self.layer, row, self.head), near=False)
        if shape.converts:
            for i, row in enumerate(rows):
                vector = self.cached_keys.part((self.layer, row, self.head), 0, shape.hd)
                for d in range(0, shape.hd, shape.out_width):
                    b.vstore(vector(d), self.keys, i, d)
            totals = self.dots(lambda i, d: b.load(self.keys, i, d))
        else:
            rows_at = [self.cached_keys.indices((self.layer, row, self.head)) for row in rows]
            totals = self.dots(lambda i, d: b.load(self.cached_keys.buffer, *rows_at[i], d))
        never = b.splat(NEVER, shape.width)
        for v, c in enumerate(self.lanes):
            limit = b.vload(self.limits, shape.width, c)
            for i in range(shape.rows):
                position = b.broadcast(b.to_i32(b.add(first, i)), shape.width)
                if self.how.bidirectional:
                    seen = b.compare("sle", position, b.broadcast(b.to_i32(last), shape.width))
                    if self.how.window is not None:
                        reach = b.binary("addi", limit, b.isplat(self.how.window, shape.width))
                        seen = b.both(seen, b.compare("slt", position, reach))
                else:
                    seen = b.compare("sle", position, limit)
                if self.how.window is not None:
                    near = b.binary("addi", position, b.isplat(self.how.window, shape.width))
                    seen = b.both(seen, b.compare("sgt", near, limit))
                score = self.how.capped(b, totals[i * shape.vectors + v])
                b.vstore(b.select(seen, score, never), self.scores, b.add(j, i), c)

    def dots(self, key: Callable[[int, Index], Ssa]) -> list[Ssa]:
        """Emit code that computes the dot products of `shape.rows` keys and all queries of the tile."""
        b, shape = self.b, self.shape
        lanes, parts = shape.leaves, max(1, shape.leaves // 2)
        each = [(i, c) for i in range(shape.rows) for c in self.lanes]

        def lane(first: Index) -> list[Ssa]:
            sums: list[Ssa] = []
            for d in range(0, shape.hd, lanes):
                at = b.add(first, d)
                queries = [b.vload(self.q, shape.width, at, c) for c in self.lanes]
                keys = (b.broadcast(key(row, at), shape.width) for row in range(shape.rows))
                sums = outer(b, keys, queries, sums) if sums else [b.mulf(k, q) for k in keys for q in queries]
            return sums

        def halves(first: Index, step: int) -> list[Ssa]:
            # The sum over lanes first, first + step, first + 2 * step, and so on.
            if step == lanes:
                return lane(first)
            return added(halves(first, 2 * step), halves(b.add(first, step), 2 * step))

        def added(low: Sequence[Ssa], high: Sequence[Ssa]) -> list[Ssa]:
            return [b.addf(x, y) for x, y in zip(low, high, strict=True)]

        if parts == 1:
            return halves(0, 1)
        with b.loop(0, parts) as part:
            for at, total in zip(each, halves(part.index, parts), strict=True):
                b.vstore(total, self.parts, part.index, *at)
        totals = [[b.vload(self.parts, shape.width, part, *at) for at in each] for part in range(parts)]
        while len(totals) > 1:
            half = len(totals) // 2
            totals = [added(low, high) for low, high in zip(totals[:half], totals[half:], strict=True)]
        return totals[0]

    def softmax(self, count: Index) -> None:
        b, shape = self.b, self.shape
        old = [b.vload(self.maxima, shape.width, c) for c in self.lanes]
        with b.loop(0, count, carry=old) as j:
            scores = [b.vload(self.scores, shape.width, j.index, c) for c in self.lanes]
            j.give(*[b.maxf(s, m) for s, m in zip(scores, j.values, strict=True)])
        top = j.results
        sums = []
        for c, before, after in zip(self.lanes, old, top, strict=True):
            rescale = exp2(b, b.subf(before, after))
            b.vstore(after, self.maxima, c)
            b.vstore(rescale, self.rescale, c)
            sums.append(b.mulf(b.vload(self.sums, shape.width, c), rescale))
        with b.loop(0, count, carry=sums) as j:
            totals = []
            for c, m, total in zip(self.lanes, top, j.values, strict=True):
                weight = exp2(b, b.subf(b.vload(self.scores, shape.width, j.index, c), m))
                b.vstore(weight, self.scores, j.index, c)
                totals.append(b.addf(total, weight))
            j.give(*totals)
        for c, total in zip(self.lanes, j.results, strict=True):
            b.vstore(total, self.sums, c)

    def add_values(self, column: Index, d: Index, first: Index, count: Index) -> None:
        """Emit code that computes out = rescale * out + weights @ values for a part of the tile."""
        b, shape = self.b, self.shape
        width = shape.out_width
        columns = [b.add(column, i) for i in range(shape.out_columns)]
        targets = [self.target(c) for c in columns]
        offsets = [b.add(d, i * width) for i in range(shape.out_vectors)]
        start = []
        for c, (token, offset) in zip(columns, targets, strict=True):
            rescale = b.broadcast(b.load(self.rescale, c), width)
            start += [b.mulf(b.vload(self.out, width, token, b.add(offset, e)), rescale) for e in offsets]
        with b.loop(0, count, carry=start) as j:
            row = b.add(first, j.index)
            weights = [b.broadcast(b.load(self.scores, j.index, c), width) for c in columns]
            sums = []
            # Load one value vector at a time, because all of them and the sums do not fit in the registers.
            part = self.cached_values.part((self.layer, row, self.head), d, shape.out_vectors * width)
            for i in range(shape.out_vectors):
                v = part(i * width)
                sums.append([b.fma(w, v, j.values[c * len(offsets) + i]) for c, w in enumerate(weights)])
            j.give(*[sums[i][c] for c in range(len(columns)) for i in range(len(offsets))])
        for (token, offset), totals in zip(targets, batches(j.results, len(offsets)), strict=True):
            for e, total in zip(offsets, totals, strict=True):
                b.vstore(total, self.out, token, b.add(offset, e))

    def finish(self, real: Index) -> None:
        b, shape = self.b, self.shape
        width = shape.out_width
        with b.loop(0, shape.columns) as c:
            token, offset = self.target(c.index)
            inverse = b.broadcast(b.divf(b.f32(1.0), b.load(self.top_sums, c.index)), width)
            padding = b.less(token, real)
            with b.loop(0, shape.hd, width) as d:
                at = b.add(offset, d.index)
                value = b.mulf(b.vload(self.merged, width, token, at), inverse)
                b.vstore(b.select(padding, value, b.splat(0.0, width)), self.out, token, at)
