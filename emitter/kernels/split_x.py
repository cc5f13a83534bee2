"""Convert f32 x to bf16, once for all matmuls that read x.

Each element becomes either three bf16 whose sum is exactly the element, or the nearest bf16. A
workgroup converts a tile of up to 16 rows of x. For each 32 elements x of a row, it computes

    sums of x                         over elements that share a scale in the weight, if needed
    for i in 0 .. count - 1:          count is 3, or 1 to round
      y[i] = the high 16 bits of x; if count is 1, the bf16 nearest to x
      x -= y[i]

An i32 has the bf16 of two elements, the even element in the lower half. Zeros fill up the last
tile, and the last 32 elements of a row.
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.bf16_pairs import pieces
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import lane_sums

EXACT = 3  # number of bf16 whose sum is exactly an f32
ROWS = 16  # max rows of a tile
DEPTH = 32  # elements of k in a step
PAIRS = DEPTH // 2  # i32 of a step, which have two elements each


def tile_rows(rows: int) -> int:
    return min(ROWS, rows)


def split_type(rows: int, in_features: int, count: int) -> TensorType:
    """Return the type of the kernel `split_x`'s result y, which has x [rows, in_features] as bf16.

    The shape is i32 [count, tiles, steps, rows of a tile, 16], where

    - count is the number of bf16 that an element of x is split into
    - a tile is min(rows, 16) rows of x
    - a step is 32 consecutive elements of a row, as 16 i32 with two bf16 each
    """
    tile = tile_rows(rows)
    return TensorType((count, -(-rows // tile), -(-in_features // DEPTH), tile, PAIRS), I32)


def _cut(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest(x: np.ndarray) -> np.ndarray:
    """Round each f32 to the nearest bf16, ties away from zero, and return the result as f32."""
    return _cut((np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(0x8000)).view(np.float32))


def split(x: np.ndarray, count: int) -> np.ndarray:
    """Compute the result y of the kernel `split_x` in NumPy: x as bf16, of type `split_type`.

    x: f32 [rows, in].
    count: 1 to round each element to the nearest bf16; 3 for three bf16 whose sum is the element.
    """
    parts, rest = [], x.astype(np.float32)
    for _ in range(count):
        parts.append(_cut(rest) if count > 1 else nearest(rest))
        rest = rest - parts[-1]
    _, tiles, steps, tile, _ = split_type(len(x), x.shape[1], count).shape
    filled = np.zeros((count, tiles * tile, steps * DEPTH), np.uint16)
    filled[:, : len(x), : x.shape[1]] = np.stack(parts).view(np.uint32) >> 16
    words = filled.view("<i4").reshape(count, tiles, tile, steps, PAIRS)
    return np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4))


def joined(words: np.ndarray, rows: int, in_features: int) -> np.ndarray:
    """Convert the result y of the kernel `split_x` back to x, f64 [rows, in_features].

    words: the result y, which has one or more bf16 for each element of x; they are added.
    """
    count, tiles, steps, tile, _ = words.shape
    halves = np.ascontiguousarray(words.transpose(0, 1, 3, 2, 4)).view(np.uint16).reshape(count, tiles * tile, steps * DEPTH)
    values = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64).sum(axis=0)
    return values[:rows, :in_features]


@cache
def split_x(rows: int, in_features: int, count: int, group: int = 0, *, isa: Isa) -> Kernel:
    """Return the kernel that converts x f32 [rows, in] to bf16, for all matmuls that read x.

    count: 1 to round each element to the nearest bf16; 3 for three bf16 whose sum is the element.
    group: number of elements of x in each sum of the result `sums`; 0 for no such result.
    Results: y, the bf16 (`split_type` returns its type); sums f32 [rows, in / group], sums of x.
    """
    tile, full = tile_rows(rows), in_features // DEPTH * DEPTH
    results = {"y": split_type(rows, in_features, count)}
    if group:
        results["sums"] = TensorType((rows, in_features // group), F32)

    def write(b: Body, x: Ssa, y: Ssa, sums: Ssa | None = None) -> None:
        number = b.workgroup()
        first = b.mul(number, tile)
        end = b.sub(b.min(b.add(first, tile), rows), first)
        tail = b.stack(DEPTH) if full < in_features else None

        def put(row: Index, step: Index, low: Ssa, high: Ssa) -> None:
            even, odd = (b.shuffle(low, high, range(start, DEPTH, 2)) for start in (0, 1))
            for i, words in enumerate(pieces(b, even, odd, count)):
                b.vstore(words, y, i, number, step, row, 0)

        if tail is not None:
            for start in (0, PAIRS):
                b.vstore(b.splat(0.0, PAIRS), tail, start)
        with b.loop(0, end) as row:
            token = b.add(first, row.index)
            with b.loop(0, in_features // DEPTH) as step:
                low, high = (b.vload(x, PAIRS, token, b.add(b.mul(step.index, DEPTH), k)) for k in (0, PAIRS))
                if sums is not None:
                    parts = [b.addf(low, high)] if group == DEPTH else [low, high]
                    for i, part in enumerate(parts):
                        at = b.add(b.mul(step.index, len(parts)), i)
                        b.store(b.extract(lane_sums(b, [part]), 0), sums, token, at)
                put(row.index, step.index, low, high)
            if tail is not None:
                with b.loop(0, in_features - full) as k:
                    b.store(b.load(x, token, b.add(k.index, full)), tail, k.index)
                put(row.index, full // DEPTH, b.vload(tail, PAIRS, 0), b.vload(tail, PAIRS, PAIRS))
        with b.loop(end, tile) as row, b.loop(0, -(-in_features // DEPTH)) as step:
            for i in range(count):
                b.vstore(b.isplat(0, PAIRS), y, i, number, step.index, row.index, 0)

    def reference(x: np.ndarray) -> dict[str, np.ndarray]:
        found = {"y": split(x, count)}
        if group:
            found["sums"] = x.reshape(rows, -1, group).sum(axis=2, dtype=np.float64).astype(np.float32)
        return found

    return Kernel(
        f"split_x_{rows}x{in_features}_{count}{f'_by{group}' if group else ''}_{isa.name}",
        {"x": TensorType((rows, in_features), F32)},
        results,
        results["y"].shape[1],
        write,
        reference=reference,
        flops=4 * count * rows * in_features,
        nbytes=(4 + 2 * count) * rows * in_features,
    )
