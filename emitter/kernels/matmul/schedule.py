"""The default tile sizes of all matmul kernels, by codec, instruction set, tokens and threads.

`castiron tune` varies them. A kernel's tiles say what it computes at a time:

- a **row block** is 16 rows of the packed weight, which are 16 columns of y;
- a **panel** is a buffer on the stack with a decoded part of some row blocks;
- a **workgroup** is a share of the kernel's work; any thread may take it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, lcm
from typing import Any, ClassVar, Self

from castiron.emitter.codecs.codec import Codec
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import MATRIX_STACK_BYTES, PARTS, STACK_BYTES
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.matrix import ROW_BYTES
from castiron.emitter.kernels.split_x import DEPTH, EXACT, tile_rows
from castiron.emitter.kernels.weights.packing import LANES, layout
from castiron.emitter.kernels.weights.panel import (
    BLOCK_BYTES,
    EXACT_COUNTS,
    Bf16BlockPanel,
    Bf16CodePanel,
    Bf16Panel,
    Bf16SplitPanel,
    units,
)

# The letter of each size in a kernel's name.
LETTERS = {
    "workgroups": "g", "rows": "r", "vectors": "v", "wide": "w", "high": "h", "row_blocks": "b", "depth": "d", "tokens": "t",
    "together": "b", "ahead": "a", "unroll": "u", "rest": "e", "few": "f", "direct": "n",
}  # fmt: skip

# One token. Distance of prefetched weights: of one row block, and of all row blocks that are read at the same time.
AHEAD_BYTES, AHEAD_TOTAL = 5 << 10, 10 << 10
# Bytes of weights of a workgroup. Each workgroup has to prepare x and starts without prefetched weights, so small weights
# have one workgroup per thread. Larger weights have up to PARTS per thread, because threads may start late.
MIN_BYTES, ENOUGH_BYTES = 16 << 10, 1 << 20
# Row blocks of a workgroup that quantises x: this takes about as long as to multiply x by two row blocks.
MIN_BLOCKS = 24
# What a set of row blocks that are computed together costs besides its row blocks, in the time of one row block.
SET_COST = 1

# Few tokens.
FEW_TOKENS = 8
FEW_PARTS = 2  # workgroups for each thread
# With x in integers: max rows of a tile, because more accumulators would spill; the same for row blocks that are read at
# the same time, with one digit and with more, and for the product of rows and row blocks.
FEW_ROWS, FEW_BLOCKS, FEW_SUMS = 8, (4, 2), 16

# Many tokens.
GEMM_DEPTH = 288  # a panel of 18 KB for 16 columns; larger panels would evict x from the L1 cache
GEMM_TOKENS = 132  # more tokens would evict x from the L2 cache between blocks of columns
# Max rows of a tile, by lanes; more accumulators would spill. The value for NEON is from llvm-mca for Neoverse V1 and N2.
INTEGER_ROWS = {4: 2, 8: 6, 16: 6}
INTEGER_DEPTH = 512
BF16_TOKENS, BF16_DEPTH = 128, 256

# A matrix unit. Fewest tokens for which it is faster: than f32, than f32 with a small panel (`has_small_panel`), and than int8.
MATRIX_MIN_TOKENS, MATRIX_MIN_SMALL_TOKENS, MATRIX_MIN_INT8_TOKENS = 9, 5, 32
MATRIX_SMALL_TOKENS = 64  # for more tokens a larger panel is faster, because x is read less often
MATRIX_TOKENS, MATRIX_DEPTH, MATRIX_ROW_BLOCKS = 128, 512, 8
# Of the unit's eight registers, four have sums, two x and two weights; or four have sums, three the pieces of x.
MATRIX_HIGH, MATRIX_WIDE = 2, 4
MATRIX_X_BYTES = 24 << 10  # max bytes of x that are multiplied by a panel at a time; half of L1

# Experts.
DECODING = 4  # decoding the weights of a block takes as long as the computation of this many pairs
# Max pairs of a block whose weights are decoded in registers, without a panel, with x in f32 and in integers.
DIRECT, DIRECT_INTEGER = 32, 16


@dataclass(frozen=True)
class Tiles(ABC):
    """The tile sizes of a matmul kernel, all positive integers, which `castiron tune` varies.

    Results for different tile sizes differ by rounding only.

    workgroups: number of workgroups of the kernel. For an MoE kernel with one GEMV for each (token,
        expert) pair: number of workgroups of each pair.
    """

    workgroups: int = field(default=12, kw_only=True)

    @property
    def name(self) -> str:
        """Return the tile sizes as text for a kernel's name: "r6w2" means `rows` 6 and `wide` 2."""
        return "".join(f"{LETTERS[name]}{value}" for name, value in asdict(self).items())

    @classmethod
    @abstractmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self: ...

    @abstractmethod
    def fit(self, matmul: Matmul) -> bool: ...


