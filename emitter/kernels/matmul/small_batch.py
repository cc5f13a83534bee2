"""Compute Y = X W^T for a few tokens; weights are decoded in registers, as in `gemv`.

`gemm` decodes weights to a buffer first. For so few tokens, this would take as long as the matmul.
Here the kernel decodes some codes to registers, and multiplies several tokens by them. It also
computes several vectors of outputs (rows of W) with each x that it loads. So there are enough
independent accumulators to hide the latency of fma.

It serves floats, and codes that are not integers (E4M3, NF4): a weight is scale * code, and a group
of elements of a row has one scale. T is the number of tokens.

    each workgroup: a share of the rows of W, `row_blocks` blocks of 16 rows at a time
      xs [T, in] = x * code_factors                                                            stack
      for `rows` tokens x `vectors` vectors of outputs:
        for group:
          dots [rows, vectors] = sum over k in group of code[k] * xs[tokens, k]            registers
          Y += scale * dots                                                                    stack
      Y = epilogue(Y)                                                                         memory

If xs does not fit on the stack, the kernel prepares and multiplies one part of x after another. For
float codecs, x is read from memory, and the sums stay in registers over all k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Self

from castiron.emitter.kernels.matmul.prepared_x import PAD, PreparedX
from castiron.emitter.kernels.matmul.tiles import Buffers, Finish, Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.records import Records

MAX_TOKENS = 8
SUMS_BYTES = 8 << 10  # bytes of stack for sums if x is prepared in parts
PARTS = 2  # workgroups for each thread


@dataclass(frozen=True)
class SmallBatchTiles(Tiles):
    """The tile sizes of `SmallBatch`, the matmul kernel for a few tokens.

    rows: number of tokens whose sums are in registers at the same time.
    vectors: number of vectors of sums in registers for each of these tokens. A lane of a vector is
        one row of the weight.
    unroll: number of loop steps that are unrolled, for a float codec. A step multiplies one element
        of each row of the weight (bf16: two).
    """

    rows: int
    vectors: int
    unroll: int = 4

    def row_blocks(self, isa: Isa, shared: int) -> int:
        # Row blocks of a set. shared: row blocks that give one block of results, 2 with a GLU, otherwise 1.
        per_block = LANES // isa.lanes
        return lcm(lcm(per_block, self.vectors) // per_block, shared)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        # More vectors share each load of x, which quantised codes gain by, and floats do not. But codes are decoded again
        # for each tile of tokens, so all tokens should fit in one.
        max_sums = 20 if isa.registers == 32 else isa.registers * 5 // 8
        is_wide = isa.lanes < 8 or (isa.registers == 32 and matmul.format.quantised and 4 * matmul.tokens <= max_sums)
        vectors = 1 if isa.canonical and not isa.roomy else 4 if is_wide else 2
        max_rows = max_sums // vectors
        rows = -(-matmul.tokens // -(-matmul.tokens // max_rows))
        row_blocks = cls(rows, vectors).row_blocks(isa, matmul.blocks_per_result)
        return cls(rows, vectors, workgroups=min(-(-matmul.weight_shape[0] // row_blocks), PARTS * threads))

    def fit(self, matmul: Matmul) -> bool:
        return self.rows <= matmul.tokens


class SmallBatch:
    """Emits the body of a matmul kernel for a few tokens.

    The code computes one tile of results after another. A tile has a few tokens and, for each, a
    few vectors of outputs. A lane of such a vector is one row of the weight. The sums of all tokens
    are in `self.sums` [T, columns].

    sides: argument of the methods, the vectors of a tile, each as (block, v, column). It is vector
        `v` of the 16-row block with index `block`, and its sums begin at `column` of `self.sums`.
    """

    def __init__(self, b: Body, matmul: Matmul, isa: Isa, tiles: SmallBatchTiles, buffers: Buffers):
        self.b, self.codec, self.tiles, self.buffers = b, matmul.format, tiles, buffers
        self.lanes, self.T, self.in_features = isa.lanes, matmul.tokens, matmul.in_features
        self.row_blocks, self.count, _ = matmul.weight_shape
        self.records = Records(b, self.codec, isa, buffers["weight"])
        self.layout = self.records.layout
        self.set = tiles.row_blocks(isa, matmul.blocks_per_result)
        self.unit = tiles.row_blocks(isa, 1)
        set_bytes = 4 * self.T * LANES * self.set
        self.chunk, self.batch = self.count, 1  # records of x prepared at once, and sets that share them
        if self.codec.quantised:
            x_bytes = 4 * self.T * self.layout.elements
            space = STACK_BYTES - 4 * self.T * PAD - set_bytes
            if x_bytes * self.count > space:
                self.batch = max(1, SUMS_BYTES // set_bytes)
                chunks = -(-self.count // int((space - (self.batch - 1) * set_bytes) // x_bytes))
                self.chunk = -(-self.count // chunks)
            capacity = self.chunk * self.layout.elements
            self.x = PreparedX(b, matmul, self.lanes, buffers, capacity, self.T)
        self.sums = b.stack(self.T, self.batch * self.set * LANES)
        self.finish = Finish(b, matmul, self.lanes, buffers, self.sums)

    def write(self) -> None:
        b = self.b
        end = b.real(self.buffers.get("length"), 0, self.T)
        if self.codec.quantised and self.chunk == self.count:
            self.x.fill(0, self.count * self.layout.elements)
        sets = -(-self.row_blocks // self.set)
        low, high = b.share(sets, b.workgroup(), self.tiles.workgroups)
        with b.loop(low, high, self.batch) as batch:
            first = b.mul(batch.index, self.set)
            last = b.min(b.mul(b.min(b.add(batch.index, self.batch), high), self.set), self.row_blocks)
            if self.codec.quantised:
                self._add_chunks(first, last, end)
            else:
                self._tiles(first, last, end, self._float_tile)
            self.finish.store(first, b.sub(last, first), 0, end, self.T)

    def _add_chunks(self, first: Index, last: Index, end: Index) -> None:
        """Emit code that multiplies all tokens by 16-row blocks first .. last - 1 of the weight.

        If x does not fit on the stack, the code prepares and multiplies one part of x after
        another. Otherwise x was prepared before.

        end: number of tokens that are not padding; the sums of the others are not used.
        """
        b = self.b
        zero = b.splat(0.0, self.lanes)
        with b.loop(0, self.T) as t, b.loop(0, self.batch * self.set * LANES, self.lanes) as column:
            b.vstore(zero, self.sums, t.index, column.index)

        def add_chunk(start: Index, stop: Index) -> None:
            def add(sides: list[tuple[Index, int, Index]], token: Index, rows: int) -> None:
                with b.loop(start, stop) as record, b.loop(0, self.layout.groups) as group:
                    number = 0 if self.layout.groups == 1 else group.index
                    self._add_group(sides, token, rows, record.index, number, b.sub(record.index, start))

            self._tiles(first, last, end, add)

        if self.chunk == self.count:
            add_chunk(0, self.count)
            return
        with b.loop(0, self.count, self.chunk) as part:
            stop = b.min(b.add(part.index, self.chunk), self.count)
            self.x.fill(b.mul(part.index, self.layout.elements), b.mul(stop, self.layout.elements))
            add_chunk(part.index, stop)

    def _tiles(self, first: Index, last: Index, end: Index, add: Callable[[list, Index, int], None]) -> None:
        """Emit loops over tiles of results; a tile is a few tokens times a few rows of the weight.

        The tiles cover 16-row blocks first .. last - 1 of the weight, and tokens 0 .. end - 1. If a
        tile extends past the end of the weight, it computes the last 16-row block again.

        add(sides, token, rows): function that emits the code of one tile. The tile has `rows`
            tokens, from token index `token` on. For `sides`, its vectors of rows of the weight, see
            the class.
        """
        b, rows, vectors, per_block, unit = self.b, self.tiles.rows, self.tiles.vectors, self.records.vectors, self.unit
        full = self.T // rows * rows
        with b.loop(first, last, unit) as block:
            numbers = [b.add(block.index, i) for i in range(unit)]
            columns = [b.mul(b.sub(number, first), LANES) for number in numbers]
            if self.row_blocks % unit:
                numbers = [b.min(number, self.row_blocks - 1) for number in numbers]
            sides = [(numbers[i], v, b.add(columns[i], v * self.lanes)) for i in range(unit) for v in range(per_block)]
            tiles = [sides[i : i + vectors] for i in range(0, len(sides), vectors)]
            with b.loop(0, b.min(b.mul(b.ceildiv(end, rows), rows), full), rows) as t:
                for tile in tiles:
                    add(tile, t.index, rows)
            if full < self.T:
                with b.when(b.less(full, end)):
                    for tile in tiles:
                        add(tile, full, self.T - full)

    def _add_group(self, sides: list, token: Index, rows: int, record: Index, group: Index, slot: Index) -> None:
        """Emit code that adds the dot products over one codec group to the sums of a tile.

        A codec group is some elements of a row that share a scale. The code adds
        scale * sum(x * code), where the sum is over the group.

        sides: the rows of the weight that belong to the tile, see the class.
        token, rows: the tile has `rows` tokens, from token index `token` on.
        record: index of a record in its 16-row block; a record has one codec block of each row.
        group: index of the group in the record.
        slot: index of the record in the part of x that is on the stack.
        """
        b, records, codec = self.b, self.records, self.codec
        number = b.add(b.mul(slot, self.layout.groups), group)
        start = b.mul(number, codec.group)
        tokens = [b.add(token, t) for t in range(rows)]
        codes = {block: records.group_codes(block, record, group) for block, _, _ in sides}
        records.prefetch_later(codes, self.unit, record, *records.extent(group))
        dots: list[list[Ssa | None]] = [[None] * len(sides) for _ in tokens]
        for k in range(codec.group):
            weights = [codes[block].code(k, v) for block, v, _ in sides]
            for mine, t in zip(dots, tokens, strict=True):
                x = self.x.at(b.add(start, k), t)
                mine[:] = [
                    b.mulf(weight, x) if so_far is None else b.fma(weight, x, so_far)
                    for weight, so_far in zip(weights, mine, strict=True)
                ]
        for i, (block, v, column) in enumerate(sides):
            scale, _ = records.scale_and_base(block, record, group, v)
            for mine, t in zip(dots, tokens, strict=True):
                dot = mine[i]
                assert dot is not None, "a group has codes"
                b.vstore(b.fma(dot, scale, b.vload(self.sums, self.lanes, t, column)), self.sums, t, column)

    def _float_tile(self, sides: list, token: Index, rows: int) -> None:
        b, elements, unroll = self.b, self.layout.elements, self.tiles.unroll
        full, rest = divmod(self.in_features, elements)

        def add(record: Index, sums: Sequence[Ssa], count: int = elements) -> Sequence[Ssa]:
            weights = [self.records.elements(block, record, v) for block, v, _ in sides]
            for e in range(count):
                k, done = b.add(b.mul(record, elements), e), []
                for t in range(rows):
                    x = b.broadcast(b.load(self.buffers["x"], b.add(token, t), k), self.lanes)
                    mine = sums[t * len(sides) : (t + 1) * len(sides)]
                    done += [b.fma(weight[e], x, total) for weight, total in zip(weights, mine, strict=True)]
                sums = done
            return sums

        def prefetch(record: Index) -> None:
            self.records.prefetch_later((block for block, _, _ in sides), self.unit, record, 0, self.layout.size * unroll)

        sums = b.unrolled(full, unroll, [b.splat(0.0, self.lanes)] * (rows * len(sides)), add, prefetch)
        for n, total in enumerate(add(full, sums, rest) if rest else sums):
            t, side = divmod(n, len(sides))
            b.vstore(total, self.sums, b.add(token, t), sides[side][2])
