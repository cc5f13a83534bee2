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

The loops, with the location of each buffer on the right:

    each workgroup: some items; an item is `tokens` tokens x 16 * `row_blocks` rows of W
      for item:
        sums [tokens, 16 * row_blocks] = 0                                                     stack
        for k in steps of `depth`:
          for each 16 rows of W in the item:
            prefetch their weights of the next panel
            panel [pieces, depth / 32, 16 pairs, 16] = W[rows, k : k + depth]^T                  stack
          for each `rows` tokens, for each 16 * `wide` rows of W in the panel:
            for codec group in depth:                          float W: once, for all of depth
              part [wide] = 0                                         registers of the matrix unit
              for every 32 k in the group, for pieces i of x and j of W with i + j < 3:
                part += x[i, tokens, k] * panel[j, k, rows]
              sums += scale * part + minimum * (sum of x)      float W: sums += part
        y [tokens, 16 * row_blocks] = epilogue(sums)                                          memory
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.tiles import Buffers, PanelTiles, even_share, even_tokens, panel_columns, panel_workgroups
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import MATRIX_STACK_BYTES, Body, Index
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.matrix import ROW_BYTES, Block, Matrix
from castiron.emitter.kernels.split_x import DEPTH, EXACT, tile_rows
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import (
    BLOCK_BYTES,
    EXACT_COUNTS,
    Bf16BlockPanel,
    Bf16CodePanel,
    Bf16Panel,
    Bf16SplitPanel,
)

MIN_TOKENS = 2  # for fewer tokens f32 is faster
MIN_INT8_TOKENS = 32  # for fewer tokens int8 is faster, where it is allowed
MAX_TOKENS = 128
WIDE = 4  # of the unit's eight registers, four have sums, three the pieces of x, and one has weights
PANEL_BYTES = 8 << 10  # max bytes of a panel; larger ones measured slower, because they leave L1