@dataclass(frozen=True)
class GemvTiles(Tiles):
    """The tile sizes of `Gemv`, the matmul kernel for one token.

    together: row blocks that share loads of x; with a GLU, 1 or an even number. ahead: prefetch
    distance, in records. unroll: records in a loop iteration; for float codecs only.
    """

    together: int = 2
    ahead: int = 16
    unroll: int = 4

    def fit(self, matmul: Matmul) -> bool:
        return self.together == 1 or self.together % matmul.blocks_per_result == 0

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        blocks, records, size = matmul.weight_shape
        nbytes, codec = blocks * records * size, matmul.format
        workgroups = threads * max(1, min(PARTS, nbytes // (threads * ENOUGH_BYTES)))
        workgroups = min(workgroups, max(1, nbytes // MIN_BYTES), -(-blocks // 2))
        if matmul.experts:
            # Each (token, expert) pair has its own workgroups, about 2 * threads in total.
            workgroups = min(workgroups, -(-2 * threads // matmul.tokens))
        if matmul.digits:
            workgroups = min(workgroups, max(threads, blocks // MIN_BLOCKS))
        ahead = 16 if codec.block == 32 else -(-AHEAD_BYTES // size)
        if isa.roomy:
            together = _together(blocks, workgroups, (4, 2) if matmul.glu else (4, 3, 2))
            ahead = -(-AHEAD_TOTAL // (together * size))
            return cls(together, ahead, workgroups=workgroups)
        # Two row blocks overflow the registers for codes of several groups, and for all codes on NEON.
        together = 1 if layout(codec).groups > 1 or (codec.quantised and isa.lanes < 8) else 2
        return cls(together, ahead, workgroups=workgroups)


def _together(blocks: int, workgroups: int, choices: Sequence[int]) -> int:
    """Return how many row blocks to compute together, so that no workgroup has much more than the others."""
    sets_of_busiest = lambda together: ceil(blocks / together / workgroups)
    return min(choices, key=lambda together: sets_of_busiest(together) * (together + SET_COST))


@dataclass(frozen=True)
class SmallBatchTiles(Tiles):
    """The tile sizes of `SmallBatch`, the matmul kernel for a few tokens.

    rows: tokens, and vectors: vectors of outputs of each, whose sums are in registers.
    unroll: records in a loop iteration; for float codecs only.
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
        # More vectors share each load of x, which codes gain by, and floats do not. But codes are decoded again for each tile
        # of tokens, so all tokens should fit in one.
        max_sums = 20 if isa.registers == 32 else isa.registers * 5 // 8
        is_wide = isa.lanes < 8 or (isa.registers == 32 and matmul.format.quantised and 4 * matmul.tokens <= max_sums)
        vectors = 4 if is_wide else 2
        if matmul.format.quantised and vectors * matmul.tokens > max_sums:
            vectors = 1
        max_rows = max_sums // vectors
        rows = -(-matmul.tokens // -(-matmul.tokens // max_rows))
        row_blocks = cls(rows, vectors).row_blocks(isa, matmul.blocks_per_result)
        return cls(rows, vectors, workgroups=min(-(-matmul.weight_shape[0] // row_blocks), FEW_PARTS * threads))

    def fit(self, matmul: Matmul) -> bool:
        return self.rows <= matmul.tokens


@dataclass(frozen=True)
class SmallBatchIntegerTiles(Tiles):
    """The tile sizes of `SmallBatchInteger`.

    rows: tokens whose sums are in registers. row_blocks: row blocks that are read at the same time.
    """

    rows: int
    row_blocks: int = 1

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        rows = -(-matmul.tokens // -(-matmul.tokens // FEW_ROWS))
        row_blocks = max(1, min(FEW_BLOCKS[matmul.digits > 1], FEW_SUMS // rows)) if isa.roomy else 1
        sets = matmul.weight_shape[0] // lcm(row_blocks, matmul.blocks_per_result)
        return cls(rows, row_blocks, workgroups=max(1, min(sets, FEW_PARTS * threads)))

    def fit(self, matmul: Matmul) -> bool:
        return self.rows <= matmul.tokens


@dataclass(frozen=True)
class PanelTiles(Tiles):
    """The tile sizes of kernels that decode weights into a panel.

    rows: tokens, and wide: row blocks, whose sums are in registers at the same time.
    row_blocks, depth: row blocks, and elements of each row, in a panel.
    tokens: number of tokens that are multiplied by one panel.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int

    max_stack: ClassVar[int] = STACK_BYTES

    @abstractmethod
    def units(self, matmul: Matmul) -> tuple[int, int]:
        """Return (n, m): `tokens` must be a multiple of n, and `depth` must be a multiple of m."""

    def stack_bytes(self, matmul: Matmul) -> int:
        """Return the bytes of stack that the kernel needs: here, of its f32 sums."""
        return 4 * LANES * self.row_blocks * self.tokens

    def fit(self, matmul: Matmul) -> bool:
        token_unit, depth_unit = self.units(matmul)
        return (
            self.stack_bytes(matmul) <= self.max_stack
            and self.depth % depth_unit == 0
            and self.tokens % token_unit == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % matmul.blocks_per_result == 0
            and matmul.weight_shape[0] % self.row_blocks == 0
        )


@dataclass(frozen=True)
class GemmTiles(PanelTiles):
    """The tile sizes of `Gemm`.

    unroll: number of elements of in_features that an iteration of the inner loop multiplies.
    """

    unroll: int = 8

    def units(self, matmul: Matmul) -> tuple[int, int]:
        return self.rows, units(matmul.codec)

    def stack_bytes(self, matmul: Matmul) -> int:
        return 4 * LANES * self.row_blocks * (self.depth + self.tokens)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        T = matmul.tokens
        wide, row_blocks = panel_columns(matmul, isa.roomy)
        max_rows = 12 if isa.roomy else 6
        # A tile of fewer than 4 rows is as slow as one of 4 rows, because of the latency of fma.
        costs = {rows: T // rows * rows + max(T % rows, 4 if T % rows else 0) for rows in range(4, max_rows + 1)}
        rows = max(rows for rows, cost in costs.items() if cost <= 1.03 * min(costs.values()))
        budget = STACK_BYTES // (4 * LANES * row_blocks)
        tokens = even_tokens(T, min(GEMM_TOKENS, budget * 3 // 5), rows)
        size = units(matmul.codec)
        depth = even_share(-(-matmul.in_features // size), min(GEMM_DEPTH, budget - tokens) // size) * size
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=panel_workgroups(matmul, row_blocks, tokens, threads))


@dataclass(frozen=True)
class GemmIntegerTiles(PanelTiles):
    def units(self, matmul: Matmul) -> tuple[int, int]:
        return self.rows, matmul.format.unit(matmul.digits)

    def stack_bytes(self, matmul: Matmul) -> int:
        return super().stack_bytes(matmul) + LANES * self.row_blocks * row_bytes(self.depth, matmul.format.group)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        T = matmul.tokens
        wide, row_blocks = panel_columns(matmul, isa.lanes == LANES)
        rows = -(-T // -(-T // INTEGER_ROWS[isa.lanes]))
        budget = STACK_BYTES // (LANES * row_blocks)
        tokens = even_tokens(T, min(GEMM_TOKENS, budget // 4 * 3 // 5), rows)
        depth = int8_depth(matmul, budget - 4 * tokens)
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=panel_workgroups(matmul, row_blocks, tokens, threads))


def row_bytes(depth: int, group: int) -> int:
    """Return the bytes of a row of W in a panel: codes, and an f32 scale and base per group."""
    return depth + depth // group * 8


def int8_depth(matmul: Matmul, budget: int) -> int:
    """Return the default depth of a panel; budget: its max bytes for each row of W."""
    unit = matmul.format.unit(matmul.digits)
    fitting = budget * unit // row_bytes(unit, matmul.format.group)
    return even_share(matmul.in_features // unit, min(INTEGER_DEPTH, fitting) // unit) * unit


@dataclass(frozen=True)
class GemmBf16Tiles(PanelTiles):
    """The tile sizes of `GemmBf16`; rows: rows of x whose sums are in registers at a time."""

    def units(self, matmul: Matmul) -> tuple[int, int]:
        return tile_rows(matmul.tokens), DEPTH

    def stack_bytes(self, matmul: Matmul) -> int:
        panel = 0 if matmul.codec == "bf16" else self.depth // DEPTH * self.row_blocks * BLOCK_BYTES
        return super().stack_bytes(matmul) + panel

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        # The accumulators leave two vector registers free for weights.
        wide, row_blocks = panel_columns(matmul, isa.lanes == LANES)
        tile, rows = tile_rows(matmul.tokens), 8 if isa.lanes == LANES else 6
        tokens = even_tokens(matmul.tokens, BF16_TOKENS, tile)
        limit = BF16_DEPTH // DEPTH
        if matmul.codec != "bf16":
            limit = min(limit, (STACK_BYTES // row_blocks - 4 * LANES * tokens) // BLOCK_BYTES)
        steps = even_share(-(-matmul.in_features // DEPTH), limit)
        workgroups = panel_workgroups(matmul, row_blocks, tokens, threads)
        return cls(-(-tile // -(-tile // rows)), wide, row_blocks, steps * DEPTH, tokens, workgroups=workgroups)


@dataclass(frozen=True)
class GemmMatrixTiles(PanelTiles):
    """The tile sizes of `GemmMatrix`; it has high * wide accumulators f32 [rows, 16] at a time.

    high: number of blocks of `rows` tokens that are multiplied at a time.
    """

    high: int
    max_stack: ClassVar[int] = MATRIX_STACK_BYTES

    def units(self, matmul: Matmul) -> tuple[int, int]:
        return self.rows * self.high, DEPTH

    def stack_bytes(self, matmul: Matmul) -> int:
        parts = self.high * self.wide * self.rows * ROW_BYTES
        return super().stack_bytes(matmul) + parts + self.depth // DEPTH * _matrix_step_bytes(matmul, self.row_blocks)

    def fit(self, matmul: Matmul) -> bool:
        fits_unit = self.high * self.wide + self.high + self.wide <= 8 or (self.high == 1 and self.wide <= MATRIX_WIDE)
        block = matmul.format.block
        fits_blocks = matrix_panel_type(matmul) is not Bf16BlockPanel or block % self.depth == 0 or self.depth % block == 0
        return self.rows == tile_rows(matmul.tokens) and fits_unit and fits_blocks and super().fit(matmul)

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        if has_code_panel(matmul) and matmul.tokens <= MATRIX_SMALL_TOKENS:
            return cls._small_panel(matmul, threads)
        # Two by two accumulators, and a panel whose part of x fits in L1.
        wide, _ = panel_columns(matmul, True)
        rows = tile_rows(matmul.tokens)
        high = MATRIX_HIGH if rows < matmul.tokens else 1
        tokens = even_tokens(matmul.tokens, MATRIX_TOKENS, rows * high)
        row_blocks = _matrix_row_blocks(matmul, wide, MATRIX_ROW_BLOCKS, threads)
        x_step = ROW_BYTES * rows * high * (1 if matmul.numerics == "bf16_matrix" else EXACT)
        space = cls.max_stack - cls(rows, wide, row_blocks, 0, tokens, high).stack_bytes(matmul)
        limit = min(MATRIX_DEPTH // DEPTH, MATRIX_X_BYTES // x_step, space // _matrix_step_bytes(matmul, row_blocks))
        total = -(-matmul.in_features // DEPTH)
        if matrix_panel_type(matmul) is Bf16BlockPanel:
            total = matmul.format.block // DEPTH  # the panel is a part of a block, or one block
        steps = even_share(total, limit)
        workgroups = panel_workgroups(matmul, row_blocks, tokens, threads)
        return cls(rows, wide, row_blocks, steps * DEPTH, tokens, high, workgroups=workgroups)

    @classmethod
    def _small_panel(cls, matmul: Matmul, threads: int) -> Self:
        # A panel of 4 KB, so that it is still in L1 when it is multiplied.
        rows, row_blocks = tile_rows(matmul.tokens), _matrix_row_blocks(matmul, 1, MATRIX_WIDE, threads)
        tokens, wide = even_tokens(matmul.tokens, MATRIX_TOKENS, rows), min(row_blocks, MATRIX_WIDE)
        workgroups = panel_workgroups(matmul, row_blocks, tokens, threads)
        return cls(rows, wide, row_blocks, DEPTH, tokens, 1, workgroups=workgroups)


def _matrix_row_blocks(matmul: Matmul, wide: int, limit: int, threads: int) -> int:
    # The more columns a panel has, the less often x is read, which may not fit in L2. But all threads need work.
    blocks, unit = matmul.weight_shape[0], max(wide, matmul.blocks_per_result)
    fitting = [n for n in range(unit, limit + 1, unit) if blocks % n == 0] or [unit]
    load = {n: -(-blocks // (n * threads)) * n for n in fitting}  # row blocks of the busiest thread
    return max(n for n in fitting if load[n] <= 1.03 * min(load.values()))


def has_small_panel(codec: Codec) -> bool:
    """Return whether panels of `bf16_split` have one bf16 for each element."""
    has_one = not Bf16BlockPanel.fits(codec) or layout(codec).scales is None
    return codec.quantised and codec.has_integers and has_one


def has_code_panel(matmul: Matmul) -> bool:
    return matmul.numerics == "bf16_split" and has_small_panel(matmul.format)


def matrix_panel_type(matmul: Matmul) -> type[Any]:
    if matmul.numerics == "bf16_matrix":
        return Bf16Panel
    if not matmul.format.quantised:
        return Bf16SplitPanel
    return Bf16BlockPanel if Bf16BlockPanel.fits(matmul.format) else Bf16CodePanel


def _matrix_step_bytes(matmul: Matmul, row_blocks: int) -> int:
    # Bytes of the panel for 32 elements of in_features.
    codec, kind = matmul.format, matrix_panel_type(matmul)
    if kind is Bf16BlockPanel:
        return row_blocks * (2 * BLOCK_BYTES + 4 * LANES)
    if kind is Bf16CodePanel:
        return DEPTH // codec.group * row_blocks * (BLOCK_BYTES + 4 * LANES * (2 if codec.minimum else 1))
    return (EXACT_COUNTS[codec.name] if kind is Bf16SplitPanel else 1) * row_blocks * BLOCK_BYTES


@dataclass(frozen=True)
class _PairTiles(PanelTiles):
    """Tile sizes of MoE matmuls of blocks of up to `tokens` (token, expert) pairs of one expert.

    direct: max number of pairs of a small block, for which weights are decoded in registers.
    few: pairs in a tile of a small block; divides `direct`.
    rest: pairs in a tile at the end of a large block; divides `rows`.
    """

    rest: int = 1
    few: int = 1
    direct: int = 1

    def fit(self, matmul: Matmul) -> bool:
        fits_small = self.rows % self.rest == 0 and self.direct % self.few == 0 and self.direct <= self.tokens
        lists = 4 * (matmul.experts + self.tokens)  # bytes of `Grouped.counts` and `Grouped.pairs`
        return fits_small and self.stack_bytes(matmul) + lists <= STACK_BYTES and super().fit(matmul)


@dataclass(frozen=True)
class GroupedTiles(_PairTiles, GemmTiles):
    """The tile sizes of `Grouped`, an MoE matmul for f32 x that groups tokens by expert."""

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        wide, row_blocks = panel_columns(matmul, isa.lanes == LANES)
        rows = 12 if isa.lanes == LANES else 6
        budget = (STACK_BYTES - 4 * matmul.experts) // (4 * LANES * row_blocks + 4)
        tokens = _pairs_of_block(matmul, rows, min(GEMM_TOKENS, budget * 3 // 5))
        size = units(matmul.codec)
        depth = even_share(-(-matmul.in_features // size), min(GEMM_DEPTH, budget - tokens) // size) * size
        small = _small_tiles(isa, rows, min(DIRECT, tokens))
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=PARTS * threads, **small)


@dataclass(frozen=True)
class GroupedIntegerTiles(_PairTiles, GemmIntegerTiles):
    """The tile sizes of `GroupedInteger`, an MoE matmul for quantised x that groups tokens by expert."""

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        wide, row_blocks = panel_columns(matmul, isa.lanes == LANES)
        rows = INTEGER_ROWS[isa.lanes]
        budget = (STACK_BYTES - 4 * matmul.experts) // (LANES * row_blocks)
        tokens = _pairs_of_block(matmul, rows, min(GEMM_TOKENS, budget // 5 * 3 // 5))
        depth = int8_depth(matmul, budget - 5 * tokens)
        small = _small_tiles(isa, rows, min(DIRECT_INTEGER, tokens))
        return cls(rows, wide, row_blocks, depth, tokens, workgroups=PARTS * threads, **small)


def _small_tiles(isa: Isa, rows: int, direct: int) -> dict[str, int]:
    # Defaults of `_PairTiles`; `direct` is an upper limit.
    few = min(8 if isa.lanes == LANES else 4, direct)
    return {"rest": max(1, rows // 3), "few": few, "direct": direct // few * few}


def _pairs_of_block(matmul: Matmul, rows: int, limit: int) -> int:
    # A multiple of `rows`, at most max(limit, rows).
    return max(1, min(-(-matmul.tokens // rows), limit // rows)) * rows


def panel_columns(matmul: Matmul, can_pair: bool) -> tuple[int, int]:
    """Return the default (`wide`, `row_blocks`) of `PanelTiles`.

    can_pair: whether the registers have space for the sums of two row blocks.
    """
    shared = matmul.blocks_per_result
    wide = 2 if can_pair and (shared == 2 or matmul.weight_shape[0] % 2 == 0) else 1
    return wide, max(wide, shared)


def even_tokens(tokens: int, limit: int, unit: int) -> int:
    """Return the tokens of a block, for few equal blocks up to `limit`, in multiples of `unit`."""
    blocks = -(-tokens // limit)
    return -(-tokens // (blocks * unit)) * unit


def even_share(total: int, limit: int) -> int:
    """Return the largest divisor of `total` up to `limit`, or `limit` if it is below half of that."""
    limit = min(limit, total)
    share = next(n for n in range(limit, 0, -1) if total % n == 0)
    return share if 2 * share >= limit else limit


def panel_workgroups(matmul: Matmul, row_blocks: int, tokens: int, threads: int) -> int:
    items = matmul.weight_shape[0] // row_blocks * -(-matmul.tokens // tokens)
    return min(items, PARTS * threads)
