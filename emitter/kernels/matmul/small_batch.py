"""Compute Y = X W^T for a few tokens in f32; weights are decoded in registers.

`gemm` decodes weights to a buffer first. For so few tokens, this would take as long as the matmul.
Here the kernel decodes some weights to registers, and multiplies several tokens by them. It also
computes several vectors of outputs (rows of W) with each x that it loads. So there are enough
independent accumulators to hide the latency of fma.

    each workgroup: a share of the rows of W, `row_blocks` blocks of 16 rows at a time
      for `rows` tokens x `vectors` vectors of outputs:
        sums [rows, vectors] = 0                                                         registers
        for unit of k (`panel.units`), for k in unit:
          sums += W[outputs, k] * X[tokens, k]                                           registers
      Y = epilogue(sums)                                                                    memory
"""

from collections.abc import Sequence

from castiron.emitter.kernels.matmul.output import Buffers, Epilogue
from castiron.emitter.kernels.matmul.schedule import SmallBatchTiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import outer
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Decoded, units
from castiron.emitter.kernels.weights.records import Records


class SmallBatch:
    """Emits the body of a matmul kernel for a few tokens.

    sides: the vectors of a tile, each as (block, v, column): vector v of row block `block`, whose
    sums begin at `column` of `self.sums` [T, columns].
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: SmallBatchTiles, buffers: Buffers):
        self.b, self.codec, self.tiles, self.buffers = b, matmul.format, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, matmul.tokens, matmul.in_features
        self.row_blocks, self.count, _ = matmul.weight_shape
        self.records = Records(b, self.codec, isa, buffers["weight"])
        self.layout = self.records.layout
        self.set = tiles.row_blocks(isa, matmul.blocks_per_result)
        self.unit = tiles.row_blocks(isa, 1)
        self.sums = b.stack(self.T, self.set * LANES)
        self.epilogue = Epilogue(b, matmul, self.lanes, buffers, self.sums)

    def write(self) -> None:
        b = self.b
        end = b.real(self.buffers.get("length"), 0, self.T)
        sets = -(-self.row_blocks // self.set)
        low, high = b.share(sets, b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high) as number:
            first = b.mul(number.index, self.set)
            last = b.min(b.add(first, self.set), self.row_blocks)
            self._tiles(first, last, end)
            self.epilogue.store(first, b.sub(last, first), 0, end, self.T)

    def _tiles(self, first: Index, last: Index, end: Index) -> None:
        """Emit loops over tiles of results; a tile is a few tokens times a few rows of the weight."""
        b, rows, vectors, per_block, unit = self.b, self.tiles.rows, self.tiles.vectors, self.records.vectors, self.unit
        full = self.T // rows * rows
        with b.loop(first, last, unit) as block:
            numbers = [b.add(block.index, i) for i in range(unit)]
            columns = [b.mul(b.sub(number, first), LANES) for number in numbers]
            if self.row_blocks % unit:
                numbers = [b.min(number, self.row_blocks - 1) for number in numbers]
            sides = [(numbers[i], v, b.add(columns[i], v * self.lanes)) for i in range(unit) for v in range(per_block)]
            tiles = [sides[i : i + vectors] for i in range(0, len(sides), vectors)]
            with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), full), rows) as t:
                for tile in tiles:
                    self._tile(tile, t.index, rows)
            if full < self.T:
                with b.when(b.less(full, end)):
                    for tile in tiles:
                        self._tile(tile, full, self.T - full)

    def _tile(self, sides: list, token: Index, rows: int) -> None:
        b, size = self.b, units(self.codec.name)
        unroll = 1 if self.codec.quantised else self.tiles.unroll
        full, rest = divmod(self.in_features, size)

        def add(unit: Index, sums: Sequence[Ssa], count: int = size) -> Sequence[Ssa]:
            decoded = {block: Decoded(self.records, block, unit) for block, _, _ in sides}
            for e in range(count):
                k, weights = b.add(b.mul(unit, size), e), [decoded[block].weight(e, v) for block, v, _ in sides]
                x = (b.broadcast(b.load(self.buffers["x"], b.add(token, t), k), self.lanes) for t in range(rows))
                sums = outer(b, x, weights, sums)
            return sums

        def prefetch(unit: Index) -> None:
            groups = self.records.layout.groups
            offset, nbytes = self.records.extent(b.rem(unit, groups)) if groups > 1 else (0, self.records.layout.size * unroll)
            self.records.prefetch_later((block for block, _, _ in sides), self.unit, b.div(unit, groups), offset, nbytes)

        sums = b.unrolled(full, unroll, [b.splat(0.0, self.lanes)] * (rows * len(sides)), add, prefetch)
        for n, total in enumerate(add(full, sums, rest) if rest else sums):
            t, side = divmod(n, len(sides))
            b.vstore(total, self.sums, b.add(token, t), sides[side][2])
