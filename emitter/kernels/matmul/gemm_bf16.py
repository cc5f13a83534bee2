"""Compute Y = X W^T with x and weights rounded to bf16, with instructions for pairs of bf16.

The kernel is for 2 or more tokens. Its loops are those of `gemm`, with two differences:
- The elements of x and of weights are in i32 words; each word has two bf16 that are neighbours
  along k. So an instruction adds two products at a time:
  X[token, k] * W[column, k] + X[token, k + 1] * W[column, k + 1].
- bf16 weights are read directly from the packed weight. Other weights are decoded into a buffer
  first, the panel. For both, the kernel multiplies all tokens of a block by `depth` elements along
  k before it goes on to the next elements, so that these weights stay in the L1 cache.
"""

from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.output import Buffers
from castiron.emitter.kernels.matmul.schedule import GemmBf16Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.bf16_pairs import Pairs
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.split_x import DEPTH, PAIRS, tile_rows
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import BasePanel, Bf16Panel


class _Weights(BasePanel):
    """A class with the methods of a panel (a buffer of decoded weights) for bf16 weights.

    It has no buffer, because the kernel can read bf16 weights directly from the packed weight.
    """

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        self.block, self.first = first_block, self.b.div(k, 2)

    def pair(self, n: Index, step: Index, pair: int, v: int) -> Ssa:
        b = self.b
        return self.records.rows((b.add(self.block, n), b.add(self.first, b.add(b.mul(step, PAIRS), pair)), 0), v, "i32", 32)


class _Panel(Bf16Panel):
    def pair(self, n: Index, step: Index, pair: int, v: int) -> Ssa:
        return self.b.vload(self.words, self.lanes, 0, step, n, pair, v * self.lanes)


class GemmBf16(Gemm):
    """A writer of the body of a matmul kernel for tokens and weights rounded to bf16."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: GemmBf16Tiles, buffers: Buffers):
        self.panel_type = _Weights if matmul.codec == "bf16" else _Panel
        super().__init__(b, matmul, isa, tiles, buffers)
        self.full_rows = tile_rows(matmul.tokens)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        b, tile = self.b, self.full_rows
        with b.loop(0, b.ceildiv(count, tile)) as i:
            self._prefetch_next(i.index, -(-self.tiles.tokens // tile))
            for row in range(0, tile, self.tiles.rows):
                rows = min(self.tiles.rows, tile - row)
                self._rows(b.add(b.mul(i.index, tile), row), b.add(b.div(first, tile), i.index), row, rows, k, depth)

    def _rows(self, sum_row: Index, tile: Index, row: int, rows: int, k: Index, depth: int) -> None:
        # The rows of x are row .. row + rows - 1 of a tile of `split_x`; sum_row: row of `self.sums` for the first one.
        b, lanes, pairs = self.b, self.lanes, Pairs(self.b, self.isa)
        first_step, count = b.div(k, DEPTH), -(-depth // 2)
        with b.loop(0, self.tiles.row_blocks, self.tiles.wide) as block:
            columns = [(b.add(block.index, n), v) for n in range(self.tiles.wide) for v in range(LANES // lanes)]
            at = [(b.add(sum_row, r), b.add(b.mul(n, LANES), v * lanes)) for r in range(rows) for n, v in columns]

            def step(sums: list[Ssa], number: Index, among: int) -> list[Ssa]:
                for pair in range(among):
                    weights = [self.panel.pair(n, number, pair, v) for n, v in columns]
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
