"""Compute y = W x for one token; packed weights are decoded in registers.

Layout of a packed W (`weights.packing`): 16 rows of W are a row block. Each lane of a vector
computes one of these rows, so nothing is added across lanes. A row block is a sequence of records.
A record has one codec block (such as 32 or 256 elements) of each of the 16 rows.

    each workgroup: a share of the row blocks
      xs [in] = norm(x), quantised to integers if codes are integers                       stack, L2
      for `together` row blocks at a time:
        for record, for unit of 32 elements in record:
          y = y + W[rows, unit] * xs[unit]                            `gemm_integer.Step`  registers
        y = epilogue(y)                                                                       memory

- With a GLU, row blocks of gate and of up alternate in W. Each row block of gate is computed in the
  same set of row blocks as the next one, which belongs to up.
- If xs does not fit on the stack, the kernel prepares and multiplies one part of x after another,
  and stores partial results on the stack. It is slower, because the core then reads a part of a row
  block and skips the rest, and hardware prefetchers read on at the end of every part.
- Codes that are not integers (E4M3, NF4): y += (d * code[k]) * x[k] in f32, as in the kernels for several tokens.
- Float codecs: a record has one element of each row (bf16: two), and is not decoded.
"""

from collections.abc import Callable, Sequence
from functools import partial

from castiron.emitter.kernels.epilogue import combine, with_operands
from castiron.emitter.kernels.matmul.gemm_integer import Step, share_of
from castiron.emitter.kernels.matmul.output import Buffers, each_block
from castiron.emitter.kernels.matmul.prepared_x import PreparedX, QuantisedX
from castiron.emitter.kernels.matmul.schedule import GemvTiles
from castiron.emitter.kernels.matmul.sum_tables import SumTables, is_summed_by_tables
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import CACHE_LINE, L2_STACK_BYTES, Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import tree
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Decoded
from castiron.emitter.kernels.weights.records import Records

Prefetches = list[Callable[[], None]]  # functions that each emit a prefetch
BATCH = 32  # sets of row blocks whose totals stay on the stack if x is prepared in parts


