"""Y = X W^T for a chunk of tokens: weights become f32 once per workgroup and row block, then are multiplied at f32 peak.

A workgroup takes a few row blocks of the weight and a block of tokens. It decodes a panel [depth, columns] of
the weight onto the stack, multiplies tiles of tokens with it in registers, adds them to sums [tokens, columns] that
stay on the stack too, and goes on to the next panel along k. (Goto and van de Geijn 2008, with the packing of B
replaced by decoding.)

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          panel [depth, 16 * blocks] = decoded W[columns, k : k + depth]^T                             stack
          for tile of `rows` tokens:
            for 16 * `wide` columns:
              acc [rows, 16 * wide] = sums[tile]                                                   registers
              for j in depth:                                       `unroll` at a time
                acc += x[token, k + j] * panel[j]                   x broadcast from memory
              sums[tile] = acc
        y [tokens, 16 * blocks] = epilogue(sums)                                                     memory

Rows of x from `length` on are not multiplied, but for those that fill the last tile; their results are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.products.several import Finish
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Panel, units
from castiron.emitter.kernels.writing.body import PARTS, STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import outer

MOST_DEPTH = 288  # 18 KB of panel for 16 columns: more would push x out of the L1 cache
MOST_TOKENS = 132  # more of them push x out of the L2 cache between blocks of columns


@dataclass(frozen=True)
class GemmTiles(Tiles):
    """rows x (16 * wide) sums stand in registers. `row_blocks` of 16 columns, a multiple of `wide` that divides the
    weight's, share a panel `depth` k deep, whole groups. `tokens`, a multiple of `rows`, are multiplied with a panel
    before it is decoded again. `unroll` k stand in one iteration. Panel and sums fit the stack. `workgroups` share the
    products of `row_blocks` with `tokens`.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int
    unroll: int = 8
    workgroups: int = 12

    letters: ClassVar = "rwbdtug"

    @property
    def stack_bytes(self) -> int:
        return 4 * LANES * self.row_blocks * (self.depth + self.tokens)

    def fit(self, product: Product) -> bool:
        return (
            self.stack_bytes <= STACK_BYTES
            and self.depth % units(product.codec) == 0
            and self.tokens % self.rows == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % product.epilogue.row_blocks == 0
            and product.weight_shape[0] % self.row_blocks == 0
        )


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemmTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    T, shared, row_blocks = product.tokens, product.epilogue.row_blocks, -(-product.out_features // LANES)
    even = shared == 2 or row_blocks % 2 == 0
    wide = 2 if isa.roomy and even else 1
    together = max(wide, shared)
    most_rows = 12 if isa.roomy else 6
    # A tile of few rows takes as long as one of 4, by the latency of fma.
    costs = {rows: T // rows * rows + max(T % rows, 4 if T % rows else 0) for rows in range(4, most_rows + 1)}
    rows = max(rows for rows, cost in costs.items() if cost <= 1.03 * min(costs.values()))
    budget = STACK_BYTES // (4 * LANES * together)
    token_blocks = -(-T // min(MOST_TOKENS, budget * 3 // 5))
    tokens = -(-T // (token_blocks * rows)) * rows
    size = units(product.codec)
    depth = even_share(-(-product.in_features // size), min(MOST_DEPTH, budget - tokens) // size) * size
    items = row_blocks * shared // together * -(-T // tokens)
    return GemmTiles(rows, wide, together, depth, tokens, workgroups=min(items, PARTS * threads))


def even_share(total: int, most: int) -> int:
    """The largest part of `total` up to `most` that divides it, if there is one of at least half of `most`."""
    most = min(most, total)
    share = next(n for n in range(most, 0, -1) if total % n == 0)
    return share if 2 * share >= most else most


def gemm(product: Product, isa: Isa, tiles: GemmTiles) -> Kernel:
    """The kernel of a product of many tokens. ValueError for tiles that do not fit."""
    write = lambda b, buffers: Gemm(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class Gemm:
    """Writes the body of one kernel; `tiles` have the fields of GemmTiles."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: Any, buffers: Buffers):
        self.b, self.product, self.isa, self.tiles, self.buffers = b, product, isa, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, product.tokens, product.in_features
        self.row_blocks, self.columns = product.weight_shape[0], LANES * tiles.row_blocks
        self.whole_rows = tiles.rows  # tokens are multiplied so many at a time
        self.panel = self._panel()
        self.sums = b.stack(tiles.tokens, self.columns)
        self.finish = Finish(b, product, self.lanes, buffers, self.sums)

    def _panel(self) -> Any:
        """What has the weights of a step on the stack, and `fill(first_block, k, depth)`."""
        return Panel(self.b, self.product.format, self.isa, self.buffers["weight"], self.tiles.depth, self.tiles.row_blocks)

    def write(self) -> None:
        b, tiles = self.b, self.tiles
        groups = self.row_blocks // tiles.row_blocks
        items = groups * -(-self.T // tiles.tokens)
        low, high = b.share(items, b.workgroup(), tiles.workgroups)
        with b.loop(low, high) as item:
            self._item(b.mul(b.rem(item.index, groups), tiles.row_blocks), b.mul(b.div(item.index, groups), tiles.tokens))

    def _item(self, first_block: Index, first: Index) -> None:
        """All results of `tiles.row_blocks` and `tiles.tokens` tokens."""
        b, tiles = self.b, self.tiles
        last = b.min(b.add(first, tiles.tokens), self.T)
        end = b.real(self.buffers.get("length"), first, last)
        with b.when(b.less(first, end)):
            self._products(first_block, first, end)
        self.finish.store(first_block, tiles.row_blocks, first, end, last)

    def _products(self, first_block: Index, first: Index, end: Index) -> None:
        """The sums of tokens `first` to `end`, rounded up to a tile."""
        b, depth = self.b, self.tiles.depth
        whole = self.in_features // depth * depth
        count = b.sub(end, first)
        self._zero(count)
        with b.loop(0, whole, depth) as k:
            self.panel.fill(first_block, k.index, depth)
            self._multiply(first, count, k.index, depth)
        if whole < self.in_features:
            self.panel.fill(first_block, whole, self.in_features - whole)
            self._multiply(first, count, whole, self.in_features - whole)

    def _zero(self, count: Index) -> None:
        b, rows = self.b, self.whole_rows
        with b.loop(0, b.mul(b.ceildiv(count, rows), rows)) as t:
            for column in range(0, self.columns, self.lanes):
                b.vstore(b.splat(0.0, self.lanes), self.sums, t.index, column)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """sums += x[first : first + count, k : k + depth] @ panel, in tiles; the last of T may have fewer rows."""
        b, rows = self.b, self.tiles.rows
        rest = self.T % rows  # blocks of tokens are multiples of `rows`, so only the last one has a smaller tile
        start = self.T - rest
        needed = b.mul(b.ceildiv(count, rows), rows)
        with b.loop(0, b.min(needed, b.sub(start, first)), rows) as t:
            self._tile(t.index, b.add(first, t.index), rows, k, depth)
        if rest:
            with b.when(b.less(start, b.add(first, count))):
                self._tile(b.sub(start, first), start, rest, k, depth)

    def _x_rows(self, token: Index, rows: int) -> Callable[[int], Index]:
        """The row of x that is the one of `rows` from `token` on."""
        return lambda r: self.b.add(token, r)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """sums[row : row + rows] += x[token : token + rows, k : k + depth] @ panel."""
        b, lanes, unroll = self.b, self.lanes, self.tiles.unroll
        width, x_row = LANES * self.tiles.wide, self._x_rows(token, rows)
        with b.loop(0, self.columns, width) as column:
            at = [(b.add(row, r), b.add(column.index, c)) for r in range(rows) for c in range(0, width, lanes)]

            def step(j: Index, sums: list[Ssa]) -> list[Ssa]:
                weights = [self.panel.row(j, b.add(column.index, c)) for c in range(0, width, lanes)]
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), b.add(k, j)), lanes) for r in range(rows))
                return outer(b, x, weights, sums)

            sums = [b.vload(self.sums, lanes, *sum_at) for sum_at in at]
            whole = depth // unroll * unroll
            with b.loop(0, whole, unroll, carry=sums) as loop:
                sums = loop.values
                for u in range(unroll):
                    sums = step(b.add(loop.index, u), sums)
                loop.give(*sums)
            sums = loop.results
            for j in range(whole, depth):
                sums = step(j, sums)
            for total, sum_at in zip(sums, at, strict=True):
                b.vstore(total, self.sums, *sum_at)
