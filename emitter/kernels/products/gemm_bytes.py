"""Y = X W^T for a chunk of tokens whose x is rounded to bytes (`weights.x_bytes`): products of bytes, sums of a group exact.

As `gemm`, but that the panel holds codes, a byte each, and that a group's scale is applied to its sum:

    each workgroup: a share of the items, (block of `tokens` tokens) x (16 * `blocks` columns), columns first
      for item in share:
        sums [tokens, 16 * blocks] = 0                                                                 stack
        for k in steps of `depth`:
          codes [depth / 4, 16 * blocks] of four, scale, base [depth / group, 16 * blocks]             stack
          for tile of `rows` tokens, for 16 * `wide` columns:
            acc [rows, 16 * wide] = sums[tile]                                                         registers
            for group in depth:
              dot [rows, 16 * wide] = 0                                                                registers, s32
              for four k of the group:                                    unrolled
                dot += codes * x[token]                                   x broadcast from memory
              acc += scale * (x_scale * dot) + base * x_sum
            sums[tile] = acc
        y [tokens, 16 * blocks] = epilogue(sums)                                                       memory

where w = scale * code + base for the codes as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.frame import Buffers, Tiles, product_kernel
from castiron.emitter.kernels.products.gemm import PARTS, Gemm, even_share
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.code_bytes import CodeBytes
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.dot import Dot, Total
from castiron.emitter.kernels.writing.isa import Isa

MOST_TOKENS = 132
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
            and self.depth % product.format.group == 0
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
    most_rows = 6 if isa.lanes == LANES else 4
    rows = -(-T // -(-T // most_rows))
    budget = STACK_BYTES // (LANES * together)
    token_blocks = -(-T // min(MOST_TOKENS, budget // 4 * 3 // 5))
    tokens = -(-T // (token_blocks * rows)) * rows
    room = (budget - 4 * tokens) * group // _bytes_of(group, group)
    depth = even_share(product.in_features // group, min(MOST_DEPTH, room) // group) * group
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
        self.has_base = False

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        b, records, group = self.b, self.records, self.codec.group
        with b.loop(0, self.tiles.row_blocks) as i, b.loop(0, depth // group) as g, b.loop(0, records.vectors) as vector:
            block, unit, v = b.add(first_block, i.index), b.add(b.div(k, group), g.index), vector.index
            record, number = b.div(unit, records.layout.groups), b.rem(unit, records.layout.groups)
            column = b.add(b.mul(i.index, LANES), b.mul(v, self.isa.lanes))
            codes = CodeBytes(records, self.isa, block, record, number)
            scale, base = records.scale_and_base(block, record, number, v, codes.bias)
            b.vstore(scale, self.scales, g.index, column)
            if base is not None:
                self.has_base = True
                b.vstore(base, self.bases, g.index, column)
            for q in range(group // 4):
                b.vstore(codes.quad(q, v), self.codes, b.add(b.mul(g.index, group // 4), q), column)

    def side(self, group: Index, column: Index) -> tuple[Ssa, Ssa | None]:
        """Scale and base of one vector of columns."""
        scale, base = (self.b.vload(each, self.isa.lanes, group, column) for each in (self.scales, self.bases))
        return scale, base if self.has_base else None


class _GemmBytes(Gemm):
    """Writes the body of one kernel."""

    def _panel(self) -> _Panel:
        self.dot = Dot(self.b, self.isa, self.product.format.bits)
        return _Panel(self.b, self.product, self.isa, self.buffers["weight"], self.tiles)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """sums[row : row + rows] += x[token : token + rows, k : k + depth] @ panel."""
        b, group, panel, width = self.b, self.product.format.group, self.panel, LANES * self.tiles.wide
        with b.loop(0, self.columns, width) as column:
            columns = [b.add(column.index, c) for c in range(0, width, self.lanes)]
            at = [(b.add(row, r), c) for r in range(rows) for c in columns]
            with b.loop(0, depth // group, carry=[b.vload(self.sums, self.lanes, *each) for each in at]) as loop:
                dots = [Total()] * len(at)
                for q in range(group // 4):
                    quad = b.add(b.mul(loop.index, group // 4), q)
                    codes = [self.dot.code(b.vload(panel.codes, self.lanes, quad, c)) for c in columns]
                    word = b.add(b.div(k, 4), quad)
                    for r in range(rows):
                        x = self.dot.x(b.load(self.buffers["x"], b.add(token, r), word))
                        for i, code in enumerate(codes, r * len(columns)):
                            dots[i] = self.dot.add(dots[i], code, x)
                unit, sides = b.add(b.div(k, group), loop.index), [panel.side(loop.index, c) for c in columns]
                given = []
                for i, so_far in enumerate(loop.values):
                    r, c = divmod(i, len(columns))
                    given.append(add_group(b, self.dot, self.buffers, dots[i], so_far, (b.add(token, r), unit), *sides[c]))
                loop.give(*given)
            for total, each in zip(loop.results, at, strict=True):
                b.vstore(total, self.sums, *each)


def add_group(
    b: Body, dot: Dot, buffers: Buffers, total: Total, so_far: Ssa, at: tuple[Index, Index], scale: Ssa, base: Ssa | None
) -> Ssa:
    """so_far + scale * (x_scale * total) + base * x_sum, where x's scale and sum stand `at` (row, group)."""
    words = dot.words(total)
    floats = b.let(f"arith.sitofp {words} : {words.type} to {scale.type}", scale.type)
    dotted = b.mulf(floats, b.broadcast(b.load(buffers["x_scales"], *at), dot.lanes))
    so_far = b.fma(dotted, scale, so_far)
    return so_far if base is None else b.fma(base, b.broadcast(b.load(buffers["x_sums"], *at), dot.lanes), so_far)
