"""Panels for GEMMs: buffers on the stack with an unpacked part of a weight, transposed.

A panel is a transposed copy of a part of the weight [out, in]: `depth` consecutive elements of some
rows, whose number is a multiple of 16. Each row of the weight is a column of the panel.

The classes differ in what a panel stores: weights as f32 or bf16, or their codes as f32 or int8. A
panel of codes also has a scale and a minimum for each codec group (the elements of a row that share
a scale). A bf16 panel has the block layout of `mlir.matrix`.
"""

from castiron.emitter.codecs import codec_of
from castiron.emitter.codecs.codec import Codec
from castiron.emitter.kernels.mlir.bf16_pairs import pieces
from castiron.emitter.kernels.mlir.body import CACHE_LINE, Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.split_x import DEPTH, PAIRS
from castiron.emitter.kernels.weights.packing import LANES, layout
from castiron.emitter.kernels.weights.records import Int8Codes, Records, code_factors

BLOCK_BYTES = 4 * PAIRS * LANES
# The number of bf16 whose sum is exactly a weight of a float codec.
EXACT_COUNTS = {"bf16": 1, "f16": 2, "f32": 3}


def units(codec_name: str) -> int:
    """Return the elements of a row in a unit: a codec group, 2 for bf16, 1 for f16 and f32."""
    codec = codec_of(codec_name)
    return codec.group if codec.quantised else layout(codec).elements


class Decoded:
    """A writer of code that decodes one unit of the rows of a row block to f32, scales once."""

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
        """Emit code that decodes one element of `lanes` neighbouring rows; return f32 [lanes]."""
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
    """Emit code that decodes a unit; entry [v][k] of the result is `Decoded.weight(k, v)`."""
    weights = Decoded(records, block, unit)
    return [[weights.weight(k, v) for k in range(units(records.codec.name))] for v in range(records.vectors)]


