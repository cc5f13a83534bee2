"""Compute Y = X W^T for a chunk of tokens; weights are decoded to f32 once for many tokens.

This is the GEMM of Goto and van de Geijn 2008, with decoding in place of packing B. The decoded
part of the weight is called a panel. `tokens`, `rows`, `row_blocks`, `wide` and `depth` are tile
sizes (`PanelTiles`). The right column names the memory that the line writes:

    each workgroup: a few items; an item is `tokens` tokens and 16 * `row_blocks` columns of Y
      for each item (the columns of Y are rows of W):
        sums [tokens, columns] = 0                                                          stack
        for k in steps of `depth`:
          panel [depth, columns] = decoded W[columns, k : k + depth]^T                      stack
          sums += X[tokens, k : k + depth] @ panel                                          stack
            in tiles of `rows` tokens and 16 * `wide` columns, whose sums are in registers
            meanwhile, prefetch the part of W that is decoded next
        Y[tokens, columns] = epilogue(sums)                                                memory

Rows of Y from `length` on are padding and become zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

from castiron.emitter.kernels.matmul.output import Buffers, Epilogue
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import outer
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Panel


class Gemm:
    """A writer of the body of a matmul kernel for many tokens; panel_type: from `weights.panel`."""

    panel_type: type[Any] = Panel

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: Any, buffers: Buffers):
        self.b, self.matmul, self.isa, self.tiles, self.buffers = b, matmul, isa, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, matmul.tokens, matmul.in_features
        self.row_blocks, self.columns = matmul.weight_shape[0], LANES * tiles.row_blocks
        self.full_rows = tiles.rows  # tokens multiplied at a time
        self.panel = self.panel_type(b, matmul.format, isa, buffers["weight"], tiles.depth, tiles.row_blocks)
        self.sums = b.stack(tiles.tokens, self.columns)
        self.epilogue = Epilogue(b, matmul, self.lanes, buffers, self.sums)

    def write(self) -> None:
        b, tiles = self.b, self.tiles
        groups = self.row_blocks // tiles.row_blocks
        items = groups * -(-self.T // tiles.tokens)
        low, high = b.share(items, b.workgroup(), tiles.workgroups)
        with b.loop(low, high) as item:
            first_block = b.mul(b.rem(item.index, groups), tiles.row_blocks)
            first = b.mul(b.div(item.index, groups), tiles.tokens)
            last = b.min(b.add(first, tiles.tokens), self.T)
            end = b.real(self.buffers.get("length"), first, last)
            with b.when(b.less(first, end)):
                self._dots(first_block, first, end)
            self.epilogue.store(first_block, tiles.row_blocks, first, end, last)

    def _dots(self, first_block: Index, first: Index, end: Index) -> None:
        """Emit code that stores the dot products of tokens and weight rows in `self.sums`."""
        b, depth, rows = self.b, self.tiles.depth, self.full_rows
        full = self.in_features // depth * depth
        count = b.sub(end, first)
        with b.loop(0, b.mul(b.ceildiv(count, rows), rows)) as t:
            for column in range(0, self.columns, self.lanes):
                b.vstore(b.splat(0.0, self.lanes), self.sums, t.index, column)
        with b.loop(0, full, depth) as k:
            self._fill(first_block, k.index, depth)
            self._set_next_panel(first_block, b.add(k.index, depth))
            self._multiply(first, count, k.index, depth)
        if full < self.in_features:
            self._fill(first_block, full, self.in_features - full)
            self._set_next_panel(first_block, self.in_features)
            self._multiply(first, count, full, self.in_features - full)

    def _set_next_panel(self, first_block: Index, k: Index) -> None:
        # The next panel begins at element k of the same rows, or at the first element of the next rows.
        b = self.b
        wraps = b.div(k, self.in_features)
        self.next_panel = b.add(first_block, b.mul(wraps, self.tiles.row_blocks)), b.sub(k, b.mul(wraps, self.in_features))

    def _fill(self, first_block: Index, k: Index, depth: int) -> None:
        self.panel.fill(first_block, k, depth)

    def _prefetch_next(self, part: Index, parts: int) -> None:
        """Emit prefetches of a part of the weights that the kernel decodes next."""
        self.panel.prefetch(*self.next_panel, self.tiles.depth, part, parts)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        # self.sums[: count] += x[first : first + count, k : k + depth] @ panel
        b, rows = self.b, self.tiles.rows
        rest = self.T % rows  # blocks of tokens are multiples of `rows`, so only the last one has a smaller tile
        start = self.T - rest
        needed = b.mul(b.ceildiv(count, rows), rows)
        with b.loop(0, b.min(needed, b.sub(start, first)), rows) as t:
            self._prefetch_next(b.div(t.index, rows), -(-self.tiles.tokens // rows))
            self._tile(t.index, b.add(first, t.index), rows, k, depth)
        if rest:
            with b.when(b.less(start, b.add(first, count))):
                self._tile(b.sub(start, first), start, rest, k, depth)

    def _x_rows(self, token: Index, rows: int) -> Callable[[int], Index]:
        # The result maps i < rows to the row of x for token `token` + i.
        return lambda r: self.b.add(token, r)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        # self.sums[row : row + rows] += x[token : token + rows, k : k + depth] @ panel
        b, lanes = self.b, self.lanes
        width, x_row = LANES * self.tiles.wide, self._x_rows(token, rows)
        with b.loop(0, self.columns, width) as column:
            at = [(b.add(row, r), b.add(column.index, c)) for r in range(rows) for c in range(0, width, lanes)]

            def step(j: Index, sums: Sequence[Ssa]) -> list[Ssa]:
                weights = [b.vload(self.panel.values, lanes, j, b.add(column.index, c)) for c in range(0, width, lanes)]
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), b.add(k, j)), lanes) for r in range(rows))
                return outer(b, x, weights, sums)

            sums = b.unrolled(depth, self.tiles.unroll, [b.vload(self.sums, lanes, *sum_at) for sum_at in at], step)
            for total, sum_at in zip(sums, at, strict=True):
                b.vstore(total, self.sums, *sum_at)
