"""Compute Y = X W^T for a chunk of tokens with x in int8 (`round_x`); sums of a group are exact.

As `gemm`, but the panel has codes as bytes, and a group's scale is applied to its sum:

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          codes [depth / 4, 16 * blocks] of four, scale, base [depth / group, 16 * blocks]             stack
          for tile of `rows` tokens, for 16 * `wide` columns:
            acc [rows, 16 * wide] = sums[tile]                                                         registers
            for 32 k in depth:
              dot [rows, 16 * wide] = 0                                                                registers, s32
              for four k of the 32:                                       unrolled
                dot += codes * x[token]                                   x broadcast from memory
              acc += scale * (x_scale * dot) + base * x_sum
            sums[tile] = acc
        y [tokens, 16 * blocks] = epilogue(sums)                                                       memory

A weight is scale * code + base, where code is the stored code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from castiron.emitter.int8 import GROUP
from castiron.emitter.kernels.matmul.gemm import MAX_TOKENS, Gemm
from castiron.emitter.kernels.matmul.tiles import Buffers, PanelTiles, even_share, even_tokens, panel_columns, panel_workgroups
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import I32, STACK_BYTES, Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.dot import dot_of
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.int8_codes import Int8Codes
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Int8Panel
from castiron.emitter.kernels.weights.records import Records

# Maximum rows of a tile by lanes; more sums, f32 and s32, spill registers. NEON: by llvm-mca for Neoverse V1 and N2.
MAX_ROWS = {4: 2, 8: 6, 16: 6}
MAX_DEPTH = 512


@dataclass(frozen=True)
class GemmInt8Tiles(PanelTiles):
    def depth_unit(self, matmul: Matmul) -> int:
        return GROUP

    def stack_bytes(self, matmul: Matmul) -> int:
        return super().stack_bytes(matmul) + LANES * self.row_blocks * row_bytes(self.depth, matmul.format.group)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> GemmInt8Tiles:
        T = matmul.tokens
        wide, row_blocks = panel_columns(matmul, isa.lanes == LANES)
        rows = -(-T // -(-T // MAX_ROWS[isa.lanes]))
        budget = STACK_BYTES // (LANES * row_blocks)
        tokens = even_tokens(T, min(MAX_TOKENS, budget // 4 * 3 // 5), rows)
        depth = int8_depth(matmul, budget - 4 * tokens)
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=panel_workgroups(matmul, row_blocks, tokens, threads))


def row_bytes(depth: int, group: int) -> int:
    """Return the stack bytes of codes, scales and bases for `depth` elements of a row of W."""
    return depth + depth // group * 8


def int8_depth(matmul: Matmul, budget: int) -> int:
    """Return the depth of a panel that takes up to `budget` bytes of stack for each row of W."""
    fitting = budget * GROUP // row_bytes(GROUP, matmul.format.group)
    return even_share(matmul.in_features // GROUP, min(MAX_DEPTH, fitting) // GROUP) * GROUP


class GemmInt8(Gemm):
    """A writer of the body of a `gemm_int8` kernel."""

    def _panel(self) -> Int8Panel:
        self.step, tiles = Step(self.b, self.matmul, self.isa, self.buffers), self.tiles
        return Int8Panel(self.b, self.matmul.format, self.isa, self.buffers["weight"], tiles.depth, tiles.row_blocks)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """Add x[token : token + rows, k : k + depth] @ panel to sums[row : row + rows]."""
        b, panel, width = self.b, self.panel, LANES * self.tiles.wide
        x_row = self._x_rows(token, rows)
        with b.loop(0, self.columns, width) as column:
            columns = [b.add(column.index, c) for c in range(0, width, self.lanes)]
            at = [(b.add(row, r), c) for r in range(rows) for c in columns]
            with b.loop(0, depth // GROUP, carry=[b.vload(self.sums, self.lanes, *each) for each in at]) as loop:
                parts = self.step.parts
                at_once, first = self.step.dot.quads, b.mul(loop.index, GROUP // 4)
                quads = lambda q: [panel.quads(b.add(first, q), c, at_once) for c in columns]
                groups = [b.add(b.mul(loop.index, parts), part) for part in range(parts)]
                sides = [[panel.side(group, c) for c in columns] for group in groups]
                tokens = [x_row(r) for r in range(rows)]
                loop.give(*self.step.add(loop.values, tokens, b.add(b.div(k, GROUP), loop.index), quads, sides))
            for total, each in zip(loop.results, at, strict=True):
                b.vstore(total, self.sums, *each)


class Step:
    """A writer of one step, which adds the products over GROUP k to f32 sums.

    For stored codes c (plus `Dot.bias`) and bytes n of x, it adds scale * (x_scale * sum(c n)) +
    base * sum(x) if the codec has minima, otherwise scale * (x_scale * (sum(c n) - (offset + bias)
    sum(n))).
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, buffers: Buffers):
        self.b, self.codec, self.lanes, self.buffers = b, matmul.format, isa.lanes, buffers
        self.dot, self.parts = dot_of(isa)(b, isa, self.codec.code_bits), GROUP // matmul.format.group
        self.bias = 0 if self.codec.minimum else self.codec.offset + self.dot.bias

    def add(
        self,
        sums: Sequence[Ssa],
        rows: Sequence[Index],
        unit: Index,
        quads: Callable[[int], Sequence[Sequence[Ssa]]],
        sides: Sequence[Sequence[tuple[Ssa, Ssa | None]]],
    ) -> list[Ssa]:
        """Return sums [rows * vectors] plus the products over the GROUP k with number `unit`.

        quads(q): codes of each vector of outputs from quad q on, for `Dot.code`. sides: scale and
        base of each vector of outputs, for each group of the codec.
        """
        b, vectors = self.b, len(sides[0])
        groups = [self._dots(rows, unit, part, quads, vectors) for part in range(self.parts)]
        totals = []
        for i, so_far in enumerate(sums):
            row, v = rows[i // vectors], i % vectors
            dotted = b.mulf(groups[0][i], sides[0][v][0])
            for part in range(1, self.parts):
                dotted = b.fma(groups[part][i], sides[part][v][0], dotted)
            total = b.fma(dotted, b.broadcast(b.load(self.buffers["x_scales"], row, unit), self.lanes), so_far)
            for part in range(self.parts):
                base = sides[part][v][1]
                if self.codec.minimum and base is not None:
                    total = b.fma(base, b.broadcast(self._sum(row, unit, part), self.lanes), total)
            totals.append(total)
        return totals

    def add_records(
        self,
        sums: Sequence[Ssa],
        rows: Iterable[Index],
        unit: Index,
        records: Records,
        block: Index,
        groups: Sequence[tuple[Index, Index]],
        v: Index,
    ) -> list[Ssa]:
        """Return sums plus the products of one step, for vector v of a row block of `records`.

        groups: the record, and the group in it, of each codec group of the step.
        """
        codes = [Int8Codes(records, block, *group) for group in groups]
        sides = [[records.scale_and_base(block, *group, v)] for group in groups]
        each = self.codec.group // 4
        return self.add(sums, list(rows), unit, lambda q: [codes[q // each].quads(q % each, v)], sides)

    def _dots(
        self, rows: Sequence[Index], unit: Index, part: int, quads: Callable[[int], Sequence[Sequence[Ssa]]], vectors: int
    ) -> list[Ssa]:
        """Return sum(c n) - (offset + bias) sum(n) f32 [rows * vectors] for a group of the codec."""
        b, dot, quads_a_group = self.b, self.dot, self.codec.group // 4
        together = batches(rows, dot.rows)
        totals = [[dot.start([self._start(row, unit, part) for row in each])] * vectors for each in together]
        for q in range(part * quads_a_group, (part + 1) * quads_a_group, dot.quads):
            codes, word = [dot.code(arranged) for arranged in quads(q)], b.add(b.mul(unit, GROUP // 4), q)
            for i, each in enumerate(together):
                x = dot.x(self.buffers["x"], each, word)
                totals[i] = [dot.add(total, code, x) for total, code in zip(totals[i], codes, strict=True)]
        # The vectors of each row; an odd last row uses half of its block.
        by_row = [row for of_rows in totals for row in zip(*map(dot.words, of_rows), strict=True)]
        return [b.convert("sitofp", words, "f32") for row in by_row[: len(rows)] for words in row]

    def _start(self, row: Index, unit: Index, part: int) -> Ssa:
        """Return the initial sum of a group: -(offset + bias) times the sum of x."""
        if not self.bias:
            return self.b.constant("0", I32)
        return self.b.binary("muli", self._sum(row, unit, part), self.b.constant(str(-self.bias), I32))

    def _sum(self, row: Index, unit: Index, part: int) -> Ssa:
        return self.b.load(self.buffers["x_sums"], row, self.b.add(self.b.mul(unit, self.parts), part))
