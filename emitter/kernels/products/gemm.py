"""Y = X W^T for a chunk of tokens: weights become f32 once per workgroup and row block, then are multiplied at f32 peak.

A workgroup takes a few blocks of 16 rows of the weight and a block of tokens. It decodes a panel [depth, columns] of
the weight onto the stack, multiplies tiles of tokens with it in registers, adds them to sums [tokens, columns] that
stay on the stack too, and goes on to the next panel along k. (Goto and van de Geijn 2008, with the packing of B
replaced by decoding.)
"""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.codecs import Codec, codec_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import Arguments, Epilogue
from castiron.emitter.kernels.products.several import Finish, several_tokens
from castiron.emitter.kernels.weights.packing import LANES, packed_shape
from castiron.emitter.kernels.weights.panel import Panel, units
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.writing.isa import Isa

MOST_DEPTH = 288  # 18 KB of panel for 16 columns: more would push x out of the L1 cache
MOST_TOKENS = 132  # more of them push x out of the L2 cache between blocks of columns
PARTS = 6  # workgroups a thread: fewer than 8, from where on IREE hands out 8 at a time


@dataclass(frozen=True)
class GemmTiles:
    """What a search may vary; results change by rounding only.

    rows x (16 * wide) sums stand in registers. `blocks` of 16 columns, a multiple of `wide` that divides the weight's,
    share a panel `depth` k deep, whole groups. `tokens`, a multiple of `rows`, are multiplied with a panel before it is
    decoded again. `unroll` k stand in one iteration. Panel and sums fit the stack. `workgroups` share the products of
    `blocks` with `tokens`.
    """

    rows: int
    wide: int
    blocks: int
    depth: int
    tokens: int
    unroll: int = 8
    workgroups: int = 12

    @property
    def name(self) -> str:
        sizes = f"r{self.rows}w{self.wide}b{self.blocks}d{self.depth}t{self.tokens}"
        return f"{sizes}u{self.unroll}g{self.workgroups}"

    @property
    def stack_bytes(self) -> int:
        return 4 * LANES * self.blocks * (self.depth + self.tokens)


