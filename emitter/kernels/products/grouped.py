"""y = W_e x for many pairs of a token and one of its experts e: those of one expert come together and share its weights,
which are decoded once for them.

Every workgroup counts the pairs of each expert and takes a part of the work that follows from the counts, so that all have as
much to do whatever the router chose. A block of pairs is to `gemm` what a block of tokens is there.

    each workgroup:
      counts [experts] = how many pairs chose each, of the first per_row * `length`                        stack
      for expert, for block of `tokens` of its pairs:
        low, high = the part of its sets of 16 * `row_blocks` columns that is this workgroup's
        if low < high:
          pairs [tokens] = those of the block, in order                                                    stack
          for set in low .. high:
            sums [tokens, set] = x[pairs / per_row] @ W_expert[set]^T                                      as in `gemm`
            y[pairs, set] = epilogue(sums)                                                                 memory
      y[a share of the pairs that are padding] = 0

Tiles are of `rows` pairs and, at the end of a block, of `rest`. A pair's sums are the same in either, whatever came with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import gemm, gemm_bytes
from castiron.emitter.kernels.products.frame import Buffers, product_kernel
from castiron.emitter.kernels.products.gemm import PARTS, Gemm, GemmTiles, even_share
from castiron.emitter.kernels.products.gemm_bytes import GemmBytes, GemmBytesTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.products.several import Finish
from castiron.emitter.kernels.weights.code_bytes import CodeBytes
from castiron.emitter.kernels.weights.packing import LANES
from castiron.emitter.kernels.weights.panel import Decoded, units
from castiron.emitter.kernels.weights.records import CACHE_LINE
from castiron.emitter.kernels.weights.x_bytes import GROUP
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import outer

# Pairs an expert, on average, from which on they come together; with x in bytes.
LEAST, LEAST_BYTES = 3, 2
# What decoding a block's weights takes, in pairs.
DECODING = 4
# Pairs of a block up to which each tile decodes weights for itself, in registers.
DIRECT, DIRECT_BYTES = 32, 16
UNITS = 8  # of a float codec in one iteration


class _Grouped(Gemm):
    """Writes the body of one kernel."""

    def __init__(self, b: Body, product: Product, isa: Isa, tiles: Any, buffers: Buffers):
        super().__init__(b, product, isa, tiles, buffers)
        self.counts = b.stack(product.experts, element="i32")
        self.pairs = b.stack(tiles.tokens, element="i32")
        in_order = {name: buffer for name, buffer in buffers.items() if name != "length"}
        self.finish = Finish(b, product, self.lanes, in_order, self.sums, self._pair)

    def write(self) -> None:
        b, tiles, product = self.b, self.tiles, self.product
        sets, row_blocks = self.row_blocks // tiles.row_blocks, self.row_blocks
        real = self._real()
        self._count(real)
        with b.loop(0, product.experts, carry=[b.index(0)]) as expert:
            count = self._at(self.counts, expert.index)
            blocks = b.ceildiv(count, tiles.tokens)
            expert.give(b.index(b.add(expert.values[0], b.add(count, b.mul(blocks, DECODING)))))
        low, high = b.share(b.mul(expert.results[0], sets), b.workgroup(), tiles.workgroups)
        with b.loop(0, product.experts, carry=[b.index(0)]) as expert:
            count, base = self._at(self.counts, expert.index), b.mul(expert.index, row_blocks)
            with b.loop(0, count, tiles.tokens, carry=expert.values) as block:
                here = b.min(b.sub(count, block.index), tiles.tokens)
                work, done = b.add(here, DECODING), block.values[0]
                start, stop = (b.min(b.ceildiv(b.max(b.sub(end, done), 0), work), sets) for end in (low, high))
                with b.when(b.less(start, stop)):
                    self._gather(expert.index, block.index, real)
                    with b.loop(start, stop) as item:
                        first = b.mul(item.index, tiles.row_blocks)
                        self._set(first, b.add(base, first), here)
                block.give(b.index(b.add(done, b.mul(work, sets))))
            expert.give(*block.results)
        self._pad(real)

    def _at(self, buffer: Ssa, i: Index) -> Ssa:
        return self.b.to_index(self.b.load(buffer, i))

    def _pair(self, i: Index) -> Ssa:
        """Pair i of the block."""
        return self._at(self.pairs, i)

    def _real(self) -> Index:
        """Of pairs that are no padding."""
        b, per_row = self.b, self.product.per_row
        return b.mul(b.real(self.buffers.get("length"), 0, self.T // per_row), per_row)

    def _count(self, real: Index) -> None:
        b, zero, one = self.b, self.b.constant("0", "i32"), self.b.constant("1", "i32")
        for buffer, size in (self.counts, self.product.experts), (self.pairs, self.tiles.tokens):
            with b.loop(0, size) as i:
                b.store(zero, buffer, i.index)
        with b.loop(0, real) as pair:
            expert = self._at(self.buffers["chosen"], pair.index)
            b.store(b.binary("addi", b.load(self.counts, expert), one), self.counts, expert)

    def _gather(self, expert: Index, first: Index, real: Index) -> None:
        """The pairs of an expert from its number `first` on. What a tile has beyond them is some pair."""
        b = self.b
        with b.loop(0, real, carry=[b.index(0)]) as pair:
            number = pair.values[0]
            slot, its = b.sub(number, first), b.equal(self._at(self.buffers["chosen"], pair.index), expert)
            here = b.both(b.negate(b.less(slot, 0)), b.less(slot, self.tiles.tokens))
            with b.when(b.both(its, here)):
                b.store(b.to_i32(pair.index), self.pairs, slot)
            pair.give(b.choose(its, b.add(number, 1), number))

    def _set(self, first_block: Index, block: Index, count: Index) -> None:
        """The results of a set of row blocks, whose first is number `block` of all experts'."""
        b = self.b
        few = b.less(count, self.tiles.direct + 1)
        with b.when(few):
            self._direct(block, count)
        with b.when(b.negate(few)):
            self._products(block, 0, count)
        self.finish.store(first_block, self.tiles.row_blocks, 0, count, count)

    def _direct(self, block: Index, count: Index) -> None:
        """The sums of `count` pairs, each tile with weights that it decodes for itself."""
        b, few, lanes, vectors = self.b, self.tiles.few, self.lanes, LANES * self.tiles.wide // self.lanes
        per_block, whole = LANES // lanes, b.mul(b.div(count, few), few)
        sizes = sorted({max(1, few // 2), few})
        with b.loop(0, self.columns, LANES * self.tiles.wide) as column:
            first = b.add(block, b.div(column.index, LANES))
            sides = [(b.add(first, i // per_block), i % per_block, b.add(column.index, i * lanes)) for i in range(vectors)]
            with b.loop(0, whole, few) as t:
                self._direct_tile(sides, t.index, few)
            rest = b.sub(count, whole)
            for less, size in zip([0, *sizes], sizes):
                with b.when(b.both(b.less(less, rest), b.less(rest, size + 1))):
                    self._direct_tile(sides, whole, size)

    def _direct_tile(self, sides: Sequence[tuple[Index, int, Index]], token: Index, rows: int) -> None:
        """sums[token : token + rows] of `sides`, each a row block, a vector of it and its column in the sums."""
        b, lanes, unit = self.b, self.lanes, self.panel.unit
        x_row = self._x_rows(token, rows)

        def add(number: Index, sums: Sequence[Ssa], most: int) -> list[Ssa]:
            decoded = {block: Decoded(self.panel.records, block, number) for block, _, _ in sides}
            done = list(sums)
            for j in range(min(unit, most)):
                weights = [decoded[block].weight(j, v) for block, v, _ in sides]
                k = b.add(b.mul(number, unit), j)
                x = (b.broadcast(b.load(self.buffers["x"], x_row(r), k), lanes) for r in range(rows))
                done = outer(b, x, weights, done)
            return done

        together = 1 if self.product.format.quantised else UNITS
        whole = self.in_features // (unit * together) * together
        with b.loop(0, whole, together, carry=[b.splat(0.0, lanes)] * (rows * len(sides))) as loop:
            self._prefetch(sides, loop.index, together)
            sums: Sequence[Ssa] = loop.values
            for i in range(together):
                sums = add(b.add(loop.index, i), sums, unit)
            loop.give(*sums)
        sums = loop.results
        for number in range(whole, -(-self.in_features // unit)):
            sums = add(number, sums, self.in_features - number * unit)
        for i, total in enumerate(sums):
            b.vstore(total, self.sums, b.add(token, i // len(sides)), sides[i % len(sides)][2])

    def _prefetch(self, sides: Sequence[tuple[Index, Index, Index]], unit: Index, units: int) -> None:
        """Ask for `units` from number `unit` on of the row blocks that come next."""
        b, records = self.b, self.panel.records
        layout, groups = records.layout, records.layout.groups
        record = b.div(unit, groups) if groups > 1 else unit
        start, nbytes = (records.codes_at(b.rem(unit, groups)), layout.group_bytes) if groups > 1 else (0, layout.size * units)
        for block in {block: None for block, _, _ in sides}:
            for line in range(0, nbytes, CACHE_LINE):
                records.prefetch(b.add(block, self.tiles.row_blocks), record, b.add(start, line))

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        b, rows, rest = self.b, self.tiles.rows, self.tiles.rest
        whole = b.mul(b.div(count, rows), rows)
        for low, high, size in (0, whole, rows), (whole, count, rest):
            with b.loop(low, high, size) as t:
                self._tile(t.index, t.index, size, k, depth)

    def _x_rows(self, token: Index, rows: int) -> Callable[[int], Index]:
        b, per_row = self.b, self.product.per_row
        found = [b.div(self._pair(b.add(token, r)), per_row) for r in range(rows)]
        return found.__getitem__

    def _pad(self, real: Index) -> None:
        b, y = self.b, self.buffers["y"]
        if "length" in self.buffers:
            low, high = b.share(b.sub(self.T, real), b.workgroup(), self.tiles.workgroups)
            with b.loop(b.add(real, low), b.add(real, high)) as pair, b.loop(0, self.product.out_features) as k:
                b.store(b.f32(0.0), y, pair.index, k.index)


class _GroupedBytes(_Grouped, GemmBytes):
    """The same with x in bytes."""

    def _direct_tile(self, sides: Sequence[tuple[Index, int, Index]], token: Index, rows: int) -> None:
        b, vectors, (block, _, column) = self.b, self.panel.records.vectors, sides[0]
        with b.loop(0, len(sides)) as side:
            i = side.index
            at = b.add(block, b.div(i, vectors)), b.rem(i, vectors), b.add(column, b.mul(i, self.lanes))
            self._direct_side(at, token, rows)

    def _direct_side(self, side: tuple[Index, Index, Index], token: Index, rows: int) -> None:
        b, records, parts = self.b, self.panel.records, self.step.parts
        (block, v, column), groups, x_row = side, records.layout.groups, self._x_rows(token, rows)
        with b.loop(0, self.in_features // GROUP, carry=[b.splat(0.0, self.lanes)] * rows) as loop:
            units = [b.add(b.mul(loop.index, parts), part) for part in range(parts)]
            at = [(b.div(unit, groups), b.rem(unit, groups)) for unit in units]
            self._prefetch([side], units[0], parts)
            codes = [CodeBytes(records, self.isa, block, *each) for each in at]
            scales = [[records.scale_and_base(block, *each, v)] for each in at]
            each = self.product.format.group // 4
            quads = lambda q: [codes[q // each].quads(q % each, v)]
            loop.give(*self.step.add(loop.values, [x_row(r) for r in range(rows)], loop.index, quads, scales))
        for r, total in enumerate(loop.results):
            b.vstore(total, self.sums, b.add(token, r), column)


@dataclass(frozen=True)
class GroupedTiles(GemmTiles):
    """As those of `gemm`, tokens being pairs, and `rest`, which divides `rows`, being a tile where `rows` are no more left.
    Blocks of up to `direct` pairs, whole tiles of `few`, need no panel.
    """

    rest: int = 1
    few: int = 1
    direct: int = 1

    letters: ClassVar = GemmTiles.letters + "efn"

    def fit(self, product: Product) -> bool:
        return _fit(self, self.stack_bytes, product) and super().fit(product)


@dataclass(frozen=True)
class GroupedBytesTiles(GemmBytesTiles):
    """As GroupedTiles."""

    rest: int = 1
    few: int = 1
    direct: int = 1

    letters: ClassVar = GemmBytesTiles.letters + "efn"

    def fit(self, product: Product) -> bool:
        return _fit(self, self.stack_bytes(product), product) and super().fit(product)


def _fit(tiles: GroupedTiles | GroupedBytesTiles, stack_bytes: int, product: Product) -> bool:
    """Whether counts and pairs fit the stack too, and small tiles the large ones."""
    lists = 4 * (product.experts + tiles.tokens)
    small = tiles.rows % tiles.rest == 0 and tiles.direct % tiles.few == 0 and tiles.direct <= tiles.tokens
    return small and stack_bytes + lists <= STACK_BYTES


def default_tiles(product: Product, isa: Isa, threads: int = 2) -> GroupedTiles:
    """Tiles that measured well for a kernel that is expected to run on `threads`."""
    wide, together = _columns(product, isa)
    rows = 12 if isa.lanes == LANES else 6
    budget = (STACK_BYTES - 4 * product.experts) // (4 * LANES * together + 4)
    tokens = _block(product, rows, min(gemm.MOST_TOKENS, budget * 3 // 5))
    size = units(product.codec)
    depth = even_share(-(-product.in_features // size), min(gemm.MOST_DEPTH, budget - tokens) // size) * size
    small = _small(isa, rows, min(DIRECT, tokens))
    return GroupedTiles(rows, wide, together, depth, tokens, workgroups=PARTS * threads, **small)


def default_bytes_tiles(product: Product, isa: Isa, threads: int = 2) -> GroupedBytesTiles:
    """Those of the kernel with x in bytes."""
    wide, together = _columns(product, isa)
    rows, group = gemm_bytes.MOST_ROWS[isa.lanes], product.format.group
    budget = (STACK_BYTES - 4 * product.experts) // (LANES * together)
    tokens = _block(product, rows, min(gemm_bytes.MOST_TOKENS, budget // 5 * 3 // 5))
    room = (budget - 5 * tokens) * GROUP // gemm_bytes.bytes_of(GROUP, group)
    depth = even_share(product.in_features // GROUP, min(gemm_bytes.MOST_DEPTH, room) // GROUP) * GROUP
    small = _small(isa, rows, min(DIRECT_BYTES, tokens))
    return GroupedBytesTiles(rows, wide, together, depth, tokens, workgroups=PARTS * threads, **small)


def _columns(product: Product, isa: Isa) -> tuple[int, int]:
    """Row blocks of a tile and of a set."""
    shared = product.epilogue.row_blocks
    wide = 2 if isa.lanes == LANES and (shared == 2 or product.weight_shape[0] % 2 == 0) else 1
    return wide, max(wide, shared)


def _small(isa: Isa, rows: int, direct: int) -> dict[str, int]:
    """The tiles where pairs are few, or few are left."""
    few = min(8 if isa.lanes == LANES else 4, direct)
    return {"rest": max(1, rows // 3), "few": few, "direct": direct // few * few}


def _block(product: Product, rows: int, most: int) -> int:
    """Pairs of a block: whole tiles, up to `most` if that is a tile."""
    return max(1, min(-(-product.tokens // rows), most // rows)) * rows


def grouped(product: Product, isa: Isa, tiles: GroupedTiles) -> Kernel:
    """Row i of y is the product of x's row i // per_row with the weight of expert chosen[i]. ValueError for tiles that do
    not fit."""
    write = lambda b, buffers: _Grouped(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"grouped_{product.name}", tiles.workgroups, write)


def grouped_bytes(product: Product, isa: Isa, tiles: GroupedBytesTiles) -> Kernel:
    """The same with x in bytes."""
    write = lambda b, buffers: _GroupedBytes(b, product, isa, tiles, buffers).write()
    return product_kernel(product, isa, tiles, f"grouped_{product.name}", tiles.workgroups, write)