@dataclass(frozen=True)
class GemmMatrixTiles(PanelTiles):
    """The tile sizes of `GemmMatrix`: how it divides a matmul among the registers of a matrix unit.

    The matrix unit has `wide` accumulators at a time. Each has the results f32 [rows, 16] for `rows`
    tokens and 16 rows of the weight.

    max_stack: max bytes of stack buffers.
    For the other sizes, see `PanelTiles`.
    """

    max_stack: ClassVar[int] = MATRIX_STACK_BYTES

    def units(self, matmul: Matmul) -> tuple[int, int]:
        return self.rows, DEPTH

    def stack_bytes(self, matmul: Matmul) -> int:
        parts = self.wide * self.rows * ROW_BYTES
        return super().stack_bytes(matmul) + parts + self.depth // DEPTH * _step_bytes(matmul, self.row_blocks)

    def fit(self, matmul: Matmul) -> bool:
        block = matmul.format.block
        fits_blocks = _panel_type(matmul) is not Bf16BlockPanel or block % self.depth == 0 or self.depth % block == 0
        return self.rows == tile_rows(matmul.tokens) and self.wide <= WIDE and fits_blocks and super().fit(matmul)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        rows, row_blocks = tile_rows(matmul.tokens), _row_blocks(matmul, threads)
        wide = max(n for n in range(1, WIDE + 1) if row_blocks % n == 0)
        total = -(-matmul.in_features // DEPTH)
        if _panel_type(matmul) is Bf16BlockPanel:
            total = matmul.format.block // DEPTH  # the panel is a part of a block, or one block
        steps = even_share(total, max(1, PANEL_BYTES // _step_bytes(matmul, row_blocks)))
        tokens = even_tokens(matmul.tokens, MAX_TOKENS, rows)
        workgroups = panel_workgroups(matmul, row_blocks, tokens, threads)
        return cls(rows, wide, row_blocks, steps * DEPTH, tokens, workgroups=workgroups)


def _row_blocks(matmul: Matmul, threads: int) -> int:
    # As many as the unit has accumulators for. But all threads need work.
    blocks, unit = matmul.weight_shape[0], matmul.blocks_per_result
    fitting = [n for n in range(unit, WIDE + 1, unit) if blocks % n == 0]
    load = {n: -(-blocks // (n * threads)) * n for n in fitting}  # row blocks of the busiest thread
    return max(n for n in fitting if load[n] <= 1.03 * min(load.values()))


def _panel_type(matmul: Matmul) -> type[Any]:
    if matmul.numerics == "bf16_matrix":
        return Bf16Panel
    if not matmul.format.quantised:
        return Bf16SplitPanel
    return Bf16BlockPanel if Bf16BlockPanel.fits(matmul.format) else Bf16CodePanel


def _step_bytes(matmul: Matmul, row_blocks: int) -> int:
    # Bytes of the panel for 32 elements of in_features.
    codec, kind = matmul.format, _panel_type(matmul)
    if kind is Bf16BlockPanel:
        return row_blocks * (2 * BLOCK_BYTES + 4 * LANES)
    if kind is Bf16CodePanel:
        return DEPTH // codec.group * row_blocks * (BLOCK_BYTES + 4 * LANES * (2 if codec.minimum else 1))
    return (EXACT_COUNTS[codec.name] if kind is Bf16SplitPanel else 1) * row_blocks * BLOCK_BYTES


class GemmMatrix(Gemm):
    """Emits the body of a matmul kernel for a matrix unit, with x and weights in bf16.

    The code decodes a part of the weight to a stack buffer, the panel. Then it multiplies a tile of
    x, which is `rows` tokens, by `wide` blocks of 16 rows of the weight at a time. This gives
    `wide` accumulators f32 [rows, 16] in the matrix unit. `self.sums`, on the stack, has the sums
    of all tokens for which the code uses the panel.

    Arguments of the methods:
    parts: the `wide` accumulators.
    tile: index of the tile in x.
    at: index of the same tile in `self.sums`.
    block: index in the panel of the first of the `wide` 16-row blocks.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: GemmMatrixTiles, buffers: Buffers):
        self.panel_type = _panel_type(matmul)
        super().__init__(b, matmul, isa, tiles, buffers)
        self.parts = b.stack(tiles.wide, tiles.rows, LANES)
        # Elements of k whose sums are added at once, times a scale unless weights are floats.
        group, block = matmul.format.group, matmul.format.block
        self.span = {Bf16CodePanel: group, Bf16BlockPanel: min(block, tiles.depth)}.get(self.panel_type)
        self.matrix = Matrix(b, isa, tiles.rows, self.parts)
        self.x_at, self.panel_at = b.address(buffers["x"]), b.address(self.panel.words)
        self.x_shape = matmul.operands()["x"].shape

    def _fill(self, first_block: Index, k: Index, depth: int) -> None:
        b = self.b
        next_block, next_k = self.next_panel
        with b.loop(0, self.tiles.row_blocks) as i:
            self.panel.prefetch_block(b.add(next_block, i.index), next_k, self.tiles.depth)
            self.panel.fill_block(i.index, b.add(first_block, i.index), k, depth)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        b, rows, span = self.b, self.tiles.rows, self.span or depth
        first_step, before = b.div(k, DEPTH), b.div(first, rows)
        with b.loop(0, b.ceildiv(count, rows)) as at, b.loop(0, self.tiles.row_blocks, self.tiles.wide) as block:
            tile = b.add(before, at.index)
            with b.loop(0, depth // span) as group:
                start = b.mul(group.index, span)
                parts = [self.matrix.zero(n) for n in range(self.tiles.wide)]
                with b.loop(0, -(-span // DEPTH), carry=parts) as step:
                    at_step = b.add(b.div(start, DEPTH), step.index)
                    panel_step = group.index if self.panel_type is Bf16CodePanel else at_step
                    step.give(*self._step(step.values, tile, b.add(first_step, at_step), panel_step, block.index))
                of = (group.index, b.div(b.add(k, start), span)) if self.span else None
                self._add(step.results, at.index, tile, block.index, of)

    def _step(self, parts: list[Block], tile: Index, x_step: Index, step: Index, block: Index) -> list[Block]:
        b, matrix = self.b, self.matrix
        (pieces, x_tiles, x_steps, *_), (_, steps, row_blocks, *_) = self.x_shape, self.panel.words.type.shape
        tiles = [b.add(b.mul(b.add(tile, i * x_tiles), x_steps), x_step) for i in range(pieces)]
        x = [matrix.x(self.x_at, b.mul(each, self.tiles.rows * ROW_BYTES)) for each in tiles]
        parts = list(parts)
        for j in range(self.panel.count):
            at = b.add(b.mul(b.add(step, j * steps), row_blocks), block)
            for n in range(len(parts)):
                weights = matrix.weights(self.panel_at, b.mul(b.add(at, n), BLOCK_BYTES))
                for piece in x[: EXACT - j]:
                    parts[n] = matrix.add(parts[n], piece, weights)
        return parts

    def _add(self, parts: list[Block], at: Index, tile: Index, block: Index, of: tuple[Index, Index] | None) -> None:
        """Emit code that adds the matrix unit's accumulators to `self.sums` on the stack.

        If `of` is None, the code adds `parts` without a factor. Otherwise `parts` has dot products
        of x and codes over one codec group (elements that share a scale), and the code adds

            scale * parts + minimum * (sum of x over the group)

        parts, at, tile, block: see the class.
        of: the codec group, as (its index in the panel, its index in a row of x).
        """
        b, lanes, rows, wide = self.b, self.lanes, self.tiles.rows, self.tiles.wide
        for i, part in enumerate(parts):
            self.matrix.store(part, i)
        columns = [(n, c, b.add(b.mul(b.add(block, n), LANES), c)) for n in range(wide) for c in range(0, LANES, lanes)]
        minima = self.panel.minima if of else None
        scales = [b.vload(self.panel.scales, lanes, of[0], column) for *_, column in columns] if of else []
        bases = [b.vload(minima, lanes, of[0], column) for *_, column in columns] if of and minima is not None else []
        with b.loop(0, rows) as row:
            sum_row = b.add(b.mul(at, rows), row.index)
            if of and bases:
                token = b.add(b.mul(tile, rows), row.index)
                token = b.min(token, self.T - 1) if self.T % rows else token
                x_sum = b.broadcast(b.load(self.buffers["x_sums"], token, of[1]), lanes)
            for i, (n, c, column) in enumerate(columns):
                total = b.vload(self.sums, lanes, sum_row, column)
                added = b.vload(self.parts, lanes, n, row.index, c)
                total = b.fma(added, scales[i], total) if of else b.addf(total, added)
                b.vstore(b.fma(bases[i], x_sum, total) if bases else total, self.sums, sum_row, column)
