"""Mathematics on vector values that kernels share: exp, tanh, and sums and maxima across lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from castiron.emitter.kernels.writing.body import Body, Index, Ssa, largest_width, width_of

LOG2_E = 1.44269504088896341
# ln 2 in two parts: the first has few enough bits that a small integer times it is exact in f32 (Cody and Waite).
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440054690583e-4
# Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the sum.
ROUND = 12582912.0
EXP_LOW, EXP_HIGH = -88.0, 88.0
# exp(r) = 1 + r + r^2 * P(r) on |r| <= ln(2)/2, least maximum of the relative error, highest power first.
EXP_POLYNOMIAL = (1.381459860e-3, 8.368716914e-3, 4.166838805e-2, 1.666652063e-1, 4.999999345e-1)
# 2^r = 1 + r * Q(r) on |r| <= 1/2, the same way.
EXP2_LOW = -127.0
EXP2_POLYNOMIAL = (1.53533619e-4, 1.33988744e-3, 9.61843736e-3, 5.55033247e-2, 2.40226479e-1, 6.93147203e-1)


def exp(b: Body, x: Ssa) -> Ssa:
    """e^x of a vector of f32, within 1.1 ulp; exactly 0 below -87.7, e^88 above 88, and never NaN for infinite x."""
    width = width_of(x)
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
    """2^x of a vector of f32 up to 127, within 1 ulp; exactly 0 below -126.5. Two thirds of what exp takes."""
    width = width_of(x)
    x = b.maxf(x, b.splat(EXP2_LOW, width))
    shifted = b.addf(x, b.splat(ROUND, width))
    r = b.subf(x, b.subf(shifted, b.splat(ROUND, width)))
    p = b.splat(EXP2_POLYNOMIAL[0], width)
    for coefficient in (*EXP2_POLYNOMIAL[1:], 1.0):
        p = b.fma(p, r, b.splat(coefficient, width))
    return b.mulf(p, _power(b, shifted))


def _power(b: Body, shifted: Ssa) -> Ssa:
    """2^n of whole numbers n from -127 (which gives 0) to 127, of which `shifted` is n + ROUND."""
    width = width_of(shifted)
    bits = b.binary("shli", b.bitcast(shifted, width, "i32"), b.isplat(23, width))
    return b.bitcast(b.binary("addi", bits, b.isplat(127 << 23, width)), width, "f32")


def lane_sums(b: Body, vectors: Sequence[Ssa]) -> Ssa:
    """The sum of the lanes of each vector, as one vector of len(vectors); a power of two of them, up to their width.

    Each is folded in halves, however many there are. On x86 most shuffles stay within 128 bits.
    """
    vectors = list(vectors)
    width = width_of(vectors[0])
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
            quad = min(4, width)
            low = [lane // quad * quad + (lane % quad * 2) % quad + (lane % quad * 2 // quad) * width for lane in lanes]
            high = [i + 1 for i in low]
        vectors = [b.addf(b.shuffle(x, y, low), b.shuffle(x, y, high)) for x, y in pairs]
        fold //= 2
    (total,) = vectors
    while width > count:
        half = width // count // 2
        low = [lane for lane in range(width) if lane % (2 * half) < half]
        total = b.addf(b.shuffle(total, total, low), b.shuffle(total, total, [lane + half for lane in low]))
        width //= 2
    return total


def row_sum(b: Body, count: int, lanes: int, read: Callable[[Index, int], Ssa]) -> Ssa:
    """The sum of the `count` elements that `read(index, width)` gives, as a scalar; several sums run side by side."""
    width = largest_width(lanes, count)
    ways = largest_width(4, count // width)
    with b.loop(0, count, ways * width, carry=[b.splat(0.0, width)] * ways) as loop:
        loop.give(*[b.addf(s, read(b.add(loop.index, i * width), width)) for i, s in enumerate(loop.values)])
    return b.extract(lane_sums(b, [tree(b.addf, loop.results)]), 0)


def tree(combine: Callable[[Ssa, Ssa], Ssa], parts: Sequence[Ssa]) -> Ssa:
    """All parts combined, in pairs."""
    while len(parts) > 1:
        parts = [combine(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def outer(b: Body, rows: Iterable[Ssa], columns: Sequence[Ssa], sums: Sequence[Ssa]) -> list[Ssa]:
    """sums [rows * columns] + each row's element times each column's; a row is asked for when its turn comes."""
    totals = iter(sums)
    return [b.fma(row, column, next(totals)) for row in rows for column in columns]


def transpose(b: Body, rows: Sequence[Ssa]) -> list[Ssa]:
    """The columns of as many vectors as each has lanes, a power of two."""
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
    """The largest lane, as a scalar."""
    width = width_of(vector)
    while width > 1:
        width //= 2
        low = b.shuffle(vector, vector, range(width))
        vector = b.maxf(low, b.shuffle(vector, vector, range(width, 2 * width)))
    return b.extract(vector, 0)


def tanh(b: Body, x: Ssa) -> Ssa:
    """Hyperbolic tangent of a vector of f32, through IREE's rational approximation."""
    return b.let(f"math.tanh {x} : {x.type}", x.type)
