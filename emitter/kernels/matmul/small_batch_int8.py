"""Compute Y = X W^T for a few tokens with x quantised to int8 (`round_x`).

Codes are unpacked in registers and stay there while all tokens of a tile are multiplied.

    each workgroup: a share of the sets of 16-row blocks
      for set in share, for vector of outputs in set, for tile of `rows` tokens:
        acc [rows] = 0                                                                                 registers
        for 32 k of all records:
          prefetch the records of the next block
          dot [rows] = 0                                                                               registers, s32
          for four k of the 32:                                          unrolled
            dot += (word & mask) * x[token]                               x broadcast from memory
          acc += scale * (x_scale * dot) + base * x_sum
        sums[tile, vector] = acc                                                                       stack
      y [T, 16 * blocks] = epilogue(sums)                                                              memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.matmul.gemm_int8 import Step
from castiron.emitter.kernels.matmul.small_batch import PARTS
from castiron.emitter.kernels.matmul.tiles import Buffers, Finish, Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records

MAX_ROWS = 8  # maximum rows of a tile; more sums spill registers


@dataclass(frozen=True)
class SmallBatchInt8Tiles(Tiles):
    """Tiles of `small_batch_int8`; rows: tokens whose sums, for one vector, are in registers."""

    rows: int

    letters: ClassVar = "gr"

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> SmallBatchInt8Tiles:
        rows = -(-matmul.tokens // -(-matmul.tokens // MAX_ROWS))
        sets = matmul.weight_shape[0] // matmul.epilogue.row_blocks
        return cls(rows, workgroups=min(sets, PARTS * threads))

    def fit(self, matmul: Matmul) -> bool:
        return self.rows <= matmul.tokens


class SmallBatchInt8:
    """A writer of the body of a `small_batch_int8` kernel."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: SmallBatchInt8Tiles, buffers: Buffers):
        self.b, self.codec, self.isa, self.tiles, self.buffers = b, matmul.format, isa, tiles, buffers
        self.T, self.set = matmul.tokens, matmul.epilogue.row_blocks
        self.row_blocks, self.count, _ = matmul.weight_shape
        self.records, self.step = Records(b, self.codec, isa, buffers["weight"]), Step(b, matmul, isa, buffers)
        self.sums = b.stack(self.T, self.set * LANES)
        self.finish = Finish(b, matmul, isa.lanes, buffers, self.sums)

    def write(self) -> None:
        b, T, rows, vectors = self.b, self.T, self.tiles.rows, self.records.vectors
        end, full = b.real(self.buffers.get("length"), 0, T), T // rows * rows
        low, high = b.share(self.row_blocks // self.set, b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high) as item:
            first = b.mul(item.index, self.set)
            with b.loop(0, self.set * vectors) as side:
                at = b.add(first, b.div(side.index, vectors)), b.rem(side.index, vectors)
                column = b.mul(side.index, self.isa.lanes)
                with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), full), rows) as t:
                    self._tile(*at, column, t.index, rows)
                if full < T:
                    with b.when(b.less(full, end)):
                        self._tile(*at, column, full, T - full)
            self.finish.store(first, self.set, 0, end, T)

    def _tile(self, block: Index, v: Index, column: Index, token: Index, rows: int) -> None:
        """Compute self.sums[token : token + rows, column :] for vector v of row block `block`."""
        b, groups, parts = self.b, self.records.layout.groups, self.step.parts
        with b.loop(0, self.count * groups // parts, carry=[b.splat(0.0, self.isa.lanes)] * rows) as loop:
            first = b.mul(loop.index, parts)
            record, group = b.div(first, groups), b.rem(first, groups)
            numbers = [b.add(group, part) for part in range(parts)]
            self.records.prefetch_later([block], self.set, record, *self.records.extent(group, parts))
            groups_at, tokens = [(record, number) for number in numbers], (b.add(token, r) for r in range(rows))
            loop.give(*self.step.add_records(loop.values, tokens, loop.index, self.records, block, groups_at, v))
        for r, total in enumerate(loop.results):
            b.vstore(total, self.sums, b.add(token, r), column)
