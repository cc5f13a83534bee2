"""Y = X W^T for many tokens of codes, with the sums of `gemv` and `gemm_few`: to the last bit what each token gets alone.

As `gemm`, but the panel on the stack has codes, not weights. Each group of a tile is summed up from nothing, in registers, and
comes to the sums by its scale, which costs a load, a store and an fma or two for `group` of them.

          for tile of `rows` tokens:
            for 16 * `wide` columns:
              for group in depth:
                acc [rows, 16 * wide] = 0, or x_sums[token, group] for codes with an offset           registers
                for j in group: acc += x[token, k + j] * codes[j]   x broadcast from memory
                sums[tile] += d * scale * acc + m * minimum * x_sums[token, group]                       stack

`gemv` multiplies codes that still have the power of two of their place in a word, by x without it; here codes are without it.
The products are the same, but for x so near to 0 (1e-30) that it has no such part.
"""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.codecs import Codec
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import gemm
from castiron.emitter.kernels.products.frame import product_kernel
from castiron.emitter.kernels.products.gemm import MOST_DEPTH, Gemm, GemmTiles, even_share
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records, code_factors
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import outer


@dataclass(frozen=True)
class GemmCanonicalTiles(GemmTiles):
    """Those of `gemm`; beside the panel stand a scale and a minimum a group."""

    def fit(self, product: Product) -> bool:
        scales = 4 * LANES * self.row_blocks * 2 * (self.depth // product.format.group)
        return super().fit(product) and self.stack_bytes + scales <= STACK_BYTES


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemmCanonicalTiles:
    """Those of `gemm`, but for a panel that leaves room for scales."""
    tiles, size = gemm.default_tiles(product, isa, threads), product.format.group
    room = STACK_BYTES // (4 * LANES * tiles.row_blocks) - tiles.tokens
    most = min(MOST_DEPTH, room * size // (size + 2)) // size
    depth = even_share(-(-product.in_features // size), most) * size
    return GemmCanonicalTiles(**{**vars(tiles), "depth": depth})


def gemm_canonical(product: Product, isa: Isa, tiles: GemmCanonicalTiles) -> Kernel:
    """The kernel of a canonical product of many tokens. ValueError for tiles that do not fit."""
    write = lambda b, buffers: _Canonical(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"gemm_{product.name}", tiles.workgroups, write)


class _Canonical(Gemm):
    """Writes the body of one kernel."""

    panel: _Codes

    def _panel(self) -> _Codes:
        weight, tiles = self.buffers["weight"], self.tiles
        return _Codes(self.b, self.product.format, self.isa, weight, tiles.depth, tiles.row_blocks)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """sums[row : row + rows] += x[token : token + rows, k : k + depth] @ panel."""
        b, lanes, group = self.b, self.lanes, self.panel.codec.group
        width, x_row, x_sums = LANES * self.tiles.wide, self._x_rows(token, rows), self.buffers.get("x_sums")
        with b.loop(0, self.columns, width) as column, b.loop(0, depth // group) as g:
            columns = [b.add(column.index, c) for c in range(0, width, lanes)]
            number = b.add(b.div(k, group), g.index)
            row_sums = [b.broadcast(b.load(x_sums, x_row(r), number), lanes) for r in range(rows)] if x_sums else []
            start = [b.splat(0.0, lanes)] * (rows * len(columns))
            if self.panel.codec.offset:
                start = [total for total in row_sums for _ in columns]
            products = self._group(x_row, rows, k, b.mul(g.index, group), columns, start)
            scales = [b.vload(self.panel.scales, lanes, g.index, c) for c in columns]
            minima = [b.vload(self.panel.minima, lanes, g.index, c) for c in columns] if self.panel.minima else []
            for r in range(rows):
                for i, c in enumerate(columns):
                    at = b.add(row, r), c
                    total = b.fma(products[r * len(columns) + i], scales[i], b.vload(self.sums, lanes, *at))
                    b.vstore(b.fma(minima[i], row_sums[r], total) if minima else total, self.sums, *at)

    def _group(self, x_row, rows: int, k: Index, first: Index, columns: list[Index], sums: list[Ssa]) -> list[Ssa]:
        """sums + the products of the group of the panel that begins at `first`."""
        b, lanes, unroll = self.b, self.lanes, min(self.tiles.unroll, self.panel.codec.group)
        with b.loop(0, self.panel.codec.group, unroll, carry=sums) as loop:
            sums = loop.values
            for u in range(unroll):
                j = b.add(first, b.add(loop.index, u))
                codes = [b.vload(self.panel.codes, lanes, j, c) for c in columns]
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), b.add(k, j)), lanes) for r in range(rows))
                sums = outer(b, x, codes, sums)
            loop.give(*sums)
        return loop.results


class _Codes:
    """`depth` k of so many `row_blocks` of the packed weight on the stack: codes as f32, and each group's factors.

    codes [depth, columns]; scales and minima [depth / group, columns]: d * scale and m * minimum of a group.
    """

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, depth: int, row_blocks: int):
        self.b, self.codec, self.row_blocks, self.lanes = b, codec, row_blocks, isa.lanes
        self.records = Records(b, codec, isa, weight)
        columns, groups = LANES * row_blocks, depth // codec.group
        self.codes, self.scales = b.stack(depth, columns), b.stack(groups, columns)
        self.minima = b.stack(groups, columns) if codec.minimum else None

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        """Decode k to k + depth of row blocks `first_block` and up."""
        b, group, groups, records = self.b, self.codec.group, self.records.layout.groups, self.records
        factors = code_factors(self.codec)
        with b.loop(0, self.row_blocks) as i, b.loop(0, depth // group) as g:
            block, number = b.add(first_block, i.index), b.add(b.div(k, group), g.index)
            record, within = b.div(number, groups), b.rem(number, groups)
            codes = records.group_codes(block, record, within)
            for v in range(records.vectors):
                column = b.add(b.mul(i.index, LANES), v * self.lanes)
                for j, factor in enumerate(factors.tolist()):
                    code = codes.code(j, v)
                    code = code if factor == 1.0 else b.mulf(code, b.splat(factor, self.lanes))
                    b.vstore(code, self.codes, b.add(b.mul(g.index, group), j), column)
                scale, minimum = records.scale_and_minimum(block, record, within, v)
                b.vstore(scale, self.scales, g.index, column)
                if self.minima is not None and minimum is not None:
                    b.vstore(minimum, self.minima, g.index, column)
