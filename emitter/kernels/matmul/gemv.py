"""Compute y = W x for one token; packed weights are decoded in registers, and sums are f32.

Layout of a packed W (`weights.packing`): 16 rows of W are a row block. Each lane of a vector
computes one of these rows, so nothing is added across lanes. A row block is a sequence of records.
A record has one codec block (such as 32 or 256 elements) of each of the 16 rows.

A weight is d * scale * code + m * minimum (`codec.Parts`). Each codec block has d and m. Its
elements are divided into groups, and each group has a scale and a minimum.

    each workgroup: a share of the row blocks
      xs [in] = norm(x) * code_factors                                                     stack, L2
      sums [in / group] = sum of norm(x) over each group                                   stack, L2
      for `together` row blocks at a time:
        for record, for group in record:
          dots = sum over k in group of code[k] * xs[k]        in `chains` independent accumulators
          y += d * scale * dots + m * minimum * sums[group]                                registers
        y = epilogue(y)                                                                       memory

- A code is read as `f32(word & mask)`, without a shift, so the result is the code times a power of
  two. `code_factors` are the inverses of these powers.
- `sums` are also multiplied by -1 if minima are subtracted, or by -offset if codes are stored with
  an offset (`group_sum`).
- With a GLU, row blocks of gate and of up alternate in W. Each row block of gate is computed in the
  same set of row blocks as the next one, which belongs to up.
- If xs does not fit on the stack, the kernel prepares and multiplies one part of x after another,
  and stores partial results on the stack. It is slower, because the core then reads a part of a row
  block and skips the rest, and hardware prefetchers read on at the end of every part.
- Float codecs: a record has one element of each row (bf16: two), and is not decoded.
- With --numerics canonical, `chains` is 1, and groups are added in the same order as in the kernels
  for several tokens.

For codes of up to three bits, table look-ups replace multiplications where they are faster
(`is_summed_by_tables`): a lane looks up the sum of x times several codes in a table (`sum_tables`).
"""

from collections.abc import Callable, Sequence
from functools import partial

from castiron.emitter.kernels.epilogue import combine, with_operands
from castiron.emitter.kernels.matmul.gemv_tiles import GemvTiles
from castiron.emitter.kernels.matmul.prepared_x import PreparedX, bytes_per_element
from castiron.emitter.kernels.matmul.sum_tables import SumTables, is_summed_by_tables, table_bytes
from castiron.emitter.kernels.matmul.tiles import Buffers, each_block
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import CACHE_LINE, L2_STACK_BYTES, Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.lookup import permuted, shifted_index
from castiron.emitter.kernels.mlir.vector_math import tree
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import GroupCodes, Records

BATCH = 32  # sets of row blocks whose totals stay on the stack if x is prepared in parts


