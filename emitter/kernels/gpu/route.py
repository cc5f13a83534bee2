"""A GPU kernel that chooses the experts of each token of an MoE layer.

It computes the same function as `lowering.portable.route`. The right column names the memory that
the line writes:

    each workgroup: one token
      likely [experts] = softmax or sigmoid of the logits                                   shared
      rated [experts] = likely + correction; the experts with the highest numbers win       shared
      if experts are divided into groups:
        rating of a group = sum of its `best` highest numbers in `rated`                    shared
        rated = -inf for the experts outside the groups with the highest ratings            shared
      for each expert:
        rank = number of experts with a higher `rated`, or with an equal one and a lower index
        if rank < top_k: chosen[rank] = expert; weights[rank] = likely[expert]              shared
      weights = weights / sum(weights), if `normalised`                                     memory
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.gpu.activations import sigmoid
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.mlir.body import Index, Ssa

THREADS = 128


@cache
def route(
    T: int, experts: int, top_k: int, scores: str, normalised: bool, correction: bool, groups: tuple[int, int] = (1, 1),
    best: int = 0,
) -> GpuKernel:  # fmt: skip
    """Return the GPU kernel of `layers.route` for T tokens, with its arguments.

    Operands: logits f32 [T, experts]; correction f32 [experts] if `correction`. Results: chosen i32
        [T, top_k], best first; weights f32 [T, top_k].
    """
    operands = {"logits": TensorType((T, experts), F32)}
    if correction:
        operands["correction"] = TensorType((experts,), F32)

    def write(b: GpuBody, logits: Ssa, chosen: Ssa, weights: Ssa, **given: Ssa) -> None:
        thread, t = b.thread(), b.workgroup()
        likely, rated = b.shared(experts), b.shared(experts)
        slots, own = b.shared(top_k, "i32"), b.shared(top_k)
        with b.strided(thread, top_k) as k:
            b.store(b.i32(0), slots, k.index)
            b.store(b.f32(0.0), own, k.index)
        if scores == "sigmoid":
            with b.strided(thread, experts) as e:
                b.store(sigmoid(b, b.load(logits, t, e.index)), likely, e.index)
        else:
            _softmax(b, thread, lambda e: b.load(logits, t, e), likely, experts)
        with b.strided(thread, experts) as e:
            score = b.load(likely, e.index)
            b.store(b.addf(score, b.load(given["correction"], e.index)) if correction else score, rated, e.index)
        b.barrier()
        if groups[0] > 1:
            _drop_groups(b, thread, rated, experts, groups, best)
        with b.strided(thread, experts) as e:
            rank = _rank(b, rated, experts, e.index)
            with b.when(b.less(rank, top_k)):
                b.store(b.to_i32(e.index), slots, rank)
                b.store(b.load(likely, e.index), own, rank)
        b.barrier()
        total = b.f32(0.0)
        for i in range(top_k if normalised else 0):
            total = b.addf(total, b.load(own, i))
        with b.strided(thread, top_k) as k:
            weight = b.load(own, k.index)
            b.store(b.load(slots, k.index), chosen, t, k.index)
            b.store(b.divf(weight, total) if normalised else weight, weights, t, k.index)

    def reference(logits: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
        wide = logits.astype(np.float64)
        likely = 1 / (1 + np.exp(-wide)) if scores == "sigmoid" else np.exp(wide - wide.max(1, keepdims=True))
        likely = likely if scores == "sigmoid" else likely / likely.sum(1, keepdims=True)
        rated = likely + given.get("correction", 0)
        if groups[0] > 1:
            sums = np.sort(rated.reshape(T, groups[0], -1), 2)[:, :, -best:].sum(2)
            order = np.argsort(np.argsort(-sums, 1, kind="stable"), 1)
            rated = np.where(np.repeat(order < groups[1], experts // groups[0], 1), rated, -np.inf)
        best_first = np.argsort(-rated, 1, kind="stable")[:, :top_k]
        weights = np.take_along_axis(likely, best_first, 1)
        weights = weights / weights.sum(1, keepdims=True) if normalised else weights
        return {"chosen": best_first.astype(np.int32), "weights": weights.astype(np.float32)}

    results = {"chosen": TensorType((T, top_k), I32), "weights": TensorType((T, top_k), F32)}
    name = f"gpu_route_{T}x{experts}_{top_k}_{scores}" + "_normalised" * normalised + "_correction" * correction
    name += f"_best{groups[1]}of{groups[0]}by{best}" if groups[0] > 1 else ""
    return GpuKernel(name, operands, results, T, write, reference=reference, threads=THREADS)


def _rank(b: GpuBody, scores: Ssa, count: int, i: Index) -> Ssa:
    """Emit code that computes the rank of score `i`: 0 for the largest, first on a tie."""
    score = b.load(scores, i)
    with b.loop(0, count, carry=[b.i32(0)]) as other:
        x = b.load(scores, other.index)
        first = b.both(b.compare("oeq", x, score), b.less(other.index, i))
        before = b.either(b.compare("ogt", x, score), first)
        other.give(b.binary("addi", other.values[0], b.select(before, b.i32(1), b.i32(0))))
    return b.to_index(other.results[0])


def _drop_groups(b: GpuBody, thread: Ssa, rated: Ssa, experts: int, groups: tuple[int, int], best: int) -> None:
    count, each = groups[0], experts // groups[0]
    sums = b.shared(count)
    with b.strided(thread, count) as group:
        with b.loop(0, each, carry=[b.f32(float("-inf"))] * best) as e:
            x, largest = b.load(rated, b.add(b.mul(group.index, each), e.index)), []
            for y in e.values:
                is_larger = b.compare("ogt", x, y)
                largest.append(b.select(is_larger, x, y))
                x = b.select(is_larger, y, x)
            e.give(*largest)
        total = e.results[0]
        for y in e.results[1:]:
            total = b.addf(total, y)
        b.store(total, sums, group.index)
    b.barrier()
    with b.strided(thread, experts) as e:
        rank = _rank(b, sums, count, b.div(e.index, each))
        score = b.select(b.less(rank, groups[1]), b.load(rated, e.index), b.f32(float("-inf")))
        b.store(score, rated, e.index)
    b.barrier()


def _softmax(b: GpuBody, thread: Ssa, read, target: Ssa, count: int) -> None:
    with b.strided(thread, count, [b.f32(float("-inf"))]) as e:
        e.give(b.maxf(read(e.index), e.values[0]))
    totals, at = b.sums(thread, e.results, b.threads, "maxf")
    top = b.load(totals, at)
    with b.strided(thread, count, [b.f32(0.0)]) as e:
        weight = b.math("exp", b.subf(read(e.index), top))
        b.store(weight, target, e.index)
        e.give(b.addf(e.values[0], weight))
    totals, at = b.sums(thread, e.results, b.threads)
    total = b.load(totals, at)
    with b.strided(thread, count) as e:
        b.store(b.divf(b.load(target, e.index), total), target, e.index)
