"""Compute Y = X W^T for many tokens and quantised weights, in the order of sums of `gemv`.

Each token gets the same bits as in a call with any other number of tokens.

As `gemm`, but the panel on the stack has codes, not weights. Each group of a tile is summed in
registers, multiplied by its scale and added to the sums, which costs a load, a store and one or two
fma for every `group` fma.

          for tile of `rows` tokens:
            for 16 * `wide` columns:
              for group in depth:
                acc [rows, 16 * wide] = 0, or x_sums[token, group] for codes with an offset           registers
                for j in group: acc += x[token, k + j] * codes[j]   x broadcast from memory
                sums[tile] += d * scale * acc + m * minimum * x_sums[token, group]                       stack

`gemv` multiplies (code * 2^n) by (x / 2^n), and this kernel code by x. Both give the same bits
unless |x| is below 1e-30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from castiron.emitter.kernels.matmul.gemm import MAX_DEPTH, Gemm, GemmTiles
from castiron.emitter.kernels.matmul.tiles import even_share
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import outer
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import CodePanel


@dataclass(frozen=True)
class GemmCanonicalTiles(GemmTiles):
    """Tiles of `gemm` with a scale and a minimum for each group of the panel."""

    def stack_bytes(self, matmul: Matmul) -> int:
        return super().stack_bytes(matmul) + 4 * LANES * self.row_blocks * 2 * (self.depth // matmul.format.group)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        tiles, size = super().default(matmul, isa, threads), matmul.format.group
        fitting = STACK_BYTES // (4 * LANES * tiles.row_blocks) - tiles.tokens
        limit = min(MAX_DEPTH, fitting * size // (size + 2)) // size
        return replace(tiles, depth=even_share(-(-matmul.in_features // size), limit) * size)


class GemmCanonical(Gemm):
    """A writer of the body of a `gemm_canonical` kernel."""

    panel: CodePanel

    def _panel(self) -> CodePanel:
        weight, tiles = self.buffers["weight"], self.tiles
        return CodePanel(self.b, self.matmul.format, self.isa, weight, tiles.depth, tiles.row_blocks)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """Add x[token : token + rows, k : k + depth] @ panel to sums[row : row + rows]."""
        b, lanes, group = self.b, self.lanes, self.panel.codec.group
        width, x_row, x_sums = LANES * self.tiles.wide, self._x_rows(token, rows), self.buffers.get("x_sums")
        with b.loop(0, self.columns, width) as column, b.loop(0, depth // group) as g:
            columns = [b.add(column.index, c) for c in range(0, width, lanes)]
            number = b.add(b.div(k, group), g.index)
            row_sums = [b.broadcast(b.load(x_sums, x_row(r), number), lanes) for r in range(rows)] if x_sums else []
            start = [b.splat(0.0, lanes)] * (rows * len(columns))
            if self.panel.codec.offset:
                start = [total for total in row_sums for _ in columns]
            dots = self._group(x_row, rows, k, b.mul(g.index, group), columns, start)
            scales = [b.vload(self.panel.scales, lanes, g.index, c) for c in columns]
            minima = [b.vload(self.panel.minima, lanes, g.index, c) for c in columns] if self.panel.minima else []
            for r in range(rows):
                for i, c in enumerate(columns):
                    at = b.add(row, r), c
                    total = b.fma(dots[r * len(columns) + i], scales[i], b.vload(self.sums, lanes, *at))
                    b.vstore(b.fma(minima[i], row_sums[r], total) if minima else total, self.sums, *at)

    def _group(self, x_row, rows: int, k: Index, first: Index, columns: list[Index], sums: list[Ssa]) -> Sequence[Ssa]:
        """Return sums plus x times the group of the panel that begins at `first`."""
        b, lanes, size = self.b, self.lanes, self.panel.codec.group

        def step(i: Index, sums: Sequence[Ssa]) -> list[Ssa]:
            j = b.add(first, i)
            codes = [b.vload(self.panel.codes, lanes, j, c) for c in columns]
            x = (b.broadcast(b.load(self.buffers["x"], x_row(r), b.add(k, j)), lanes) for r in range(rows))
            return outer(b, x, codes, sums)

        return b.unrolled(size, min(self.tiles.unroll, size), sums, step)
