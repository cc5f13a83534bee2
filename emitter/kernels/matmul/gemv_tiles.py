"""The tile sizes of the kernel for one token, `gemv`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Self

from castiron.emitter.kernels.matmul.tiles import Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import PARTS
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import layout

# Distance of prefetched weights: of one row block, and of all row blocks that are read at the same time.
AHEAD_BYTES, AHEAD_TOTAL = 5 << 10, 10 << 10
# Bytes of weights of a workgroup. Each workgroup has to prepare x and starts without prefetched weights, so small weights
# have one workgroup per thread. Larger weights have up to PARTS per thread, because threads may start late.
MIN_BYTES, ENOUGH_BYTES = 16 << 10, 1 << 20
# Row blocks of a workgroup that quantises x: this takes about as long as to multiply x by two row blocks.
MIN_BLOCKS = 24
# What a set of row blocks that are computed together costs besides its row blocks, in the time of one row block.
SET_COST = 1


@dataclass(frozen=True)
class GemvTiles(Tiles):
    """The tile sizes of `Gemv`, the matmul kernel for one token.

    The kernel reads the packed weight in records. A record has one codec block (such as 32
    elements) of each of 16 rows of the weight. For a float codec, it has one element of each row
    (bf16: two).

    together: number of 16-row blocks that are computed together, so that they share loads of x and
        the core reads several addresses at a time; with a GLU, 1 or an even number.
    ahead: prefetch distance, in records.
    unroll: number of records in a loop iteration; for float codecs only.
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
