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
            for v, weights in enumerate(self._decoded(block, b.add(b.div(k, unit), u.index))):
                for j, weight in enumerate(weights):
                    row = b.add(b.mul(u.index, unit), j)
                    b.vstore(weight, self.values, row, b.add(column, v * self.lanes))

    def row(self, k: Index, column: Index) -> Ssa:
        """One vector of row k of the panel."""
        return self.b.vload(self.values, self.lanes, k, column)

    def _decoded(self, block: Index, unit: Index) -> list[list[Ssa]]:
        """[vectors][unit size] weights of unit number `unit` (k from unit * size up)."""
        records, groups = self.records, self.records.layout.groups
        if not self.codec.quantised:
            return [records.elements(block, unit, v) for v in range(records.vectors)]
        record, group = self.b.div(unit, groups), self.b.rem(unit, groups)
        codes = records.group_codes(block, record, group)
        decoded = []
        for v in range(records.vectors):
            scale, base = self._scale_and_base(block, record, group, v)
            scaled = {1.0: scale}
            weights = []
            for k, factor in enumerate(map(float, code_factors(self.codec))):
                if factor not in scaled:
                    scaled[factor] = self.b.mulf(scale, self.b.splat(factor, records.lanes))
                code = codes.code(k, v)
                weight = self.b.mulf(code, scaled[factor]) if base is None else self.b.fma(code, scaled[factor], base)
                weights.append(weight)
            decoded.append(weights)
        return decoded

    def _scale_and_base(self, block: Index, record: Index, group: Index, v: int) -> tuple[Ssa, Ssa | None]:
        """weight = scale * stored code + base."""
        b, records, codec = self.b, self.records, self.codec
        scale, base = records.d(block, record, v), records.m(block, record, v)
        factor = records.group_scale(block, record, group, v)
        if factor is not None:
            scale = b.mulf(scale, factor)
        if base is not None:
            factor = records.group_minimum(block, record, group, v)
            base = base if factor is None else b.mulf(base, factor)
            return scale, base if codec.minimum > 0 else b.mulf(base, b.splat(-1.0, records.lanes))
        if codec.offset:
            base = b.mulf(scale, b.splat(-codec.offset, records.lanes))
        return scale, base
