"""The index of the largest logit."""

from __future__ import annotations

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.writing.body import Body, Index, Ssa, executable, largest_width
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.kernels.writing.vectors import lane_max
from castiron.emitter.types import F32, I32, TensorType


def argmax(vocab: int, *, isa: Isa, rows: int | None = None, block: int = 512) -> Kernel:
    """logits [vocab] -> i32, or [rows, vocab] -> i32 [rows]: the lowest index of the largest, as HF's greedy search has it.

    NaN is never chosen; where nothing is larger than -inf, the result is 0. Blocks of `block` logits are compared by their
    maximum alone; the index is looked for once, in the first block that has the largest.
    """
    shape = (vocab,) if rows is None else (rows, vocab)
    operands, results = (TensorType(shape, F32),), (TensorType(shape[:-1], I32),)
    name = f"argmax_{'x'.join(map(str, shape))}_{isa.name}_b{block}"
    if block % (8 * isa.lanes):
        raise ValueError(f"argmax takes blocks of a multiple of {8 * isa.lanes} logits on {isa.name}, got {block}")
    whole = vocab // block * block

    def write(b: Body, logits: Ssa, out: Ssa) -> None:
        least = b.f32(float("-inf"))
        lead = () if rows is None else (b.workgroup(),)

        def block_max(low: Index, high: Index, width: int, ways: int) -> Ssa:
            with b.loop(low, high, ways * width, carry=[b.splat(float("-inf"), width)] * ways) as loop:
                places = [b.add(loop.index, i * width) for i in range(ways)]
                loop.give(*[b.maxf(b.vload(logits, width, *lead, p), m) for p, m in zip(places, loop.values, strict=True)])
            tops = loop.results
            while len(tops) > 1:
                tops = [b.maxf(x, y) for x, y in zip(tops[::2], tops[1::2], strict=True)]
            return lane_max(b, tops[0])

        with b.loop(0, whole, block, carry=[least, b.index(0)]) as loop:
            top = block_max(loop.index, b.add(loop.index, block), isa.lanes, 8)
            better = b.compare("ogt", top, loop.values[0])
            loop.give(b.select(better, top, loop.values[0]), b.select(better, loop.index, loop.values[1]))
        best, place = loop.results
        if whole < vocab:
            top = block_max(whole, vocab, largest_width(isa.lanes, vocab - whole), 1)
            better = b.compare("ogt", top, best)
            best, place = b.select(better, top, best), b.select(better, b.index(whole), place)
        last = b.min(b.add(place, block), vocab)
        # Backwards, so that what remains is the lowest index.
        with b.loop(0, b.sub(last, place), carry=[place]) as loop:
            at = b.sub(b.sub(last, 1), loop.index)
            equal = b.compare("oeq", b.load(logits, *lead, at), best)
            loop.give(b.select(equal, at, loop.values[0]))
        found = b.compare("ogt", best, least)
        b.store(b.to_i32(b.select(found, loop.results[0], b.index(0))), out, *lead)

    def reference(logits: np.ndarray) -> tuple[np.ndarray]:
        return (np.array(np.argmax(np.where(np.isnan(logits), -np.inf, logits), -1), np.int32),)

    return Kernel(
        name=name,
        operands=operands,
        results=results,
        tied=(None,),
        text=executable(name, operands, results, (None,), rows or 1, write),
        reference=reference,
        flops=(rows or 1) * vocab,
        bytes=4 * (rows or 1) * vocab,
    )
