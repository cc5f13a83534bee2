"""Y = X W^T for several tokens and bf16 weights, x rounded to bf16: sums of products of pairs (`writing.pairs`).

As `gemm`, but that the panel holds the weights as they are, two k in an i32, and x comes alike (`weights.x_pieces`):

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          panel [depth / 32, blocks, 16 pairs, 16] = W[columns, k : k + depth]^T                       stack
          for tile of up to 16 tokens, `rows` of them at a time, for 16 * `wide` columns:
            acc [rows, 16 * wide] = sums[tile]                                                         registers
            for pair of k in depth:                                   16 at a time
              acc += pairs of x[tile, k] * panel[k]                   x broadcast from memory
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
from castiron.emitter.kernels.weights.pair_panel import BLOCK_BYTES, PAIRS, PairPanel
from castiron.emitter.kernels.weights.x_pieces import DEPTH, tile_rows
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.pairs import Pairs

MOST_TOKENS = 128
MOST_DEPTH = 512


@dataclass(frozen=True)
class GemmPairsTiles(Tiles):
    """rows x (16 * wide) sums stand in registers. `row_blocks` of 16 columns share a panel `depth` k deep, whole steps of 32,
    and `tokens`, whole tiles of x, are multiplied with it. `workgroups` share the products.
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
        return self.row_blocks * (4 * self.tokens * LANES + self.depth // DEPTH * BLOCK_BYTES)

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
    room = STACK_BYTES // together - 4 * tokens * LANES
    steps = even_share(-(-product.in_features // DEPTH), min(MOST_DEPTH // DEPTH, room // BLOCK_BYTES))
    items = row_blocks // together * -(-T // tokens)
    rows = -(-tile // -(-tile // most))
    return GemmPairsTiles(rows, wide, together, steps * DEPTH, tokens, workgroups=min(items, PARTS * threads))


def gemm_pairs(product: Product, isa: Isa, tiles: GemmPairsTiles) -> Kernel:
    """The kernel of a product of several tokens with bf16 weights. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _GemmPairs(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class _GemmPairs(Gemm):
    """Writes the body of one kernel."""

    def _panel(self) -> PairPanel:
        self.pairs = Pairs(self.b, self.isa)
        product, tiles = self.product, self.tiles
        return PairPanel(self.b, product.format, self.isa, self.buffers["weight"], tiles.depth, tiles.row_blocks, 1)

    def _zero(self, count: Index) -> None:
        super()._zero(self.b.mul(self.b.ceildiv(count, tile_rows(self.T)), tile_rows(self.T)))

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """sums += x[first : first + count, k : k + depth] @ panel, in whole tiles of x."""
        b, tile = self.b, tile_rows(self.T)
        with b.loop(0, b.ceildiv(count, tile)) as i:
            for row in range(0, tile, self.tiles.rows):
                rows = min(self.tiles.rows, tile - row)
                self._tile(b.add(b.mul(i.index, tile), row), b.add(b.div(first, tile), i.index), row, rows, k, depth)

    def _tile(self, sum_row: Index, tile: Index, row: int, rows: int, k: Index, depth: int) -> None:  # type: ignore[override]
        """The products of rows `row` and up of a tile of x, added to the sums from `sum_row` on."""
        b, lanes, words = self.b, self.lanes, self.panel.words
        first_step = b.div(k, DEPTH)
        with b.loop(0, self.tiles.row_blocks, self.tiles.wide) as block:
            columns = [(b.add(block.index, n), c) for n in range(self.tiles.wide) for c in range(0, LANES, lanes)]
            at = [(b.add(sum_row, r), b.add(b.mul(n, LANES), c)) for r in range(rows) for n, c in columns]
            with b.loop(0, -(-depth // DEPTH), carry=[b.vload(self.sums, lanes, *each) for each in at]) as step:
                sums, x_step = step.values, b.add(first_step, step.index)
                for pair in range(PAIRS):
                    weights = [b.vload(words, lanes, 0, step.index, n, pair, c) for n, c in columns]
                    for r in range(rows):
                        x = b.load(self.buffers["x"], 0, tile, x_step, row + r, pair)
                        for i, weight in enumerate(weights, r * len(weights)):
                            sums[i] = self.pairs.add(sums[i], b.broadcast(x, lanes), weight)
                step.give(*sums)
            for total, each in zip(step.results, at, strict=True):
                b.vstore(total, self.sums, *each)
