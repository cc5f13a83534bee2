"""Compute y = W_e x for (token, expert) pairs, where W_e is the weight of expert e.

The router of an MoE layer chooses `per_row` experts for each token, so each row of x has `per_row`
consecutive pairs. Rows of x from `length` on are padding. `tokens`, `rows`, `rest` and `row_blocks`
are tile sizes.

With few pairs for each expert, the kernel computes a GEMV for each pair, as in `gemv`:

    each workgroup: one pair, and one of `tiles.workgroups` equal shares of the rows of W_e
      y[pair, share] = W_e[share] x[pair / per_row], or 0 if the pair is padding

With more pairs, the kernel groups them by expert. It decodes the weight of an expert once for a
block of up to `tokens` pairs, and multiplies as in `gemm`. `columns` are 16 * `row_blocks` columns
of y, which are rows of W_e:

    each workgroup:
      count the pairs of each expert, without padding
      for each expert, for each block of its pairs, for the columns that this workgroup computes:
        sums [tokens, columns] = x[pairs / per_row] @ W_e[columns]^T
        y[pairs, columns] = epilogue(sums)
      set y to 0 for a part of the padding

A block is multiplied in tiles of `rows` pairs. If fewer than `rows` pairs are left at its end, they
are multiplied in tiles of `rest` pairs. The size of a tile does not change the results.
"""

from collections.abc import Callable, Sequence
from typing import Any

from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.gemm_integer import GemmInteger
from castiron.emitter.kernels.matmul.gemv import Gemv
from castiron.emitter.kernels.matmul.output import Buffers, Epilogue
from castiron.emitter.kernels.matmul.schedule import (
    DECODING,
    GemvTiles,
)
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, Type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import outer
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Decoded, units

UNITS = 8  # units of k (`panel.units`) of a float codec per loop iteration


