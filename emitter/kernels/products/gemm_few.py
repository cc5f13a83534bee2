"""Y = X W^T for a few tokens: weights are multiplied in the registers they are decoded in, as in `gemv`, by all tokens.

With so few tokens decoding to memory, as `gemm` does, takes as long as the products. Here of a code there remain a mask and
a conversion, which do not compete with fma, and its scale once a group. Some tokens times some vectors of outputs are
summed up side by side: they share loads of x and decoded codes, and are as many sums as the latency of fma asks for.

    each workgroup: a share of the sets of 16-row blocks
      xs [T, in] = x * factors of the codes, sums [T, in / group]                                      stack
      for set in share:
        acc [T, 16 * blocks] = 0                                                                       stack
        for tile of `rows` tokens x `vectors` vectors of outputs:
          for group in groups of all records:
            prefetch the group of the blocks that come next
            products [rows, vectors] = 0                                                           registers
            for k in group:                                         unrolled
              code [vectors] = f32(word & mask)                                                    registers
              products[t] += code * xs[t, k]                        for each token t of the tile
            acc[t] += d * scale * products[t] + m * minimum * sums[t, group]
        y [T, 16 * blocks] = epilogue(acc)                                                           memory

Where xs would not fit the stack, it is prepared in parts, each once for several sets, whose acc are all on the stack. Float
codecs need no xs: x is read from memory, and the products of a tile stay in registers over all k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.products.several import Finish
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.prepared_x import PAD, PreparedX, bytes_per_element
from castiron.emitter.kernels.weights.records import CACHE_LINE, Records
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa

MOST_TOKENS = 8
SUMS_BYTES = 8 << 10  # of them for sums, where x does not fit at once: every part of x is prepared once for so many
PARTS = 2  # workgroups a thread


@dataclass(frozen=True)
class FewTiles(Tiles):
    """rows x vectors sums stand in registers: of `rows` tokens, and of `vectors` times as many outputs as a vector has
    lanes. unroll: k of a float codec in one iteration.
    """

    rows: int
    vectors: int
    workgroups: int
    unroll: int = 4

    letters: ClassVar = "rvwu"

    def row_blocks(self, isa: Isa, shared: int) -> int:
        """Row blocks that a workgroup finishes at a time; `shared` is `Epilogue.row_blocks`."""
        per_block = LANES // isa.lanes
        return lcm(lcm(per_block, self.vectors) // per_block, shared)

    def fit(self, product: Product) -> bool:
        return self.rows <= product.tokens


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> FewTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    vectors = 1 if isa.canonical and not isa.roomy else 4 if isa.lanes < 8 else 2
    most_rows = (20 if isa.registers == 32 else isa.registers * 5 // 8) // vectors
    rows = -(-product.tokens // -(-product.tokens // most_rows))
    together = FewTiles(rows, vectors, 1).row_blocks(isa, product.epilogue.row_blocks)
    return FewTiles(rows, vectors, min(-(-product.weight_shape[0] // together), PARTS * threads))


def gemm_few(product: Product, isa: Isa, tiles: FewTiles) -> Kernel:
    """The kernel of a product of up to MOST_TOKENS tokens. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _Few(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"few_{product.name}", tiles.workgroups, write)


