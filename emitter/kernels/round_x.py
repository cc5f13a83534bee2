"""Quantise x to int8, once for all matmuls that read x.

Every 32 elements of a row of x share a scale. A workgroup quantises `ROWS` rows. For each 32
elements x of a row, it computes

    scale = max |x| / 127
    n = round(x / scale)              to nearest, ties to even; 0 if the scale is almost 0
    sums of n                         one sum for each 16 or 32 elements that share a scale in the
                                      weight; times `scale` if the weight has minima (as Q4_K)

and stores the scale, the sums, and n as int8. Each eight n are in the order 0, 2, 4, 6, 1, 3, 5, 7
(`EVEN_ODD`).
"""

from functools import cache

import numpy as np

from castiron.emitter import int8
from castiron.emitter.codec import Codec
from castiron.emitter.int8 import GROUP
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import as_bytes, lane_sums, low_bytes, numbers_of, tree
from castiron.emitter.types import F32, I32, TensorType

# Order of eight elements of k in bytes. Masking a word of eight 4-bit codes gives the bytes of codes 0, 2, 4, 6; masking
# it after a shift gives those of 1, 3, 5, 7 (`weights.records`).
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)
ROWS = 4  # rows of a workgroup


def rounded_types(rows: int, in_features: int, codec: Codec) -> dict[str, TensorType]:
    """Return the types, by name, of the results of the kernel `round_x` for x [rows, in_features].

    codec: the format of the weight that x is multiplied by. The result `sums` has one sum for each
        `codec.group` elements: f32 if the codec has minima (as Q4_K), otherwise i32.
    """
    return {
        "y": TensorType((rows, in_features // 4), I32),
        "scales": TensorType((rows, in_features // GROUP), F32),
        "sums": TensorType((rows, in_features // codec.group), F32 if codec.minimum else I32),
    }


def rounded(x: np.ndarray, codec: Codec) -> dict[str, np.ndarray]:
    """Compute in NumPy what the kernel `round_x` computes, and return its results by name.

    x: f32 [rows, in]. codec: the format of the weight that x is multiplied by.
    """
    numbers, scales = int8.as_bytes(x.astype(np.float32).reshape(len(x), -1, GROUP))
    ordered = numbers.reshape(-1, 8)[:, EVEN_ODD].astype(np.int8)
    sums = numbers.reshape(len(x), -1, codec.group).sum(axis=2)
    if codec.minimum:
        sums = sums * np.repeat(scales, GROUP // codec.group, axis=1)
    types = rounded_types(len(x), x.shape[1], codec)
    return {"y": ordered.reshape(len(x), -1).view("<i4"), "scales": scales, "sums": sums.astype(types["sums"].dtype.numpy)}


def of_bytes(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantise x to f64 [rows, in].

    words, scales: the results `y` and `scales` of the kernel `round_x`, which quantises x.
    """
    numbers = np.ascontiguousarray(words).view(np.int8).reshape(-1, 8)[:, np.argsort(EVEN_ODD)]
    groups = numbers.astype(np.float64).reshape(*scales.shape, GROUP)
    return (groups * scales[..., None]).reshape(len(words), -1)


@cache
def round_x(rows: int, in_features: int, codec: Codec, *, isa: Isa) -> Kernel:
    """Return the kernel that quantises x f32 [rows, in] to int8, with a scale for 32 elements.

    codec: the format of the weight that x is multiplied by.

    The kernel's results (`rounded_types` returns their types):

    - y: the int8, four in an i32; each eight are in the order 0, 2, 4, 6, 1, 3, 5, 7
    - scales: one scale for each 32 elements
    - sums: one sum for each `codec.group` elements. It is the sum of their int8, times their scale
      if the codec has minima (as Q4_K).
    """
    lanes = isa.lanes

    def write(b: Body, x: Ssa, y: Ssa, scales: Ssa, sums: Ssa) -> None:
        low = b.mul(b.workgroup(), ROWS)
        with b.loop(low, b.min(b.add(low, ROWS), rows)) as t, b.loop(0, in_features // GROUP) as g:
            start = b.mul(g.index, GROUP)
            parts = [b.vload(x, lanes, t.index, b.add(start, k)) for k in range(0, GROUP, lanes)]
            shifted, scale = as_bytes(b, parts)
            b.store(scale, scales, t.index, g.index)
            numbers = [numbers_of(b, s) for s in shifted]
            summed = batches(numbers, codec.group // lanes)
            for i, group in enumerate(summed):
                total = b.extract(lane_sums(b, [tree(b.addf, group)]), 0)
                value = b.mulf(total, scale) if codec.minimum else b.convert("fptosi", total, "i32")
                b.store(value, sums, t.index, b.add(b.mul(g.index, len(summed)), i))
            _store_bytes(b, shifted, y, t.index, b.div(start, 4))

    kind = f"by{codec.group}{'f32' if codec.minimum else 'i32'}"
    return Kernel(
        f"round_x_{rows}x{in_features}_{kind}_{isa.name}",
        {"x": TensorType((rows, in_features), F32)},
        rounded_types(rows, in_features, codec),
        -(-rows // ROWS),
        write,
        reference=lambda x: rounded(x, codec),
        flops=4 * rows * in_features,
        nbytes=5 * rows * in_features,
    )


def _store_bytes(b: Body, shifted: list[Ssa], y: Ssa, row: Index, start: Index) -> None:
    while len(shifted) > 1 and shifted[0].width < 8:
        pairs = zip(shifted[::2], shifted[1::2], strict=True)
        shifted = [b.shuffle(low, high, range(2 * low.width)) for low, high in pairs]
    width = shifted[0].width
    order = [start + k for start in range(0, width, 8) for k in EVEN_ODD]
    for i, lanes in enumerate(shifted):
        low = low_bytes(b, lanes)
        quads = b.bitcast(b.shuffle(low, low, order), width // 4, "i32")
        b.vstore(quads, y, row, b.add(start, i * width // 4))
