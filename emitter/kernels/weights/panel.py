"""A panel of a packed weight as f32 on the stack: [depth, 16 * row blocks], each weight once rounded from its definition."""

from __future__ import annotations

from castiron.emitter.codecs import Codec, codec_of
from castiron.emitter.kernels.weights.packing import LANES, layout
from castiron.emitter.kernels.weights.records import Records, code_factors
from castiron.emitter.kernels.writing.body import Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa


def units(codec_name: str) -> int:
    """Elements of k that are decoded together: a panel's depth is a multiple of it."""
    codec = codec_of(codec_name)
    return codec.group if codec.quantised else layout(codec).elements


class Decoded:
    """The weights of `units` k of a row block, k from `unit` * units up, each decoded when first asked for."""

    def __init__(self, records: Records, block: Index, unit: Index):
        self.records, self.block = records, block
        if records.codec.quantised:
            groups = records.layout.groups
            self.at = records.b.div(unit, groups), records.b.rem(unit, groups)
            self.codes = records.group_codes(block, *self.at)
            self._sides: dict[int, tuple[dict[float, Ssa], Ssa | None]] = {}
        else:
            self._elements: dict[int, list[Ssa]] = {}
            self.at = unit, 0

    def weight(self, k: int, v: int) -> Ssa:
        """Weight k of vector v."""
        b, records = self.records.b, self.records
        if not records.codec.quantised:
            if v not in self._elements:
                self._elements[v] = records.elements(self.block, self.at[0], v)
            return self._elements[v][k]
        if v not in self._sides:
            scale, base = records.scale_and_base(self.block, *self.at, v)
            self._sides[v] = {1.0: scale}, base
        scaled, base = self._sides[v]
        factor = float(code_factors(records.codec)[k])
        if factor not in scaled:
            scaled[factor] = b.mulf(scaled[1.0], b.splat(factor, records.lanes))
        code = self.codes.code(k, v)
        return b.mulf(code, scaled[factor]) if base is None else b.fma(code, scaled[factor], base)


def decoded(records: Records, block: Index, unit: Index) -> list[list[Ssa]]:
    """[vectors][unit size] weights of a row block's unit number `unit`."""
    weights = Decoded(records, block, unit)
    return [[weights.weight(k, v) for k in range(units(records.codec.name))] for v in range(records.vectors)]


class Panel:
    """`depth` k of so many `row_blocks` of the packed weight, decoded to f32 on the stack."""

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, depth: int, row_blocks: int):
        self.b, self.codec, self.row_blocks, self.lanes = b, codec, row_blocks, isa.lanes
        self.records = Records(b, codec, isa, weight)
        self.unit = units(codec.name)
        self.values = b.stack(depth, LANES * row_blocks)

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        """Decode k to k + depth of row blocks `first_block` and up."""
        b, unit = self.b, self.unit
        with b.loop(0, self.row_blocks) as i, b.loop(0, -(-depth // unit)) as u:
            block = b.add(first_block, i.index)
            column = b.mul(i.index, LANES)
            for v, weights in enumerate(decoded(self.records, block, b.add(b.div(k, unit), u.index))):
                for j, weight in enumerate(weights):
                    row = b.add(b.mul(u.index, unit), j)
                    b.vstore(weight, self.values, row, b.add(column, v * self.lanes))

    def row(self, k: Index, column: Index) -> Ssa:
        """One vector of row k of the panel."""
        return self.b.vload(self.values, self.lanes, k, column)
