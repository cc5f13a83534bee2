"""Y = X W^T for a chunk of tokens whose x is rounded to bytes (`weights.x_bytes`): products of bytes, sums of a group exact.

As `gemm`, but that the panel holds codes, a byte each, and that a group's scale is applied to its sum:

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

where w = scale * code + base for the codes as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.gemm import PARTS, Gemm, even_share
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.code_bytes import CodeBytes
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records
from castiron.emitter.kernels.weights.x_bytes import GROUP
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa, batches, vector_type
from castiron.emitter.kernels.writing.dot import dot_of
from castiron.emitter.kernels.writing.isa import Isa

MOST_TOKENS = 132
# Rows of a tile by lanes: more sums than that, f32 and s32, spill. NEON's are of llvm-mca's Neoverse V1 and N2.
MOST_ROWS = {4: 2, 8: 6, 16: 6}
MOST_DEPTH = 512


@dataclass(frozen=True)
class GemmBytesTiles(Tiles):
    """As those of `gemm`: rows x (16 * wide) sums at once, `row_blocks` of 16 columns share a panel `depth` k deep, `tokens`
    are multiplied with a panel before it is taken apart again, `workgroups` share the products.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int
    workgroups: int = 12

    letters: ClassVar = "rwbdtg"

    def stack_bytes(self, product: Product) -> int:
        return LANES * self.row_blocks * (_bytes_of(self.depth, product.format.group) + 4 * self.tokens)

    def fit(self, product: Product) -> bool:
        return (
            self.stack_bytes(product) <= STACK_BYTES
            and self.depth % GROUP == 0
            and self.tokens % self.rows == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % product.epilogue.row_blocks == 0
            and product.weight_shape[0] % self.row_blocks == 0
        )


