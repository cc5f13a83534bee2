"""The tile sizes of the kernel for one token, `gemv`."""

from dataclasses import dataclass
from typing import Self

from castiron.emitter.kernels.matmul.sum_tables import is_summed_by_tables
from castiron.emitter.kernels.matmul.tiles import Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import PARTS
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import LANES, layout

AHEAD_BYTES = 5 << 10  # distance of prefetched weights
# Bytes of weights of a workgroup. Each workgroup has to prepare x and starts without prefetched weights, so small weights
# have one workgroup per thread. Larger weights have up to PARTS per thread, because threads may start late.
MIN_BYTES, ENOUGH_BYTES = 16 << 10, 1 << 20


@dataclass(frozen=True)
class GemvTiles(Tiles):
    """The tile sizes of `Gemv`, the matmul kernel for one token.

    The kernel reads the packed weight in records. A record has one codec block (such as 32
    elements) of each of 16 rows of the weight. For a float codec, it has one element of each row
    (bf16: two).

    together: number of 16-row blocks that are computed together, so that they share loads of x; at
        most 2 with a GLU.
    chains: number of independent accumulators for each row of the weight.
    ahead: prefetch distance, in records.
    unroll: number of records in a loop iteration; for float codecs only.
    """

    together: int = 2
    chains: int = 2
    ahead: int = 16
    unroll: int = 4

    def fit(self, matmul: Matmul) -> bool:
        return self.together <= 2 or not matmul.glu

    @classmethod
    def default(cls, matmul: Matmul, isa: Isa, threads: int) -> Self:
        blocks, records, size = matmul.weight_shape
        nbytes, codec = blocks * records * size, matmul.format
        workgroups = threads * max(1, min(PARTS, nbytes // (threads * ENOUGH_BYTES)))
        workgroups = min(workgroups, max(1, nbytes // MIN_BYTES), -(-blocks // 2))
        if matmul.experts:
            # Each (token, expert) pair has its own workgroups, about 2 * threads in total.
            workgroups = min(workgroups, -(-2 * threads // matmul.tokens))
        ahead = 16 if codec.block == 32 else -(-AHEAD_BYTES // size)
        if isa.canonical:
            return cls(2 if matmul.glu or not isa.roomy else 4, 1, ahead, workgroups=workgroups)
        if is_summed_by_tables(codec, isa):
            return cls(2 if matmul.glu or not isa.roomy else 4, 2, ahead, workgroups=workgroups)
        # Two row blocks overflow the registers for K-quants, which have two levels of scales, and for all codecs on NEON.
        together = 1 if layout(codec).groups > 1 or (codec.quantised and isa.lanes < 8) else 2
        chains = {("q4_k", 8): 3}.get((codec.name, isa.lanes), 4 if isa.lanes == LANES else 2)
        return cls(together, chains, ahead, workgroups=workgroups)