class _Few:
    """Writes the body of one kernel."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: FewTiles, buffers: Buffers):
        self.b, self.codec, self.tiles, self.buffers = b, product.format, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, product.tokens, product.in_features
        self.row_blocks, self.count, _ = product.weight_shape
        self.records = Records(b, self.codec, isa, buffers["weight"])
        self.layout = self.records.layout
        self.set = tiles.row_blocks(isa, product.epilogue.row_blocks)
        self.unit = tiles.row_blocks(isa, 1)
        set_bytes = 4 * self.T * LANES * self.set
        self.chunk, self.batch = self.count, 1  # records of x prepared at once, sets that share them
        if self.codec.quantised:
            x_bytes = self.T * self.layout.elements * bytes_per_element(self.codec)
            room = STACK_BYTES - 4 * self.T * PAD - set_bytes
            if x_bytes * self.count > room:
                self.batch = max(1, SUMS_BYTES // set_bytes)
                chunks = -(-self.count // int((room - (self.batch - 1) * set_bytes) // x_bytes))
                self.chunk = -(-self.count // chunks)
            capacity = self.chunk * self.layout.elements
            self.x = PreparedX(b, product, self.lanes, buffers, capacity, self.T)
        self.sums = b.stack(self.T, self.batch * self.set * LANES)
        self.finish = Finish(b, product, self.lanes, buffers, self.sums)

    def write(self) -> None:
        b = self.b
        end = b.real(self.buffers.get("length"), 0, self.T)
        if self.codec.quantised and self.chunk == self.count:
            self.x.fill(0, self.count * self.layout.elements)
        sets = -(-self.row_blocks // self.set)
        low, high = b.share(sets, b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high, self.batch) as batch:
            first = b.mul(batch.index, self.set)
            last = b.min(b.mul(b.min(b.add(batch.index, self.batch), high), self.set), self.row_blocks)
            if self.codec.quantised:
                self._add_chunks(first, last, end)
            else:
                self._tiles(first, last, end, self._float_tile)
            self.finish.store(first, b.sub(last, first), 0, end, self.T)

    def _add_chunks(self, first: Index, last: Index, end: Index) -> None:
        """The sums of row blocks `first` to `last`, x in as many parts as the stack asks for."""
        b = self.b
        zero = b.splat(0.0, self.lanes)
        with b.loop(0, self.T) as t, b.loop(0, self.batch * self.set * LANES, self.lanes) as column:
            b.vstore(zero, self.sums, t.index, column.index)
        for start in range(0, self.count, self.chunk):
            stop = min(start + self.chunk, self.count)
            if self.chunk < self.count:
                self.x.fill(start * self.layout.elements, stop * self.layout.elements)

            def add(sides: list[tuple[Index, int, Index]], token: Index, rows: int) -> None:
                with b.loop(start, stop) as record, b.loop(0, self.layout.groups) as group:
                    number = 0 if self.layout.groups == 1 else group.index
                    self._add_group(sides, token, rows, record.index, number, b.sub(record.index, start))

            self._tiles(first, last, end, add)

    def _tiles(self, first: Index, last: Index, end: Index, add: Callable[[list, Index, int], None]) -> None:
        """add(sides, token, rows) for all tiles of row blocks `first` to `last` and tokens up to `end`.

        A side is a row block, a vector of it and its column in the sums. The last block stands in for those that a set lacks.
        """
        b, rows, vectors, per_block, unit = self.b, self.tiles.rows, self.tiles.vectors, self.records.vectors, self.unit
        whole = self.T // rows * rows
        with b.loop(first, last, unit) as block:
            numbers = [b.add(block.index, i) for i in range(unit)]
            columns = [b.mul(b.sub(number, first), LANES) for number in numbers]
            if self.row_blocks % unit:
                numbers = [b.min(number, self.row_blocks - 1) for number in numbers]
            sides = [(numbers[i], v, b.add(columns[i], v * self.lanes)) for i in range(unit) for v in range(per_block)]
            tiles = [sides[i : i + vectors] for i in range(0, len(sides), vectors)]
            with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), whole), rows) as t:
                for tile in tiles:
                    add(tile, t.index, rows)
            if whole < self.T:
                with b.when(b.less(whole, end)):
                    for tile in tiles:
                        add(tile, whole, self.T - whole)

    def _add_group(self, sides: list, token: Index, rows: int, record: Index, group: Index, slot: Index) -> None:
        """sums += d * scale * sum(x code) + m * minimum * sum(x) of a group of a record, number `slot` of the chunk."""
        b, records, codec = self.b, self.records, self.codec
        number = b.add(b.mul(slot, self.layout.groups), group)
        start = b.mul(number, codec.group)
        tokens = [b.add(token, t) for t in range(rows)]
        codes = {block: records.group_codes(block, record, group) for block, _, _ in sides}
        soon = (0, self.layout.size) if self.layout.groups == 1 else (records.codes_at(group), self.layout.group_bytes)
        self._prefetch(sides, record, *soon)
        products: list[list[Ssa | None]] = [[None] * len(sides) for _ in tokens]
        if codec.offset:
            products = [[self.x.sum_of(number, t)] * len(sides) for t in tokens]
        for k in range(codec.group):
            weights = [codes[block].code(k, v) for block, v, _ in sides]
            for mine, t in zip(products, tokens, strict=True):
                x = self.x.at(b.add(start, k), t)
                mine[:] = [
                    b.mulf(weight, x) if so_far is None else b.fma(weight, x, so_far)
                    for weight, so_far in zip(weights, mine, strict=True)
                ]
        for i, (block, v, column) in enumerate(sides):
            scale, minimum = records.scale_and_minimum(block, record, group, v)
            for mine, t in zip(products, tokens, strict=True):
                product = mine[i]
                assert product is not None, "a group has codes"
                total = b.fma(product, scale, b.vload(self.sums, self.lanes, t, column))
                if minimum is not None:
                    total = b.fma(minimum, self.x.sum_of(number, t), total)
                b.vstore(total, self.sums, t, column)

    def _prefetch(self, sides: list, record: Index, offset: Index, nbytes: int) -> None:
        """Ask for `nbytes` of a record in the row blocks that come next."""
        for block in {block: None for block, _, _ in sides}:
            for line in range(0, nbytes, CACHE_LINE):
                self.records.prefetch(self.b.add(block, self.unit), record, self.b.add(offset, line))

    def _float_tile(self, sides: list, token: Index, rows: int) -> None:
        """The sums of `sides` and tokens `token` to `token + rows`."""
        b, elements, unroll = self.b, self.layout.elements, self.tiles.unroll

        def add(record: Index, sums: list[Ssa], most: int) -> list[Ssa]:
            weights = [self.records.elements(block, record, v) for block, v, _ in sides]
            for e in range(min(elements, most)):
                k, done = b.add(b.mul(record, elements), e), []
                for t in range(rows):
                    x = b.broadcast(b.load(self.buffers["x"], b.add(token, t), k), self.lanes)
                    mine = sums[t * len(sides) : (t + 1) * len(sides)]
                    done += [b.fma(weight[e], x, total) for weight, total in zip(weights, mine, strict=True)]
                sums = done
            return sums

        whole = self.in_features // (elements * unroll) * unroll
        zeros = [b.splat(0.0, self.lanes)] * (rows * len(sides))
        with b.loop(0, whole, unroll, carry=zeros) as loop:
            sums = loop.values
            self._prefetch(sides, loop.index, 0, self.layout.size * unroll)
            for u in range(unroll):
                sums = add(b.add(loop.index, u), sums, elements)
            loop.give(*sums)
        sums = loop.results
        for record in range(whole, self.count):
            sums = add(record, sums, self.in_features - record * elements)
        for n, total in enumerate(sums):
            t, side = divmod(n, len(sides))
            b.vstore(total, self.sums, b.add(token, t), sides[side][2])
