"""Tile sizes of matmul kernels, and a class that emits the code to store their results."""

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

# Memrefs of a matmul's operands (`Matmul.operands`) and of its result y, by name.
Buffers = Mapping[str, Ssa]
# The letter of each size in a kernel's name.
LETTERS = {
    "workgroups": "g", "rows": "r", "vectors": "v", "wide": "w", "high": "h", "row_blocks": "b", "depth": "d", "tokens": "t",
    "together": "b", "chains": "c", "ahead": "a", "unroll": "u", "rest": "e", "few": "f", "direct": "n",
}  # fmt: skip


@dataclass(frozen=True)
class Tiles(ABC):
    """Tile sizes of a matmul kernel, which `castiron tune` varies; all are positive integers.

    Results for different tiles differ by rounding only. workgroups: number of workgroups of the
    kernel; for a kernel with a GEMV for each (token, expert) pair, of one pair.
    """

    workgroups: int = field(default=12, kw_only=True)

    @property
    def name(self) -> str:
        """Return the sizes for a kernel's name, each after the letter of its field: "r6w2b2"."""
        return "".join(f"{LETTERS[name]}{value}" for name, value in asdict(self).items())

    @classmethod
    @abstractmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        """Return the default tiles for `threads` threads, which were chosen by measurements."""

    @abstractmethod
    def fit(self, matmul: Matmul) -> bool:
        """Return whether these tiles are valid for a kernel of this matmul."""


@dataclass(frozen=True)
class PanelTiles(Tiles):
    """Tiles of kernels that decode weights into a panel on the stack.

    depth: k of a panel. row_blocks: columns of a panel, in blocks of 16. tokens: tokens that are
    multiplied by one panel. rows, wide: the accumulators in registers are for `rows` tokens and
    16 * `wide` columns.
    """

    rows: int
    wide: int
    row_blocks: int
    depth: int
    tokens: int

    @abstractmethod
    def units(self, matmul: Matmul) -> tuple[int, int]:
        """Return (token unit, depth unit); `tokens` and `depth` must be multiples of them."""

    def stack_bytes(self, matmul: Matmul) -> int:
        """Return the bytes of stack for sums and panel; here, for f32 sums only."""
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
    """Return default `wide` and `row_blocks`; can_pair: whether registers suffice for wide 2."""
    shared = matmul.blocks_per_result
    wide = 2 if can_pair and (shared == 2 or matmul.weight_shape[0] % 2 == 0) else 1
    return wide, max(wide, shared)


def even_tokens(tokens: int, limit: int, unit: int) -> int:
    """Return the size of equal blocks of tokens: about `limit`, and a multiple of `unit`."""
    blocks = -(-tokens // limit)
    return -(-tokens // (blocks * unit)) * unit


def even_share(total: int, limit: int) -> int:
    """Return the largest divisor of `total` up to `limit`; `limit` if it is under limit / 2."""
    limit = min(limit, total)
    share = next(n for n in range(limit, 0, -1) if total % n == 0)
    return share if 2 * share >= limit else limit


def panel_workgroups(matmul: Matmul, row_blocks: int, tokens: int, threads: int) -> int:
    items = matmul.weight_shape[0] // row_blocks * -(-matmul.tokens // tokens)
    return min(items, PARTS * threads)


def each_block(b: Body, out_features: int, block: Index, store: Callable[[int], None]) -> None:
    """Emit the code that stores the 16 results of row block `block`.

    store: called with 0 for a full block, and with n for a last block of only n results.
    """
    last, ragged = divmod(out_features, LANES)
    if not ragged:
        store(0)
        return
    with b.when(b.less(block, last)):
        store(0)
    with b.when(b.equal(block, last)):
        store(ragged)


class Finish:
    """A writer of the code that applies the epilogue to `sums` [tokens, columns] and stores y.

    row_of: from a token's index to its row of y.
    """

    def __init__(
        self, b: Body, matmul: Matmul, lanes: int, buffers: Buffers, sums: Ssa, row_of: Callable[[Index], Index] = lambda t: t
    ):
        self.b, self.matmul, self.lanes, self.buffers, self.sums, self.row_of = b, matmul, lanes, buffers, sums, row_of

    def store(self, first_block: Index, row_blocks: Index, first: Index, end: Index, last: Index) -> None:
        """Store the results of tokens first .. end - 1, and zeros for tokens end .. last - 1.

        Row 0 of the sums is token `first`. Columns 0 to 15 are row block `first_block`.
        """
        b, shared = self.b, self.matmul.blocks_per_result
        with b.loop(0, b.div(row_blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            each_block(b, self.matmul.out_features, block, partial(self._block, i.index, column, first, end, last))

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int) -> None:
        """Store 16 columns of the result, or only the first `ragged` columns if it is not 0."""
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
        """Store up to 16 results of a token; add: whether to add bias and residual first."""
        b, lanes, row = self.b, self.lanes, self.row_of(token)
        for lane in range(0, ragged or LANES, 1 if ragged else lanes):
            y = results[lane // lanes]
            y = b.extract(y, lane % lanes) if ragged else y
            at = b.add(column, lane)
            y = with_operands(b, y, self.buffers, row, at) if add else y
            (b.store if ragged else b.vstore)(y, self.buffers["y"], row, at)
