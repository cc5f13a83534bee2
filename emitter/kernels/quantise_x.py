"""Quantise x to integers of 8, 16 or 24 bits (`fixed_point`), once for all matmuls that read x.

Every 32 elements of a row of x, a span, are quantised together. A unit of elements shares a scale;
it is one span for most codecs, or more (`Codec.unit`):

    scale = max |x| / n                 n is `MAX_INTEGER`
    q = round(x / scale)                to nearest, ties to even; 0 if the scale is almost 0

The integers q are stored by digit: as one to three int8, so that instructions for int8 dot products
multiply them. The 32 highest digits of a span are followed by its next digits. Each eight elements
are in the order 0, 2, 4, 6, 1, 3, 5, 7 (`EVEN_ODD`).
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from castiron.emitter.codecs.codec import Codec
from castiron.emitter.codecs.fixed_point import GROUP, digits_of, quantise
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa, batches
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.mlir.vector_math import ROUND, as_integers, lane_sums, tree

# Order of eight elements of k in bytes. Masking a word of eight 4-bit codes gives the bytes of codes 0, 2, 4, 6; masking
# it after a shift gives those of 1, 3, 5, 7 (`weights.records`).
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)
WORDS = GROUP // 4  # words of a digit of a span, each with four int8
ROWS = 4  # rows of a workgroup


def parts_of_sum(codec: Codec, digits: int) -> int:
    """Return in how many i32 the dot product of a codec group is computed: 1 or 2."""
    return 2 if digits == 3 and codec.has_wide_dots(digits) else 1


def quantised_types(rows: int, in_features: int, codec: Codec, digits: int) -> dict[str, TensorType]:
    """Return the types of the operands that a matmul reads in place of x [rows, in].

    x: i32 [rows, in / 32 * digits * 8], the digits. x_scales: f32 [rows, in / `Codec.unit`].
    x_sums: sums of x over each codec group, f32 [rows, in / group]; only if the codec has minima.
    x_integer_sums: sums of q over each codec group, i32 [rows, in / group * parts]; only if codes
        are stored with an offset, or may be negative. If there are two parts, the first is the sum of q
        without the lowest digit, divided by 256, and the second the sum of lowest digits.
    """
    groups, parts = in_features // (codec.group or GROUP), parts_of_sum(codec, digits)
    types = {
        "x": TensorType((rows, in_features // 4 * digits), I32),
        "x_scales": TensorType((rows, in_features // codec.unit(digits)), F32),
    }
    if codec.minimum:
        types["x_sums"] = TensorType((rows, groups), F32)
    if codec.offset or codec.integers[0] < 0:
        types["x_integer_sums"] = TensorType((rows, groups * parts), I32)
    return types


def quantised(x: np.ndarray, codec: Codec, digits: int) -> dict[str, np.ndarray]:
    """Compute in NumPy what the kernel `quantise_x` computes, for x f32 [rows, in]."""
    rows, in_features = x.shape
    types = quantised_types(rows, in_features, codec, digits)
    numbers, scales = quantise(x.astype(np.float32).reshape(rows, -1, codec.unit(digits)), digits)
    numbers = numbers.reshape(rows, -1, GROUP)
    ordered = digits_of(numbers, digits).reshape(digits, rows, -1, 4, 8)[..., EVEN_ODD].reshape(digits, rows, -1, GROUP)
    sums = numbers.reshape(rows, -1, codec.group).sum(axis=2)
    found = {"x": np.ascontiguousarray(ordered.transpose(1, 2, 0, 3)).reshape(rows, -1).view("<i4"), "x_scales": scales}
    if "x_sums" in types:
        found["x_sums"] = sums.astype(np.float32) * np.repeat(scales, GROUP // codec.group, axis=1)
    if "x_integer_sums" in types:
        low = digits_of(numbers, digits)[-1].astype(np.int64).reshape(rows, -1, codec.group).sum(axis=2)
        parts = [sums] if parts_of_sum(codec, digits) == 1 else [(sums - low) / 256, low]
        found["x_integer_sums"] = np.stack(parts, axis=2).reshape(rows, -1).astype(np.int32)
    return found


def dequantised(words: np.ndarray, scales: np.ndarray, digits: int) -> np.ndarray:
    """Return the x of `quantised`'s results "x" and "x_scales" as f64 [rows, in]."""
    rows = len(words)
    by_digit = np.ascontiguousarray(words).view(np.int8).reshape(rows, -1, digits, GROUP).astype(np.float64)
    numbers = np.tensordot(by_digit, 256.0 ** np.arange(digits)[::-1], (2, 0))
    numbers = numbers.reshape(rows, -1, 4, 8)[..., np.argsort(EVEN_ODD)].reshape(*scales.shape, -1)
    return (numbers * scales[..., None]).reshape(rows, -1)


