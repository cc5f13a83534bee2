"""The way of several tokens' results to memory, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from castiron.emitter.kernels.products.epilogue import each_block
from castiron.emitter.kernels.products.frame import Buffers
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.writing.body import Body, Index, Ssa


class Finish:
    """Stores results of `sums` [tokens, 16 * row blocks of the weight], with what the product's epilogue does to them.

    Those of a token are row `place`(token) of the result.
    """

    def __init__(
        self, b: Body, product: Product, lanes: int, buffers: Buffers, sums: Ssa, place: Callable[[Index], Index] = lambda t: t
    ):
        self.place = place
        self.b, self.lanes, self.epilogue, self.buffers = b, lanes, product.epilogue, buffers
        self.out_features, self.sums = product.out_features, sums

    def store(self, first_block: Index, row_blocks: Index, first: Index, end: Index, last: Index) -> None:
        """The results of `row_blocks` of the weight for tokens `first` to `end`, and zeros from there to `last`.

        Token `first` has the sums of row 0, row block `first_block` those of columns 0 to 15.
        """
        b, shared = self.b, self.epilogue.row_blocks
        with b.loop(0, b.div(row_blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            store = partial(self._block, i.index, column, first, end, last)
            each_block(b, self.out_features, block, store)

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int) -> None:
        """16 columns of the result, or the first `ragged` of them if that is not 0."""
        b, buffers, lanes = self.b, self.buffers, self.lanes
        shared = self.epilogue.row_blocks

        def put(token: Index, results: list[Ssa], add: bool) -> None:
            token = self.place(token)
            for lane in range(0, ragged or LANES, 1 if ragged else lanes):
                y = results[lane // lanes]
                y = b.extract(y, lane % lanes) if ragged else y
                at = b.add(column, lane)
                y = self.epilogue.finish(b, y, buffers, token, at) if add else y
                (b.store if ragged else b.vstore)(y, buffers["y"], token, at)

        with b.loop(first, end) as token:
            products = []
            for i in range(shared):
                at = b.mul(b.add(b.mul(slot, shared), i), LANES)
                row = b.sub(token.index, first)
                products.append([b.vload(self.sums, lanes, row, b.add(at, c)) for c in range(0, LANES, lanes)])
            put(token.index, self.epilogue.combine(b, products), True)
        if "length" in buffers:
            with b.loop(end, last) as token:
                put(token.index, [b.splat(0.0, lanes)] * (LANES // lanes), False)
