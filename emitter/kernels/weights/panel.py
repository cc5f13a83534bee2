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


def decoded(records: Records, block: Index, unit: Index) -> list[list[Ssa]]:
    """[vectors][unit size] weights of a row block's unit number `unit` (k from unit * size up)."""
    b, codec = records.b, records.codec
    if not codec.quantised:
        return [records.elements(block, unit, v) for v in range(records.vectors)]
    groups = records.layout.groups
    record, group = b.div(unit, groups), b.rem(unit, groups)
    codes = records.group_codes(block, record, group)
    found = []
    for v in range(records.vectors):
        scale, base = records.scale_and_base(block, record, group, v)
        scaled = {1.0: scale}
        weights = []
        for k, factor in enumerate(map(float, code_factors(codec))):
            if factor not in scaled:
                scaled[factor] = b.mulf(scale, b.splat(factor, records.lanes))
            code = codes.code(k, v)
            weight = b.mulf(code, scaled[factor]) if base is None else b.fma(code, scaled[factor], base)
            weights.append(weight)
        found.append(weights)
    return found


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
