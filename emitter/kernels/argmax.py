"""Find the index of the largest logit.

each workgroup: one row of logits [rows, vocab]
  best, first = -inf, 0                                                                        registers
  for start in steps of `block` logits:                         the last block may be shorter
    tops [8 vectors] = -inf                                                                    registers
    for logits in block, 8 vectors at a time: tops = max(tops, logits)
    if max(tops) > best: best, first = max(tops), start
  for i in the block at `first`, backwards:
    if logits[i] == best: index = i
  out = index, or 0 where best is still -inf                                                     memory
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, largest_width
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import lane_max, tree

BLOCK = 512  # logits of a block, a multiple of 8 vectors of every instruction set


@cache
def argmax(vocab: int, *, isa: Isa, rows: int | None = None) -> Kernel:
    """Return the kernel that finds the index of the largest logit.

    Operand: logits f32 [vocab], or [rows, vocab] if `rows` is given. Result: index i32 scalar, or
    i32 [rows]. Among equal logits the kernel chooses the lowest index, as HF does. It never chooses
    NaN, and returns 0 if no logit is above -inf.
    """
    shape = (vocab,) if rows is None else (rows, vocab)
    full = vocab // BLOCK * BLOCK

    def write(b: Body, logits: Ssa, index: Ssa) -> None:
        lowest = b.f32(float("-inf"))
        lead = () if rows is None else (b.workgroup(),)

        def block_max(low: Index, high: Index, width: int, ways: int) -> Ssa:
            with b.loop(low, high, ways * width, carry=[b.splat(float("-inf"), width)] * ways) as loop:
                starts = [b.add(loop.index, i * width) for i in range(ways)]
                loop.give(*[b.maxf(b.vload(logits, width, *lead, i), m) for i, m in zip(starts, loop.values, strict=True)])
            return lane_max(b, tree(b.maxf, loop.results))

        with b.loop(0, full, BLOCK, carry=[lowest, b.index(0)]) as loop:
            top = block_max(loop.index, b.add(loop.index, BLOCK), isa.lanes, 8)
            better = b.compare("ogt", top, loop.values[0])
            loop.give(b.select(better, top, loop.values[0]), b.select(better, loop.index, loop.values[1]))
        best, first = loop.results
        if full < vocab:
            top = block_max(full, vocab, largest_width(isa.lanes, vocab - full), 1)
            better = b.compare("ogt", top, best)
            best, first = b.select(better, top, best), b.select(better, full, first)
        last = b.min(b.add(first, BLOCK), vocab)
        # The loop runs backwards, so that it writes the lowest index last.
        with b.loop(0, b.sub(last, first), carry=[first]) as loop:
            at = b.sub(b.sub(last, 1), loop.index)
            equal = b.compare("oeq", b.load(logits, *lead, at), best)
            loop.give(b.select(equal, at, loop.values[0]))
        found = b.compare("ogt", best, lowest)
        b.store(b.to_i32(b.select(found, loop.results[0], 0)), index, *lead)

    def reference(logits: np.ndarray) -> dict[str, np.ndarray]:
        return {"index": np.array(np.argmax(np.where(np.isnan(logits), -np.inf, logits), -1), np.int32)}

    return Kernel(
        f"argmax_{'x'.join(map(str, shape))}_{isa.name}_b{BLOCK}",
        {"logits": TensorType(shape, F32)},
        {"index": TensorType(shape[:-1], I32)},
        rows or 1,
        write,
        reference=reference,
        flops=(rows or 1) * vocab,
        nbytes=4 * (rows or 1) * vocab,
    )
