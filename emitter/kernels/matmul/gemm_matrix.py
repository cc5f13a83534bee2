"""Compute Y = X W^T on a matrix unit such as AMX, which multiplies bf16 and adds in f32.

As in `gemm`, a workgroup decodes a part of W into a stack buffer, which is called a panel, and
multiplies many tokens by it. Here x and the panel have bf16, two in each i32 (`split_x`).

For results as exact as with f32, each element of x and W is split into bf16 pieces whose sum is the
element: three pieces for an f32, two for an f16, one for a bf16 or for the code of a quantised
weight. The kernel multiplies piece i of x by piece j of W if i + j < 3. The other products are
below the precision of f32.

Quantised W: a weight is scale * code + minimum. A codec group, which is a few consecutive elements
of a row of W, has one scale and one minimum. The panel stores the codes only. The kernel sums
x * code over a codec group, multiplies the sum by the scale, and adds minimum * (sum of x over the
group).

Two exceptions:

- Formats without minima whose codec blocks have several groups, if the groups have 16 elements (as
  Q6_K) or no scales of their own: weight = d * (group scale * code), with one d for each codec
  block. The panel then stores group scale * code as two pieces, or the code as one piece if groups
  have no scales. So the loop "for codec group" below runs over codec blocks, or over the part of a
  block that is in the panel, with d as the scale.
- With `--numerics fast`, x and the decoded weights are rounded to one bf16 each. The panel stores
  these weights, and the loops are those of a float W.

A small panel (`has_small_panel`) has 32 elements of few rows. While the kernel decodes it, it
prefetches the weights of the next panel, and the matrix unit keeps x in its registers.

The loops, with the location of each buffer on the right:

    each workgroup: some items; an item is `tokens` tokens x 16 * `row_blocks` rows of W
      for item:
        sums [tokens, 16 * row_blocks] = 0                                                     stack
        for k in steps of `depth`:
          panel [pieces, depth / 32, row_blocks, 16 pairs, 16] = W[rows of the item, k : k + depth]^T  stack
          for each `high` * `rows` tokens, for each 16 * `wide` rows of W in the panel:
            prefetch some of the weights of the next panel
            for codec group in depth:                          float W: once, for all of depth
              part [high * wide] = 0                                  registers of the matrix unit
              for every 32 k in the group, for pieces i of x and j of W with i + j < 3:
                part += x[i, tokens, k] * panel[j, k, rows]
              sums += scale * part + minimum * (sum of x)      float W: sums += part
        y [tokens, 16 * row_blocks] = epilogue(sums)                                          memory
"""

from itertools import product as pairs_of

from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.output import Buffers
from castiron.emitter.kernels.matmul.schedule import GemmMatrixTiles, has_code_panel, matrix_panel_type
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.matrix import ROW_BYTES, Block, Matrix
from castiron.emitter.kernels.split_x import DEPTH, EXACT
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import (
    BLOCK_BYTES,
    Bf16BlockPanel,
    Bf16CodePanel,
)


