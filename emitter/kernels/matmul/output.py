"""Emit the code that computes the results of matmuls from their dot products, and stores them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from castiron.emitter.kernels.epilogue import combine, with_operands
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.weights.packing import LANES

# Memrefs of a matmul's operands (`Matmul.operands`) and of its result y, by name.
Buffers = Mapping[str, Ssa]


def each_block(b: Body, out_features: int, block: Index, store: Callable[[int], None]) -> None:
    """Emit code that stores a block of 16 outputs, or fewer in the last block.

    out_features: total number of outputs.
    block: index of the block of 16 outputs.
    store(n): function that emits code to store the first n results of the block; n is 0 for all 16.
    """
    last, ragged = divmod(out_features, LANES)
    if not ragged:
        store(0)
        return
    with b.when(b.less(block, last)):
        store(0)
    with b.when(b.equal(block, last)):
        store(ragged)


class Epilogue:
    """Emits the code that applies GLU, bias and residual to dot products, and stores y.

    sums: stack buffer f32 [tokens, columns] with the dot products. row_of(token): the row of y.

    Tokens first .. end - 1 get results; tokens end .. last - 1, which are padding, get zeros if the
    matmul has an operand `length`. ragged: number of columns if fewer than 16, otherwise 0.
    """

    def __init__(
        self, b: Body, matmul: Matmul, lanes: int, buffers: Buffers, sums: Ssa, row_of: Callable[[Index], Index] = lambda t: t
    ):
        self.b, self.matmul, self.lanes, self.buffers, self.sums, self.row_of = b, matmul, lanes, buffers, sums, row_of

    def store(self, first_block: Index, row_blocks: Index, first: Index, end: Index, last: Index) -> None:
        """Emit code that computes and stores y for some tokens and some rows of the weight."""
        b, shared = self.b, self.matmul.blocks_per_result
        with b.loop(0, b.div(row_blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            each_block(b, self.matmul.out_features, block, partial(self._block, i.index, column, first, end, last))

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int) -> None:
        # slot: index of the block of results in `self.sums`
        b, lanes, shared = self.b, self.lanes, self.matmul.blocks_per_result
        with b.loop(first, end) as token:
            dots = []
            for i in range(shared):
                at = b.mul(b.add(b.mul(slot, shared), i), LANES)
                row = b.sub(token.index, first)
                dots.append([b.vload(self.sums, lanes, row, b.add(at, c)) for c in range(0, LANES, lanes)])
            self._put(token.index, column, combine(b, self.matmul.glu, dots), ragged, add=True)
        if "length" in self.buffers:
            with b.loop(end, last) as token:
                self._put(token.index, column, [b.splat(0.0, lanes)] * (LANES // lanes), ragged, add=False)

    def _put(self, token: Index, column: Index, results: Sequence[Ssa], ragged: int, add: bool) -> None:
        # add: whether to add the bias and the residual
        b, lanes, row = self.b, self.lanes, self.row_of(token)
        for lane in range(0, ragged or LANES, 1 if ragged else lanes):
            y = results[lane // lanes]
            y = b.extract(y, lane % lanes) if ragged else y
            at = b.add(column, lane)
            y = with_operands(b, y, self.buffers, row, at) if add else y
            (b.store if ragged else b.vstore)(y, self.buffers["y"], row, at)