def _bytes_of(depth: int, group: int) -> int:
    """Of the stack for a row's codes, scales and bases."""
    return depth + depth // group * 8


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemmBytesTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    T, shared, row_blocks, group = product.tokens, product.epilogue.row_blocks, product.weight_shape[0], product.format.group
    even = shared == 2 or row_blocks % 2 == 0
    wide = 2 if isa.lanes == LANES and even else 1
    together = max(wide, shared)
    rows = -(-T // -(-T // MOST_ROWS[isa.lanes]))
    budget = STACK_BYTES // (LANES * together)
    token_blocks = -(-T // min(MOST_TOKENS, budget // 4 * 3 // 5))
    tokens = -(-T // (token_blocks * rows)) * rows
    room = (budget - 4 * tokens) * GROUP // _bytes_of(GROUP, group)
    depth = even_share(product.in_features // GROUP, min(MOST_DEPTH, room) // GROUP) * GROUP
    items = row_blocks // together * -(-T // tokens)
    return GemmBytesTiles(rows, wide, together, depth, tokens, workgroups=min(items, PARTS * threads))


def gemm_bytes(product: Product, isa: Isa, tiles: GemmBytesTiles) -> Kernel:
    """The kernel of a product of many tokens with bytes. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _GemmBytes(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class _Panel:
    """`depth` k of so many row blocks: codes, four in an i32, with scale and base of each group, on the stack."""

    def __init__(self, b: Body, product: Product, isa: Isa, weight: Ssa, tiles: GemmBytesTiles):
        self.b, self.codec, self.isa, self.tiles = b, product.format, isa, tiles
        self.records = Records(b, self.codec, isa, weight)
        groups, columns = tiles.depth // self.codec.group, LANES * tiles.row_blocks
        self.codes = b.stack(tiles.depth // 4, columns, element="i32")
        self.scales, self.bases = b.stack(groups, columns), b.stack(groups, columns)

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        b, records, group = self.b, self.records, self.codec.group
        with b.loop(0, self.tiles.row_blocks) as i, b.loop(0, depth // group) as g, b.loop(0, records.vectors) as vector:
            block, unit, v = b.add(first_block, i.index), b.add(b.div(k, group), g.index), vector.index
            record, number = b.div(unit, records.layout.groups), b.rem(unit, records.layout.groups)
            column = b.add(b.mul(i.index, LANES), b.mul(v, self.isa.lanes))
            codes = CodeBytes(records, self.isa, block, record, number)
            scale, base = records.scale_and_base(block, record, number, v)
            b.vstore(scale, self.scales, g.index, column)
            if base is not None and self.codec.minimum:
                b.vstore(base, self.bases, g.index, column)
            for q in range(0, group // 4, codes.dot.quads):
                for each, arranged in enumerate(codes.quads(q, v), q):
                    b.vstore(arranged, self.codes, b.add(b.mul(g.index, group // 4), each), column)

    def quads(self, q: Index, column: Index, count: int) -> list[Ssa]:
        """Of one vector of columns so many quads, as they were arranged."""
        return [self.b.vload(self.codes, self.isa.lanes, self.b.add(q, i), column) for i in range(count)]

    def side(self, group: Index, column: Index) -> tuple[Ssa, Ssa | None]:
        """Scale and base of one vector of columns."""
        scale, base = (self.b.vload(each, self.isa.lanes, group, column) for each in (self.scales, self.bases))
        return scale, base if self.codec.minimum else None


class _GemmBytes(Gemm):
    """Writes the body of one kernel."""

    def _panel(self) -> _Panel:
        self.step = Step(self.b, self.product, self.isa, self.buffers)
        return _Panel(self.b, self.product, self.isa, self.buffers["weight"], self.tiles)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """sums[row : row + rows] += x[token : token + rows, k : k + depth] @ panel."""
        b, panel, width = self.b, self.panel, LANES * self.tiles.wide
        with b.loop(0, self.columns, width) as column:
            columns = [b.add(column.index, c) for c in range(0, width, self.lanes)]
            at = [(b.add(row, r), c) for r in range(rows) for c in columns]
            with b.loop(0, depth // GROUP, carry=[b.vload(self.sums, self.lanes, *each) for each in at]) as loop:
                parts = self.step.parts
                at_once, first = self.step.dot.quads, b.mul(loop.index, GROUP // 4)
                quads = lambda q: [panel.quads(b.add(first, q), c, at_once) for c in columns]
                groups = [b.add(b.mul(loop.index, parts), part) for part in range(parts)]
                sides = [[panel.side(group, c) for c in columns] for group in groups]
                tokens = [b.add(token, r) for r in range(rows)]
                loop.give(*self.step.add(loop.values, tokens, b.add(b.div(k, GROUP), loop.index), quads, sides))
            for total, each in zip(loop.results, at, strict=True):
                b.vstore(total, self.sums, *each)


class Step:
    """sums += the products of GROUP k of some rows of x with some vectors of outputs.

    For codes c, as stored, with a bias where unsigned ones are wanted, and bytes n: of a codec with minima
    scale * (x_scale * sum(c n)) + base * sum(x), of the others scale * (x_scale * (sum(c n) - (offset + bias) sum(n))).
    """

    def __init__(self, b: Body, product: Product, isa: Isa, buffers: Buffers):
        self.b, self.codec, self.lanes, self.buffers = b, product.format, isa.lanes, buffers
        self.dot, self.parts = dot_of(isa)(b, isa, self.codec.code_bits), GROUP // product.format.group
        self.bias = 0 if self.codec.minimum else self.codec.offset + self.dot.bias

    def add(
        self,
        sums: Sequence[Ssa],
        rows: Sequence[Index],
        unit: Index,
        quads: Callable[[int], Sequence[Sequence[Ssa]]],
        sides: Sequence[Sequence[tuple[Ssa, Ssa | None]]],
    ) -> list[Ssa]:
        """sums [rows * vectors] with unit number `unit` of GROUP k. quads(q): of each vector codes from quad q on, as
        `Dot.code` takes them; sides: by group of the codec scale and base of each vector.
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

    def _dots(
        self, rows: Sequence[Index], unit: Index, part: int, quads: Callable[[int], Sequence[Sequence[Ssa]]], vectors: int
    ) -> list[Ssa]:
        """sum(c n) of a group of the codec, without what is to be taken off: [rows * vectors], f32."""
        b, dot, quads_a_group = self.b, self.dot, self.codec.group // 4
        together = batches(rows, dot.rows)
        totals = [[dot.start([self._start(row, unit, part) for row in each])] * vectors for each in together]
        for q in range(part * quads_a_group, (part + 1) * quads_a_group, dot.quads):
            codes, word = [dot.code(arranged) for arranged in quads(q)], b.add(b.mul(unit, GROUP // 4), q)
            for i, each in enumerate(together):
                x = dot.x(self.buffers["x"], each, word)
                totals[i] = [dot.add(total, code, x) for total, code in zip(totals[i], codes, strict=True)]
        # Of each row the vectors; a last row alone leaves half of what was multiplied at once unused.
        by_row = [row for of_rows in totals for row in zip(*map(dot.words, of_rows), strict=True)]
        return [self._float(words) for row in by_row[: len(rows)] for words in row]

    def _start(self, row: Index, unit: Index, part: int) -> Ssa:
        """What a group's sum begins with: the codes' offset and bias times the sum of x, taken off."""
        if not self.bias:
            return self.b.constant("0", "i32")
        return self.b.binary("muli", self._sum(row, unit, part), self.b.constant(str(-self.bias), "i32"))

    def _sum(self, row: Index, unit: Index, part: int) -> Ssa:
        return self.b.load(self.buffers["x_sums"], row, self.b.add(self.b.mul(unit, self.parts), part))

    def _float(self, words: Ssa) -> Ssa:
        type_ = vector_type(self.lanes)
        return self.b.let(f"arith.sitofp {words} : {words.type} to {type_}", type_)
