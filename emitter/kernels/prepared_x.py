"""x as a matrix-vector product wants it: on the stack, normalised, multiplied by the powers of two that codes come with.

Beside it stand the sums over groups of x that minima and offsets of codes need.
"""

from __future__ import annotations

from collections.abc import Sequence

from emitter.codecs import Codec
from emitter.kernels.records import code_factors
from emitter.kernels.rope_append import inverse_rms
from emitter.kernels.text import Body, Index, Value, vector_type
from emitter.kernels.vector_math import lane_sums


def bytes_per_element(codec: Codec) -> float:
    """Stack that an element of x takes."""
    return 4 + (4 / codec.group if _needs_sums(codec) else 0)


def _needs_sums(codec: Codec) -> bool:
    return bool(codec.offset or codec.minimum)


def tree_sum(b: Body, parts: Sequence[Value]) -> Value:
    """The sum of vectors, in pairs."""
    while len(parts) > 1:
        parts = [b.addf(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


class PreparedX:
    """Up to `capacity` elements of x [1, in_features], RMS-normalised with the weight `norm` if there is one."""

    def __init__(
        self,
        b: Body,
        codec: Codec,
        lanes: int,
        x: Value,
        norm: Value | None,
        eps: float | None,
        in_features: int,
        capacity: int,
    ):
        self.b, self.codec, self.lanes, self.in_features = b, codec, lanes, in_features
        self.source, self.norm = x, norm
        self.values = b.stack(capacity)
        self.sums = b.stack(capacity // codec.group) if _needs_sums(codec) else None
        self.inverse = None if norm is None else inverse_rms(b, self._read, in_features, eps, lanes)

    def at(self, k: Index) -> Value:
        """Element k of what was filled in last, in every lane."""
        return self.b.broadcast(self.b.load(self.values, k), self.lanes)

    def sum_of(self, group: Index) -> Value:
        """Its sum over a group, times the sign of the codec's minimum or minus its offset, in every lane."""
        return self.b.broadcast(self.b.load(self.sums, group), self.lanes)

    def fill(self, first: int, last: int) -> None:
        """Take elements `first` to `last`; zeros past the end of x."""
        if self.codec.quantised:
            self._fill_groups(first, last)
        else:
            self._fill_elements(first, last)

    def _read(self, k: Index, width: int) -> Value:
        return self.b.vload(self.source, width, 0, k)

    def _normalised(self, k: Index, width: int) -> Value:
        b, x = self.b, self._read(k, width)
        if self.inverse is None:
            return x
        return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.norm, width, k))

    def _fill_elements(self, first: int, last: int) -> None:
        b, lanes = self.b, self.lanes
        end = min(last, self.in_features)
        whole = (end - first) // lanes * lanes
        with b.loop(0, whole, lanes) as k:
            b.vstore(self._normalised(b.add(k.index, first), lanes), self.values, k.index)
        for k in range(whole, end - first):
            b.vstore(self._normalised(first + k, 1), self.values, k)
        for k in range(end - first, last - first):
            b.vstore(b.splat(0.0, 1), self.values, k)

    def _fill_groups(self, first: int, last: int) -> None:
        b, lanes, group = self.b, self.lanes, self.codec.group
        factors = code_factors(self.codec)
        with b.loop(0, (last - first) // group) as g:
            start, parts = b.mul(g.index, group), []
            for k in range(0, group, lanes):
                x = self._normalised(b.add(b.add(start, first), k), lanes)
                parts.append(x)
                if (factors[k : k + lanes] != 1).any():
                    listed = ", ".join(f"{factor:.9e}" for factor in factors[k : k + lanes])
                    x = b.mulf(x, b.constant(f"dense<[{listed}]>", vector_type(lanes)))
                b.vstore(x, self.values, b.add(start, k))
            if self.sums is not None:
                total = b.extract(lane_sums(b, [tree_sum(b, parts)]), 0)
                b.store(b.mulf(total, b.f32(self.codec.minimum or -self.codec.offset)), self.sums, g.index)
