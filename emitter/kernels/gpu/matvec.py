"""A GPU kernel for decoding and for MoE experts: multiply a few rows of x by a quantised weight.

    each workgroup: `slots` groups of `lanes` threads; each group computes `rows` rows of the weight
      thread l of a group, for units l, l + lanes, l + 2 * lanes, and so on:
        x [tokens, 8] = this unit of x                                                   registers
        with an RMS norm: squares [tokens] += sum(x^2), x = x * norm weight              registers
        for each row, for each token:
          totals[row, token] += scale * (codes [8] . x[token]) + minimum * sum(x[token]) registers
      add totals and squares over the threads of a group                                    shared
      y[token, row] = epilogue(totals[row, token]); with a norm: epilogue(totals / rms)     memory

The epilogue applies the GLU, the bias and the residual.
"""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.epilogue import ACTIVATIONS as REFERENCES
from castiron.emitter.kernels.gpu.activations import ACTIVATIONS
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.gpu.words import UNIT, Units, WordLayout, layout_of, weight_values
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Index, Ssa
from castiron.emitter.kernels.mlir.vector_math import rms_normed

THREADS = 64
MAX_TOKENS = 8  # more tokens are multiplied in tiles (`gemm`)
TOTALS = 32  # max sums of a thread
ROWS = 4


def operands(matmul: Matmul, layout: WordLayout) -> dict[str, TensorType]:
    """Return the types of the operands by name: those of `matmul.operands()`, with packed weights.

    weight: i32 [rows, words]; all rows of gate, then those of up; all rows of expert 0 first.
    """
    rows = matmul.out_features * matmul.blocks_per_result * max(1, matmul.experts)
    return matmul.operands() | {"weight": TensorType((rows, layout.row_words(matmul.in_features)), I32)}


def define(matmul: Matmul, summed: int, x: np.ndarray, weight: np.ndarray, **given: np.ndarray) -> dict[str, np.ndarray]:
    """Compute {"y": f32 [tokens, out]} in NumPy in f64; `summed` as in `matvec`."""
    x = np.repeat(x.astype(np.float64), matmul.per_row, 0)
    if matmul.rms_eps is not None:
        x = rms_normed(x, given["norm"], matmul.rms_eps)
    values = weight_values(layout_of(matmul.codec), weight, matmul.in_features).astype(np.float64)
    if matmul.experts:
        chosen = values.reshape(matmul.experts, -1, matmul.in_features)[given["chosen"]]
        dots = np.einsum("ti,toi->to", x, chosen)
    else:
        dots = x @ values.T
    if matmul.glu is not None:
        gate, up = np.split(dots, 2, 1)
        dots = REFERENCES[matmul.glu][1](gate) * up
    if summed:
        dots = (dots * given["weights"][:, None]).reshape(-1, summed, dots.shape[1]).sum(1)
    return {"y": (dots + given.get("bias", 0) + given.get("residual", 0)).astype(np.float32)}


