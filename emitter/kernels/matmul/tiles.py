"""Define the tile sizes of matmul kernels, and emit the code that stores their results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import ClassVar, Self

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
    "together": "b", "ahead": "a", "unroll": "u", "rest": "e", "few": "f", "direct": "n",
}  # fmt: skip


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
class PanelTiles(Tiles):
    """The tile sizes of kernels that decode weights into a panel, a buffer on the stack.

    rows: number of tokens whose sums are in registers at the same time.
    wide: number of 16-row blocks of the weight whose sums are in registers at the same time.
    row_blocks: number of 16-row blocks of the weight in a panel.
    depth: number of elements of each row of the weight in a panel.
    tokens: number of tokens that are multiplied by one panel.
    max_stack: max bytes of stack buffers.
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


def panel_columns(matmul: Matmul, can_pair: bool) -> tuple[int, int]:
    """Return the default (`wide`, `row_blocks`) of `PanelTiles` for a matmul.

    Both are numbers of 16-row blocks of the weight: those whose sums are in registers at a time, and
    those in a panel.

    can_pair: whether the CPU has enough vector registers for the sums of two 16-row blocks of the
        weight at a time (`wide` 2).
    """
    shared = matmul.blocks_per_result
    wide = 2 if can_pair and (shared == 2 or matmul.weight_shape[0] % 2 == 0) else 1
    return wide, max(wide, shared)


def even_tokens(tokens: int, limit: int, unit: int) -> int:
    """Divide `tokens` tokens into as few equal blocks as possible; return the tokens of a block.

    limit: max number of tokens in a block, before rounding.
    unit: the result is rounded up to a multiple of this number.
    """
    blocks = -(-tokens // limit)
    return -(-tokens // (blocks * unit)) * unit


def even_share(total: int, limit: int) -> int:
    """Return the largest divisor of `total` up to `limit`: for total 96 and limit 40, it is 32.

    If this divisor is less than half of `limit`, return `limit`, even though it does not divide
    `total`. If `limit` exceeds `total`, return `total`.
    """
    limit = min(limit, total)
    share = next(n for n in range(limit, 0, -1) if total % n == 0)
    return share if 2 * share >= limit else limit


def panel_workgroups(matmul: Matmul, row_blocks: int, tokens: int, threads: int) -> int:
    items = matmul.weight_shape[0] // row_blocks * -(-matmul.tokens // tokens)
    return min(items, PARTS * threads)


def each_block(b: Body, out_features: int, block: Index, store: Callable[[int], None]) -> None:
    """Emit code that stores a block of 16 outputs, or fewer in the last block.

    out_features: total number of outputs.
    block: index of the block of 16 outputs.
    store(n): function that emits code to store the first n results of the block; n is 0 for all 16.
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
    """Emits the code that computes y from the dot products of a matmul, and stores it.

    The code applies the GLU, and adds the bias and the residual, where the matmul has them.

    sums: stack buffer f32 [tokens, columns] with the dot products.
    row_of(token): function that returns the index of the row of y for a token.

    Arguments of the methods:
    first, end, last: tokens first .. end - 1 get results. Tokens end .. last - 1 are padding, and
        get zeros if the matmul has an operand `length`.
    column: index of the first of 16 columns of y.
    ragged: number of these columns that exist, if y has fewer than 16 from `column` on; otherwise
        0.
    """

    def __init__(
        self, b: Body, matmul: Matmul, lanes: int, buffers: Buffers, sums: Ssa, row_of: Callable[[Index], Index] = lambda t: t
    ):
        self.b, self.matmul, self.lanes, self.buffers, self.sums, self.row_of = b, matmul, lanes, buffers, sums, row_of

    def store(self, first_block: Index, row_blocks: Index, first: Index, end: Index, last: Index) -> None:
        """Emit code that computes and stores y for some tokens and some rows of the weight."""
        b, shared = self.b, self.matmul.blocks_per_result
        with b.loop(0, b.div(row_blocks, shared)) as i:
            block = b.add(b.div(first_block, shared), i.index)
            column = b.mul(block, LANES)
            each_block(b, self.matmul.out_features, block, partial(self._block, i.index, column, first, end, last))

    def _block(self, slot: Index, column: Index, first: Index, end: Index, last: Index, ragged: int) -> None:
        # slot: index of the block of results in `self.sums`
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

    def _put(self, token: Index, column: Index, results: Sequence[Ssa], ragged: int, add: bool) -> None:
        # add: whether to add the bias and the residual
        b, lanes, row = self.b, self.lanes, self.row_of(token)
        for lane in range(0, ragged or LANES, 1 if ragged else lanes):
            y = results[lane // lanes]
            y = b.extract(y, lane % lanes) if ragged else y
            at = b.add(column, lane)
            y = with_operands(b, y, self.buffers, row, at) if add else y
            (b.store if ragged else b.vstore)(y, self.buffers["y"], row, at)
