"""y = W x for one token: packed weights are decoded in registers, sums are f32.

Sixteen rows run side by side, one a lane, so nothing is ever summed across lanes. x is prepared once per workgroup
(`weights.prepared_x`); of a code there remain a mask, a conversion and an fma.

    each workgroup: a share of the sets of 16-row blocks; a set is `together` blocks, with a GLU at least gate and up
      prefetch the first records of the first set
      xs [in] = norm(x) * factors of the codes, sums [in / group] = those of norm(x)                   stack
      for set in share:
        for `together` blocks of the set at once:
          totals [together, 16] = 0                                                                registers
          for record in records:                                    a codec's block of 16 rows, memory, once
            for group in record:                                    one, in K-quants many
              products [chains, together, 16] = 0                                                  registers
              for k in group:                                       unrolled; prefetches of a record `ahead` in between
                products[k % chains] += f32(word[k / fields] & mask[k % fields]) * xs[k]
            totals += d * sum(products) + m * sums[group]           many groups: times their scales and minima
        y [set] = epilogue(totals)                                                                   memory

A word is loaded once for all of its fields. Codes with an offset start a chain with sums[group], which has minus the offset
as a factor. Where xs would not fit the stack, it is prepared in parts, and the totals of 32 sets wait on the stack for the
next part. A record of a float codec is one k (bf16: two) and its elements are the products' factors as they are.

The canonical form has one chain, and adds each group of a record to the totals by d * scale and m * minimum, as the kernels of
several tokens do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import each_block
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES, layout
from castiron.emitter.kernels.weights.prepared_x import PreparedX, bytes_per_element
from castiron.emitter.kernels.weights.records import CACHE_LINE, Records
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import tree

AHEAD_BYTES = 5 << 10  # by which weights are asked for early
BATCH = 32  # sets of row blocks whose sums wait on the stack, 4 KB, where x does not fit at once
X_BYTES = STACK_BYTES - (4 << 10)
# Weights of a workgroup. Every workgroup prepares x again and starts without prefetched weights, so that a small weight is
# cut into one part a thread. Larger ones are cut finer, against threads that start late, but into fewer than 8 parts a
# thread, from where on IREE hands out 8 at a time.
LEAST_BYTES, ENOUGH_BYTES, MOST_PARTS = 16 << 10, 1 << 20, 6


@dataclass(frozen=True)
class GemvTiles(Tiles):
    """together: row blocks side by side, which share every load of x; 1 or 2 with a GLU. chains: sums a row is split
    into, to hide the latency of fma. ahead: how many records early weights are asked for. unroll: records of a float
    codec in one iteration.
    """

    workgroups: int
    together: int = 2
    chains: int = 2
    ahead: int = 16
    unroll: int = 4

    letters: ClassVar = "wbcau"

    def fit(self, product: Product) -> bool:
        return self.together <= 2 or not product.glu


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemvTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    shape = product.weight_shape
    nbytes = shape[0] * shape[1] * shape[2]
    workgroups = threads * max(1, min(MOST_PARTS, nbytes // (threads * ENOUGH_BYTES)))
    workgroups = min(workgroups, max(1, nbytes // LEAST_BYTES), -(-shape[0] // 2))
    codec = product.format
    record = layout(codec)
    if isa.canonical:
        together = 2 if product.glu or not isa.roomy else 4
        return GemvTiles(workgroups, together, 1, 16 if codec.block == 32 else -(-AHEAD_BYTES // record.size))
    # Side by side the K-quants' two levels of scales, and any codec on NEON's quarters of a row block, overflow the
    # registers.
    together = 1 if record.groups > 1 or (codec.quantised and isa.lanes < 8) else 2
    chains = {("q4_k", 8): 3}.get((codec.name, isa.lanes), 4 if isa.lanes == LANES else 2)
    ahead = 16 if codec.block == 32 else -(-AHEAD_BYTES // record.size)
    return GemvTiles(workgroups, together, chains, ahead)


def gemv(product: Product, isa: Isa, tiles: GemvTiles) -> Kernel:
    """The kernel of a product of one token. ValueError for tiles that do not fit."""
    prefix = f"gemv_{product.codec}_{product.out_features}x{product.in_features}{product.suffix}"

    write = lambda b, buffers: Gemv(b, product, isa, tiles, buffers).write(b.workgroup())
    return product_kernel(product, isa, tiles, prefix, tiles.workgroups, write)


class Gemv:
    """Writes the body of one kernel: row `y_row` of y from row `x_row` of x and the weight from row block `base` on."""

    def __init__(
        self,
        b: Body,
        product: Product,
        isa: Isa,
        tiles: GemvTiles,
        buffers: Buffers,
        x_row: Index = 0,
        y_row: Index = 0,
        base: Index = 0,
    ):
        self.b, self.codec, self.tiles, self.epilogue, self.buffers = b, product.format, tiles, product.epilogue, buffers
        self.chains = 1 if isa.canonical else tiles.chains
        self.canonical = isa.canonical
        self.lanes, self.x_row, self.y_row = isa.lanes, x_row, y_row
        self.product, self.out_features, self.in_features = product, product.out_features, product.in_features
        self.row_blocks, self.count, self.size = product.weight_shape
        self.records = Records(b, self.codec, isa, buffers["weight"], base)
        self.layout = self.records.layout
        self.together = min(tiles.together, self.row_blocks)
        self.set = max(self.together, self.epilogue.row_blocks)  # of row blocks that give results together
        self.sides = [(i, v) for i in range(self.together) for v in range(self.records.vectors)]

    def write(self, workgroup: Index) -> None:
        """Share `workgroup` of `tiles.workgroups`."""
        b, elements = self.b, self.layout.elements
        chunks = -(-int(self.in_features * bytes_per_element(self.codec)) // X_BYTES)
        chunk = -(-self.count // chunks)  # records
        sets = -(-self.row_blocks // self.set)
        low, high = b.share(sets, workgroup, self.tiles.workgroups)
        self._ask_for_the_first(low)
        self.x = PreparedX(b, self.product, self.lanes, self.buffers, chunk * elements, 1, self.x_row)
        if chunks == 1:
            self._sets(low, high, 0, self.count, None)
            return
        parts = b.stack(BATCH * self.set, LANES)
        with b.loop(low, high, BATCH) as batch:
            end = b.min(b.add(batch.index, BATCH), high)
            for first in range(0, self.count, chunk):
                self._sets(batch.index, end, first, min(first + chunk, self.count), parts)

    def _ask_for_the_first(self, low: Index) -> None:
        """Prefetch the weights that set `low` begins with, so that memory has work while x is prepared."""
        b = self.b
        row_blocks = self._blocks_of(low)[: self.together]
        with b.loop(0, min(self.tiles.ahead, self.count)) as record:
            for line in range(0, self.size, CACHE_LINE):
                for block in row_blocks:
                    self.records.prefetch(block, record.index, line)

    def _sets(self, low: Index, high: Index, first: int, last: int, parts: Ssa | None) -> None:
        """Sets `low` to `high` of row blocks times elements of records `first` to `last`; unfinished sums stay in `parts`."""
        b = self.b
        self.x.fill(first * self.layout.elements, last * self.layout.elements)
        with b.loop(low, high) as row:
            row_blocks, products = self._blocks_of(row.index), []
            for at in range(0, self.set, self.together):
                slot = b.add(b.mul(b.sub(row.index, low), self.set), at)
                kept = [(b.add(slot, i), v * self.lanes) for i, v in self.sides]
                if parts is None or first == 0:
                    totals = [b.splat(0.0, self.lanes)] * len(self.sides)
                else:
                    totals = [b.vload(parts, self.lanes, *at_sum) for at_sum in kept]
                totals = self._products(row_blocks[at : at + self.together], first, last, totals)
                if parts is not None and last < self.count:
                    for total, at_sum in zip(totals, kept, strict=True):
                        b.vstore(total, parts, *at_sum)
                products += totals
            if last == self.count:
                self._finish(row_blocks, products)

    def _blocks_of(self, row: Index) -> list[Index]:
        """Set `row` of row blocks; where the last set is short its last block is taken again."""
        b = self.b
        row_blocks = [b.add(b.mul(row, self.set), i) for i in range(self.set)]
        return [b.min(block, self.row_blocks - 1) for block in row_blocks] if self.row_blocks % self.set else row_blocks

    def _products(self, row_blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        """totals + the products of the row blocks' records from `first` to `last`, one vector for each of `sides`."""
        if not self.codec.quantised:
            return self._float_products(row_blocks, first, last, totals)
        with self.b.loop(first, last, carry=totals) as record:
            slot = self.b.sub(record.index, first)
            record.give(*self._record(row_blocks, record.index, slot, record.values))
        return record.results

    def _prefetches(self, row_blocks: list[Index], record: Index, offset: Index, nbytes: int) -> list[Callable[[], None]]:
        """One for each cache line of what will be read `ahead` records later, in the next set of row blocks if need be."""
        b = self.b
        then = b.add(record, self.tiles.ahead)
        skipped, record = b.mul(b.div(then, self.count), self.together), b.rem(then, self.count)
        lines = range(0, nbytes, CACHE_LINE)
        return [
            partial(self.records.prefetch, b.add(block, skipped), record, b.add(offset, line))
            for line in lines
            for block in row_blocks
        ]

    def _record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        """totals + the products of one record."""
        if self.layout.groups == 1:
            return self._group_record(row_blocks, record, slot, totals)
        return (self._canonical_record if self.canonical else self._super_record)(row_blocks, record, slot, totals)

    def _group_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        """A record of one group: total + d * sum(x code) + m * sum(x)."""
        b, records = self.b, self.records
        products = self._group(row_blocks, record, 0, slot, self._prefetches(row_blocks, record, 0, self.size))
        done = []
        for (i, v), product, total in zip(self.sides, products, totals, strict=True):
            total = b.fma(product, records.d(row_blocks[i], record, v), total)
            minimum = records.m(row_blocks[i], record, v)
            if minimum is not None:
                total = b.fma(minimum, self.x.sum_of(slot), total)
            done.append(total)
        return done

    def _super_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        """A record of many groups: total + d * sum over groups(scale * sum(x code)) + m * sum(minimum * sum(x))."""
        b, records, groups = self.b, self.records, self.layout.groups
        minima = self.codec.minimum != 0
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)
        with b.loop(0, groups, carry=zeros * (1 + minima)) as g:
            soon = self._prefetches(row_blocks, record, records.codes_at(g.index), self.layout.group_bytes)
            at = b.add(b.mul(slot, groups), g.index)
            products = self._group(row_blocks, record, g.index, at, soon)
            sums, lows = list(g.values[: len(self.sides)]), list(g.values[len(self.sides) :])
            for n, (i, v) in enumerate(self.sides):
                scale = records.group_scale(row_blocks[i], record, g.index, v)
                sums[n] = b.addf(products[n], sums[n]) if scale is None else b.fma(products[n], scale, sums[n])
                low = records.group_minimum(row_blocks[i], record, g.index, v)
                if low is not None:
                    lows[n] = b.fma(low, self.x.sum_of(at), lows[n])
            g.give(*sums, *lows)
        done = []
        for n, (i, v) in enumerate(self.sides):
            total = b.fma(g.results[n], records.d(row_blocks[i], record, v), totals[n])
            minimum = records.m(row_blocks[i], record, v)
            if minimum is not None:
                total = b.fma(g.results[len(self.sides) + n], minimum, total)
            done.append(total)
        return done

    def _canonical_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        """A record of many groups: total + d * scale * sum(x code) + m * minimum * sum(x), group by group."""
        b, records, groups = self.b, self.records, self.layout.groups
        with b.loop(0, groups, carry=totals) as g:
            soon = self._prefetches(row_blocks, record, records.codes_at(g.index), self.layout.group_bytes)
            at = b.add(b.mul(slot, groups), g.index)
            products, done = self._group(row_blocks, record, g.index, at, soon), []
            for (i, v), product, total in zip(self.sides, products, g.values, strict=True):
                scale, minimum = records.scale_and_minimum(row_blocks[i], record, g.index, v)
                total = b.fma(product, scale, total)
                done.append(total if minimum is None else b.fma(minimum, self.x.sum_of(at), total))
            g.give(*done)
        return g.results

    def _group(
        self, row_blocks: list[Index], record: Index, group: Index, slot: Index, soon: list[Callable[[], None]]
    ) -> list[Ssa]:
        """sum over a group of x * code, a vector for each of `sides`; `slot` is the group's number in the chunk.

        `soon` are prefetches, spread over the group because one burst of them stalls.
        """
        b, chains = self.b, self.chains
        codes = [self.records.group_codes(block, record, group) for block in row_blocks]
        start = b.mul(slot, self.codec.group)
        offset = self.x.sum_of(slot) if self.codec.offset else None
        sums: list[list[Ssa | None]] = [[offset] + [None] * (chains - 1) for _ in self.sides]
        for k in range(self.codec.group):
            if k % 8 == 0:
                for prefetch in _share(soon, k // 8, self.codec.group // 8):
                    prefetch()
            x = self.x.at(b.add(start, k))
            for n, (i, v) in enumerate(self.sides):
                code, so_far = codes[i].code(k, v), sums[n][k % chains]
                sums[n][k % chains] = b.mulf(code, x) if so_far is None else b.fma(code, x, so_far)
        return [tree(b.addf, [part for part in parts if part is not None]) for parts in sums]

    def _float_products(self, row_blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        b, chains, unroll, elements = self.b, self.chains, self.tiles.unroll, self.layout.elements
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)

        def add(record: Index, sums: list[Ssa], number: int) -> None:
            weights = [self.records.elements(row_blocks[i], record, v) for i, v in self.sides]
            for e in range(elements):
                x = self.x.at(b.add(b.mul(b.sub(record, first), elements), e))
                chain = (number * elements + e) % chains * len(self.sides)
                for n, weight in enumerate(weights):
                    sums[chain + n] = b.fma(weight[e], x, sums[chain + n])

        whole = (last - first) // unroll * unroll
        with b.loop(first, first + whole, unroll, carry=totals + zeros * (chains - 1)) as loop:
            soon = self._prefetches(row_blocks, loop.index, 0, self.size * unroll)
            sums = list(loop.values)
            for i in range(unroll):
                for prefetch in _share(soon, i, unroll):
                    prefetch()
                add(b.add(loop.index, i), sums, i)
            loop.give(*sums)
        sums = list(loop.results)
        for i, record in enumerate(range(first + whole, last)):
            add(record, sums, i)
        return [tree(b.addf, sums[n :: len(self.sides)]) for n in range(len(self.sides))]

    def _finish(self, row_blocks: list[Index], totals: list[Ssa]) -> None:
        """Store the results of a set of row blocks."""
        vectors = self.records.vectors
        products = [totals[i : i + vectors] for i in range(0, len(totals), vectors)]
        if self.epilogue.glu:
            self._store(self.b.div(row_blocks[0], 2), self.epilogue.combine(self.b, products))
            return
        for block, product in zip(row_blocks, products, strict=True):
            self._store(block, product)

    def _store(self, block: Index, results: list[Ssa]) -> None:
        """Store 16 results from 16 * block on, of which the last row block may have fewer."""
        b, buffers, row = self.b, self.buffers, self.y_row
        column = b.mul(block, LANES)

        def store(ragged: int) -> None:
            for lane in range(0, ragged or LANES, 1 if ragged else self.lanes):
                at, y = b.add(column, lane), results[lane // self.lanes]
                y = b.extract(y, lane % self.lanes) if ragged else y
                y = self.epilogue.finish(b, y, buffers, row, at)
                (b.store if ragged else b.vstore)(y, buffers["y"], row, at)

        each_block(b, self.out_features, block, store)


def _share(items: list, i: int, parts: int) -> list:
    """Part i of `parts` equal ones."""
    return items[len(items) * i // parts : len(items) * (i + 1) // parts]
