"""y = W_e x for the experts e that a router chose: one dispatch for all of them, which reads no other expert's weights.

A pair is a token and one of its experts; each is a GEMV (`products.gemv`) of its own with the expert's part of the
stacked weight. Where several pairs have one expert, they come together in `products.grouped`.

    each workgroup: one pair and one share of its sets of 16-row blocks; `tiles.workgroups` of them make up a pair
      row = pair / per_row                                          of x [pairs / per_row, in]
      if row < length:                                              always, without `length`
        base = chosen[pair] * blocks                                where the expert's records begin
        y[pair, share] = gemv(weight[base : base + blocks], x[row])
      else:
        y[pair] = 0                                                 by the first share
"""

from __future__ import annotations

from dataclasses import replace

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import gemv
from castiron.emitter.kernels.products.frame import Buffers, product_kernel
from castiron.emitter.kernels.products.gemv import Gemv, GemvTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import Body
from castiron.emitter.kernels.writing.isa import Isa


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GemvTiles:
    """Those of one GEMV, in as many workgroups as give every thread two to do."""
    tiles = gemv.default_tiles(product, isa, threads)
    return replace(tiles, workgroups=min(tiles.workgroups, -(-2 * threads // product.tokens)))


def experts(product: Product, isa: Isa, tiles: GemvTiles) -> Kernel:
    """Row i of y is the product of x's row i // per_row with the weight of expert chosen[i].

    `tiles.workgroups` are for each pair. ValueError for tiles that do not fit.
    """
    row_blocks = product.weight_shape[0]

    def write(b: Body, buffers: Buffers) -> None:
        pair, share = b.div(b.workgroup(), tiles.workgroups), b.rem(b.workgroup(), tiles.workgroups)
        row = b.div(pair, product.per_row)

        def multiply() -> None:
            base = b.mul(b.to_index(b.load(buffers["chosen"], pair)), row_blocks)
            Gemv(b, product, isa, tiles, buffers, row, pair, base).write(share)

        if "length" not in buffers:
            multiply()
            return
        real = b.less(row, b.to_index(b.load(buffers["length"])))
        with b.when(real):
            multiply()
        with b.when(b.both(b.negate(real), b.equal(share, 0))), b.loop(0, product.out_features) as k:
            b.store(b.f32(0.0), buffers["y"], pair, k.index)

    name = f"gemv_{product.codec}_{product.out_features}x{product.in_features}{product.epilogue.name}"
    name += f"_{product.tokens}of{product.experts}by{product.per_row}" + "_length" * product.length
    return product_kernel(product, isa, tiles, name, product.tokens * tiles.workgroups, write)