class BasePanel:
    """A base class of panels; see the module.

    A subclass has `fill(first_block, k, depth)`, which emits code that decodes elements k .. k +
    depth - 1 of `row_blocks` row blocks into buffers of the stack.
    """

    def __init__(self, b: Body, codec: Codec, isa: Isa, weight: Ssa, depth: int, row_blocks: int):
        self.b, self.codec, self.lanes, self.row_blocks = b, codec, isa.lanes, row_blocks
        self.records = Records(b, codec, isa, weight)
        self.allocate(depth, LANES * row_blocks)

    def allocate(self, depth: int, columns: int) -> None:
        """Allocate the buffers of a panel with `depth` rows and `columns` columns on the stack."""

    def prefetch(self, first_block: Index, k: Index, depth: int, part: Index, parts: int) -> None:
        """Emit prefetches into L2 of a part of the packed weight that `fill` will read."""
        for i in range(self.row_blocks):
            self.prefetch_block(self.b.add(first_block, i), k, depth, part, parts)

    def prefetch_block(self, block: Index, k: Index, depth: int, part: Index = 0, parts: int = 1) -> None:
        """Emit the prefetches of `prefetch` for one block of 16 rows, of index `block`."""
        b, record = self.b, self.records.layout
        start, nbytes = b.mul(b.div(k, record.elements), record.size), -(-depth // record.elements) * record.size
        if depth < record.elements:
            start = b.add(start, b.mul(b.div(b.rem(k, record.elements), self.codec.group), record.group_bytes))
            nbytes = record.codes + depth // self.codec.group * record.group_bytes
        lines = -(-nbytes // (CACHE_LINE * parts))
        first = b.add(start, b.mul(part, lines * CACHE_LINE))
        for line in range(lines):
            self.records.prefetch(block, 0, b.add(first, line * CACHE_LINE), near=False)

    def _allocate_sides(self, groups: int, columns: int) -> None:
        self.scales = self.b.stack(groups, columns)
        self.minima = self.b.stack(groups, columns) if self.codec.minimum else None

    def _store_sides(self, group: Index, column: Index, scale: Ssa, minimum: Ssa | None) -> None:
        self.b.vstore(scale, self.scales, group, column)
        if self.minima is not None and minimum is not None:
            self.b.vstore(minimum, self.minima, group, column)

    def _group(self, first_block: Index, k: Index, i: Index, g: Index) -> tuple[Index, Index, Index]:
        # i, g: index of the 16-row block and of the group in the panel.
        # The result is their index in the weight: (block, record, group in the record).
        b, groups = self.b, self.records.layout.groups
        block, number = b.add(first_block, i), b.add(b.div(k, self.codec.group), g)
        return block, b.div(number, groups), b.rem(number, groups)


class Panel(BasePanel):
    """A panel with weights as f32, in the buffer `values` [depth, columns]; see `BasePanel`."""

    def allocate(self, depth: int, columns: int) -> None:
        self.values = self.b.stack(depth, columns)

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        b, unit = self.b, units(self.codec.name)
        with b.loop(0, self.row_blocks) as i, b.loop(0, -(-depth // unit)) as u:
            block = b.add(first_block, i.index)
            column = b.mul(i.index, LANES)
            for v, weights in enumerate(decoded(self.records, block, b.add(b.div(k, unit), u.index))):
                for j, weight in enumerate(weights):
                    row = b.add(b.mul(u.index, unit), j)
                    b.vstore(weight, self.values, row, b.add(column, v * self.lanes))


class Int8Panel(BasePanel):
    """A panel with the stored codes of quantised weights as int8.

    codes: i32 [depth / 4, columns], four codes of one row in the order `EVEN_ODD`.
    scales, bases: f32 [groups, columns], see `Int8Codes.scale_and_base`.
    """

    def allocate(self, depth: int, columns: int) -> None:
        self.codes = self.b.stack(depth // 4, columns, element="i32")
        self.scales = self.b.stack(depth // self.codec.group, columns)
        self.bases = self.b.stack(depth // self.codec.group, columns) if self.codec.minimum else None

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        b, records, group = self.b, self.records, self.codec.group
        with b.loop(0, self.row_blocks) as i, b.loop(0, depth // group) as g, b.loop(0, records.vectors) as vector:
            at, v = self._group(first_block, k, i.index, g.index), vector.index
            column = b.add(b.mul(i.index, LANES), b.mul(v, self.lanes))
            codes = Int8Codes(records, *at)
            scale, base = codes.scale_and_base(v)
            b.vstore(scale, self.scales, g.index, column)
            if base is not None and self.bases is not None:
                b.vstore(base, self.bases, g.index, column)
            for q in range(0, group // 4, codes.dot.quads):
                for each, arranged in enumerate(codes.quads(q, v), q):
                    b.vstore(arranged, self.codes, b.add(b.mul(g.index, group // 4), each), column)

    def quads(self, q: Index, column: Index, count: int) -> list[Ssa]:
        """Load `count` vectors i32 [lanes] from the buffer `codes`, where each i32 has four codes."""
        return [self.b.vload(self.codes, self.lanes, self.b.add(q, i), column) for i in range(count)]


class Bf16Panel(BasePanel):
    """A panel with weights rounded to bf16; subclasses may store a weight as a sum of `count` bf16.

    words: i32 [count, depth / 32, row blocks, 16 pairs, 16 columns], with two neighbours.
    """

    count = 1

    def allocate(self, depth: int, columns: int) -> None:
        self.words = self.b.stack(self.count, depth // DEPTH, self.row_blocks, PAIRS, LANES, element="i32")

    def fill(self, first_block: Index, k: Index, depth: int) -> None:
        with self.b.loop(0, self.row_blocks) as i:
            self.fill_block(i.index, self.b.add(first_block, i.index), k, depth)

    def fill_block(self, i: Index, block: Index, k: Index, depth: int) -> None:
        """Emit code that decodes 16 rows into the panel; the arguments are those of `fill`, except:"""
        # Float weights are padded with zeros to a multiple of 32 elements.
        fill = self._fill_codes if self.codec.quantised else self._fill_floats
        fill(i, block, k, depth)

    def _fill_codes(self, i: Index, block: Index, k: Index, depth: int) -> None:
        b, unit = self.b, units(self.codec.name)
        with b.loop(0, depth // unit) as u:
            for v, weights in enumerate(decoded(self.records, block, b.add(b.div(k, unit), u.index))):
                for j in range(0, unit, 2):
                    pair = b.add(b.mul(u.index, unit // 2), j // 2)
                    self._store(i, pair, v, pieces(b, weights[j], weights[j + 1], self.count))

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
        # The pair has elements k and k + 1; if k is the last element, the second one is zero.
        # i, block: index of the 16-row block in the panel and in the weight.
        b, records = self.b, self.records
        if self.codec.name == "bf16":
            self._store(i, pair, v, [records.rows((block, b.div(k, 2), 0), v, "i32", 32)])
            return
        low = records.elements(block, k, v)[0]
        high = b.splat(0.0, self.lanes) if last else records.elements(block, b.add(k, 1), v)[0]
        self._store(i, pair, v, pieces(b, low, high, self.count))

    def _store(self, i: Index, pair: Index, v: int, words: list[Ssa]) -> None:
        b = self.b
        for piece, word in enumerate(words):
            b.vstore(word, self.words, piece, b.div(pair, PAIRS), i, b.rem(pair, PAIRS), v * self.lanes)


class Bf16SplitPanel(Bf16Panel):
    """A panel with float weights, each stored as `count` bf16 whose sum is exactly the weight.

    The buffer is described in `Bf16Panel`. The count is 1 for bf16, 2 for f16 and 3 for f32.
    """

    def allocate(self, depth: int, columns: int) -> None:
        self.count = EXACT_COUNTS[self.codec.name]
        super().allocate(depth, columns)


class Bf16BlockPanel(Bf16Panel):
    """A panel with quantised weights divided by the scale d of their codec block.

    An element is code * (scale of its group), as `count` bf16 whose sum is exact: 2, or 1 if groups
    have no scales.

    scales: f32 [blocks, columns], d. The GEMM multiplies the sum over a block, or a part, by it.
    """

    minima = None

    @staticmethod
    def fits(codec: Codec) -> bool:
        """Return whether GEMMs of a codec are faster with this panel than with `Bf16CodePanel`."""
        return codec.block > codec.group and not codec.minimum and (codec.group < DEPTH or layout(codec).scales is None)

    def allocate(self, depth: int, columns: int) -> None:
        # Scales and codes have at most 8 bits each.
        self.count = 1 if self.records.layout.scales is None else 2
        super().allocate(depth, columns)
        self.scales = self.b.stack(-(-depth // self.codec.block), columns)

    def fill_block(self, i: Index, block: Index, k: Index, depth: int) -> None:
        b, records, group = self.b, self.records, self.codec.group
        factors, offset = [float(factor) for factor in code_factors(self.codec)], -float(self.codec.offset)
        for v in range(records.vectors):
            with b.loop(0, -(-depth // self.codec.block)) as n:
                d = records.d(block, b.add(b.div(k, self.codec.block), n.index), v)
                b.vstore(d, self.scales, n.index, b.add(b.mul(i, LANES), v * self.lanes))
        with b.loop(0, depth // group) as g:
            at = self._group(block, k, 0, g.index)
            codes = records.group_codes(*at)
            for v in range(records.vectors):
                scale = records.group_scale(*at, v)
                for j in range(0, group, 2):
                    number = b.add(b.mul(g.index, group // 2), j // 2)
                    if scale is None:
                        self._store(i, number, v, [codes.bf16_pair(j, v)])
                        continue
                    pair = [
                        b.fma(codes.code(j + n, v), b.splat(factors[j + n], self.lanes), b.splat(offset, self.lanes))
                        for n in range(2)
                    ]
                    low, high = (b.mulf(each, scale) for each in pair)
                    self._store(i, number, v, pieces(b, low, high, self.count))


class Bf16CodePanel(Bf16Panel):
    """A panel with the codes of quantised weights, converted exactly to bf16.

    words: i32 [1, groups, row blocks, 16 pairs, 16 columns]; for groups of 16, half of the pairs
    are 0.
    scales, minima: f32 [groups, columns]. A weight is scale * code + minimum.
    """

    def allocate(self, depth: int, columns: int) -> None:
        b, groups = self.b, depth // self.codec.group
        self.words = b.stack(1, groups, self.row_blocks, PAIRS, LANES, element="i32")
        self._allocate_sides(groups, columns)
        if self.codec.group < DEPTH:
            with b.loop(0, groups) as g, b.loop(0, self.row_blocks) as i, b.loop(0, PAIRS) as pair:
                for lane in range(0, LANES, self.lanes):
                    b.vstore(b.isplat(0, self.lanes), self.words, 0, g.index, i.index, pair.index, lane)

    def fill_block(self, i: Index, block: Index, k: Index, depth: int) -> None:
        b, records, group = self.b, self.records, self.codec.group
        with b.loop(0, depth // group) as g:
            at = self._group(block, k, 0, g.index)
            codes, first = records.group_codes(*at), b.mul(b.rem(g.index, DEPTH // group), group // 2)
            for v in range(records.vectors):
                self._store_sides(g.index, b.add(b.mul(i, LANES), v * self.lanes), *records.scale_and_base(*at, v))
                for j in range(0, group, 2):
                    pair = codes.bf16_pair(j, v)
                    b.vstore(pair, self.words, 0, g.index, i, b.add(first, j // 2), v * self.lanes)
