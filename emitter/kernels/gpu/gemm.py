"""A GPU kernel for prefill: multiply many tokens by a quantised weight, tile by tile.

The right column names the memory that the line writes:

    each workgroup of 64 threads: 64 rows of the weight, and `width` tokens (16, 32 or 64)
      for k in steps of 16:
        W [16, 64] = 16 columns of these rows, dequantised and transposed                  shared
        X [16, width] = the same columns of x for these tokens, transposed                 shared
        each thread, for 8 of the rows and width / 8 of the tokens:
          totals[row, token] += sum over the 16 steps i of W[i, row] * X[i, token]      registers
      y[token, row] = totals[row, token] after GLU, bias and residual                      memory

With a GLU, the 64 rows are 32 rows of gate and 32 rows of up. The dequantised weight is never
written to global memory.
"""

from functools import cache

from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.gpu.matvec import define, finished, load_x, operands
from castiron.emitter.kernels.gpu.words import UNIT, Units, layout_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Ssa

THREADS, TILE, DEPTH = 64, 64, 16
SIDE = 8  # threads along the rows, and along the tokens, of a tile


@cache
def gemm(matmul: Matmul) -> Kernel:
    """Return the GPU kernel of a matmul of many tokens, without RMS norm and experts.

    Operands: see `matvec.operands`. Result: y f32 [tokens, out].
    """
    layout, inner, out, tokens = layout_of(matmul.codec), matmul.in_features, matmul.out_features, matmul.tokens
    width = next(n for n in (16, 32, 64) if n >= min(tokens, 64))
    halves, each = matmul.blocks_per_result, width // SIDE
    rows = TILE // halves  # results of a tile
    row_tiles, token_tiles = -(-out // rows), -(-tokens // width)
    units = -(-inner // UNIT)

    def write(b: GpuBody, x: Ssa, weight: Ssa, y: Ssa, **given: Ssa) -> None:
        thread, unit = b.thread(), b.workgroup()
        first_row, first_token = b.mul(b.rem(unit, row_tiles), rows), b.mul(b.div(unit, row_tiles), width)
        decoder, depth = Units(b, layout, weight, inner), DEPTH // UNIT
        # One more column avoids bank conflicts.
        w_pitch, x_pitch = TILE + 1, width + 1
        w_tile, x_tile = b.shared(DEPTH * w_pitch), b.shared(DEPTH * x_pitch)
        own_row, own_token = b.rem(thread, SIDE), b.div(thread, SIDE)

        def fill(tile: Ssa, pitch: int, count: int, read) -> None:
            """Emit code that copies 16 columns of the weight or of x, transposed, to shared memory.

            read(row, unit): loads 8 elements. pitch: elements from a row of the tile to the next.
            """
            with b.strided(thread, count * depth) as item:
                column, step = b.div(item.index, depth), b.rem(item.index, depth)
                part = b.add(k.index, step)
                values = read(column, b.min(part, units - 1))
                for j, value in enumerate(values):
                    beyond = b.less(b.add(b.mul(part, UNIT), j), inner) if inner % DEPTH else None
                    value = value if beyond is None else b.select(beyond, value, b.f32(0.0))
                    b.store(value, tile, b.add(b.mul(b.add(b.mul(step, UNIT), j), pitch), column))

        def weight_unit(column, part):
            row = b.min(b.add(first_row, b.rem(column, rows)), out - 1)
            return decoder.values(b.add(row, b.mul(b.div(column, rows), out)) if halves > 1 else row, part)

        def x_unit(column, part):
            return load_x(b, x, b.min(b.add(first_token, column), tokens - 1), part)

        with b.loop(0, units, depth, carry=[b.f32(0.0)] * (SIDE * each)) as k:
            fill(w_tile, w_pitch, TILE, weight_unit)
            fill(x_tile, x_pitch, width, x_unit)
            b.barrier()
            with b.loop(0, DEPTH, 1, carry=k.values) as step:
                at_w, at_x = b.add(b.mul(step.index, w_pitch), own_row), b.add(b.mul(step.index, x_pitch), own_token)
                w = [b.load(w_tile, b.add(at_w, i * SIDE)) for i in range(SIDE)]
                xs = [b.load(x_tile, b.add(at_x, i * SIDE)) for i in range(each)]
                step.give(*(b.fma(a, c, step.values[i * each + j]) for i, a in enumerate(w) for j, c in enumerate(xs)))
            b.barrier()
            k.give(*step.results)
        for i in range(SIDE // halves):
            row = b.add(first_row, b.add(own_row, i * SIDE))
            for j in range(each):
                token = b.add(first_token, b.add(own_token, j * SIDE))
                dots = [k.results[(half * SIDE // halves + i) * each + j] for half in range(halves)]
                with b.when(b.both(b.less(row, out), b.less(token, tokens))):
                    b.store(finished(b, matmul, dots, given, token, row), y, token, row)

    return GpuKernel(
        f"gpu_gemm_{matmul.name}",
        operands(matmul, layout),
        matmul.results(),
        row_tiles * token_tiles,
        write,
        reference=lambda **given: define(matmul, 0, **given),
        flops=2 * tokens * halves * out * inner,
        nbytes=4 * (layout.row_words(inner) * out * halves + tokens * (inner + out)),
        threads=THREADS,
        single_store=True,
        reads_often=("x",),
    )
