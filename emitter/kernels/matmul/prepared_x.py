"""Prepare x on the stack for matmuls of few tokens: norm, and quantisation or scaling for the codec of the weight."""

from collections.abc import Mapping
from functools import partial

from castiron.emitter.fixed_point import GROUP
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import inverse_rms
from castiron.emitter.kernels.quantise_x import quantised_types, write_unit
from castiron.emitter.kernels.weights.records import E4M3_FACTOR

PAD = 16  # elements between rows of x on the stack


class _NormedX:
    """Reads rows of x from memory, and applies the RMS norm of a matmul that has one.

    row: index in x of the first row; the argument `token` of methods counts from it.
    """

    def __init__(self, b: Body, matmul: Matmul, lanes: int, buffers: Mapping[str, Ssa], row: Index = 0):
        self.b, self.matmul, self.codec, self.lanes, self.in_features = b, matmul, matmul.format, lanes, matmul.in_features
        self.source, self.norm, self.row = buffers["x"], buffers.get("norm"), row
        self.inverse = None
        if matmul.rms_eps is not None:
            self.inverse = inverse_rms(b, partial(self._read, 0), self.in_features, matmul.rms_eps, lanes)

    def _read(self, token: Index, k: Index, width: int) -> Ssa:
        return self.b.vload(self.source, width, self.b.add(token, self.row), k)

    def _normalised(self, token: Index, k: Index, width: int) -> Ssa:
        b, x = self.b, self._read(token, k, width)
        if self.inverse is None or self.norm is None:
            return x
        return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.norm, width, k))


class QuantisedX(_NormedX):
    """Stack buffers with one row of x, quantised as by the kernel `quantise_x`.

    made: the buffers by name, with the types of `quantised_types` for `capacity` elements.
    """

    def __init__(self, b: Body, matmul: Matmul, lanes: int, buffers: Mapping[str, Ssa], capacity: int, row: Index = 0):
        super().__init__(b, matmul, lanes, buffers, row)
        types = quantised_types(1, capacity, self.codec, matmul.digits)
        self.made = {name: b.stack(*type_.shape, element=type_.dtype.name) for name, type_ in types.items()}

    @staticmethod
    def bytes_per_element(matmul: Matmul) -> float:
        return sum(type_.nbytes for type_ in quantised_types(1, 256, matmul.format, matmul.digits).values()) / 256

    def fill(self, first: int, last: int) -> None:
        """Emit code that quantises elements first .. last - 1; they are stored from the start of the buffers on."""
        b = self.b
        with b.loop(0, (last - first) // GROUP) as unit:
            start = b.add(b.mul(unit.index, GROUP), first)
            x = [self._normalised(0, b.add(start, k), self.lanes) for k in range(0, GROUP, self.lanes)]
            write_unit(b, self.codec, self.matmul.digits, x, self.made, 0, unit.index)


class PreparedX(_NormedX):
    """A stack buffer with T rows of f32 x, normalised and scaled for the codes of the weight.

    If the rows do not fit on the stack, each call of `fill` prepares a part of them. `at` counts
    elements from the start of this part.

    capacity: max number of elements of a row that one call of `fill` prepares.
    """

    def __init__(
        self, b: Body, matmul: Matmul, lanes: int, buffers: Mapping[str, Ssa], capacity: int, T: int = 1, row: Index = 0
    ):
        super().__init__(b, matmul, lanes, buffers, row)
        self.T = T
        # PAD keeps rows whose length is a power of two from sharing cache sets.
        self.values = b.stack(T, capacity + (PAD if T > 1 else 0))

    def at(self, k: Index, token: Index = 0) -> Ssa:
        """Load element `k` of row `token` of the prepared x into all lanes of a vector."""
        return self.b.broadcast(self.b.load(self.values, token, k), self.lanes)

    def fill(self, first: Index, last: Index) -> None:
        """Emit code that prepares elements first .. last - 1 of every row; elements past the end of a row become zero."""
        fill_row = self._fill_codes if self.codec.quantised else self._fill_floats
        with self.b.loop(0, self.T) as token:
            fill_row(token.index, first, last)

    def _fill_floats(self, token: Index, first: Index, last: Index) -> None:
        b, lanes = self.b, self.lanes
        assert isinstance(first, int) and isinstance(last, int), "bounds of float codecs"
        end = min(last, self.in_features)
        full = (end - first) // lanes * lanes
        with b.loop(0, full, lanes) as vector:
            b.vstore(self._normalised(token, b.add(vector.index, first), lanes), self.values, token, vector.index)
        for k in range(full, end - first):
            b.vstore(self._normalised(token, first + k, 1), self.values, token, k)
        for k in range(end - first, last - first):
            b.vstore(b.splat(0.0, 1), self.values, token, k)

    def _fill_codes(self, token: Index, first: Index, last: Index) -> None:
        b, lanes = self.b, self.lanes
        with b.loop(0, b.sub(last, first), lanes) as vector:
            x = self._normalised(token, b.add(vector.index, first), lanes)
            if self.codec.e4m3:
                x = b.mulf(x, b.splat(E4M3_FACTOR, lanes))
            b.vstore(x, self.values, token, vector.index)
