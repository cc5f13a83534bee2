"""Compute Y = X W^T with x quantised to 8, 16 or 24 bits; dot products are exact.

A weight is scale * code + base, where the code is a small integer. Each codec group (some
consecutive elements of a row) has one scale and one base. An element of x is x_scale * q, with an
integer q of one to three int8 digits (`quantise_x`), and one x_scale for each unit of 32 elements.
So a codec group adds to an element of Y

    scale * x_scale * sum(code * q) + base * sum(x)

The first sum is exact in integers, so that it does not depend on the order of additions, the tile
sizes or the CPU. `Step` defines the few f32 operations that follow, and their order. All kernels for
integers use it, so that they give the same bits for a token, whichever other tokens they compute.

`Gemv` has one token, and quantises x itself. `SmallBatchInteger`, for a few tokens, loads codes into
registers, and multiplies `rows` tokens by them before it loads the next codes. `GemmInteger`, for a
chunk of tokens, has the loops of `gemm`. It decodes a part of the weight into a panel, a buffer with
int8 codes, four in each i32, and with the scale and base of each codec group.

If the codes of a codec are indices in a table of floats, as for NF4, the entries of the table are
rounded to int8.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import lcm
from typing import TypeVar

from castiron.emitter.codecs.fixed_point import GROUP
from castiron.emitter.kernels.matmul.gemm import Gemm
from castiron.emitter.kernels.matmul.output import Buffers, Epilogue
from castiron.emitter.kernels.matmul.schedule import (
    AHEAD_TOTAL,
    PanelTiles,
    SmallBatchIntegerTiles,
)
from castiron.emitter.kernels.matmul_spec import DIGITS, Matmul
from castiron.emitter.kernels.mlir.body import CACHE_LINE, I32, Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.dot import Accumulators, dot_of
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import tree
from castiron.emitter.kernels.quantise_x import WORDS, parts_of_sum
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Int8Panel
from castiron.emitter.kernels.weights.records import Int8Codes, Records

MIN_CHAINS = 4  # rows from which on the accumulators of one digit are enough to hide latency
T = TypeVar("T")
Quads = Callable[[int], Sequence[Sequence[Ssa]]]
Sides = Sequence[Sequence[tuple[Ssa, Ssa | None]]]


class GemmInteger(Gemm):
    """A writer of the body of a matmul kernel for many tokens, with x quantised to integers."""

    panel_type = Int8Panel

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: PanelTiles, buffers: Buffers):
        super().__init__(b, matmul, isa, tiles, buffers)
        self.step = Step(b, matmul, isa, buffers["weight"], buffers)

    def _tile(self, row: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        b, lanes, panel, width = self.b, self.lanes, self.panel, LANES * self.tiles.wide
        x_row = self._x_rows(token, rows)
        with b.loop(0, self.columns, width) as column:
            columns = [b.add(column.index, c) for c in range(0, width, self.lanes)]
            at = [(b.add(row, r), c) for r in range(rows) for c in columns]
            with b.loop(0, depth // self.step.unit, carry=[b.vload(self.sums, self.lanes, *each) for each in at]) as loop:
                parts = self.step.scales
                at_once, first = self.step.dot.quads, b.mul(loop.index, self.step.unit // 4)
                quads = lambda q: [panel.quads(b.add(first, q), c, at_once) for c in columns]
                groups = [b.add(b.mul(loop.index, self.step.parts), part) for part in range(parts)]
                base = lambda g, c: b.vload(panel.bases, lanes, g, c) if panel.bases else None
                side = lambda g, c: (b.vload(panel.scales, lanes, g, c), base(g, c))
                sides = [[side(group, c) for c in columns] for group in groups]
                tokens = [x_row(r) for r in range(rows)]
                loop.give(*self.step.add(loop.values, tokens, b.add(b.div(k, self.step.unit), loop.index), quads, sides))
            for total, each in zip(loop.results, at, strict=True):
                b.vstore(total, self.sums, *each)


class Step:
    """A writer of code that multiplies one unit of quantised x by weights and adds to f32 sums.

    A unit is the elements of x that share a scale (`Codec.unit`): 32 elements, with one or two codec
    groups, or more elements whose weights share a scale, which count as one group.

    A weight is scale * c + base if the codec has minima, and otherwise scale * (c - offset - bias),
    where c is the code that the instruction multiplies: the stored code plus a bias (`Dot.bias`).
    For each codec group of the unit, let D be the exact integer

        sum(c * q)                                  if the codec has minima
        sum(c * q) - (offset + bias) * sum(q)       otherwise

    D is computed in one i32, or if it may not fit (`parts_of_sum`), in two: D = 256 * high + low.
    Then in f32, in this order, with a codec group g of one or two in the unit:

        d[g] = f32(D)                               or fma(f32(high), 256, f32(low))
        dot = d[0] * scale[0];  dot = fma(d[1], scale[1], dot)
        y = fma(dot, x_scale, y)
        y = fma(base[g], x_sums[g], y)              for each g, if the codec has minima

    x: memrefs with the names and types of `quantised_types`.

    Arguments of the methods:
    rows: indices of the rows of x.
    unit: index of the unit in x.
    part: index of a codec group in the unit.
    quads: function that returns codes. A quad is four c in an i32.
        quads(q) returns, for each vector of outputs (rows of the weight), a list of `Dot.quads`
        vectors: quads q, q + 1 and so on. Each lane has the quad of one output.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, weight: Ssa, x: Mapping[str, Ssa], base: Index = 0):
        self.b, self.codec, self.lanes, self.x = b, matmul.format, isa.lanes, x
        self.digits = DIGITS[matmul.numerics]
        self.records = Records(b, self.codec, isa, weight, base)
        self.dot, self.unit = dot_of(isa)(b, isa, self.codec.integers), self.codec.unit(self.digits)
        self.parts, self.spans = self.unit // self.codec.group, self.unit // GROUP
        self.scales = 1 if self.spans > 1 else self.parts
        self.bias = 0 if self.codec.minimum and not self.dot.bias else self.codec.offset + self.dot.bias
        self.sum_parts = parts_of_sum(self.codec, self.digits)

    def add(self, sums: Sequence[Ssa], rows: Sequence[Index], unit: Index, quads: Quads, sides: Sides) -> list[Ssa]:
        """Return `sums` plus the dot products of the unit of x and of the weight.

        sums: f32 vectors, a flat list [rows of x][vectors of outputs].
        """
        groups = [self._dots(rows, unit, part, quads, len(sides[0])) for part in range(self.scales)]
        return self.scaled(sums, rows, unit, groups, sides)

    def scaled(
        self, sums: Sequence[Ssa], rows: Sequence[Index], unit: Index, groups: Sequence[Sequence[Ssa]], sides: Sides
    ) -> list[Ssa]:
        """Return `sums` plus scaled dot products; groups[g] has d[g], in the order of `sums`."""
        b, vectors, totals = self.b, len(sides[0]), []
        for i, so_far in enumerate(sums):
            row, v = rows[i // vectors], i % vectors
            dotted = b.mulf(groups[0][i], sides[0][v][0])
            for part in range(1, self.scales):
                dotted = b.fma(groups[part][i], sides[part][v][0], dotted)
            total = b.fma(dotted, b.broadcast(b.load(self.x["x_scales"], row, unit), self.lanes), so_far)
            for part in range(self.scales):
                base = sides[part][v][1]
                if base is not None:
                    x_sum = b.load(self.x["x_sums"], row, self._group(unit, part))
                    total = b.fma(base, b.broadcast(x_sum, self.lanes), total)
            totals.append(total)
        return totals

    def add_packed(
        self,
        sums: Sequence[Ssa],
        rows: Iterable[Index],
        unit: Index,
        block: Index,
        groups: Sequence[tuple[Index, Index]],
        v: Index,
        soon: Sequence[Callable[[], None]] = (),
    ) -> list[Ssa]:
        """Return `sums` plus the dot products of the unit of x and of the packed weight.

        sums: f32 vectors, one for each row of x; each lane belongs to one row of the weight.
        """
        codes = [Int8Codes(self.records, block, *group) for group in groups]
        sides = [[each.scale_and_base(v)] for each in codes[: self.scales]]
        each, calls, numbers = self.codec.group // 4, self.digits * self.unit // 4 // self.dot.quads, count()

        def quads(q: int) -> list[list[Ssa]]:
            for prefetch in share_of(soon, next(numbers), calls):
                prefetch()
            return [codes[q // each].quads(q % each, v)]

        return self.add(sums, list(rows), unit, quads, sides)

    def _dots(self, rows: Sequence[Index], unit: Index, part: int, quads: Quads, vectors: int) -> list[Ssa]:
        # d of codec group `part` (see the class), a flat list [rows][vectors].
        every = list(range(self.digits))
        if self.spans > 1:
            parts = [self._words(rows, unit, part, quads, vectors, every, 0) for part in range(self.spans)]
            return [self._float(tree(self.b.addi, words)) for words in zip(*parts, strict=True)]
        if self.sum_parts == 1:
            return [self._float(words) for words in self._words(rows, unit, part, quads, vectors, every, 0)]
        high, low = (self._words(rows, unit, part, quads, vectors, *of) for of in ((every[:-1], 0), (every[-1:], 1)))
        factor = self.b.splat(256.0, self.lanes)
        return [self.b.fma(self._float(h), factor, self._float(l)) for h, l in zip(high, low, strict=True)]

    def _float(self, words: Ssa) -> Ssa:
        return self.b.convert("sitofp", words, "f32")

    def _words(
        self, rows: Sequence[Index], unit: Index, part: int, quads: Quads, vectors: int, digits: Sequence[int], of_sum: int
    ) -> list[Ssa]:
        # The exact sum over some digits of q, as i32. of_sum: the part of x_integer_sums with the sum of q over them.
        b, dot, per_group = self.b, self.dot, self.codec.group // 4
        together, zero = batches(rows, dot.rows), b.constant("0", I32)
        totals: list[list[Accumulators]] = []  # [rows together][vectors]
        for number, digit in enumerate(digits):
            starts = None
            if self.bias and number == len(digits) - 1:
                starts = [[self._start(row, unit, part, of_sum) for row in each] for each in together]
            # Few rows need several independent accumulators, to hide the latency of the instruction.
            is_new = number == 0 or len(rows) < MIN_CHAINS
            before = totals
            if is_new:
                totals = [[dot.start(starts[i] if starts else [zero] * len(each))] * vectors for i, each in enumerate(together)]
            else:
                totals = [[dot.shifted(total, starts[i] if starts else None) for total in of] for i, of in enumerate(totals)]
            span = part * per_group // WORDS
            first = b.add(b.mul(b.add(b.mul(unit, self.spans), span), WORDS * self.digits), WORDS * digit)
            for q in range(part * per_group, (part + 1) * per_group, dot.quads):
                codes = [dot.code(arranged) for arranged in quads(q)]
                for i, each in enumerate(together):
                    x = dot.x(self.x["x"], each, b.add(first, q - span * WORDS))
                    totals[i] = [dot.add(total, code, x) for total, code in zip(totals[i], codes, strict=True)]
            if is_new and number:
                totals = [[dot.joined(*pair) for pair in zip(*of, strict=True)] for of in zip(before, totals, strict=True)]
        # Separate the vectors of each row; an odd last row uses only half of its block.
        by_row = [row for of_rows in totals for row in zip(*map(dot.words, of_rows), strict=True)]
        return [words for row in by_row[: len(rows)] for words in row]

    def _start(self, row: Index, unit: Index, part: int, of_sum: int) -> Ssa:
        number = self.b.add(self.b.mul(self._group(unit, part), self.sum_parts), of_sum)
        return self.b.binary("muli", self.b.load(self.x["x_integer_sums"], row, number), self.b.constant(str(-self.bias), I32))

    def _group(self, unit: Index, part: int) -> Index:
        return self.b.add(self.b.mul(unit, self.parts), part)


def share_of(items: Sequence[T], i: int, parts: int) -> Sequence[T]:
    """Divide `items` into `parts` consecutive parts of about the same length; return part i."""
    return items[len(items) * i // parts : len(items) * (i + 1) // parts]


class SmallBatchInteger:
    """A writer of the body of a matmul kernel for a few tokens, with x quantised to integers."""

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: SmallBatchIntegerTiles, buffers: Buffers):
        self.b, self.codec, self.isa, self.tiles, self.buffers = b, matmul.format, isa, tiles, buffers
        self.T, self.set = matmul.tokens, lcm(tiles.row_blocks, matmul.blocks_per_result)
        self.row_blocks, self.count, size = matmul.weight_shape
        self.ahead = -(-AHEAD_TOTAL // (tiles.row_blocks * size))
        self.step = Step(b, matmul, isa, buffers["weight"], buffers)
        self.records = self.step.records
        # Bytes of a record that are prefetched with each 32 elements of x.
        self.share = -(-size * self.step.parts // (self.records.layout.groups * CACHE_LINE)) * CACHE_LINE
        self.sums = b.stack(self.T, self.set * LANES)
        self.epilogue = Epilogue(b, matmul, isa.lanes, buffers, self.sums)

    def write(self) -> None:
        b, T, rows, vectors, together = self.b, self.T, self.tiles.rows, self.records.vectors, self.tiles.row_blocks
        end, full = b.real(self.buffers.get("length"), 0, T), T // rows * rows
        low, high = b.share(-(-self.row_blocks // self.set), b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high) as item:
            first = b.mul(item.index, self.set)
            with b.loop(0, self.set // together * vectors) as side:
                at, v = b.mul(b.div(side.index, vectors), together), b.rem(side.index, vectors)
                blocks = [b.add(first, b.add(at, i)) for i in range(together)]
                if self.row_blocks % self.set:
                    blocks = [b.min(block, self.row_blocks - 1) for block in blocks]
                columns = [b.add(b.mul(b.add(at, i), LANES), b.mul(v, self.isa.lanes)) for i in range(together)]
                with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), full), rows) as t:
                    self._tile(blocks, v, columns, t.index, rows)
                if full < T:
                    with b.when(b.less(full, end)):
                        self._tile(blocks, v, columns, full, T - full)
            last = b.min(b.add(first, self.set), self.row_blocks)
            self.epilogue.store(first, b.sub(last, first), 0, end, T)

    def _tile(self, blocks: Sequence[Index], v: Index, columns: Sequence[Index], token: Index, rows: int) -> None:
        b, groups, parts = self.b, self.records.layout.groups, self.step.parts
        zeros = [b.splat(0.0, self.isa.lanes)] * (rows * len(blocks))
        with b.loop(0, self.count * groups // parts, carry=zeros) as loop:
            first = b.mul(loop.index, parts)
            record, group = b.div(first, groups), b.rem(first, groups)
            then = b.add(record, self.ahead)
            skipped, later = b.mul(b.div(then, self.count), self.set), b.rem(then, self.count)
            line = b.mul(b.div(group, parts), self.share)
            self.records.prefetch_later(blocks, skipped, later, line, self.share)
            groups_at = [(record, b.add(group, part)) for part in range(parts)]
            sums: list[Ssa] = []
            for block, of_block in zip(blocks, batches(loop.values, rows), strict=True):
                tokens = (b.add(token, r) for r in range(rows))
                sums += self.step.add_packed(of_block, tokens, loop.index, block, groups_at, v)
            loop.give(*sums)
        for column, of_block in zip(columns, batches(loop.results, rows), strict=True):
            for r, total in enumerate(of_block):
                b.vstore(total, self.sums, b.add(token, r), column)
