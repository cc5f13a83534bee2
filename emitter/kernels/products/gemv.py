"""y = W x for one token: packed weights are decoded in registers, sums are f32.

Sixteen rows run side by side, one a lane, so nothing is ever summed across lanes. x is prepared once per workgroup
(`weights.prepared_x`); of a code there remain a mask, a conversion and an fma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from castiron.emitter.codecs import Codec, codec_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import Arguments, Epilogue, norm_name, norm_of
from castiron.emitter.kernels.weights.packing import LANES, layout, packed_shape, unpack
from castiron.emitter.kernels.weights.prepared_x import PreparedX, bytes_per_element, tree_sum
from castiron.emitter.kernels.weights.records import CACHE_LINE, Records
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa, executable
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.types import F32, I8, TensorType

AHEAD_BYTES = 5 << 10  # by which weights are asked for early
BATCH = 32  # sets of blocks whose sums wait on the stack, 4 KB, where x does not fit at once
X_BYTES = STACK_BYTES - (4 << 10)
# Weights of a workgroup. Every workgroup prepares x again and starts without prefetched weights, so that a small weight is
# cut into one part a thread. Larger ones are cut finer, against threads that start late, but into fewer than 8 parts a
# thread, from where on IREE hands out 8 at a time.
LEAST_BYTES, ENOUGH_BYTES, MOST_PARTS = 16 << 10, 1 << 20, 6


@dataclass(frozen=True)
class GemvTiles:
    """What a search may vary; results change by rounding only.

    together: blocks of 16 rows side by side, which share every load of x, 1 or 2. chains: sums a row is split into, to
    hide the latency of fma. ahead: how many records early weights are asked for. unroll: records of a float codec in
    one iteration.
    """

    workgroups: int
    together: int = 2
    chains: int = 2
    ahead: int = 16
    unroll: int = 4

    @property
    def name(self) -> str:
        return f"w{self.workgroups}b{self.together}c{self.chains}a{self.ahead}u{self.unroll}"


def default_tiles(
    codec_name: str, out_features: int, in_features: int, isa: Isa, blocks: int = 1, threads: int = 2
) -> GemvTiles:
    """Tiles that measured well; `blocks` is `Epilogue.blocks`, `threads` what the kernel is expected to run on."""
    shape = packed_shape(codec_name, blocks * out_features, in_features)
    nbytes = shape[0] * shape[1] * shape[2]
    workgroups = threads * max(1, min(MOST_PARTS, nbytes // (threads * ENOUGH_BYTES)))
    workgroups = min(workgroups, max(1, nbytes // LEAST_BYTES), -(-shape[0] // 2))
    codec = codec_of(codec_name)
    record = layout(codec)
    # Side by side the K-quants' two levels of scales, and any codec on NEON's quarters of a block, overflow the registers.
    together = 1 if record.groups > 1 or (codec.quantised and isa.lanes < 8) else 2
    chains = {("q4_k", 8): 3}.get((codec.name, isa.lanes), 4 if isa.lanes == LANES else 2)
    ahead = 16 if codec.block == 32 else -(-AHEAD_BYTES // record.size)
    return GemvTiles(workgroups, together, chains, ahead)


def gemv(
    codec_name: str,
    out_features: int,
    in_features: int,
    *,
    isa: Isa,
    rms_eps: float | None = None,
    bias: bool = False,
    residual: bool = False,
    glu: str | None = None,
    threads: int = 2,
    tiles: GemvTiles | None = None,
) -> Kernel:
    """x [1, in], (norm [in]), weight (`packed_shape`, i8), (bias [out]), (residual [1, out]) -> y [1, out], f32.

    `rms_eps` asks for RMS norm of x with the weight `norm` before, `glu` for act(gate) * up after (then the packed
    weight has `Epilogue.weight_rows(out)` rows, interleaved), `bias` and `residual` are added last. `threads` is how many
    it is cut for; it runs on any number. ValueError for an unknown codec or activation, or rows that are not whole blocks.
    """
    codec = codec_of(codec_name)
    epilogue = Epilogue(bias, residual, glu)
    rows = epilogue.weight_rows(out_features)
    shape = packed_shape(codec_name, rows, in_features)
    tiles = tiles or default_tiles(codec_name, out_features, in_features, isa, epilogue.blocks, threads)
    norm = rms_eps is not None
    x_type, y_type = TensorType((1, in_features), F32), TensorType((1, out_features), F32)
    weight_type = TensorType(shape, I8)
    operands = (
        x_type,
        *[TensorType((in_features,), F32)] * norm,
        weight_type,
        *[TensorType((out_features,), F32)] * bias,
        *[y_type] * residual,
    )

    def write(b: Body, *arguments: Ssa) -> None:
        given = Arguments(arguments, norm, epilogue, length=False)
        Gemv(b, codec, isa, tiles, epilogue, given, out_features, in_features, shape, rms_eps).write(b.workgroup())

    def reference(*arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        given = Arguments(arguments, norm, epilogue, length=False)
        weight = unpack(codec_name, given.weight, rows, in_features)
        products = norm_of(given.x, given.norm, rms_eps) @ weight.astype(np.float64).T
        return (epilogue.define(products, out_features, given.bias, given.residual),)

    name = f"gemv_{codec_name}_{out_features}x{in_features}{norm_name(rms_eps)}{epilogue.name}_{isa.name}_{tiles.name}"
    return Kernel(
        name=name,
        operands=operands,
        results=(y_type,),
        tied=(None,),
        text=executable(name, operands, (y_type,), (None,), tiles.workgroups, write),
        reference=reference,
        flops=2 * rows * in_features,
        bytes=sum(t.nbytes for t in (*operands, y_type)),
    )


class Gemv:
    """Writes the body of one kernel.

    `rows` are the rows of x and of y; `base` is the first block of the weight [blocks, records, size] of this `shape`.
    """

    def __init__(
        self,
        b: Body,
        codec: Codec,
        isa: Isa,
        tiles: GemvTiles,
        epilogue: Epilogue,
        given: Arguments,
        out_features: int,
        in_features: int,
        shape: tuple[int, int, int],
        rms_eps: float | None,
        rows: tuple[Index, Index] = (0, 0),
        base: Index = 0,
    ):
        self.b, self.codec, self.tiles, self.epilogue, self.given = b, codec, tiles, epilogue, given
        self.lanes = isa.lanes
        self.x_row, self.y_row = rows
        self.out_features, self.in_features, self.rms_eps = out_features, in_features, rms_eps
        self.blocks, self.count, self.size = shape
        self.records = Records(b, codec, isa, given.weight, base)
        self.layout = self.records.layout
        self.together = min(tiles.together, self.blocks)
        self.set = max(self.together, epilogue.blocks)  # of blocks that give results together
        self.sides = [(i, v) for i in range(self.together) for v in range(self.records.vectors)]

    def write(self, workgroup: Index) -> None:
        """Share `workgroup` of `tiles.workgroups`."""
        b, tiles, elements = self.b, self.tiles, self.layout.elements
        chunks = -(-int(self.in_features * bytes_per_element(self.codec)) // X_BYTES)
        chunk = -(-self.count // chunks)  # records
        given = self.given
        sets = -(-self.blocks // self.set)
        low = b.div(b.mul(workgroup, sets), tiles.workgroups)
        high = b.div(b.mul(b.add(workgroup, 1), sets), tiles.workgroups)
        self._ask_for_the_first(low)
        self.x = PreparedX(
            b, self.codec, self.lanes, given.x, given.norm, self.rms_eps, self.in_features, chunk * elements, row=self.x_row
        )
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
        blocks = self._blocks(low)[: self.together]
        with b.loop(0, min(self.tiles.ahead, self.count)) as record:
            for line in range(0, self.size, CACHE_LINE):
                for block in blocks:
                    self.records.prefetch(block, record.index, line)

    def _sets(self, low: Index, high: Index, first: int, last: int, parts: Ssa | None) -> None:
        """Sets `low` to `high` of blocks times elements of records `first` to `last`; unfinished sums stay in `parts`."""
        b = self.b
        self.x.fill(first * self.layout.elements, last * self.layout.elements)
        with b.loop(low, high) as row:
            blocks, products = self._blocks(row.index), []
            for at in range(0, self.set, self.together):
                slot = b.add(b.mul(b.sub(row.index, low), self.set), at)
                places = [(b.add(slot, i), v * self.lanes) for i, v in self.sides]
                if first == 0:
                    totals = [b.splat(0.0, self.lanes)] * len(self.sides)
                else:
                    totals = [b.vload(parts, self.lanes, *place) for place in places]
                totals = self._products(blocks[at : at + self.together], first, last, totals)
                if last < self.count:
                    for total, place in zip(totals, places, strict=True):
                        b.vstore(total, parts, *place)
                products += totals
            if last == self.count:
                self._finish(blocks, products)

    def _blocks(self, row: Index) -> list[Index]:
        """Set `row` of blocks; where the last set is short its last block is taken again."""
        b = self.b
        blocks = [b.add(b.mul(row, self.set), i) for i in range(self.set)]
        return [b.min(block, self.blocks - 1) for block in blocks] if self.blocks % self.set else blocks

    def _products(self, blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        """totals + the products of the blocks' records from `first` to `last`, one vector for each of `sides`."""
        if not self.codec.quantised:
            return self._float_products(blocks, first, last, totals)
        with self.b.loop(first, last, carry=totals) as record:
            place = self.b.sub(record.index, first)
            add = self._group_record if self.layout.groups == 1 else self._super_record
            record.give(*add(blocks, record.index, place, record.values))
        return record.results

    def _prefetches(self, blocks: list[Index], record: Index, offset: Index, nbytes: int) -> list[Callable[[], None]]:
        """One for each cache line of what will be read `ahead` records later, in the next set of blocks if need be."""
        b = self.b
        then = b.add(record, self.tiles.ahead)
        skipped, record = b.mul(b.div(then, self.count), self.together), b.rem(then, self.count)
        lines = range(0, nbytes, CACHE_LINE)
        return [
            partial(self.records.prefetch, b.add(block, skipped), record, b.add(offset, line))
            for line in lines
            for block in blocks
        ]

    def _group_record(self, blocks: list[Index], record: Index, place: Index, totals: list[Ssa]) -> list[Ssa]:
        """A record of one group: total + d * sum(x code) + m * sum(x)."""
        b, records = self.b, self.records
        products = self._group(blocks, record, 0, place, self._prefetches(blocks, record, 0, self.size))
        done = []
        for (i, v), product, total in zip(self.sides, products, totals, strict=True):
            total = b.fma(product, records.d(blocks[i], record, v), total)
            if self.codec.minimum:
                total = b.fma(records.m(blocks[i], record, v), self.x.sum_of(place), total)
            done.append(total)
        return done

    def _super_record(self, blocks: list[Index], record: Index, place: Index, totals: list[Ssa]) -> list[Ssa]:
        """A record of many groups: total + d * sum over groups(scale * sum(x code)) + m * sum(minimum * sum(x))."""
        b, records, groups = self.b, self.records, self.layout.groups
        minima = self.codec.minimum != 0
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)
        with b.loop(0, groups, carry=zeros * (1 + minima)) as g:
            soon = self._prefetches(blocks, record, records.codes_at(g.index), self.layout.group_bytes)
            at = b.add(b.mul(place, groups), g.index)
            products = self._group(blocks, record, g.index, at, soon)
            sums, lows = list(g.values[: len(self.sides)]), list(g.values[len(self.sides) :])
            for n, (i, v) in enumerate(self.sides):
                sums[n] = b.fma(products[n], records.group_scale(blocks[i], record, g.index, v), sums[n])
                if minima:
                    lows[n] = b.fma(records.group_minimum(blocks[i], record, g.index, v), self.x.sum_of(at), lows[n])
            g.give(*sums, *lows)
        done = []
        for n, (i, v) in enumerate(self.sides):
            total = b.fma(g.results[n], records.d(blocks[i], record, v), totals[n])
            if minima:
                total = b.fma(g.results[len(self.sides) + n], records.m(blocks[i], record, v), total)
            done.append(total)
        return done

    def _group(
        self, blocks: list[Index], record: Index, group: Index, place: Index, soon: list[Callable[[], None]]
    ) -> list[Ssa]:
        """sum over a group of x * code, a vector for each of `sides`; `place` is the group's number in the chunk.

        `soon` are prefetches, spread over the group because one burst of them stalls.
        """
        b, chains = self.b, self.tiles.chains
        codes = [self.records.group_codes(block, record, group) for block in blocks]
        start = b.mul(place, self.codec.group)
        offset = self.x.sum_of(place) if self.codec.offset else None
        sums: list[list[Ssa | None]] = [[offset] + [None] * (chains - 1) for _ in self.sides]
        for k in range(self.codec.group):
            if k % 8 == 0:
                for prefetch in _share(soon, k // 8, self.codec.group // 8):
                    prefetch()
            x = self.x.at(b.add(start, k))
            for n, (i, v) in enumerate(self.sides):
                code, so_far = codes[i].code(k, v), sums[n][k % chains]
                sums[n][k % chains] = b.mulf(code, x) if so_far is None else b.fma(code, x, so_far)
        return [tree_sum(b, [part for part in parts if part is not None]) for parts in sums]

    def _float_products(self, blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        b, chains, unroll, elements = self.b, self.tiles.chains, self.tiles.unroll, self.layout.elements
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)

        def add(record: Index, sums: list[Ssa], number: int) -> None:
            weights = [self.records.elements(blocks[i], record, v) for i, v in self.sides]
            for e in range(elements):
                x = self.x.at(b.add(b.mul(b.sub(record, first), elements), e))
                chain = (number * elements + e) % chains * len(self.sides)
                for n, weight in enumerate(weights):
                    sums[chain + n] = b.fma(weight[e], x, sums[chain + n])

        whole = (last - first) // unroll * unroll
        with b.loop(first, first + whole, unroll, carry=totals + zeros * (chains - 1)) as loop:
            soon = self._prefetches(blocks, loop.index, 0, self.size * unroll)
            sums = list(loop.values)
            for i in range(unroll):
                for prefetch in _share(soon, i, unroll):
                    prefetch()
                add(b.add(loop.index, i), sums, i)
            loop.give(*sums)
        sums = list(loop.results)
        for i, record in enumerate(range(first + whole, last)):
            add(record, sums, i)
        return [tree_sum(b, sums[n :: len(self.sides)]) for n in range(len(self.sides))]

    def _finish(self, blocks: list[Index], totals: list[Ssa]) -> None:
        """Store the results of a set of blocks."""
        vectors = self.records.vectors
        products = [totals[i : i + vectors] for i in range(0, len(totals), vectors)]
        if self.epilogue.glu:
            self._store(self.b.div(blocks[0], 2), self.epilogue.combine(self.b, products))
            return
        for block, product in zip(blocks, products, strict=True):
            self._store(block, product)

    def _store(self, block: Index, results: list[Ssa]) -> None:
        """Store 16 results from 16 * block on, of which the last block may have fewer."""
        b, given, row = self.b, self.given, self.y_row
        column = b.mul(block, LANES)
        ragged = self.out_features % LANES

        def store_whole() -> None:
            for v, y in enumerate(results):
                at = b.add(column, v * self.lanes)
                b.vstore(self.epilogue.finish(b, y, given.bias, given.residual, row, at), given.out, row, at)

        def store_ragged() -> None:
            for lane in range(ragged):
                at = b.add(column, lane)
                y = b.extract(results[lane // self.lanes], lane % self.lanes)
                b.store(self.epilogue.finish(b, y, given.bias, given.residual, row, at), given.out, row, at)

        if not ragged:
            store_whole()
            return
        end = self.out_features // LANES
        with b.when(b.less(block, end)):
            store_whole()
        with b.when(b.equal(block, end)):
            store_ragged()


def _share(items: list, i: int, parts: int) -> list:
    """Part i of `parts` equal ones."""
    return items[len(items) * i // parts : len(items) * (i + 1) // parts]