class Gemv:
    """Emits the code of a GEMV, which multiplies a packed weight by one row of x.

    x_row, y_row: rows of x and of y. base: the first row block, of the expert's weight for MoE.
    totals, results: for each (i, v) in `self.sides`, vector v of row block row_blocks[i].
    """

    def __init__(
        self,
        b: Body,
        matmul: Matmul,
        isa: Isa,
        tiles: GemvTiles,
        buffers: Buffers,
        x_row: Index = 0,
        y_row: Index = 0,
        base: Index = 0,
    ):
        self.b, self.codec, self.tiles, self.buffers, self.base = b, matmul.format, tiles, buffers, base
        self.lanes, self.x_row, self.y_row = isa.lanes, x_row, y_row
        self.by_tables = is_summed_by_tables(matmul, isa)
        self.matmul, self.isa, self.out_features, self.in_features = matmul, isa, matmul.out_features, matmul.in_features
        self.row_blocks, self.count, self.size = matmul.weight_shape
        self.records = Records(b, self.codec, isa, buffers["weight"], base)
        self.layout = self.records.layout
        self.together = min(tiles.together, self.row_blocks)
        self.set = max(self.together, matmul.blocks_per_result)  # row blocks whose results are computed together
        self.sides = [(i, v) for i in range(self.together) for v in range(self.records.vectors)]

    def write(self) -> None:
        self.write_share(self.b.workgroup())

    def write_share(self, share: Index) -> None:
        """Emit the code that computes one of `tiles.workgroups` shares of the rows of the weight."""
        b, elements, matmul = self.b, self.layout.elements, self.matmul
        kind = SumTables if self.by_tables else QuantisedX
        x_bytes = elements * (kind.bytes_per_element(matmul, self.isa) if matmul.digits else 4)
        space = L2_STACK_BYTES - 4 * LANES * BATCH * self.set
        chunks = -(-self.count // max(1, int(space // x_bytes)))
        chunk = -(-self.count // chunks)  # records
        sets = -(-self.row_blocks // self.set)
        low, high = b.share(sets, share, self.tiles.workgroups)
        # Prefetch the first weights, to use memory bandwidth while x is prepared.
        row_blocks = self._blocks_of(low)[: self.together]
        with b.loop(0, min(self.tiles.ahead, self.count)) as record:
            for line in range(0, self.size, CACHE_LINE):
                for block in row_blocks:
                    self.records.prefetch(block, record.index, line)
        self.x: PreparedX | QuantisedX
        if matmul.digits:
            if self.by_tables:
                self.x = SumTables(b, matmul, self.isa, self.buffers, chunk * elements, self.x_row)
            else:
                self.x = QuantisedX(b, matmul, self.lanes, self.buffers, chunk * elements, self.x_row)
            self.step = Step(b, matmul, self.isa, self.buffers["weight"], self.x.made, self.base)
        else:
            self.x = PreparedX(b, matmul, self.lanes, self.buffers, chunk * elements, self.x_row)
        if chunks == 1:
            self._sets(low, high, 0, self.count, None)
            return
        parts = b.stack(BATCH * self.set, LANES)
        with b.loop(low, high, BATCH) as batch:
            end = b.min(b.add(batch.index, BATCH), high)
            for first in range(0, self.count, chunk):
                self._sets(batch.index, end, first, min(first + chunk, self.count), parts)

    def _sets(self, low: Index, high: Index, first: int, last: int, parts: Ssa | None) -> None:
        """Emit code that multiplies a part of the weight by x, and stores y once it is complete.

        parts: stack buffer that carries incomplete sums from one range of records to the next; None
            if the range has all records.
        """
        b, self.range = self.b, (first, last)
        self.x.fill(first * self.layout.elements, last * self.layout.elements)
        with b.loop(low, high) as number:
            row_blocks, dots = self._blocks_of(number.index), []
            for at in range(0, self.set, self.together):
                slot = b.add(b.mul(b.sub(number.index, low), self.set), at)
                stored_at = [(b.add(slot, i), v * self.lanes) for i, v in self.sides]
                if parts is None or first == 0:
                    totals = [b.splat(0.0, self.lanes)] * len(self.sides)
                else:
                    totals = [b.vload(parts, self.lanes, *at_sum) for at_sum in stored_at]
                totals = self._dots(row_blocks[at : at + self.together], first, last, totals)
                if parts is not None and last < self.count:
                    for total, at_sum in zip(totals, stored_at, strict=True):
                        b.vstore(total, parts, *at_sum)
                dots += totals
            if last == self.count:
                results, shared = batches(dots, self.records.vectors), self.matmul.blocks_per_result
                for block, of_block in zip(row_blocks[::shared], batches(results, shared), strict=True):
                    self._store(b.div(block, shared), combine(b, self.matmul.glu, of_block))

    def _blocks_of(self, number: Index) -> list[Index]:
        # The 16-row blocks of set `number`. An incomplete set repeats the last ones of the weight.
        b, shared = self.b, self.matmul.blocks_per_result
        row_blocks = [b.add(b.mul(number, self.set), i) for i in range(self.set)]
        if self.row_blocks % self.set == 0:
            return row_blocks
        return [b.min(block, self.row_blocks - shared + i % shared) for i, block in enumerate(row_blocks)]

    def _dots(self, row_blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        # totals + the dot products of records first .. last - 1
        if not self.codec.quantised:
            return self._float_dots(row_blocks, first, last, totals)
        add = self._integer_unit if self.matmul.digits else self._float_group
        elements = self.step.unit if self.matmul.digits else self.codec.group
        units = self.layout.elements // elements
        with self.b.loop(first, last, carry=totals) as record:
            if units > 1:
                for prefetch in self._prefetches(row_blocks, record.index, 0, self.layout.codes):  # scales and minima
                    prefetch()
            with self.b.loop(0, units, carry=record.values) as unit:
                at = 0 if units == 1 else unit.index
                offset, nbytes = self.records.extent(self.b.mul(at, elements // self.codec.group), elements // self.codec.group)
                soon = self._prefetches(row_blocks, record.index, offset, nbytes)
                slot = self.b.add(self.b.mul(self.b.sub(record.index, first), units), at)
                unit.give(*add(row_blocks, record.index, at, slot, unit.values, soon))
            record.give(*unit.results)
        return record.results

    def _prefetches(self, row_blocks: list[Index], record: Index, offset: Index, nbytes: int) -> Prefetches:
        """Return functions that each emit a prefetch of one cache line of the packed weight."""
        b, (first, last) = self.b, self.range
        then = b.add(b.sub(record, first) if first else record, self.tiles.ahead)  # may be in the next set of row blocks
        skipped, record = b.mul(b.div(then, last - first), self.together), b.add(b.rem(then, last - first), first)
        return [
            partial(self.records.prefetch, b.add(block, skipped), record, b.add(offset, line))
            for line in range(0, nbytes, CACHE_LINE)
            for block in row_blocks
        ]

    def _integer_unit(
        self,
        row_blocks: list[Index],
        record: Index,
        unit: Index,
        slot: Index,
        totals: list[Ssa],
        soon: Prefetches,
    ) -> list[Ssa]:
        """Return totals + the dot products of a unit of x with `row_blocks`."""
        done, parts = [], self.step.parts
        groups = [(record, self.b.add(self.b.mul(unit, parts), part)) for part in range(parts)]
        for n, (i, v) in enumerate(self.sides):
            mine = share_of(soon, n, len(self.sides))
            if self.by_tables:
                for prefetch in mine:
                    prefetch()
                done += self._looked_up(totals[n], slot, row_blocks[i], groups, v)
            else:
                done += self.step.add_packed([totals[n]], [0], slot, row_blocks[i], groups, v, mine)
        return done

    def _looked_up(self, total: Ssa, slot: Index, block: Index, groups: list[tuple[Index, Index]], v: int) -> list[Ssa]:
        b, records, x = self.b, self.records, self.x
        assert isinstance(x, SumTables)
        first = b.mul(slot, len(groups))
        dots = [x.dot(records.group_codes(block, *at), b.add(first, part), v) for part, at in enumerate(groups)]
        dots = [tree(b.addi, dots)] if self.step.scales == 1 else dots
        found = [records.scale_and_base(block, *at, v) for at in groups[: self.step.scales]]
        sides = [[(scale, base if self.codec.minimum else None)] for scale, base in found]
        return self.step.scaled([total], [0], slot, [[b.convert("sitofp", dot, "f32")] for dot in dots], sides)

    def _float_group(
        self,
        row_blocks: list[Index],
        record: Index,
        group: Index,
        slot: Index,
        totals: list[Ssa],
        soon: Prefetches,
    ) -> list[Ssa]:
        # The same for a codec group, whose codes are floats: totals + sum(weight * x).
        b, x = self.b, self.x
        assert isinstance(x, PreparedX)
        start = b.mul(slot, self.codec.group)
        number = b.add(b.mul(record, self.layout.groups), group)
        decoded = [Decoded(self.records, block, number) for block in row_blocks]
        for k in range(self.codec.group):
            if k % 8 == 0:
                for prefetch in share_of(soon, k // 8, self.codec.group // 8):
                    prefetch()
            element = x.at(b.add(start, k))
            totals = [b.fma(decoded[i].weight(k, v), element, t) for (i, v), t in zip(self.sides, totals, strict=True)]
        return totals

    def _float_dots(self, row_blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        b, unroll, elements, x = self.b, self.tiles.unroll, self.layout.elements, self.x
        assert isinstance(x, PreparedX)

        def add(record: Index, sums: list[Ssa]) -> list[Ssa]:
            weights = [self.records.elements(row_blocks[i], record, v) for i, v in self.sides]
            for e in range(elements):
                element = x.at(b.add(b.mul(b.sub(record, first), elements), e))
                sums = [b.fma(weight[e], element, total) for weight, total in zip(weights, sums, strict=True)]
            return sums

        full = (last - first) // unroll * unroll
        with b.loop(first, first + full, unroll, carry=totals) as loop:
            soon = self._prefetches(row_blocks, loop.index, 0, self.size * unroll)
            sums = list(loop.values)
            for i in range(unroll):
                for prefetch in share_of(soon, i, unroll):
                    prefetch()
                sums = add(b.add(loop.index, i), sums)
            loop.give(*sums)
        sums = list(loop.results)
        for record in range(first + full, last):
            sums = add(record, sums)
        return sums

    def _store(self, block: Index, results: Sequence[Ssa]) -> None:
        b, buffers, row = self.b, self.buffers, self.y_row
        column = b.mul(block, LANES)

        def store(ragged: int) -> None:
            for lane in range(0, ragged or LANES, 1 if ragged else self.lanes):
                at, y = b.add(column, lane), results[lane // self.lanes]
                y = b.extract(y, lane % self.lanes) if ragged else y
                y = with_operands(b, y, buffers, row, at)
                (b.store if ragged else b.vstore)(y, buffers["y"], row, at)

        each_block(b, self.out_features, block, store)
