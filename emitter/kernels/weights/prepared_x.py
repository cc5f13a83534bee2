"""x as products of codes want it: on the stack, normalised, multiplied by the powers of two that codes come with.

Beside it stand the sums over groups of x that minima and offsets of codes need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from castiron.emitter.codecs import Codec
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.records import code_factors
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, vector_type
from castiron.emitter.kernels.writing.rms import inverse_rms
from castiron.emitter.kernels.writing.vectors import lane_sums, tree

PAD = 16  # elements of the stack between rows of x


def bytes_per_element(codec: Codec) -> float:
    """Stack that an element of x takes."""
    return 4 + (4 / codec.group if codec.summed else 0)


def group_sum(b: Body, codec: Codec, parts: Sequence[Ssa]) -> Ssa:
    """The sum over a group of x, whose elements are `parts`, times the sign of the codec's minimum or minus its offset."""
    total = b.extract(lane_sums(b, [tree(b.addf, parts)]), 0)
    return b.mulf(total, b.f32(codec.minimum or -codec.offset))


class PreparedX:
    """Up to `capacity` elements of each of T rows of x [rows, in_features], from row `row` on.

    The one row of T = 1 is RMS-normalised with the weight `norm` if there is one.
    """

    def __init__(
        self, b: Body, product: Product, lanes: int, buffers: Mapping[str, Ssa], capacity: int, T: int, row: Index = 0
    ):
        self.b, self.codec, self.lanes, self.in_features, self.T = b, product.format, lanes, product.in_features, T
        self.source, self.norm, self.row = buffers["x"], buffers.get("norm"), row
        # Rows of a power of two would all fall into the same sets of the cache.
        self.values = b.stack(T, capacity + (PAD if T > 1 else 0))
        self.sums = b.stack(T, capacity // self.codec.group) if self.codec.summed else None
        self.inverse = None
        if product.rms_eps is not None:
            self.inverse = inverse_rms(b, partial(self._read, 0), self.in_features, product.rms_eps, lanes)

    def at(self, k: Index, token: Index = 0) -> Ssa:
        """Element k of what was filled in last, in every lane."""
        return self.b.broadcast(self.b.load(self.values, token, k), self.lanes)

    def sum_of(self, group: Index, token: Index = 0) -> Ssa:
        """Its sum over a group, times the sign of the codec's minimum or minus its offset, in every lane."""
        assert self.sums is not None, "only codecs with an offset or a minimum ask for sums"
        return self.b.broadcast(self.b.load(self.sums, token, group), self.lanes)

    def fill(self, first: int, last: int) -> None:
        """Take elements `first` to `last` of every row; zeros past the end of x."""
        fill = self._fill_groups if self.codec.quantised else self._fill_elements
        if self.T == 1:
            fill(0, first, last)
            return
        with self.b.loop(0, self.T) as token:
            fill(token.index, first, last)

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
        whole = (end - first) // lanes * lanes
        with b.loop(0, whole, lanes) as vector:
            b.vstore(self._normalised(token, b.add(vector.index, first), lanes), self.values, token, vector.index)
        for k in range(whole, end - first):
            b.vstore(self._normalised(token, first + k, 1), self.values, token, k)
        for k in range(end - first, last - first):
            b.vstore(b.splat(0.0, 1), self.values, token, k)

    def _fill_groups(self, token: Index, first: int, last: int) -> None:
        b, lanes, group = self.b, self.lanes, self.codec.group
        factors = code_factors(self.codec)
        with b.loop(0, (last - first) // group) as g:
            start, parts = b.mul(g.index, group), []
            for k in range(0, group, lanes):
                x = self._normalised(token, b.add(b.add(start, first), k), lanes)
                parts.append(x)
                if (factors[k : k + lanes] != 1).any():
                    listed = ", ".join(f"{factor:.9e}" for factor in factors[k : k + lanes])
                    x = b.mulf(x, b.constant(f"dense<[{listed}]>", vector_type(lanes)))
                b.vstore(x, self.values, token, b.add(start, k))
            if self.sums is not None:
                b.store(group_sum(b, self.codec, parts), self.sums, token, g.index)
