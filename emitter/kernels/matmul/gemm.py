"""Compute Y = X W^T for a chunk of tokens; weights are decoded to f32 once for many tokens.

A workgroup takes a few row blocks of the weight and a block of tokens. It decodes a panel [depth,
columns] of the weight onto the stack, multiplies tiles of tokens with it in registers, adds these
to sums [tokens, columns] on the stack, and goes on to the next panel along k. (Goto and van de
Geijn 2008, with the packing of B replaced by decoding.)

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

Rows of x from `length` on are computed only as padding of the last tile, and their results are
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from castiron.emitter.kernels.matmul.tiles import (
    Buffers,
    Finish,
    PanelTiles,
    even_share,
    even_tokens,
    panel_columns,
    panel_workgroups,
)
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import outer
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Panel, units

MAX_DEPTH = 288  # a panel of 18 KB for 16 columns; larger ones would evict x from the L1 cache
MAX_TOKENS = 132  # more tokens would evict x from the L2 cache between blocks of columns


@dataclass(frozen=True)
class GemmTiles(PanelTiles):
    """Tiles of `gemm`; unroll: k in one iteration."""

    unroll: int = 8

    letters: ClassVar = PanelTiles.letters + "u"

    def depth_unit(self, matmul: Matmul) -> int:
        return units(matmul.codec)

    def stack_bytes(self, matmul: Matmul) -> int:
        return 4 * LANES * self.row_blocks * (self.depth + self.tokens)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        T = matmul.tokens
        wide, row_blocks = panel_columns(matmul, isa.roomy)
        max_rows = 12 if isa.roomy else 6
        # A tile of fewer than 4 rows is as slow as one of 4 rows, because of the latency of fma.
        costs = {rows: T // rows * rows + max(T % rows, 4 if T % rows else 0) for rows in range(4, max_rows + 1)}
        rows = max(rows for rows, cost in costs.items() if cost <= 1.03 * min(costs.values()))
        budget = STACK_BYTES // (4 * LANES * row_blocks)
        tokens = even_tokens(T, min(MAX_TOKENS, budget * 3 // 5), rows)
        size = units(matmul.codec)
        depth = even_share(-(-matmul.in_features // size), min(MAX_DEPTH, budget - tokens) // size) * size
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=panel_workgroups(matmul, row_blocks, tokens, threads))


class Gemm:
    """A writer of the body of a `gemm` kernel."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: Any, buffers: Buffers):
        self.b, self.matmul, self.isa, self.tiles, self.buffers = b, matmul, isa, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, matmul.tokens, matmul.in_features
        self.row_blocks, self.columns = matmul.weight_shape[0], LANES * tiles.row_blocks
        self.full_rows = tiles.rows  # tokens multiplied at a time
        self.panel = self._panel()
        self.sums = b.stack(tiles.tokens, self.columns)
        self.finish = Finish(b, matmul, self.lanes, buffers, self.sums)

    def _panel(self) -> Any:
        """Return the panel, whose `fill(first_block, k, depth)` decodes weights."""
        return Panel(self.b, self.matmul.format, self.isa, self.buffers["weight"], self.tiles.depth, self.tiles.row_blocks)

    def write(self) -> None:
        b, tiles = self.b, self.tiles
        groups = self.row_blocks // tiles.row_blocks
        items = groups * -(-self.T // tiles.tokens)
        low, high = b.share(items, b.workgroup(), tiles.workgroups)
        with b.loop(low, high) as item:
            self._item(b.mul(b.rem(item.index, groups), tiles.row_blocks), b.mul(b.div(item.index, groups), tiles.tokens))

    def _item(self, first_block: Index, first: Index) -> None:
        """Compute all results of `tiles.row_blocks` row blocks for `tiles.tokens` tokens."""
        b, tiles = self.b, self.tiles
        last = b.min(b.add(first, tiles.tokens), self.T)
        end = b.real(self.buffers.get("length"), first, last)
        with b.when(b.less(first, end)):
            self._dots(first_block, first, end)
        self.finish.store(first_block, tiles.row_blocks, first, end, last)

    def _dots(self, first_block: Index, first: Index, end: Index) -> None:
        """Compute the sums of tokens `first` to `end`, rounded up to a complete tile."""
        b, depth = self.b, self.tiles.depth
        full = self.in_features // depth * depth
        count = b.sub(end, first)
        self._zero(count)
        with b.loop(0, full, depth) as k:
            self.panel.fill(first_block, k.index, depth)
            self._multiply(first, count, k.index, depth)
        if full < self.in_features:
            self.panel.fill(first_block, full, self.in_features - full)
            self._multiply(first, count, full, self.in_features - full)

    def _zero(self, count: Index) -> None:
        b, rows = self.b, self.full_rows
        with b.loop(0, b.mul(b.ceildiv(count, rows), rows)) as t:
            for column in range(0, self.columns, self.lanes):
                b.vstore(b.splat(0.0, self.lanes), self.sums, t.index, column)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """Add x[first : first + count, k : k + depth] @ panel to the sums; the last tile may be smaller."""
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
        """Return a function from i to the row of x of token `token` + i, for i < rows."""
        return lambda r: self.b.add(token, r)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """Add x[token : token + rows, k : k + depth] @ panel to sums[row : row + rows]."""
        b, lanes = self.b, self.lanes
        width, x_row = LANES * self.tiles.wide, self._x_rows(token, rows)
        with b.loop(0, self.columns, width) as column:
            at = [(b.add(row, r), b.add(column.index, c)) for r in range(rows) for c in range(0, width, lanes)]

            def step(j: Index, sums: Sequence[Ssa]) -> list[Ssa]:
                weights = [self.panel.row(j, b.add(column.index, c)) for c in range(0, width, lanes)]
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), b.add(k, j)), lanes) for r in range(rows))
                return outer(b, x, weights, sums)

            sums = b.unrolled(depth, self.tiles.unroll, [b.vload(self.sums, lanes, *sum_at) for sum_at in at], step)
            for total, sum_at in zip(sums, at, strict=True):
                b.vstore(total, self.sums, *sum_at)