def load_x(b: GpuBody, x: Ssa, row: Index, unit: Index) -> list[Ssa]:
    """Emit code that loads a unit of a row of x; past its end, copies of the last element.

    x: f32 [rows, in], or [in] for one row.
    """
    inner = x.type.shape[-1]
    lead = [row] if len(x.type.shape) > 1 else []
    if inner % UNIT == 0 and isinstance(x, Ssa):
        fours = b.view(x, (*x.type.shape[:-1], inner // 4), "vector<4xf32>")
        return [e for i in range(2) for e in b.four(fours, *lead, b.add(b.mul(unit, 2), i))]
    elements = [b.add(b.mul(unit, UNIT), j) for j in range(UNIT)]
    return [b.load(x, *lead, b.min(i, inner - 1) if inner % UNIT else i) for i in elements]


def finished(b: GpuBody, matmul: Matmul, dots: list[Ssa], given: dict[str, Ssa], token: Index, row: Index) -> Ssa:
    """Emit code that applies GLU, bias and residual to y[token, row].

    dots: its dot product; with a GLU, those of gate and of up.
    """
    y = dots[0] if matmul.glu is None else b.mulf(ACTIVATIONS[matmul.glu](b, dots[0]), dots[1])
    if "bias" in given:
        y = b.addf(y, b.load(given["bias"], row))
    return b.addf(y, b.load(given["residual"], token, row)) if "residual" in given else y


def _lanes(units: int) -> int:
    """Return how many threads, 8 to 64, share a weight row: those with the fewest idle ones."""
    idle = {lanes: -(-units // lanes) * lanes for lanes in (64, 32, 16, 8)}
    return min(idle, key=lambda lanes: (idle[lanes], -lanes))


@cache
def matvec(matmul: Matmul, summed: int = 0) -> Kernel:
    """Return the GPU kernel of a matmul with few rows of x.

    These are at most `MAX_TOKENS` tokens, or with experts any number of (token, expert) pairs.
    Operands: see `operands`. Result: y f32 [tokens, out], with experts a row for each pair.

    summed: 0, or how many consecutive pairs are added, each times its factor in the operand
        `weights`, f32 [pairs]; y and the residual are f32 [pairs / summed, out] then.
    """
    layout, inner, out = layout_of(matmul.codec), matmul.in_features, matmul.out_features
    tokens = 1 if matmul.experts else matmul.tokens
    units, halves = -(-inner // UNIT), matmul.blocks_per_result
    lanes = _lanes(units)
    slots = THREADS // lanes
    rows = max(1, min(ROWS, TOTALS // (halves * tokens)))
    blocks = -(-out // (slots * rows))
    results = matmul.tokens // (summed or 1) if matmul.experts else 1
    count, normed = rows * halves * tokens, matmul.rms_eps is not None

    def write(b: GpuBody, x: Ssa, weight: Ssa, y: Ssa, **given: Ssa) -> None:
        thread, unit = b.thread(), b.workgroup()
        result, block = (b.div(unit, blocks), b.rem(unit, blocks)) if matmul.experts else (0, unit)
        lane = b.rem(thread, lanes)
        first = b.mul(b.add(b.mul(block, slots), b.div(thread, lanes)), rows)
        own = [b.min(b.add(first, i), out - 1) for i in range(rows)]
        decoder, zeros = Units(b, layout, weight, inner), [b.f32(0.0)] * (count + tokens * normed)

        def dots(above: Index, x_rows: list[Index]) -> list[Ssa]:
            weight_rows = [b.add(above, b.add(row, half * out)) for half in range(halves) for row in own]
            with b.loop(lane, units, lanes, carry=zeros) as loop:
                xs, squares = [load_x(b, x, row, loop.index) for row in x_rows], []
                if normed:
                    factors = load_x(b, given["norm"], 0, loop.index)
                    squares = [_squares(b, own_x, total, loop.index, inner) for own_x, total in zip(xs, loop.values[count:])]
                    xs = [[b.mulf(a, c) for a, c in zip(own_x, factors)] for own_x in xs]
                totals = [_unit(b, decoder, row, loop.index, xs, loop.values[i * tokens : (i + 1) * tokens])
                          for i, row in enumerate(weight_rows)]  # fmt: skip
                loop.give(*(total for part in totals for total in part), *squares)
            return loop.results

        def of_expert(pair: Index) -> list[Ssa]:
            return dots(b.mul(b.to_index(b.load(given["chosen"], pair)), out * halves), [b.div(pair, matmul.per_row)])

        if summed:
            with b.loop(0, summed, carry=zeros) as part:
                pair = b.add(b.mul(result, summed), part.index)
                factor = b.load(given["weights"], pair)
                part.give(*(b.fma(factor, dot, total) for dot, total in zip(of_expert(pair), part.values)))
            totals = part.results
        else:
            totals = of_expert(result) if matmul.experts else dots(0, list(range(tokens)))
        found, low = b.sums(thread, totals, lanes)
        with b.strided(thread, rows * tokens * slots) as item:
            slot, at = b.rem(item.index, slots), b.div(item.index, slots)
            token = b.rem(at, tokens)
            row = b.add(b.mul(b.add(b.mul(block, slots), slot), rows), b.div(at, tokens))
            with b.when(b.less(row, out)):
                sums = [b.load(found, b.add(item.index, low + half * rows * tokens * slots)) for half in range(halves)]
                if normed:
                    square = b.load(found, b.add(b.add(b.mul(token, slots), slot), low + count * slots))
                    mean = b.addf(b.divf(square, b.f32(inner)), b.f32(matmul.rms_eps or 0.0))
                    inverse = b.divf(b.f32(1.0), b.math("sqrt", mean))
                    sums = [b.mulf(dot, inverse) for dot in sums]
                at = result if matmul.experts else token
                b.store(finished(b, matmul, sums, given, at, row), y, at, row)

    types, y_type = operands(matmul, layout), matmul.results()["y"]
    if summed:
        y_type = TensorType((results, out), F32)
        types |= {"weights": TensorType((matmul.tokens,), F32)} | ({"residual": y_type} if matmul.residual else {})
    return GpuKernel(
        f"gpu_matvec_{matmul.name}" + f"_sum{summed}" * (summed > 0),
        types,
        {"y": y_type},
        blocks * results,
        write,
        reference=lambda **given: define(matmul, summed, **given),
        flops=2 * matmul.tokens * halves * out * inner,
        nbytes=4 * layout.row_words(inner) * out * halves,
        threads=THREADS,
        single_store=True,
        reads_rows={} if matmul.experts else {"x": slots},
    )


def _unit(b: GpuBody, decoder: Units, row: Index, unit: Index, xs: list[list[Ssa]], totals: list[Ssa]) -> list[Ssa]:
    """Emit code that adds one unit's products to the dot products of a weight row and rows of x."""
    codes, (scale, minimum) = decoder.codes(row, unit), decoder.scale(row, unit)
    if scale is None:
        return [_dot(b, codes, x, total) for x, total in zip(xs, totals)]
    totals = [b.fma(_dot(b, codes, x), scale, total) for x, total in zip(xs, totals)]
    if minimum is None:
        return totals
    return [b.fma(_sum(b, x), minimum, total) for x, total in zip(xs, totals)]


def _dot(b: GpuBody, a: list[Ssa], c: list[Ssa], total: Ssa | None = None) -> Ssa:
    for x, y in zip(a, c, strict=True):
        total = b.mulf(x, y) if total is None else b.fma(x, y, total)
    assert total is not None, "a unit has elements"
    return total


def _sum(b: GpuBody, x: list[Ssa]) -> Ssa:
    total = x[0]
    for other in x[1:]:
        total = b.addf(total, other)
    return total


def _squares(b: GpuBody, x: list[Ssa], total: Ssa, unit: Index, inner: int) -> Ssa:
    for j, element in enumerate(x):
        square = b.mulf(element, element)
        if inner % UNIT:
            inside = b.less(b.add(b.mul(unit, UNIT), j), inner)
            square = b.select(inside, square, b.f32(0.0))
        total = b.addf(total, square)
    return total