class Gemv:
    """Emits the code of a GEMV, which multiplies a packed weight by one row of x.

    x_row: index of the row of x.
    y_row: index of the row of y that gets the result.
    base: index of the first row block of the weight; for MoE, of the expert's weight.

    A row block is 16 rows of the weight. It is a sequence of records, and a record has one codec
    block (such as 32 or 256 elements) of each of the 16 rows. The code computes a few row blocks
    together.

    Arguments and results of the methods:
    row_blocks: indices of the row blocks that are computed together.
    record: index of a record in its row block.
    slot: index of the record in the part of x that is on the stack; in `_group`, index of the codec
        group in this part.
    totals, results: one vector for each (i, v) in `self.sides`. Its lanes are the results of rows
        v * lanes .. (v + 1) * lanes - 1 of row block row_blocks[i].
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
        self.b, self.codec, self.tiles, self.buffers = b, matmul.format, tiles, buffers
        self.chains = 1 if isa.canonical else tiles.chains
        self.canonical, self.by_tables = isa.canonical, is_summed_by_tables(matmul.format, isa)
        self.lanes, self.x_row, self.y_row = isa.lanes, x_row, y_row
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
        """Emit the code that computes one of `tiles.workgroups` shares of the rows of the weight.

        share: index of the share. The shares have about the same number of rows.
        """
        b, elements = self.b, self.layout.elements
        x_bytes = elements * bytes_per_element(self.codec)
        if self.by_tables:
            x_bytes += self.layout.groups * table_bytes(self.codec, self.isa) - 4 * elements
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
        self.x: PreparedX
        if self.by_tables:
            self.x = self.tables = SumTables(b, self.matmul, self.isa, self.buffers, chunk * elements, self.x_row)
        else:
            self.x = PreparedX(b, self.matmul, self.lanes, self.buffers, chunk * elements, 1, self.x_row)
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

        A set is the few 16-row blocks that are computed together. A record has some consecutive
        elements of each of the 16 rows.

        low, high: the code computes sets low .. high - 1.
        first, last: it multiplies records first .. last - 1 of each row block. If these include the
            last record, the results are complete, and the code stores them in y.
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
        with self.b.loop(first, last, carry=totals) as record:
            if self.layout.groups == 1:
                add = self._group_record
            else:
                add = self._canonical_record if self.canonical else self._super_record
                for prefetch in self._prefetches(row_blocks, record.index, 0, self.layout.codes):  # scales and minima
                    prefetch()
            record.give(*add(row_blocks, record.index, self.b.sub(record.index, first), record.values))
        return record.results

    def _prefetches(self, row_blocks: list[Index], record: Index, offset: Index, nbytes: int) -> list[Callable[[], None]]:
        """Return functions that each emit a prefetch of one cache line of the packed weight.

        Together they prefetch bytes offset .. offset + nbytes - 1 of a record in each of the row
        blocks. This record is `tiles.ahead` records after `record`, and may belong to later row
        blocks.
        """
        b, (first, last) = self.b, self.range
        then = b.add(b.sub(record, first) if first else record, self.tiles.ahead)  # may be in the next set of row blocks
        skipped, record = b.mul(b.div(then, last - first), self.together), b.add(b.rem(then, last - first), first)
        return [
            partial(self.records.prefetch, b.add(block, skipped), record, b.add(offset, line))
            for line in range(0, nbytes, CACHE_LINE)
            for block in row_blocks
        ]

    def _group_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        # For a record of one codec group: totals + d * sum(x * code) + m * sum(x).
        b, records = self.b, self.records
        dots = self._group(row_blocks, record, 0, slot, self._prefetches(row_blocks, record, 0, self.size))
        done = []
        for (i, v), matmul, total in zip(self.sides, dots, totals, strict=True):
            total = b.fma(matmul, records.d(row_blocks[i], record, v), total)
            minimum = records.m(row_blocks[i], record, v)
            if minimum is not None:
                total = b.fma(minimum, self.x.sum_of(slot), total)
            done.append(total)
        return done

    def _super_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        # For a record of several codec groups, each with a scale and a minimum:
        # totals + d * sum(scale * sum(x * code)) + m * sum(minimum * sum(x)), where the outer sums are over the groups.
        b, records, groups = self.b, self.records, self.layout.groups
        minima = self.codec.minimum != 0
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)
        with b.loop(0, groups, carry=zeros * (1 + minima)) as g:
            soon = self._prefetches(row_blocks, record, records.codes_at(g.index), self.layout.group_bytes)
            at = b.add(b.mul(slot, groups), g.index)
            dots = self._group(row_blocks, record, g.index, at, soon)
            sums, lows = list(g.values[: len(self.sides)]), list(g.values[len(self.sides) :])
            for n, (i, v) in enumerate(self.sides):
                scale = records.group_scale(row_blocks[i], record, g.index, v)
                sums[n] = b.addf(dots[n], sums[n]) if scale is None else b.fma(dots[n], scale, sums[n])
                low = records.group_minimum(row_blocks[i], record, g.index, v)
                if low is not None:
                    lows[n] = b.fma(low, self.x.sum_of(at), lows[n])
                elif minima:
                    lows[n] = b.addf(self.x.sum_of(at), lows[n])
            g.give(*sums, *lows)
        done = []
        for n, (i, v) in enumerate(self.sides):
            total = b.fma(g.results[n], records.d(row_blocks[i], record, v), totals[n])
            minimum = records.m(row_blocks[i], record, v)
            if minimum is not None:
                total = b.fma(g.results[len(self.sides) + n], minimum, total)
            done.append(total)
        return done

    def _canonical_record(self, row_blocks: list[Index], record: Index, slot: Index, totals: list[Ssa]) -> list[Ssa]:
        # In canonical order: one codec group after another adds d * scale * sum(x * code) + m * minimum * sum(x).
        b, records, groups = self.b, self.records, self.layout.groups
        with b.loop(0, groups, carry=totals) as g:
            soon = self._prefetches(row_blocks, record, records.codes_at(g.index), self.layout.group_bytes)
            at = b.add(b.mul(slot, groups), g.index)
            dots, done = self._group(row_blocks, record, g.index, at, soon), []
            for (i, v), matmul, total in zip(self.sides, dots, g.values, strict=True):
                scale, minimum = records.scale_and_minimum(row_blocks[i], record, g.index, v)
                total = b.fma(matmul, scale, total)
                done.append(total if minimum is None else b.fma(minimum, self.x.sum_of(at), total))
            g.give(*done)
        return g.results

    def _group(
        self, row_blocks: list[Index], record: Index, group: Index, slot: Index, soon: list[Callable[[], None]]
    ) -> list[Ssa]:
        """Return the sum of x * code over one codec group, for every row of `row_blocks`.

        The result is a list of vectors, in the order of `self.sides` (see the class). A codec group
        is some elements of a row that share a scale.

        row_blocks, record: see the class.
        group: index of the group in the record.
        slot: index of the group in the part of x that is on the stack.
        soon: functions that each emit a prefetch. They are called between the multiplications,
            because many prefetches in sequence stall the CPU.
        """
        b, chains = self.b, self.chains
        codes = [self.records.group_codes(block, record, group) for block in row_blocks]
        if self.by_tables:
            return self._looked_up(codes, slot, soon)
        start = b.mul(slot, self.codec.group)
        offset = self.x.sum_of(slot) if self.codec.offset else None
        sums: list[list[Ssa | None]] = [[offset] + [None] * (chains - 1) for _ in self.sides]
        for k in range(self.codec.group):
            if k % 8 == 0:
                for prefetch in _share(soon, k // 8, self.codec.group // 8):
                    prefetch()
            x = self.x.at(b.add(start, k))
            for n, (i, v) in enumerate(self.sides):
                code, so_far = codes[i].code(k, v), sums[n][k % chains]
                sums[n][k % chains] = b.mulf(code, x) if so_far is None else b.fma(code, x, so_far)
        return [tree(b.addf, [part for part in parts if part is not None]) for parts in sums]

    def _looked_up(self, codes: list[GroupCodes], group: Index, soon: list[Callable[[], None]]) -> list[Ssa]:
        # Table look-ups in place of multiplications. codes: of the group in each row block.
        b, x, chains = self.b, self.tables, self.chains
        sums: list[list[Ssa | None]] = [[None] * chains for _ in self.sides]
        number, count = 0, x.words * len(x.slices)
        for word in range(x.words):
            for n, (shift, _) in enumerate(x.slices):
                if number % 4 == 0:
                    for prefetch in _share(soon, number // 4, -(-count // 4)):
                        prefetch()
                table = x.table(group, word, n)
                for side, (i, v) in enumerate(self.sides):
                    found = permuted(b, self.isa, table, shifted_index(b, self.isa, codes[i].word(word, v), shift))
                    so_far = sums[side][number % chains]
                    sums[side][number % chains] = found if so_far is None else b.addf(so_far, found)
                number += 1
        return [tree(b.addf, [part for part in parts if part is not None]) for parts in sums]

    def _float_dots(self, row_blocks: list[Index], first: int, last: int, totals: list[Ssa]) -> list[Ssa]:
        b, chains, unroll, elements = self.b, self.chains, self.tiles.unroll, self.layout.elements
        zeros = [b.splat(0.0, self.lanes)] * len(self.sides)

        def add(record: Index, sums: list[Ssa], number: int) -> None:
            weights = [self.records.elements(row_blocks[i], record, v) for i, v in self.sides]
            for e in range(elements):
                x = self.x.at(b.add(b.mul(b.sub(record, first), elements), e))
                chain = (number * elements + e) % chains * len(self.sides)
                for n, weight in enumerate(weights):
                    sums[chain + n] = b.fma(weight[e], x, sums[chain + n])

        full = (last - first) // unroll * unroll
        with b.loop(first, first + full, unroll, carry=totals + zeros * (chains - 1)) as loop:
            soon = self._prefetches(row_blocks, loop.index, 0, self.size * unroll)
            sums = list(loop.values)
            for i in range(unroll):
                for prefetch in _share(soon, i, unroll):
                    prefetch()
                add(b.add(loop.index, i), sums, i)
            loop.give(*sums)
        sums = list(loop.results)
        for i, record in enumerate(range(first + full, last)):
            add(record, sums, i)
        return [tree(b.addf, sums[n :: len(self.sides)]) for n in range(len(self.sides))]

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


def _share(items: list, i: int, parts: int) -> list:
    return items[len(items) * i // parts : len(items) * (i + 1) // parts]
