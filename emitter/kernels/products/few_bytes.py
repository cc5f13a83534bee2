"""Y = X W^T for a few tokens whose x is rounded to bytes (`weights.x_bytes`): codes are multiplied in the registers they are
taken apart in, by all tokens.

    each workgroup: a share of the sets of 16-row blocks
      for set in share, for vector of outputs in set, for tile of `rows` tokens:
        acc [rows] = 0                                                                                 registers
        for 32 k of all records:
          prefetch those of the block that comes next
          dot [rows] = 0                                                                               registers, s32
          for four k of the 32:                                          unrolled
            dot += (word & mask) * x[token]                               x broadcast from memory
          acc += scale * (x_scale * dot) + base * x_sum
        sums[tile, vector] = acc                                                                       stack
      y [T, 16 * blocks] = epilogue(sums)                                                              memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.gemm_bytes import Step
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.products.several import Finish
from castiron.emitter.kernels.weights.code_bytes import CodeBytes
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import CACHE_LINE, Records
from castiron.emitter.kernels.writing.body import Body, Index
from castiron.emitter.kernels.writing.isa import Isa

MOST_ROWS = 8  # of a tile: more sums than that spill
PARTS = 2  # workgroups a thread


@dataclass(frozen=True)
class FewBytesTiles(Tiles):
    """Sums of `rows` tokens and one vector of outputs stand in registers."""

    rows: int
    workgroups: int

    letters: ClassVar = "rw"

    def fit(self, product: Product) -> bool:
        return self.rows <= product.tokens


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> FewBytesTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    rows = -(-product.tokens // -(-product.tokens // MOST_ROWS))
    sets = product.weight_shape[0] // product.epilogue.row_blocks
    return FewBytesTiles(rows, min(sets, PARTS * threads))


def few_bytes(product: Product, isa: Isa, tiles: FewBytesTiles) -> Kernel:
    """The kernel of a product of a few tokens with bytes. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _FewBytes(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"few_{product.name}", tiles.workgroups, write)


class _FewBytes:
    """Writes the body of one kernel."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: FewBytesTiles, buffers: Buffers):
        self.b, self.codec, self.isa, self.tiles, self.buffers = b, product.format, isa, tiles, buffers
        self.T, self.set = product.tokens, product.epilogue.row_blocks
        self.row_blocks, self.count, _ = product.weight_shape
        self.records, self.step = Records(b, self.codec, isa, buffers["weight"]), Step(b, product, isa, buffers)
        self.sums = b.stack(self.T, self.set * LANES)
        self.finish = Finish(b, product, isa.lanes, buffers, self.sums)

    def write(self) -> None:
        b, T, rows, vectors = self.b, self.T, self.tiles.rows, self.records.vectors
        end, whole = b.real(self.buffers.get("length"), 0, T), T // rows * rows
        low, high = b.share(self.row_blocks // self.set, b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high) as item:
            first = b.mul(item.index, self.set)
            with b.loop(0, self.set * vectors) as side:
                at = b.add(first, b.div(side.index, vectors)), b.rem(side.index, vectors)
                column = b.mul(side.index, self.isa.lanes)
                with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), whole), rows) as t:
                    self._tile(*at, column, t.index, rows)
                if whole < T:
                    with b.when(b.less(whole, end)):
                        self._tile(*at, column, whole, T - whole)
            self.finish.store(first, self.set, 0, end, T)

    def _tile(self, block: Index, v: Index, column: Index, token: Index, rows: int) -> None:
        """sums[token : token + rows, column :] of vector v of a row block."""
        b, groups, parts = self.b, self.records.layout.groups, self.step.parts
        with b.loop(0, self.count * groups // parts, carry=[b.splat(0.0, self.isa.lanes)] * rows) as loop:
            first = b.mul(loop.index, parts)
            record, group = b.div(first, groups), b.rem(first, groups)
            numbers = [b.add(group, part) for part in range(parts)]
            self._prefetch(block, record, group)
            codes = [CodeBytes(self.records, self.isa, block, record, number) for number in numbers]
            sides = [[self.records.scale_and_base(block, record, number, v)] for number in numbers]
            each = self.codec.group // 4
            quads = lambda q: [codes[q // each].quads(q % each, v)]
            loop.give(*self.step.add(loop.values, [b.add(token, r) for r in range(rows)], loop.index, quads, sides))
        for r, total in enumerate(loop.results):
            b.vstore(total, self.sums, b.add(token, r), column)

    def _prefetch(self, block: Index, record: Index, group: Index) -> None:
        """Ask for GROUP k of the row block that comes next."""
        layout = self.records.layout
        start, nbytes = self.records.codes_at(group), layout.group_bytes * self.step.parts
        if layout.groups == 1:
            start, nbytes = 0, layout.size
        for line in range(0, nbytes, CACHE_LINE):
            self.records.prefetch(self.b.add(block, self.set), record, self.b.add(start, line))
