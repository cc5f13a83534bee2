"""Emit vector functions that many kernels use.

These are exp, sums and maxima across lanes, RMS norm, and quantisation to int8.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from castiron.emitter.codecs.fixed_point import MAX_INTEGER, MIN_SCALED
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, largest_width
from castiron.emitter.kernels.mlir.isa import SUM_LANES

LOG2_E = 1.44269504088896341
# ln 2 as a sum of two parts. The first has so few bits that its product with a small integer is exact (Cody and Waite).
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440054690583e-4
# Adding 1.5 * 2^23 to an f32 rounds it to the nearest integer, which is then in the low bits of the sum.
ROUND = 12582912.0
EXP_LOW, EXP_HIGH = -88.0, 88.0
# Coefficients of P, highest power first: exp(r) = 1 + r + r^2 * P(r) for |r| <= ln(2)/2, with minimax relative error.
EXP_POLYNOMIAL = (1.381459860e-3, 8.368716914e-3, 4.166838805e-2, 1.666652063e-1, 4.999999345e-1)
# Coefficients of Q, highest power first: 2^r = 1 + r * Q(r) for |r| <= 1/2, with minimax relative error.
EXP2_LOW = -127.0
EXP2_POLYNOMIAL = (1.53533619e-4, 1.33988744e-3, 9.61843736e-3, 5.55033247e-2, 2.40226479e-1, 6.93147203e-1)


def exp(b: Body, x: Ssa) -> Ssa:
    """Return e^x of an f32 vector, with an error of up to 1.1 ulp.

    The result is exactly 0 for x below -87.7. For x above 88 it is e^88.
    """
    width = x.width
    x = b.maxf(x, b.splat(EXP_LOW, width))
    x = b.select(b.compare("olt", x, b.splat(EXP_HIGH, width)), x, b.splat(EXP_HIGH, width))
    shifted = b.fma(x, b.splat(LOG2_E, width), b.splat(ROUND, width))
    n = b.subf(shifted, b.splat(ROUND, width))
    r = b.fma(n, b.splat(-LN_2_HIGH, width), x)
    r = b.fma(n, b.splat(-LN_2_LOW, width), r)
    p = b.splat(EXP_POLYNOMIAL[0], width)
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = b.fma(p, r, b.splat(coefficient, width))
    p = b.fma(b.mulf(r, r), p, r)
    p = b.addf(p, b.splat(1.0, width))
    return b.mulf(p, _power(b, shifted))


def exp2(b: Body, x: Ssa) -> Ssa:
    """Return 2^x of an f32 vector, with an error of up to 1 ulp; this is faster than `exp`.

    x must not exceed 127. The result is exactly 0 for x below -126.5.
    """
    width = x.width
    x = b.maxf(x, b.splat(EXP2_LOW, width))
    shifted = b.addf(x, b.splat(ROUND, width))
    r = b.subf(x, b.subf(shifted, b.splat(ROUND, width)))
    p = b.splat(EXP2_POLYNOMIAL[0], width)
    for coefficient in (*EXP2_POLYNOMIAL[1:], 1.0):
        p = b.fma(p, r, b.splat(coefficient, width))
    return b.mulf(p, _power(b, shifted))


def _power(b: Body, shifted: Ssa) -> Ssa:
    # `shifted` is n + ROUND, for integers n from -127 to 127. The result is 2^n, or 0 for n = -127.
    width = shifted.width
    bits = b.binary("shli", b.bitcast(shifted, width, "i32"), b.isplat(23, width))
    return b.bitcast(b.binary("addi", bits, b.isplat(127 << 23, width)), width, "f32")


def lane_sums(b: Body, vectors: Sequence[Ssa], add: Callable[[Ssa, Ssa], Ssa] | None = None) -> Ssa:
    """Sum the lanes of each vector: lane i of the result is the sum of all lanes of vectors[i].

    add: adds two vectors; None for `Body.addf`.

    The number of vectors must be a power of two and at most the number of lanes. The order of
    additions does not depend on the number of vectors.
    """
    vectors, add = list(vectors), add or b.addf
    width = vectors[0].width
    count = len(vectors)
    lanes = range(width)
    fold = width // 2
    while len(vectors) > 1:
        half = len(vectors) // 2
        if fold >= 4:
            pairs = list(zip(vectors[:half], vectors[half:], strict=True))
        else:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        if fold > 1:
            low = [lane if not lane & fold else lane - fold + width for lane in lanes]
            high = [i + fold for i in low]
        else:
            quad = min(4, width)  # so that on x86 most shuffles stay within 128 bits
            low = [lane // quad * quad + (lane % quad * 2) % quad + (lane % quad * 2 // quad) * width for lane in lanes]
            high = [i + 1 for i in low]
        vectors = [add(b.shuffle(x, y, low), b.shuffle(x, y, high)) for x, y in pairs]
        fold //= 2
    (total,) = vectors
    while width > count:
        half = width // count // 2
        low = [lane for lane in range(width) if lane % (2 * half) < half]
        total = add(b.shuffle(total, total, low), b.shuffle(total, total, [lane + half for lane in low]))
        width //= 2
    return total


def row_sum(b: Body, count: int, read: Callable[[Index, int], Ssa]) -> Ssa:
    """Return the sum of `count` elements as a scalar; the order of additions is the same on every CPU.

    read: callback; read(i, width) returns elements i .. i + width - 1 as a vector.
    """
    width = largest_width(SUM_LANES, count)
    ways = largest_width(4, count // width)
    with b.loop(0, count, ways * width, carry=[b.splat(0.0, width)] * ways) as loop:
        loop.give(*[b.addf(s, read(b.add(loop.index, i * width), width)) for i, s in enumerate(loop.values)])
    return b.extract(lane_sums(b, [tree(b.addf, loop.results)]), 0)


def square_sum(b: Body, count: int, read: Callable[[Index, int], Ssa]) -> Ssa:
    """Return the sum of squares of `count` elements as a scalar; see `row_sum`."""
    return row_sum(b, count, lambda d, width: b.mulf(x := read(d, width), x))


def tree(combine: Callable[[Ssa, Ssa], Ssa], parts: Sequence[Ssa]) -> Ssa:
    """Reduce a list to one value by combining its elements in pairs, as a balanced tree.

    combine: returns the combination of two values, such as their sum.
    """
    while len(parts) > 1:
        parts = [combine(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def outer(b: Body, rows: Iterable[Ssa], columns: Sequence[Ssa], sums: Sequence[Ssa]) -> list[Ssa]:
    """Accumulate the elementwise products of every vector in `rows` and every one in `columns`.

    Vector n = i * len(columns) + j of the result is sums[n] + rows[i] * columns[j].
    """
    totals = iter(sums)
    return [b.fma(row, column, next(totals)) for row in rows for column in columns]


def transpose(b: Body, rows: Sequence[Ssa]) -> list[Ssa]:
    """Transpose a square matrix: take its rows as vectors, and return its columns as vectors.

    The number of rows must be a power of two.
    """
    rows = list(rows)
    width = len(rows)
    fold = width // 2
    while fold:
        for i in range(width):
            if i & fold:
                continue
            x, y = rows[i], rows[i + fold]
            low = [lane if not lane & fold else lane - fold + width for lane in range(width)]
            rows[i] = b.shuffle(x, y, low)
            rows[i + fold] = b.shuffle(x, y, [lane + fold for lane in low])
        fold //= 2
    return rows


def lane_max(b: Body, vector: Ssa) -> Ssa:
    """Return the maximum of a vector's lanes as a scalar."""
    width = vector.width
    while width > 1:
        width //= 2
        low = b.shuffle(vector, vector, range(width))
        vector = b.maxf(low, b.shuffle(vector, vector, range(width, 2 * width)))
    return b.extract(vector, 0)


