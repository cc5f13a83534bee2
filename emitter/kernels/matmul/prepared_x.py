"""Prepare x on the stack for matmuls of few tokens: norm, scaling, and sums over codec groups.

The code applies the RMS norm to x, if the matmul has one. It multiplies x by `code_factors`. These
are powers of two, which cancel the factors with which kernels read codes from packed words.

The stack also has the sum of x over each codec group, that is, over elements of a row that share a
scale. Kernels need the sum where a weight has a minimum or its code has an offset, because
sum(x * (scale * code + minimum)) = scale * sum(x * code) + minimum * sum(x).

`group_sum` adds the elements in a fixed order. Canonical GEMMs, which give the same bits for any
number of tokens, need the same sums. The kernel `group_sums` stores these in memory:

    each workgroup: up to 16 rows of x [T, in]
      for row, for group: sums[row, group] = `group_sum` of x                                 memory
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np

from castiron.emitter.codec import Codec
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import inverse_rms, lane_sums, tree
from castiron.emitter.kernels.weights.records import code_factors
from castiron.emitter.types import F32, TensorType

PAD = 16  # elements between rows of x on the stack
ROWS = 16  # rows of a workgroup of `group_sums`


def bytes_per_element(codec: Codec) -> float:
    """Return the bytes of stack that `PreparedX` needs for each element of a row of x.

    They include the element's share of the sums over codec groups.
    """
    return 4 + (4 / codec.group if codec.summed else 0)


def group_sum(b: Body, codec: Codec, parts: Sequence[Ssa]) -> Ssa:
    """Return the sum of x over one codec group, times a factor, as a scalar.

    A codec group is some elements of a row that share a scale. The factor depends on the codec:

        1          minima are added to the weights
        -1         minima are subtracted from the weights
        -offset    codes are stored with an offset (`codec.offset`)

    parts: the x of the group, as vectors.
    """
    total = b.extract(lane_sums(b, [tree(b.addf, parts)]), 0)
    return b.mulf(total, b.f32(codec.minimum or -codec.offset))


@cache
def group_sums(rows: int, in_features: int, codec: Codec, *, isa: Isa) -> Kernel:
    """Return a kernel that computes `group_sum` of x for every codec group of every row.

    A codec group is `codec.group` consecutive elements.
    Operand: x f32 [rows, in_features]. Result: sums f32 [rows, in_features / codec.group].
    """
    count, factor = in_features // codec.group, codec.minimum or -codec.offset

    def write(b: Body, x: Ssa, sums: Ssa) -> None:
        low = b.mul(b.workgroup(), ROWS)
        with b.loop(low, b.min(b.add(low, ROWS), rows)) as row, b.loop(0, count) as g:
            start = b.mul(g.index, codec.group)
            parts = [b.vload(x, isa.lanes, row.index, b.add(start, k)) for k in range(0, codec.group, isa.lanes)]
            b.store(group_sum(b, codec, parts), sums, row.index, g.index)

    return Kernel(
        f"group_sums_{rows}x{in_features}_{codec.group}_{'m' * (factor < 0)}{abs(factor)}_{isa.name}",
        {"x": TensorType((rows, in_features), F32)},
        {"sums": TensorType((rows, count), F32)},
        -(-rows // ROWS),
        write,
        reference=lambda x: {"sums": (factor * x.reshape(rows, count, -1).sum(axis=2, dtype=np.float64)).astype(np.float32)},
        flops=rows * in_features,
        nbytes=4 * rows * (in_features + count),
        fenced=isa.canonical,
    )


class PreparedX:
    """A stack buffer with T rows of x, normalised and scaled for the codes of a packed weight.

    Kernels mask codes without shifting their bits down, so they multiply x by a code times a power
    of two. Therefore the x in the buffer is multiplied by the inverse (`code_factors`). The buffer
    also has the `group_sum` of each codec group (elements of a row that share a scale).

    If the rows do not fit on the stack, each call of `fill` prepares a part of them, for example
    elements 512 .. 1023 of each row. The other methods count elements and groups from the start of
    this part. Their argument `token` is the index of a row in the buffer.

    capacity: max number of elements of a row that one call of `fill` prepares.
    row: index in x of the first of the T rows.
    kept: number of elements of a row that the buffer stores; None for `capacity`. It is smaller if
        a subclass stores something else in place of x.
    """

    def __init__(
        self,
        b: Body,
        matmul: Matmul,
        lanes: int,
        buffers: Mapping[str, Ssa],
        capacity: int,
        T: int,
        row: Index = 0,
        kept: int | None = None,
    ):
        self.b, self.codec, self.lanes, self.in_features, self.T = b, matmul.format, lanes, matmul.in_features, T
        self.source, self.norm, self.row = buffers["x"], buffers.get("norm"), row
        # PAD keeps rows whose length is a power of two from sharing cache sets.
        self.values = b.stack(T, (kept or capacity) + (PAD if T > 1 else 0))
        self.sums = b.stack(T, capacity // self.codec.group) if self.codec.summed else None
        self.inverse = None
        if matmul.rms_eps is not None:
            self.inverse = inverse_rms(b, partial(self._read, 0), self.in_features, matmul.rms_eps, lanes)

    def at(self, k: Index, token: Index = 0) -> Ssa:
        """Load element `k` of row `token` of the prepared x into all lanes of a vector."""
        return self.b.broadcast(self.b.load(self.values, token, k), self.lanes)

    def sum_of(self, group: Index, token: Index = 0) -> Ssa:
        """Load the `group_sum` of codec group `group` of row `token` into all lanes of a vector."""
        assert self.sums is not None, "only codecs with an offset or a minimum have sums"
        return self.b.broadcast(self.b.load(self.sums, token, group), self.lanes)

    def fill(self, first: Index, last: Index) -> None:
        """Emit code that prepares elements first .. last - 1 of every row of x.

        Elements past the end of a row become zero.
        """
        if self.T == 1:
            self._fill_row(0, first, last)
            return
        with self.b.loop(0, self.T) as token:
            self._fill_row(token.index, first, last)

    def _fill_row(self, token: Index, first: Index, last: Index) -> None:
        if self.codec.quantised:
            self._fill_groups(token, first, last)
        else:
            assert isinstance(first, int) and isinstance(last, int), "bounds of float codecs"
            self._fill_elements(token, first, last)

    def _read(self, token: Index, k: Index, width: int) -> Ssa:
        return self.b.vload(self.source, width, self.b.add(token, self.row), k)

    def _normalised(self, token: Index, k: Index, width: int) -> Ssa:
        b, x = self.b, self._read(token, k, width)
        if self.inverse is None or self.norm is None:
            return x
        return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.norm, width, k))

    def _fill_elements(self, token: Index, first: int, last: int) -> None:
        b, lanes = self.b, self.lanes
        end = min(last, self.in_features)
        full = (end - first) // lanes * lanes
        with b.loop(0, full, lanes) as vector:
            b.vstore(self._normalised(token, b.add(vector.index, first), lanes), self.values, token, vector.index)
        for k in range(full, end - first):
            b.vstore(self._normalised(token, first + k, 1), self.values, token, k)
        for k in range(end - first, last - first):
            b.vstore(b.splat(0.0, 1), self.values, token, k)

    def _fill_groups(self, token: Index, first: Index, last: Index) -> None:
        b, lanes, group = self.b, self.lanes, self.codec.group
        with b.loop(0, b.div(b.sub(last, first), group)) as g:
            start, parts = b.mul(g.index, group), []
            for k in range(0, group, lanes):
                x = self._normalised(token, b.add(b.add(start, first), k), lanes)
                parts.append(x)
                self._store(token, start, k, x)
            self._finish(g.index)
            if self.sums is not None:
                b.store(group_sum(b, self.codec, parts), self.sums, token, g.index)

    def _store(self, token: Index, start: Index, k: int, x: Ssa) -> None:
        # start: index in the buffer of the codec group's first element. k: index in the group of the first element of x.
        b, lanes, factors = self.b, self.lanes, code_factors(self.codec)
        if (factors[k : k + lanes] != 1).any():
            listed = ", ".join(f"{factor:.9e}" for factor in factors[k : k + lanes])
            x = b.mulf(x, b.constant(f"dense<[{listed}]>", vector_type(lanes)))
        b.vstore(x, self.values, token, b.add(start, k))

    def _finish(self, group: Index) -> None:
        """Emit code to run after `fill` has stored one codec group of x; a hook for subclasses."""
