"""A panel of a packed weight as pairs of bf16 on the stack, in the blocks that `writing.matrix` multiplies.

[parts, steps, row blocks, 16 pairs of k, 16 columns] of i32. `PairPanel` has weights, in as many pieces as they need or
rounded to one; `CodePanel` has codes, which bf16 holds exactly, with scale and minimum of each group beside them.
"""

from __future__ import annotations

from castiron.emitter.codecs import Codec
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import decoded, units
from castiron.emitter.kernels.weights.records import Records, code_factors
from castiron.emitter.kernels.weights.x_pieces import DEPTH
from castiron.emitter.kernels.writing.body import Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.pairs import cut, pieces

PAIRS = DEPTH // 2
BLOCK_BYTES = 4 * PAIRS * LANES
# Pieces of 8 bits that hold a weight of a float codec.
_EXACT = {"bf16": 1, "f16": 2, "f32": 3}


def pieces_of(codec: Codec, exact: bool) -> int:
    """Pieces of a weight that is not rounded to one; ValueError for codes, whose scales are applied to sums."""
    if not exact:
        return 1
    if codec.quantised:
        raise ValueError(f"weights of {codec.name} are multiplied as codes")
    return _EXACT[codec.name]


class PairPanel:
    """`depth` k, whole steps, of so many row blocks of weights, in `count` pieces."""

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, depth: int, row_blocks: int, count: int):
        self.b, self.codec, self.lanes, self.row_blocks = b, codec, isa.lanes, row_blocks
        self.records, self.count = Records(b, codec, isa, weight), count
        self.words = b.stack(count, depth // DEPTH, row_blocks, PAIRS, LANES, element="i32")

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        """k to k + depth of row blocks `first_block` and up; zeros to the end of the last step."""
        with self.b.loop(0, self.row_blocks) as i:
            fill = self._fill_codes if self.codec.quantised else self._fill_floats
            fill(i.index, self.b.add(first_block, i.index), k, depth)

    def _fill_codes(self, i: Index, block: Index, k: Index, depth: int) -> None:
        b, unit = self.b, units(self.codec.name)
        with b.loop(0, depth // unit) as u:
            for v, weights in enumerate(decoded(self.records, block, b.add(b.div(k, unit), u.index))):
                for j in range(0, unit, 2):
                    self._put(i, b.add(b.mul(u.index, unit // 2), j // 2), v, *weights[j : j + 2])

    def _fill_floats(self, i: Index, block: Index, k: Index, depth: int) -> None:
        b, vectors, filled = self.b, range(self.records.vectors), -(-depth // 2)
        with b.loop(0, depth // 2) as pair:
            for v in vectors:
                self._put_pair(i, pair.index, v, block, b.add(k, b.mul(pair.index, 2)))
        for v in vectors if depth % 2 else ():
            self._put_pair(i, depth // 2, v, block, b.add(k, depth - 1), last=True)
        with b.loop(filled, -(-filled // PAIRS) * PAIRS) as pair:
            for v in vectors:
                self._store(i, pair.index, v, [b.isplat(0, self.lanes)] * self.count)

    def _put_pair(self, i: Index, pair: Index, v: int, block: Index, k: Index, last: bool = False) -> None:
        """Weights k and k + 1, or k and zero, of a float codec."""
        b, records = self.b, self.records
        if self.codec.name == "bf16":
            self._store(i, pair, v, [records.rows((block, b.div(k, 2), 0), v, "i32", 32)])
            return
        low = records.elements(block, k, v)[0]
        self._put(i, pair, v, low, b.splat(0.0, self.lanes) if last else records.elements(block, b.add(k, 1), v)[0])

    def _put(self, i: Index, pair: Index, v: int, low: Ssa, high: Ssa) -> None:
        self._store(i, pair, v, pieces(self.b, low, high, self.count))

    def _store(self, i: Index, pair: Index, v: int, words: list[Ssa]) -> None:
        b = self.b
        for piece, word in enumerate(words):
            b.vstore(word, self.words, piece, b.div(pair, PAIRS), i, b.rem(pair, PAIRS), v * self.lanes)


class CodePanel:
    """`depth` k, whole steps, of so many row blocks of codes, a step for each group: of a group of 16 k half of it is zeros."""

    count = 1

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, depth: int, row_blocks: int):
        self.b, self.codec, self.lanes, self.row_blocks = b, codec, isa.lanes, row_blocks
        self.records = Records(b, codec, isa, weight)
        groups = depth // codec.group
        self.words = b.stack(1, groups, row_blocks, PAIRS, LANES, element="i32")
        self.scales = b.stack(groups, LANES * row_blocks)
        self.minima = b.stack(groups, LANES * row_blocks) if codec.minimum else None
        if codec.group < DEPTH:
            with b.loop(0, groups) as g, b.loop(0, row_blocks) as i, b.loop(0, PAIRS) as pair:
                for lane in range(0, LANES, self.lanes):
                    b.vstore(b.isplat(0, self.lanes), self.words, 0, g.index, i.index, pair.index, lane)

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        """k to k + depth of row blocks `first_block` and up."""
        b, records, group = self.b, self.records, self.codec.group
        factors = [float(factor) for factor in code_factors(self.codec)]
        with b.loop(0, self.row_blocks) as i, b.loop(0, depth // group) as g:
            block, unit = b.add(first_block, i.index), b.add(b.div(k, group), g.index)
            record, number = b.div(unit, records.layout.groups), b.rem(unit, records.layout.groups)
            codes, first = records.group_codes(block, record, number), b.mul(b.rem(g.index, DEPTH // group), group // 2)
            for v in range(records.vectors):
                column = b.add(b.mul(i.index, LANES), v * self.lanes)
                scale, minimum = records.scale_and_base(block, record, number, v)
                b.vstore(scale, self.scales, g.index, column)
                if self.minima is not None and minimum is not None:
                    b.vstore(minimum, self.minima, g.index, column)
                for j in range(0, group, 2):
                    words = cut(b, *(self._signed(codes.code(j + n, v), factors[j + n]) for n in range(2)))
                    b.vstore(words, self.words, 0, g.index, i.index, b.add(first, j // 2), v * self.lanes)

    def _signed(self, code: Ssa, factor: float) -> Ssa:
        """A stored code times 1 / factor as the whole number that it stands for."""
        b = self.b
        if not self.codec.offset:
            return code if factor == 1 else b.mulf(code, b.splat(factor, self.lanes))
        return b.fma(code, b.splat(factor, self.lanes), b.splat(-float(self.codec.offset), self.lanes))