def inverse_rms(b: Body, read: Callable[[Index, int], Ssa], count: int, eps: float) -> Ssa:
    """Return 1 / sqrt(mean(x^2) + eps) over `count` elements x, as a scalar.

    read: callback; read(i, width) returns elements i .. i + width - 1 as a vector.
    """
    mean = b.divf(square_sum(b, count, read), b.f32(count))
    return b.divf(b.f32(1.0), b.math("sqrt", b.addf(mean, b.f32(eps))))


def rms_normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Compute the RMS norm of each row of x in f64 (Zhang and Sennrich 2019; HF `LlamaRMSNorm`)."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def as_integers(b: Body, parts: Sequence[Ssa], digits: int = 1) -> tuple[list[Ssa], Ssa]:
    """Quantise f32 vectors with a common scale (`fixed_point.quantise`); return (vectors, scale).

    A vector is still f32: each element is its integer plus ROUND, because adding this constant
    rounds. `numbers_of` and `low_bytes` extract the integer.
    """
    width, largest = parts[0].width, b.f32(MAX_INTEGER[digits])
    peak = lane_max(b, tree(b.maxf, [b.math("absf", part) for part in parts]))
    zero = b.compare("olt", peak, b.f32(float(MIN_SCALED)))
    inverse = b.broadcast(b.select(zero, b.f32(0.0), b.divf(largest, peak)), width)
    return [b.fma(part, inverse, b.splat(ROUND, width)) for part in parts], b.divf(peak, largest)


def numbers_of(b: Body, shifted: Ssa) -> Ssa:
    """Extract the integers, as f32, from a vector that `as_integers` returned."""
    return b.subf(shifted, b.splat(ROUND, shifted.width))


def low_bytes(b: Body, shifted: Ssa) -> Ssa:
    """Extract the low byte of each integer, as i8, from a vector that `as_integers` returned."""
    return b.convert("trunci", b.bitcast(shifted, shifted.width, "i32"), "i8")
