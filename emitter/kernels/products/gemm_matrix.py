"""Y = X W^T on a matrix unit (`writing.matrix`), exact out of pieces of bf16, or rounded to bf16 for `--numerics fast`.

An f32 is the sum of three bf16, of 8 bits each. Products of pieces are exact in f32, and those that f32 would lose are
left out: of pieces i of x and j of w, counted from 0, those with i + j < 3 are multiplied. Codes of a quantised weight are
one piece, and a group's scale is applied to its sum; bf16 weights are one, f16 two, f32 three.

As `gemm`, but that the panel holds pairs of bf16 and x comes in pieces (`weights.x_pieces`):

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          panel [pieces, depth / 32, blocks, 16 pairs, 16] = W[columns, k : k + depth]^T               stack
          for `high` tiles of `rows` tokens, for 16 * `wide` columns:
            for group in depth, of codes; once for others:
              part [high * wide] = 0                                                       the unit's registers
              for 32 k of the group, for j in pieces of w, for i in pieces of x, i + j < 3:
                part += x[i, tile, k] * panel[j, k]
              sums[tile] += scale * part + minimum * x_sum
        y [tokens, 16 * blocks] = epilogue(sums)                                                       memory

With one piece of each, everything is rounded to the nearest bf16 once, weights of codes as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as pairs_of
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.gemm import PARTS, Gemm, even_share
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.pair_panel import BLOCK_BYTES, CodePanel, PairPanel, pieces_of
from castiron.emitter.kernels.weights.x_pieces import DEPTH, EXACT, tile_rows
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, shape_of
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.matrix import ROW_BYTES, Block, Matrix

LEAST_TOKENS = 4  # fewer gain nothing
MOST_TOKENS = 128
HIGH = 2  # of eight registers four hold sums, two x and two weights
MOST_DEPTH = 512


@dataclass(frozen=True)
class GemmMatrixTiles(Tiles):
    """high x wide sums of `rows` x 16 stand in the unit's registers. `row_blocks` of 16 columns share a panel `depth` k deep,
    whole steps of 32, and `tokens` are multiplied with it. `workgroups` share the products.
    """

    rows: int
    high: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int
    workgroups: int = 12

    letters: ClassVar = "rhwbdtg"

    def stack_bytes(self, product: Product) -> int:
        sums = 4 * self.tokens * LANES * self.row_blocks
        parts = self.high * self.wide * self.rows * ROW_BYTES
        return sums + parts + self.depth // DEPTH * _step_bytes(product, self.row_blocks)

    def fit(self, product: Product) -> bool:
        return (
            self.rows == tile_rows(product.tokens)
            and self.high * self.wide + self.high + self.wide <= 8
            and self.stack_bytes(product) <= STACK_BYTES
            and self.depth % DEPTH == 0
            and self.tokens % (self.rows * self.high) == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % product.epilogue.row_blocks == 0
            and product.weight_shape[0] % self.row_blocks == 0
        )


def of_codes(product: Product) -> bool:
    """Whether the panel holds codes, with scales beside them."""
    return product.format.quantised and product.numerics == "pieces"


def _step_bytes(product: Product, row_blocks: int) -> int:
    """Of the stack for 32 k of a panel."""
    codec = product.format
    if not of_codes(product):
        return pieces_of(codec, product.numerics == "pieces") * row_blocks * BLOCK_BYTES
    return DEPTH // codec.group * row_blocks * (BLOCK_BYTES + 4 * LANES * (2 if codec.minimum else 1))


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemmMatrixTiles:
    """Two by two tiles, and as deep a panel as the stack has room for."""
    T, shared, row_blocks = product.tokens, product.epilogue.row_blocks, product.weight_shape[0]
    wide = 2 if shared == 2 or row_blocks % 2 == 0 else 1
    rows = tile_rows(T)
    high = HIGH if rows < T else 1
    token_blocks = -(-T // MOST_TOKENS)
    tokens = -(-T // (token_blocks * rows * high)) * rows * high
    room = STACK_BYTES - GemmMatrixTiles(rows, high, wide, wide, 0, tokens).stack_bytes(product)
    steps = even_share(-(-product.in_features // DEPTH), min(MOST_DEPTH // DEPTH, room // _step_bytes(product, wide)))
    items = row_blocks // wide * -(-T // tokens)
    return GemmMatrixTiles(rows, high, wide, wide, steps * DEPTH, tokens, workgroups=min(items, PARTS * threads))


def gemm_matrix(product: Product, isa: Isa, tiles: GemmMatrixTiles) -> Kernel:
    """The kernel of a product of several tokens. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _GemmMatrix(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class _GemmMatrix(Gemm):
    """Writes the body of one kernel."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: GemmMatrixTiles, buffers: Buffers):
        super().__init__(b, product, isa, tiles, buffers)
        self.parts, self.codes = b.stack(tiles.high * tiles.wide, tiles.rows, LANES), of_codes(product)
        self.matrix = Matrix(b, isa, tiles.rows, self.parts)
        self.x_at, self.panel_at = b.address(buffers["x"]), b.address(self.panel.words)
        self.x_shape = product.operands()["x"].shape

    def _panel(self) -> PairPanel | CodePanel:
        product, tiles = self.product, self.tiles
        given = (self.b, product.format, self.isa, self.buffers["weight"], tiles.depth, tiles.row_blocks)
        if of_codes(product):
            return CodePanel(*given)
        return PairPanel(*given, pieces_of(product.format, product.numerics == "pieces"))

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """sums += x[first : first + count, k : k + depth] @ panel, in tiles of which the last may have rows past x."""
        b, rows, high = self.b, self.tiles.rows, self.tiles.high
        there, before = b.ceildiv(count, rows), b.div(first, rows)
        whole = b.mul(b.div(there, high), high)
        for low, end, step in ((0, whole, high), (whole, there, 1)) if high > 1 else ((0, there, 1),):
            with b.loop(low, end, step) as tile:
                self._tiles(tile.index, b.add(before, tile.index), step, k, depth)

    def _tiles(self, at: Index, tile: Index, high: int, k: Index, depth: int) -> None:
        """The products of `high` tiles of x from number `tile` on, added to the sums of as many from number `at` on."""
        b, group = self.b, self.product.format.group
        first_step = b.div(k, DEPTH)
        with b.loop(0, self.tiles.row_blocks, self.tiles.wide) as block:
            if self.codes:
                with b.loop(0, depth // group) as step:
                    x_step = b.add(first_step, b.div(step.index, DEPTH // group))
                    parts = self._step(self._zeros(high), tile, x_step, step.index, block.index, high)
                    self._add(parts, at, tile, block.index, high, (step.index, b.add(b.div(k, group), step.index)))
            else:
                with b.loop(0, -(-depth // DEPTH), carry=self._zeros(high)) as step:
                    x_step = b.add(first_step, step.index)
                    step.give(*self._step(step.values, tile, x_step, step.index, block.index, high))
                self._add(step.results, at, tile, block.index, high)

    def _zeros(self, high: int) -> list[Block]:
        return [self.matrix.zero(i) for i in range(high * self.tiles.wide)]

    def _step(self, parts: list[Block], tile: Index, x_step: Index, step: Index, block: Index, high: int) -> list[Block]:
        """parts [high * wide] with the products of one step of the panel."""
        b, wide, matrix = self.b, self.tiles.wide, self.matrix
        (pieces, x_tiles, x_steps, *_), (_, steps, row_blocks, *_) = self.x_shape, shape_of(self.panel.words)
        parts = list(parts)
        for j in range(self.panel.count):
            at = b.add(b.mul(b.add(step, j * steps), row_blocks), block)
            weights = [matrix.weights(self.panel_at, b.mul(b.add(at, n), BLOCK_BYTES)) for n in range(wide)]
            for i in range(min(pieces, EXACT - j)):
                tiles = [b.add(tile, i * x_tiles + t) for t in range(high)]
                size = self.tiles.rows * ROW_BYTES
                x = [matrix.x(self.x_at, b.mul(b.add(b.mul(each, x_steps), x_step), size)) for each in tiles]
                for t, n in pairs_of(range(high), range(wide)):
                    parts[t * wide + n] = matrix.add(parts[t * wide + n], x[t], weights[n])
        return parts

    def _add(
        self, parts: list[Block], at: Index, tile: Index, block: Index, high: int, of: tuple[Index, Index] | None = None
    ) -> None:
        """Add parts to the sums, times the scale of group of[0] of the panel and with its minimum for x's group of[1]."""
        b, lanes, rows, wide = self.b, self.lanes, self.tiles.rows, self.tiles.wide
        for i, part in enumerate(parts):
            self.matrix.store(part, i)
        columns = [(n, c, b.add(b.mul(b.add(block, n), LANES), c)) for n in range(wide) for c in range(0, LANES, lanes)]
        minima = self.panel.minima if of else None
        scales = [b.vload(self.panel.scales, lanes, of[0], column) for *_, column in columns] if of else []
        bases = [b.vload(minima, lanes, of[0], column) for *_, column in columns] if of and minima is not None else []
        for t in range(high):
            with b.loop(0, rows) as row:
                sum_row = b.add(b.mul(b.add(at, t), rows), row.index)
                if of and bases:
                    token = b.add(b.mul(b.add(tile, t), rows), row.index)
                    token = b.min(token, self.T - 1) if self.T % rows else token
                    x_sum = b.broadcast(b.load(self.buffers["x_sums"], token, of[1]), lanes)
                for i, (n, c, column) in enumerate(columns):
                    total = b.vload(self.sums, lanes, sum_row, column)
                    added = b.vload(self.parts, lanes, t * wide + n, row.index, c)
                    total = b.fma(added, scales[i], total) if of else b.addf(total, added)
                    b.vstore(b.fma(bases[i], x_sum, total) if bases else total, self.sums, sum_row, column)
