"""Find the index of the largest logit on a GPU, in two dispatches.

In the first dispatch, a workgroup finds the largest of PART logits, which are one part of a row. In
the second, it finds the largest among the results of all parts of a row. Both work as follows:

    thread t: find the largest of logits t, t + THREADS, t + 2 * THREADS, ...              registers
    while there is more than one candidate: threads compare in pairs; the larger remains      shared
    store its index; in the first dispatch also the logit                                     memory

The index is 0 if no logit is above -inf.
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Index, Ssa

THREADS, PART = 128, 2048


def parts_of(vocab: int) -> int:
    return -(-vocab // PART)


@cache
def best_of_parts(rows: int, vocab: int) -> Kernel:
    """Return the kernel that finds the largest of each `PART` logits of a row.

    Operand: logits f32 [rows, vocab]. Results: best f32 and index i32, both [rows, parts]; index is
        the lowest one in the row among equal logits.
    """
    parts = parts_of(vocab)

    def write(b: GpuBody, logits: Ssa, best: Ssa, index: Ssa) -> None:
        unit = b.workgroup()
        row, low = b.div(unit, parts), b.mul(b.rem(unit, parts), PART)
        last = b.min(b.add(low, PART), vocab)
        logit, at = _search(b, lambda i: (b.load(logits, row, b.add(low, i)), b.add(low, i)), b.sub(last, low))
        with b.when(b.equal(b.thread(), 0)):
            b.store(logit, best, row, b.rem(unit, parts))
            b.store(at, index, row, b.rem(unit, parts))

    def reference(logits: np.ndarray) -> dict[str, np.ndarray]:
        padded = np.pad(logits, ((0, 0), (0, -vocab % PART)), constant_values=-np.inf).reshape(rows, parts, PART)
        at = padded.argmax(-1)
        best = np.take_along_axis(padded, at[..., None], -1)[..., 0]
        return {"best": best, "index": np.where(best > -np.inf, at + np.arange(parts) * PART, 0).astype(np.int32)}

    types = TensorType((rows, vocab), F32), TensorType((rows, parts), F32), TensorType((rows, parts), I32)
    results = {"best": types[1], "index": types[2]}
    name = f"gpu_best_{rows}x{vocab}"
    return GpuKernel(name, {"logits": types[0]}, results, rows * parts, write, reference=reference, threads=THREADS)


@cache
def best_of_rows(rows: int, parts: int) -> Kernel:
    """Return the kernel that finds the largest logit of each row after `best_of_parts`.

    Operands: best f32 and index i32, both [rows, parts]. Result: argmax i32 [rows].
    """

    def write(b: GpuBody, best: Ssa, index: Ssa, argmax: Ssa) -> None:
        row = b.workgroup()
        _, at = _search(b, lambda i: (b.load(best, row, i), b.to_index(b.load(index, row, i))), parts)
        with b.when(b.equal(b.thread(), 0)):
            b.store(at, argmax, row)

    def reference(best: np.ndarray, index: np.ndarray) -> dict[str, np.ndarray]:
        return {"argmax": np.take_along_axis(index, best.argmax(-1)[:, None], -1)[:, 0]}

    operands = {"best": TensorType((rows, parts), F32), "index": TensorType((rows, parts), I32)}
    results, name = {"argmax": TensorType((rows,), I32)}, f"gpu_argmax_{rows}x{parts}"
    return GpuKernel(name, operands, results, rows, write, reference=reference, threads=THREADS)


def _search(b: GpuBody, read, count: Index) -> tuple[Ssa, Ssa]:
    """Emit code that finds the largest of `count` numbers: (number, index) in all threads."""
    thread = b.thread()
    lowest, nowhere = b.f32(float("-inf")), b.i32(0x7FFFFFFF)

    def better(a: tuple[Ssa, Ssa], c: tuple[Ssa, Ssa]) -> tuple[Ssa, Ssa]:
        first = b.both(b.compare("oeq", c[0], a[0]), b.compare("ult", c[1], a[1]))
        chosen = b.either(b.compare("ogt", c[0], a[0]), first)
        return b.select(chosen, c[0], a[0]), b.select(chosen, c[1], a[1])

    with b.strided(thread, count, [lowest, nowhere]) as loop:
        number, at = read(loop.index)
        # NaN is never better than a number.
        chosen = b.compare("ogt", number, loop.values[0])
        loop.give(b.select(chosen, number, loop.values[0]), b.select(chosen, b.to_i32(at), loop.values[1]))
    numbers, indices = b.shared(THREADS), b.shared(THREADS, "i32")
    best, size = (loop.results[0], loop.results[1]), THREADS
    while size > 1:
        b.store(best[0], numbers, thread)
        b.store(best[1], indices, thread)
        b.barrier()
        size //= 2
        other = b.rem(b.add(thread, size), THREADS)
        best = better(best, (b.load(numbers, other), b.load(indices, other)))
        b.barrier()
    return best[0], b.select(b.compare("ogt", best[0], lowest), best[1], b.i32(0))