class ExpertGemvs:
    """A writer of the body of an MoE matmul kernel: one GEMV for each (token, expert) pair."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: GemvTiles, buffers: Buffers):
        self.b, self.matmul, self.isa, self.tiles, self.buffers = b, matmul, isa, tiles, buffers

    def write(self) -> None:
        b, matmul, buffers, workgroups = self.b, self.matmul, self.buffers, self.tiles.workgroups
        pair, share = b.div(b.workgroup(), workgroups), b.rem(b.workgroup(), workgroups)
        row = b.div(pair, matmul.per_row)

        def multiply() -> None:
            base = b.mul(b.to_index(b.load(buffers["chosen"], pair)), matmul.weight_shape[0])
            Gemv(b, matmul, self.isa, self.tiles, buffers, row, pair, base).write_share(share)

        if "length" not in buffers:
            multiply()
            return
        real = b.less(row, b.to_index(b.load(buffers["length"])))
        with b.when(real):
            multiply()
        with b.when(b.both(b.negate(real), b.equal(share, 0))), b.loop(0, matmul.out_features) as k:
            b.store(b.f32(0.0), buffers["y"], pair, k.index)


class Grouped(Gemm):
    """A writer of the body of an MoE matmul kernel that groups (token, expert) pairs by expert.

    block: first row block, in the weights of all experts; first_block: the same in the expert's own.
    count: number of pairs that are multiplied.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: Any, buffers: Buffers):
        super().__init__(b, matmul, isa, tiles, buffers)
        self.counts = b.stack(matmul.experts, element="i32")
        self.pairs = b.stack(tiles.tokens, element="i32")
        in_order = {name: buffer for name, buffer in buffers.items() if name != "length"}
        self.epilogue = Epilogue(b, matmul, self.lanes, in_order, self.sums, self._pair)

    def write(self) -> None:
        b, tiles, matmul = self.b, self.tiles, self.matmul
        sets, row_blocks = self.row_blocks // tiles.row_blocks, self.row_blocks
        real = b.mul(b.real(self.buffers.get("length"), 0, self.T // matmul.per_row), matmul.per_row)
        self._count(real)
        with b.loop(0, matmul.experts, carry=[b.index(0)]) as expert:
            count = self._at(self.counts, expert.index)
            blocks = b.ceildiv(count, tiles.tokens)
            expert.give(b.index(b.add(expert.values[0], b.add(count, b.mul(blocks, DECODING)))))
        low, high = b.share(b.mul(expert.results[0], sets), b.workgroup(), tiles.workgroups)
        with b.loop(0, matmul.experts, carry=[b.index(0)]) as expert:
            count, base = self._at(self.counts, expert.index), b.mul(expert.index, row_blocks)
            with b.loop(0, count, tiles.tokens, carry=expert.values) as block:
                here = b.min(b.sub(count, block.index), tiles.tokens)
                work, done = b.add(here, DECODING), block.values[0]
                start, stop = (b.min(b.ceildiv(b.max(b.sub(end, done), 0), work), sets) for end in (low, high))
                with b.when(b.less(start, stop)):
                    self._gather(expert.index, block.index, real)
                    with b.loop(start, stop) as item:
                        first = b.mul(item.index, tiles.row_blocks)
                        self._set(first, b.add(base, first), here)
                block.give(b.index(b.add(done, b.mul(work, sets))))
            expert.give(*block.results)
        if "length" in self.buffers:
            low, high = b.share(b.sub(self.T, real), b.workgroup(), tiles.workgroups)
            with b.loop(b.add(real, low), b.add(real, high)) as pair, b.loop(0, matmul.out_features) as k:
                b.store(b.f32(0.0), self.buffers["y"], pair.index, k.index)

    def _at(self, buffer: Ssa, i: Index) -> Ssa:
        return self.b.to_index(self.b.load(buffer, i))

    def _pair(self, i: Index) -> Ssa:
        # Pair i of the current block.
        return self._at(self.pairs, i)

    def _count(self, real: Index) -> None:
        b, zero, one = self.b, self.b.constant("0", Type("i32")), self.b.constant("1", Type("i32"))
        for buffer, size in (self.counts, self.matmul.experts), (self.pairs, self.tiles.tokens):
            with b.loop(0, size) as i:
                b.store(zero, buffer, i.index)
        with b.loop(0, real) as pair:
            expert = self._at(self.buffers["chosen"], pair.index)
            b.store(b.binary("addi", b.load(self.counts, expert), one), self.counts, expert)

    def _gather(self, expert: Index, first: Index, real: Index) -> None:
        """Emit code that writes a list of an expert's (token, expert) pairs to `self.pairs`."""
        b = self.b
        with b.loop(0, real, carry=[b.index(0)]) as pair:
            number = pair.values[0]
            slot, its = b.sub(number, first), b.equal(self._at(self.buffers["chosen"], pair.index), expert)
            here = b.both(b.negate(b.less(slot, 0)), b.less(slot, self.tiles.tokens))
            with b.when(b.both(its, here)):
                b.store(b.to_i32(pair.index), self.pairs, slot)
            pair.give(b.select(its, b.add(number, 1), number))

    def _set(self, first_block: Index, block: Index, count: Index) -> None:
        b = self.b
        few = b.less(count, self.tiles.direct + 1)
        with b.when(few):
            self._direct(block, count)
        with b.when(b.negate(few)):
            self._dots(block, 0, count)
        self.epilogue.store(first_block, self.tiles.row_blocks, 0, count, count)

    def _direct(self, block: Index, count: Index) -> None:
        b, few, lanes, vectors = self.b, self.tiles.few, self.lanes, LANES * self.tiles.wide // self.lanes
        per_block, full = LANES // lanes, b.mul(b.div(count, few), few)
        sizes = sorted({max(1, few // 2), few})
        with b.loop(0, self.columns, LANES * self.tiles.wide) as column:
            first = b.add(block, b.div(column.index, LANES))
            sides = [(b.add(first, i // per_block), i % per_block, b.add(column.index, i * lanes)) for i in range(vectors)]
            with b.loop(0, full, few) as t:
                self._direct_tile(sides, t.index, few)
            rest = b.sub(count, full)
            for less, size in zip([0, *sizes], sizes):
                with b.when(b.both(b.less(less, rest), b.less(rest, size + 1))):
                    self._direct_tile(sides, full, size)

    def _direct_tile(self, sides: Sequence[tuple[Index, int, Index]], token: Index, rows: int) -> None:
        """Emit code that multiplies a few (token, expert) pairs by some rows of the weight."""
        b, lanes, unit = self.b, self.lanes, units(self.matmul.codec)
        x_row = self._x_rows(token, rows)
        full, rest = divmod(self.in_features, unit)

        def add(number: Index, sums: Sequence[Ssa], count: int = unit) -> list[Ssa]:
            decoded = {block: Decoded(self.panel.records, block, number) for block, _, _ in sides}
            done = list(sums)
            for j in range(count):
                weights = [decoded[block].weight(j, v) for block, v, _ in sides]
                k = b.add(b.mul(number, unit), j)
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), k), lanes) for r in range(rows))
                done = outer(b, x, weights, done)
            return done

        together = 1 if self.matmul.format.quantised else UNITS
        zeros = [b.splat(0.0, lanes)] * (rows * len(sides))
        sums = b.unrolled(
            full, together, zeros, add, lambda number: self._prefetch([block for block, *_ in sides], number, together)
        )
        for i, total in enumerate(add(full, sums, rest) if rest else sums):
            b.vstore(total, self.sums, b.add(token, i // len(sides)), sides[i % len(sides)][2])

    def _prefetch(self, blocks: Sequence[Index], unit: Index, units: int) -> None:
        # Prefetch units unit .. unit + units - 1 of the row blocks that follow (`weights.panel.units`).
        b, records, groups = self.b, self.panel.records, self.panel.records.layout.groups
        record = b.div(unit, groups)
        start, nbytes = records.extent(b.rem(unit, groups))
        nbytes *= units if groups == 1 else 1
        records.prefetch_later(blocks, self.tiles.row_blocks, record, start, nbytes)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        b, rows, rest = self.b, self.tiles.rows, self.tiles.rest
        full = b.mul(b.div(count, rows), rows)
        for low, high, size in (0, full, rows), (full, count, rest):
            with b.loop(low, high, size) as t:
                if size == rows:
                    self._prefetch_next(b.div(t.index, rows), -(-self.tiles.tokens // rows))
                self._tile(t.index, t.index, size, k, depth)

    def _x_rows(self, token: Index, rows: int) -> Callable[[int], Index]:
        b, per_row = self.b, self.matmul.per_row
        found = [b.div(self._pair(b.add(token, r)), per_row) for r in range(rows)]
        return found.__getitem__


class GroupedInteger(Grouped, GemmInteger):
    """A writer of the body of an MoE matmul kernel for quantised x that groups tokens by expert."""

    def _direct_tile(self, sides: Sequence[tuple[Index, int, Index]], token: Index, rows: int) -> None:
        b, records, parts, (first_block, _, first_column) = self.b, self.panel.records, self.step.parts, sides[0]
        groups, vectors = records.layout.groups, records.vectors
        with b.loop(0, len(sides)) as side:
            block, v = b.add(first_block, b.div(side.index, vectors)), b.rem(side.index, vectors)
            column = b.add(first_column, b.mul(side.index, self.lanes))
            x_row = self._x_rows(token, rows)
            with b.loop(0, self.in_features // self.step.unit, carry=[b.splat(0.0, self.lanes)] * rows) as loop:
                units = [b.add(b.mul(loop.index, parts), part) for part in range(parts)]
                at = [(b.div(unit, groups), b.rem(unit, groups)) for unit in units]
                self._prefetch([block], units[0], parts)
                tokens = [x_row(r) for r in range(rows)]
                loop.give(*self.step.add_packed(loop.values, tokens, loop.index, block, at, v))
            for r, total in enumerate(loop.results):
                b.vstore(total, self.sums, b.add(token, r), column)