def write_unit(b: Body, codec: Codec, digits: int, x: Sequence[Ssa], made: Mapping[str, Ssa], row: Index, unit: Index) -> None:
    """Emit code that quantises one unit of x, given as vectors, and stores it in `made`.

    made: memrefs with the names and types of `quantised_types`.
    """
    lanes = x[0].width
    integers, scale = integers_of(b, x, digits)
    b.store(scale, made["x_scales"], row, unit)
    write_sums(b, codec, digits, integers, scale, made, row, b.mul(unit, codec.unit(digits) // codec.group))
    spans = codec.unit(digits) // GROUP
    for span, of_span in enumerate(batches(integers, GROUP // lanes)):
        _write_digits(b, of_span, digits, made["x"], row, b.mul(b.add(b.mul(unit, spans), span), WORDS * digits))


def _write_digits(b: Body, integers: Sequence[Ssa], digits: int, words: Ssa, row: Index, first: Index) -> None:
    lanes = integers[0].width
    for digit in range(digits):
        # Digit i, from the lowest on, is the low byte of (q + 128 + 128 * 256 + ...) >> 8 i, with i terms.
        low = digits - 1 - digit
        carry = sum(128 << 8 * i for i in range(low))
        moved = [b.binary("addi", q, b.isplat(carry, lanes)) if low else q for q in integers]
        moved = [b.binary("shrsi", q, b.isplat(8 * low, lanes)) if low else q for q in moved]
        _write_bytes(b, moved, words, row, b.add(first, WORDS * digit))


def integers_of(b: Body, x: Sequence[Ssa], digits: int) -> tuple[list[Ssa], Ssa]:
    """Quantise the f32 vectors of a unit; return (vectors of i32, their scale)."""
    shifted, scale = as_integers(b, x, digits)
    width = x[0].width
    offset = b.bitcast(b.splat(ROUND, width), width, "i32")
    return [b.binary("subi", b.bitcast(each, width, "i32"), offset) for each in shifted], scale


def write_sums(
    b: Body, codec: Codec, digits: int, integers: Sequence[Ssa], scale: Ssa, made: Mapping[str, Ssa], row: Index, first: Index
) -> None:
    """Emit code that stores the sums of codec groups, from group `first` on, that `made` has."""
    parts, lanes = parts_of_sum(codec, digits), integers[0].width
    if "x_sums" not in made and "x_integer_sums" not in made:
        return
    lanes_of = lambda values: b.extract(lane_sums(b, [tree(b.addi, values)], b.addi), 0)
    for i, group in enumerate(batches(integers, codec.group // lanes)):
        number = b.add(first, i)
        total = lanes_of(group)
        if "x_sums" in made:
            b.store(b.mulf(b.convert("sitofp", total, "f32"), scale), made["x_sums"], row, number)
        if "x_integer_sums" not in made:
            continue
        if parts == 1:
            b.store(total, made["x_integer_sums"], row, number)
            continue
        eight, half = b.isplat(8, lanes), b.isplat(128, lanes)
        high = lanes_of([b.binary("shrsi", b.binary("addi", q, half), eight) for q in group])
        scalar = lambda n: b.constant(str(n), high.type)
        low = b.binary("subi", total, b.binary("shli", high, scalar(8)))
        for part, value in enumerate((high, low)):
            b.store(value, made["x_integer_sums"], row, b.add(b.mul(number, 2), part))


def _write_bytes(b: Body, values: Sequence[Ssa], words: Ssa, row: Index, start: Index) -> None:
    # Store the low bytes of 32 integers in the order `EVEN_ODD`.
    while len(values) > 1 and values[0].width < 8:
        values = [b.shuffle(low, high, range(2 * low.width)) for low, high in batches(values, 2)]
    width = values[0].width
    order = [first + k for first in range(0, width, 8) for k in EVEN_ODD]
    for i, value in enumerate(values):
        low = b.convert("trunci", value, "i8")
        quads = b.bitcast(b.shuffle(low, low, order), width // 4, "i32")
        b.vstore(quads, words, row, b.add(start, i * width // 4))


@cache
def quantise_x(rows: int, in_features: int, codec: Codec, digits: int = 1, *, isa: Isa) -> Kernel:
    """Return the kernel that quantises x f32 [rows, in] for matmuls with weights in `codec`.

    Its results have the names and types of `quantised_types`.
    """
    types, lanes, size = quantised_types(rows, in_features, codec, digits), isa.lanes, codec.unit(digits)

    def write(b: Body, **made: Ssa) -> None:
        x = made.pop("source")
        low = b.mul(b.workgroup(), ROWS)
        with b.loop(low, b.min(b.add(low, ROWS), rows)) as t, b.loop(0, in_features // size) as unit:
            start = b.mul(unit.index, size)
            parts = [b.vload(x, lanes, t.index, b.add(start, k)) for k in range(0, size, lanes)]
            write_unit(b, codec, digits, parts, made, t.index, unit.index)

    sums = "".join(name[2:-5] + str(types[name].shape[1]) for name in ("x_sums", "x_integer_sums") if name in types)
    return Kernel(
        f"quantise_x{8 * digits}_{rows}x{in_features}_{codec.unit(digits)}by{codec.group}{sums}_{isa.name}",
        {"source": TensorType((rows, in_features), F32)},
        types,
        -(-rows // ROWS),
        write,
        reference=lambda source: quantised(source, codec, digits),
        flops=4 * rows * in_features,
        nbytes=(4 + digits) * rows * in_features,
    )
