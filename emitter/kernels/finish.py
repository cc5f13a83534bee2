"""The end of a matrix product with several tokens: sums on the stack become results in memory."""

from __future__ import annotations

from emitter.kernels.fusions import Arguments, Epilogue
from emitter.kernels.text import Body, Index, Value
from emitter.packing import LANES


class Finish:
    """Stores results of `sums` [tokens, 16 * blocks of the weight], with what `epilogue` does to them."""

    def __init__(self, b: Body, lanes: int, epilogue: Epilogue, given: Arguments, out_features: int, sums: Value):
        self.b, self.lanes, self.epilogue, self.given = b, lanes, epilogue, given
        self.out_features, self.sums = out_features, sums

    def store(self, first_block: Index, blocks: Index, first: Index, end: Index, last: Index) -> None:
        """The results of `blocks` blocks of the weight for tokens `first` to `end`, and zeros from there to `last`.

        Token `first` has the sums of row 0, block `first_block` those of columns 0 to 15.
        """
        b, shared = self.b, self.epilogue.blocks
        with b.loop(0, b.div(blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            ragged = self.out_features % LANES
            if not ragged:
                self._block(i.index, column, first, end, last, None)
            else:
                final = -(-self.out_features // LANES) - 1
                with b.when(b.less(block, final)):
                    self._block(i.index, column, first, end, last, None)
                with b.when(b.equal(block, final)):
                    self._block(i.index, column, first, end, last, ragged)

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int | None) -> None:
        """16 columns of the result, or the first `ragged` of them."""
        b, given, lanes = self.b, self.given, self.lanes
        shared = self.epilogue.blocks

        def put(token: Index, results: list[Value], add: bool) -> None:
            for lane in range(0, ragged or LANES, 1 if ragged else lanes):
                y = results[lane // lanes]
                y = b.extract(y, lane % lanes) if ragged else y
                at = b.add(column, lane)
                y = self.epilogue.finish(b, y, given.bias, given.residual, token, at) if add else y
                (b.store if ragged else b.vstore)(y, given.out, token, at)

        with b.loop(first, end) as token:
            products = []
            for i in range(shared):
                at = b.mul(b.add(b.mul(slot, shared), i), LANES)
                place = b.sub(token.index, first)
                products.append([b.vload(self.sums, lanes, place, b.add(at, c)) for c in range(0, LANES, lanes)])
            put(token.index, self.epilogue.combine(b, products), True)
        if given.length is not None:
            with b.loop(end, last) as token:
                put(token.index, [b.splat(0.0, lanes)] * (LANES // lanes), False)
