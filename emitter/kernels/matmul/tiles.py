"""Tile sizes of matmul kernels, and a writer of MLIR that stores their results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Self

from castiron.emitter.kernels.epilogue import combine, with_operands
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import PARTS, STACK_BYTES, Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import LANES

# The operands of a matmul (`Matmul.operands`) and its result y, by name.
Buffers = Mapping[str, Ssa]
# The letter of each size in a kernel's name.
LETTERS = {
    "workgroups": "g", "rows": "r", "vectors": "v", "wide": "w", "high": "h", "row_blocks": "b", "depth": "d", "tokens": "t",
    "together": "b", "chains": "c", "ahead": "a", "unroll": "u", "rest": "e", "few": "f", "direct": "n",
}  # fmt: skip


@dataclass(frozen=True)
class Tiles(ABC):
    """The sizes of a matmul kernel that a tuning search may vary, all positive integers.

    They change results by rounding only. workgroups: number of workgroups of a kernel, or of a
    (token, expert) pair.
    """

    workgroups: int = field(default=12, kw_only=True)

    @property
    def name(self) -> str:
        """Return the sizes as a part of a kernel's name, each after the letter of its field."""
        return "".join(f"{LETTERS[name]}{value}" for name, value in asdict(self).items())

    @classmethod
    @abstractmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        """Return tiles that measured well for a kernel that runs on `threads` threads."""

    @abstractmethod
    def fit(self, matmul: Matmul) -> bool:
        """Return whether a kernel of this matmul can have these tiles."""


@dataclass(frozen=True)
class PanelTiles(Tiles):
    """The tiles of kernels with a panel of `row_blocks` blocks of 16 columns x `depth` k.

    `tokens` tokens share a panel. Sums of `rows` tokens x (16 * `wide`) columns are in registers.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int

    @abstractmethod
    def units(self, matmul: Matmul) -> tuple[int, int]:
        """Return the numbers of which `tokens` and `depth` are multiples."""

    def stack_bytes(self, matmul: Matmul) -> int:
        """Return the bytes of stack for sums and panel."""
        return 4 * LANES * self.row_blocks * self.tokens

    def fit(self, matmul: Matmul) -> bool:
        token_unit, depth_unit = self.units(matmul)
        return (
            self.stack_bytes(matmul) <= STACK_BYTES
            and self.depth % depth_unit == 0
            and self.tokens % token_unit == 0
            and self.row_blocks % self.wide == 0
            and self.row_blocks % matmul.blocks_per_result == 0
            and matmul.weight_shape[0] % self.row_blocks == 0
        )


def panel_columns(matmul: Matmul, can_pair: bool) -> tuple[int, int]:
    """Return default `wide` and `row_blocks`; can_pair: whether sums of two fit registers."""
    shared = matmul.blocks_per_result
    wide = 2 if can_pair and (shared == 2 or matmul.weight_shape[0] % 2 == 0) else 1
    return wide, max(wide, shared)


def even_tokens(tokens: int, limit: int, unit: int) -> int:
    """Return the tokens of a block, about `limit`, for equal blocks; a multiple of `unit`."""
    blocks = -(-tokens // limit)
    return -(-tokens // (blocks * unit)) * unit


def even_share(total: int, limit: int) -> int:
    """Return the largest divisor of `total` up to `limit`; if it is below limit / 2, the limit."""
    limit = min(limit, total)
    share = next(n for n in range(limit, 0, -1) if total % n == 0)
    return share if 2 * share >= limit else limit


def panel_workgroups(matmul: Matmul, row_blocks: int, tokens: int, threads: int) -> int:
    items = matmul.weight_shape[0] // row_blocks * -(-matmul.tokens // tokens)
    return min(items, PARTS * threads)


def each_block(b: Body, out_features: int, block: Index, store: Callable[[int], None]) -> None:
    """Call store(0) for 16 results from 16 * block on, store(n) for a last block of n results."""
    last, ragged = divmod(out_features, LANES)
    if not ragged:
        store(0)
        return
    with b.when(b.less(block, last)):
        store(0)
    with b.when(b.equal(block, last)):
        store(ragged)


class Finish:
    """A writer that applies the epilogue to `sums` [tokens, columns] and stores y."""

    def __init__(
        self, b: Body, matmul: Matmul, lanes: int, buffers: Buffers, sums: Ssa, row_of: Callable[[Index], Index] = lambda t: t
    ):
        self.b, self.matmul, self.lanes, self.buffers, self.sums, self.row_of = b, matmul, lanes, buffers, sums, row_of

    def store(self, first_block: Index, row_blocks: Index, first: Index, end: Index, last: Index) -> None:
        """Store results for tokens `first` to `end`, zeros from `end` to `last`.

        Row 0 of the sums is token `first`; columns 0 to 15 are row block `first_block`.
        """
        b, shared = self.b, self.matmul.blocks_per_result
        with b.loop(0, b.div(row_blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            each_block(b, self.matmul.out_features, block, partial(self._block, i.index, column, first, end, last))

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int) -> None:
        """Store 16 columns of the result, or only the first `ragged` if that is not 0."""
        b, lanes, shared = self.b, self.lanes, self.matmul.blocks_per_result
        with b.loop(first, end) as token:
            dots = []
            for i in range(shared):
                at = b.mul(b.add(b.mul(slot, shared), i), LANES)
                row = b.sub(token.index, first)
                dots.append([b.vload(self.sums, lanes, row, b.add(at, c)) for c in range(0, LANES, lanes)])
            self._put(token.index, column, combine(b, self.matmul.glu, dots), ragged, add=True)
        if "length" in self.buffers:
            with b.loop(end, last) as token:
                self._put(token.index, column, [b.splat(0.0, lanes)] * (LANES // lanes), ragged, add=False)

    def _put(self, token: Index, column: Index, results: list[Ssa], ragged: int, add: bool) -> None:
        """Store the results of a token; add: whether to add bias and residual first."""
        b, lanes, row = self.b, self.lanes, self.row_of(token)
        for lane in range(0, ragged or LANES, 1 if ragged else lanes):
            y = results[lane // lanes]
            y = b.extract(y, lane % lanes) if ragged else y
            at = b.add(column, lane)
            y = with_operands(b, y, self.buffers, row, at) if add else y
            (b.store if ragged else b.vstore)(y, self.buffers["y"], row, at)
