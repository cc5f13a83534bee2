"""Y = X W^T for several tokens and bf16 weights, x rounded to bf16: sums of products of pairs (`writing.pairs`).

As `gemm`, but that nothing is decoded: packed weights are pairs of k in an i32 already, and x comes alike
(`weights.x_pieces`). Weights that a workgroup multiplies with one tile after another stay in the L1 cache:

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          for tile of up to 16 tokens, `rows` of them at a time, for 16 * `wide` columns:
            acc [rows, 16 * wide] = sums[tile]                                                         registers
            for pair of k in depth:                                   16 at a time
              acc += pairs of x[tile, k] * W[columns, k]              x broadcast from memory
            sums[tile] = acc
        y [tokens, 16 * blocks] = epilogue(sums)                                                       memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.gemm import PARTS, Gemm, even_share
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records
from castiron.emitter.kernels.weights.x_pieces import DEPTH, tile_rows
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.pairs import Pairs

MOST_TOKENS = 128
MOST_DEPTH = 256
PAIRS = DEPTH // 2  # of a step


@dataclass(frozen=True)
class GemmPairsTiles(Tiles):
    """rows x (16 * wide) sums stand in registers. `row_blocks` of 16 columns, `depth` k deep, whole steps of 32, are
    multiplied with `tokens`, whole tiles of x, before the next. `workgroups` share the products.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int
    workgroups: int = 12

    letters: ClassVar = "rwbdtg"

    @property
    def stack_bytes(self) -> int:
        return 4 * self.tokens * LANES * self.row_blocks

    def fit(self, product: Product) -> bool:
        return (
            self.stack_bytes <= STACK_BYTES
            and self.depth % DEPTH == 0
            and self.tokens % tile_rows(product.tokens) == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % product.epilogue.row_blocks == 0
            and product.weight_shape[0] % self.row_blocks == 0
        )


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemmPairsTiles:
    """As many sums as leave registers for two vectors of weights."""
    T, shared, row_blocks = product.tokens, product.epilogue.row_blocks, product.weight_shape[0]
    wide = 2 if isa.lanes == LANES and (shared == 2 or row_blocks % 2 == 0) else 1
    together, tile = max(wide, shared), tile_rows(T)
    most = 8 if isa.lanes == LANES else 6
    token_blocks = -(-T // MOST_TOKENS)
    tokens = -(-T // (token_blocks * tile)) * tile
    steps = even_share(-(-product.in_features // DEPTH), MOST_DEPTH // DEPTH)
    items = row_blocks // together * -(-T // tokens)
    rows = -(-tile // -(-tile // most))
    return GemmPairsTiles(rows, wide, together, steps * DEPTH, tokens, workgroups=min(items, PARTS * threads))


def gemm_pairs(product: Product, isa: Isa, tiles: GemmPairsTiles) -> Kernel:
    """The kernel of a product of several tokens with bf16 weights. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _GemmPairs(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class _GemmPairs(Gemm):
    """Writes the body of one kernel."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: GemmPairsTiles, buffers: Buffers):
        super().__init__(b, product, isa, tiles, buffers)
        self.whole_rows = tile_rows(product.tokens)

    def _panel(self) -> _Weights:
        return _Weights(self.b, self.product, self.isa, self.buffers["weight"])

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """sums += x[first : first + count, k : k + depth] @ panel, in whole tiles of x."""
        b, tile = self.b, self.whole_rows
        with b.loop(0, b.ceildiv(count, tile)) as i:
            for row in range(0, tile, self.tiles.rows):
                rows = min(self.tiles.rows, tile - row)
                self._rows(b.add(b.mul(i.index, tile), row), b.add(b.div(first, tile), i.index), row, rows, k, depth)

    def _rows(self, sum_row: Index, tile: Index, row: int, rows: int, k: Index, depth: int) -> None:
        """The products of rows `row` and up of a tile of x, added to the sums from `sum_row` on."""
        b, lanes, pairs = self.b, self.lanes, Pairs(self.b, self.isa)
        first_step, count = b.div(k, DEPTH), -(-depth // 2)
        with b.loop(0, self.tiles.row_blocks, self.tiles.wide) as block:
            columns = [(b.add(block.index, n), v) for n in range(self.tiles.wide) for v in range(LANES // lanes)]
            at = [(b.add(sum_row, r), b.add(b.mul(n, LANES), v * lanes)) for r in range(rows) for n, v in columns]

            def step(sums: list[Ssa], number: Index, among: int) -> list[Ssa]:
                for pair in range(among):
                    weights = [self.panel.pair(n, b.add(b.mul(number, PAIRS), pair), v) for n, v in columns]
                    for r in range(rows):
                        x = b.broadcast(b.load(self.buffers["x"], 0, tile, b.add(first_step, number), row + r, pair), lanes)
                        for i, weight in enumerate(weights, r * len(weights)):
                            sums[i] = pairs.add(sums[i], x, weight)
                return sums

            with b.loop(0, count // PAIRS, carry=[b.vload(self.sums, lanes, *each) for each in at]) as loop:
                loop.give(*step(loop.values, loop.index, PAIRS))
            sums = step(loop.results, count // PAIRS, count % PAIRS)
            for total, each in zip(sums, at, strict=True):
                b.vstore(total, self.sums, *each)


class _Weights:
    """The packed weights from a row block and a k on, where they are."""

    def __init__(self, b: Body, product: Product, isa: Isa, weight: Ssa):
        self.b, self.records = b, Records(b, product.format, isa, weight)

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        """Go on to row blocks `first_block` and up, k and up."""
        self.block, self.first = first_block, self.b.div(k, 2)

    def pair(self, n: Index, pair: Index, v: int) -> Ssa:
        return self.records.rows((self.b.add(self.block, n), self.b.add(self.first, pair), 0), v, "i32", 32)