def default_tiles(
    codec_name: str, T: int, out_features: int, in_features: int, isa: Isa, blocks: int = 1, threads: int = 2
) -> GemmTiles:
    """Tiles that measured well; `blocks` is `Epilogue.blocks`, `threads` what the kernel is expected to run on."""
    even = blocks == 2 or -(-out_features // LANES) % 2 == 0
    wide = 2 if isa.lanes == LANES and even else 1
    together = max(wide, blocks)
    most_rows = 12 if isa.lanes == LANES else 6
    # A tile of few rows takes as long as one of 4, by the latency of fma.
    costs = {rows: T // rows * rows + max(T % rows, 4 if T % rows else 0) for rows in range(4, most_rows + 1)}
    rows = max(rows for rows, cost in costs.items() if cost <= 1.03 * min(costs.values()))
    budget = STACK_BYTES // (4 * LANES * together)
    token_blocks = -(-T // min(MOST_TOKENS, budget * 3 // 5))
    tokens = -(-T // (token_blocks * rows)) * rows
    size = units(codec_name)
    depth = _even_share(-(-in_features // size), min(MOST_DEPTH, budget - tokens) // size) * size
    items = -(-out_features // LANES) * blocks // together * -(-T // tokens)
    return GemmTiles(rows, wide, together, depth, tokens, workgroups=min(items, PARTS * threads))


def _even_share(total: int, most: int) -> int:
    """The largest part of `total` up to `most` that divides it, if there is one of at least half of `most`."""
    most = min(most, total)
    share = next(n for n in range(most, 0, -1) if total % n == 0)
    return share if 2 * share >= most else most


def _check(tiles: GemmTiles, codec_name: str, weight_blocks: int, together: int) -> None:
    fits = (
        tiles.stack_bytes <= STACK_BYTES
        and tiles.depth % units(codec_name) == 0
        and tiles.tokens % tiles.rows == 0
        and tiles.blocks % tiles.wide == 0
        and tiles.blocks % together == 0
        and weight_blocks % tiles.blocks == 0
    )
    if not fits:
        raise ValueError(f"tiles {tiles.name} do not fit a {codec_name} weight of {weight_blocks} blocks: see GemmTiles")


def gemm(
    codec_name: str,
    T: int,
    out_features: int,
    in_features: int,
    *,
    isa: Isa,
    bias: bool = False,
    residual: bool = False,
    glu: str | None = None,
    length: bool = False,
    threads: int = 2,
    tiles: GemmTiles | None = None,
) -> Kernel:
    """x [T, in], weight (`packed_shape`, i8), (bias [out]), (residual [T, out]), (length i32) -> y [T, out], f32.

    Options as in `gemv`. With `length` only rows < length are computed, the others are zero. ValueError for an unknown
    codec or activation, or rows that are not whole blocks.
    """
    codec = codec_of(codec_name)
    epilogue = Epilogue(bias, residual, glu)
    shape = packed_shape(codec_name, epilogue.weight_rows(out_features), in_features)
    tiles = tiles or default_tiles(codec_name, T, out_features, in_features, isa, epilogue.blocks, threads)
    _check(tiles, codec_name, shape[0], epilogue.blocks)

    def write(b: Body, given: Arguments) -> None:
        _Gemm(b, codec, isa, tiles, epilogue, given, T, out_features, in_features).write()

    suffix = epilogue.name + "_length" * length
    name = f"gemm_{codec_name}_{T}x{out_features}x{in_features}{suffix}_{isa.name}_{tiles.name}"
    return several_tokens(name, codec_name, T, out_features, in_features, epilogue, length, tiles.workgroups, write)


class _Gemm:
    """Writes the body of one kernel."""

    def __init__(
        self,
        b: Body,
        codec: Codec,
        isa: Isa,
        tiles: GemmTiles,
        epilogue: Epilogue,
        given: Arguments,
        T: int,
        out_features: int,
        in_features: int,
    ):
        self.b, self.tiles, self.given = b, tiles, given
        self.lanes, self.T = isa.lanes, T
        self.in_features = in_features
        self.columns = LANES * tiles.blocks
        self.panel = Panel(b, codec, isa, given.weight, tiles.depth, tiles.blocks)
        self.sums = b.stack(tiles.tokens, self.columns)
        self.finish = Finish(b, self.lanes, epilogue, given, out_features, self.sums)

    def write(self) -> None:
        b, tiles = self.b, self.tiles
        groups = self.panel.weight_blocks // tiles.blocks
        items = groups * -(-self.T // tiles.tokens)
        workgroup = b.workgroup()
        low = b.div(b.mul(workgroup, items), tiles.workgroups)
        high = b.div(b.mul(b.add(workgroup, 1), items), tiles.workgroups)
        with b.loop(low, high) as item:
            self._item(b.mul(b.rem(item.index, groups), tiles.blocks), b.mul(b.div(item.index, groups), tiles.tokens))

    def _item(self, first_block: Index, first: Index) -> None:
        """All results of `tiles.blocks` blocks of columns and `tiles.tokens` tokens."""
        b, tiles = self.b, self.tiles
        last = b.min(b.add(first, tiles.tokens), self.T)
        end = last
        if self.given.length is not None:
            end = b.max(b.min(b.to_index(b.load(self.given.length)), last), first)
        with b.when(b.less(first, end)):
            self._products(first_block, first, end)
        self.finish.store(first_block, tiles.blocks, first, end, last)

    def _products(self, first_block: Index, first: Index, end: Index) -> None:
        """The sums of tokens `first` to `end`, rounded up to a tile."""
        b, depth = self.b, self.tiles.depth
        whole = self.in_features // depth * depth
        count = b.sub(end, first)
        self._zero(count)
        with b.loop(0, whole, depth) as k:
            self.panel.fill(first_block, k.index, depth)
            self._multiply(first, count, k.index, depth)
        if whole < self.in_features:
            self.panel.fill(first_block, whole, self.in_features - whole)
            self._multiply(first, count, whole, self.in_features - whole)

    def _zero(self, count: Index) -> None:
        b, rows = self.b, self.tiles.rows
        with b.loop(0, b.mul(b.ceildiv(count, rows), rows)) as t:
            for column in range(0, self.columns, self.lanes):
                b.vstore(b.splat(0.0, self.lanes), self.sums, t.index, column)

    def _multiply(self, first: Index, count: Index, k: Index, depth: int) -> None:
        """sums += x[first : first + count, k : k + depth] @ panel, in tiles; the last of T may have fewer rows."""
        b, rows = self.b, self.tiles.rows
        rest = self.T % rows  # blocks of tokens are multiples of `rows`, so only the last one has a smaller tile
        start = self.T - rest
        needed = b.mul(b.ceildiv(count, rows), rows)
        with b.loop(0, b.min(needed, b.sub(start, first)), rows) as t:
            self._tile(t.index, b.add(first, t.index), rows, k, depth)
        if rest:
            with b.when(b.less(start, b.add(first, count))):
                self._tile(b.sub(start, first), start, rest, k, depth)

    def _tile(self, place: Index, token: Index, rows: int, k: Index, depth: int) -> None:
        """sums[place : place + rows] += x[token : token + rows, k : k + depth] @ panel."""
        b, lanes, unroll = self.b, self.lanes, self.tiles.unroll
        width = LANES * self.tiles.wide
        with b.loop(0, self.columns, width) as column:
            at = [(b.add(place, r), b.add(column.index, c)) for r in range(rows) for c in range(0, width, lanes)]

            def step(j: Index, sums: list[Ssa]) -> list[Ssa]:
                weights = [self.panel.row(j, b.add(column.index, c)) for c in range(0, width, lanes)]
                done = []
                for r in range(rows):
                    x = b.broadcast(b.load(self.given.x, b.add(token, r), b.add(k, j)), lanes)
                    mine = sums[r * len(weights) : (r + 1) * len(weights)]
                    done += [b.fma(x, weight, total) for weight, total in zip(weights, mine, strict=True)]
                return done

            sums = [b.vload(self.sums, lanes, *place_of) for place_of in at]
            whole = depth // unroll * unroll
            with b.loop(0, whole, unroll, carry=sums) as loop:
                sums = loop.values
                for u in range(unroll):
                    sums = step(b.add(loop.index, u), sums)
                loop.give(*sums)
            sums = loop.results
            for j in range(whole, depth):
                sums = step(j, sums)
            for total, place_of in zip(sums, at, strict=True):
                b.vstore(total, self.sums, *place_of)
