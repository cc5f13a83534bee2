"""Prepare x on the stack for matmuls of one token: norm, and quantisation or scaling."""

from collections.abc import Container, Mapping

from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import inverse_rms
from castiron.emitter.kernels.quantise_x import quantised_types, write_unit


class _NormedX:
    """Reads a row of x from memory, and applies the RMS norm of a matmul that has one."""

    def __init__(self, b: Body, matmul: Matmul, lanes: int, buffers: Mapping[str, Ssa], row: Index = 0):
        self.b, self.matmul, self.codec, self.lanes, self.in_features = b, matmul, matmul.format, lanes, matmul.in_features
        self.source, self.norm, self.row = buffers["x"], buffers.get("norm"), row
        self.inverse = None
        if matmul.rms_eps is not None:
            self.inverse = inverse_rms(b, self._read, self.in_features, matmul.rms_eps)

    def _read(self, k: Index, width: int) -> Ssa:
        return self.b.vload(self.source, width, self.row, k)

    def _normalised(self, k: Index, width: int) -> Ssa:
        b, x = self.b, self._read(k, width)
        if self.inverse is None or self.norm is None:
            return x
        return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.norm, width, k))


class QuantisedX(_NormedX):
    """Stack buffers with one row of x, as `quantise_x` makes them, but those named in `without`."""

    def __init__(
        self,
        b: Body,
        matmul: Matmul,
        lanes: int,
        buffers: Mapping[str, Ssa],
        capacity: int,
        row: Index = 0,
        without: Container[str] = (),
    ):
        super().__init__(b, matmul, lanes, buffers, row)
        types = quantised_types(1, capacity, self.codec, matmul.digits)
        self.made = {n: b.stack(*type_.shape, element=type_.dtype.name) for n, type_ in types.items() if n not in without}

    @staticmethod
    def bytes_per_element(matmul: Matmul, isa: Isa) -> float:
        return sum(type_.nbytes for type_ in quantised_types(1, 256, matmul.format, matmul.digits).values()) / 256

    def fill(self, first: int, last: int) -> None:
        """Emit code that stores elements first .. last - 1, quantised, from the start of the buffers on."""
        b, size = self.b, self.codec.unit(self.matmul.digits)
        with b.loop(0, (last - first) // size) as unit:
            start = b.add(b.mul(unit.index, size), first)
            x = [self._normalised(b.add(start, k), self.lanes) for k in range(0, size, self.lanes)]
            self._write(x, unit.index)

    def _write(self, x: list[Ssa], unit: Index) -> None:
        write_unit(self.b, self.codec, self.matmul.digits, x, self.made, 0, unit)


class PreparedX(_NormedX):
    """A stack buffer with one row of f32 x, normalised.

    capacity: max number of elements of a call of `fill`; `at` counts from the first of them.
    """

    def __init__(
        self,
        b: Body,
        matmul: Matmul,
        lanes: int,
        buffers: Mapping[str, Ssa],
        capacity: int,
        row: Index = 0,
    ):
        super().__init__(b, matmul, lanes, buffers, row)
        self.values = b.stack(capacity)

    def at(self, k: Index) -> Ssa:
        """Load element `k` of the prepared x into all lanes of a vector."""
        return self.b.broadcast(self.b.load(self.values, k), self.lanes)

    def fill(self, first: int, last: int) -> None:
        """Emit code that prepares elements first .. last - 1; those past the end of x become zero."""
        b, lanes = self.b, self.lanes
        end = min(last, self.in_features)
        full = (end - first) // lanes * lanes
        with b.loop(0, full, lanes) as vector:
            b.vstore(self._normalised(b.add(vector.index, first), lanes), self.values, vector.index)
        for k in range(full, end - first):
            b.vstore(self._normalised(first + k, 1), self.values, k)
        for k in range(end - first, last - first):
            b.vstore(b.splat(0.0, 1), self.values, k)