class GemmMatrix(Gemm):
    """Emits the body of a matmul kernel for a matrix unit, with x and weights in bf16.

    parts: the high * wide accumulators f32 [rows, 16]. tile: the first of `high` tiles in x.
    at: the same in `self.sums`. block: the first of `wide` row blocks in the panel.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: GemmMatrixTiles, buffers: Buffers):
        self.panel_type = matrix_panel_type(matmul)
        super().__init__(b, matmul, isa, tiles, buffers)
        self.parts = b.stack(tiles.high * tiles.wide, tiles.rows, LANES)
        self.is_small = has_code_panel(matmul) and tiles.row_blocks == tiles.wide
        # Elements of k whose sums are added at once, times a scale unless weights are floats.
        group, block = matmul.format.group, matmul.format.block
        self.span = {Bf16CodePanel: group, Bf16BlockPanel: min(block, tiles.depth)}.get(self.panel_type)
        self.matrix = Matrix(b, isa, tiles.rows, self.parts)
        self.x_at, self.panel_at = b.address(buffers["x"]), b.address(self.panel.words)
        self.x_shape = matmul.operands()["x"].shape

    def _fill(self, first_block: Index, k: Index, depth: int) -> None:
        if not self.is_small:
            super()._fill(first_block, k, depth)
            return
        # So small a panel is multiplied in too few steps to prefetch all of the next one between them.
        b = self.b
        self._set_next_panel(first_block, b.add(k, depth))
        next_block, next_k = self.next_panel
        with b.loop(0, self.tiles.row_blocks) as i:
            self.panel.prefetch_block(b.add(next_block, i.index), next_k, self.tiles.depth)
            self.panel.fill_block(i.index, b.add(first_block, i.index), k, depth)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        b, rows, high = self.b, self.tiles.rows, self.tiles.high
        there, before = b.ceildiv(count, rows), b.div(first, rows)
        full = b.mul(b.div(there, high), high)
        for low, end, step in ((0, full, high), (full, there, 1)) if high > 1 else ((0, there, 1),):
            with b.loop(low, end, step) as tile:
                self._tiles(tile.index, b.add(before, tile.index), step, k, depth)

    def _tiles(self, at: Index, tile: Index, high: int, k: Index, depth: int) -> None:
        b = self.b
        first_step = b.div(k, DEPTH)
        row_blocks, wide = self.tiles.row_blocks, self.tiles.wide
        with b.loop(0, row_blocks, wide) as block:
            if not self.is_small:
                part = b.div(b.add(b.mul(b.div(at, self.tiles.high), row_blocks), block.index), wide)
                self._prefetch_next(part, self.tiles.tokens // (self.tiles.rows * self.tiles.high) * (row_blocks // wide))
            span = self.span or depth
            with b.loop(0, depth // span) as group:
                first = b.mul(group.index, span)
                with b.loop(0, -(-span // DEPTH), carry=self._zeros(high)) as step:
                    at_step = b.add(b.div(first, DEPTH), step.index)
                    panel_step = group.index if self.panel_type is Bf16CodePanel else at_step
                    step.give(*self._step(step.values, tile, b.add(first_step, at_step), panel_step, block.index, high))
                of = (group.index, b.div(b.add(k, first), span)) if self.span else None
                self._add(step.results, at, tile, block.index, high, of)

    def _zeros(self, high: int) -> list[Block]:
        return [self.matrix.zero(i) for i in range(high * self.tiles.wide)]

    def _step(self, parts: list[Block], tile: Index, x_step: Index, step: Index, block: Index, high: int) -> list[Block]:
        b, wide, matrix = self.b, self.tiles.wide, self.matrix
        (pieces, x_tiles, x_steps, *_), (_, steps, row_blocks, *_) = self.x_shape, self.panel.words.type.shape
        parts, shared = list(parts), []

        def x_of(piece: int) -> list[Block]:
            # The `high` blocks of x. If there is one, the registers of the unit can keep it for all weights.
            tiles = [b.add(tile, piece * x_tiles + t) for t in range(high)]
            size = self.tiles.rows * ROW_BYTES
            return [matrix.x(self.x_at, b.mul(b.add(b.mul(each, x_steps), x_step), size)) for each in tiles]

        if high == 1:
            shared = [x_of(i) for i in range(pieces)]
        for j in range(self.panel.count):
            at = b.add(b.mul(b.add(step, j * steps), row_blocks), block)
            for columns in [[n] for n in range(wide)] if high == 1 else [range(wide)]:
                weights = [matrix.weights(self.panel_at, b.mul(b.add(at, n), BLOCK_BYTES)) for n in columns]
                for i in range(min(pieces, EXACT - j)):
                    x = shared[i] if shared else x_of(i)
                    for (t, each), (n, weight) in pairs_of(enumerate(x), zip(columns, weights, strict=True)):
                        parts[t * wide + n] = matrix.add(parts[t * wide + n], each, weight)
        return parts

    def _add(
        self, parts: list[Block], at: Index, tile: Index, block: Index, high: int, of: tuple[Index, Index] | None = None
    ) -> None:
        """Emit code that adds the matrix unit's accumulators to `self.sums` on the stack."""
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
