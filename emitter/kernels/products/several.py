"""What products of several tokens share however they are computed: operands, definition, and the way to memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import Arguments, Epilogue
from castiron.emitter.kernels.weights.packing import LANES, packed_shape, unpack
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, executable
from castiron.emitter.types import F32, I8, I32, TensorType


def several_tokens(
    name: str,
    codec_name: str,
    T: int,
    out_features: int,
    in_features: int,
    epilogue: Epilogue,
    length: bool,
    workgroups: int,
    write: Callable[[Body, Arguments], None],
) -> Kernel:
    """x [T, in], weight (`packed_shape`, i8), (bias [out]), (residual [T, out]), (length i32) -> y [T, out], f32.

    `write` writes the body, `name` tells it from all others. With `length` only rows < length are computed, the others
    are zero.
    """
    rows = epilogue.weight_rows(out_features)
    y_type = TensorType((T, out_features), F32)
    operands = (
        TensorType((T, in_features), F32),
        TensorType(packed_shape(codec_name, rows, in_features), I8),
        *[TensorType((out_features,), F32)] * epilogue.bias,
        *[y_type] * epilogue.residual,
        *[TensorType((), I32)] * length,
    )

    def body(b: Body, *arguments: Ssa) -> None:
        write(b, Arguments(arguments, False, epilogue, length))

    def reference(*arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        given = Arguments(arguments, False, epilogue, length)
        weight = unpack(codec_name, given.weight, rows, in_features)
        products = given.x.astype(np.float64) @ weight.astype(np.float64).T
        y = epilogue.define(products, out_features, given.bias, given.residual)
        if length:
            y[int(given.length) :] = 0
        return (y,)

    return Kernel(
        name=name,
        operands=operands,
        results=(y_type,),
        tied=(None,),
        text=executable(name, operands, (y_type,), (None,), workgroups, body),
        reference=reference,
        flops=2 * T * rows * in_features,
        bytes=sum(t.nbytes for t in (*operands, y_type)),
    )


class Finish:
    """Stores results of `sums` [tokens, 16 * blocks of the weight], with what `epilogue` does to them."""

    def __init__(self, b: Body, lanes: int, epilogue: Epilogue, given: Arguments, out_features: int, sums: Ssa):
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

        def put(token: Index, results: list[Ssa], add: bool) -> None:
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
