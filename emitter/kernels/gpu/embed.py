"""Look up and dequantise rows of an embedding table; each thread decodes 8 elements of a row."""

from functools import cache

import numpy as np

from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.gpu.gpu_body import GpuBody
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel
from castiron.emitter.kernels.gpu.words import UNIT, Units, layout_of, weight_values
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Ssa

THREADS = 64


@cache
def embed(codec: str, vocab: int, hidden: int, T: int) -> Kernel:
    """Return the kernel that looks up T rows of an embedding table, dequantised to f32.

    Operands: ids i32 [T], clamped to the vocabulary; weight i32 [vocab, words of a row], see
        `gpu.words`. Result: y f32 [T, hidden].
    """
    layout, units = layout_of(codec), -(-hidden // UNIT)
    blocks = -(-units // THREADS)
    operands = {"ids": TensorType((T,), I32), "weight": TensorType((vocab, layout.row_words(hidden)), I32)}

    def write(b: GpuBody, ids: Ssa, weight: Ssa, y: Ssa) -> None:
        block = b.workgroup()
        token, unit = b.div(block, blocks), b.add(b.mul(b.rem(block, blocks), THREADS), b.thread())
        with b.when(b.less(unit, units)):
            row = b.max(b.min(b.to_index(b.load(ids, token)), vocab - 1), 0)
            for j, value in enumerate(Units(b, layout, weight, hidden).values(row, unit)):
                d = b.add(b.mul(unit, UNIT), j)
                if hidden % UNIT == 0:
                    b.store(value, y, token, d)
                    continue
                with b.when(b.less(d, hidden)):
                    b.store(value, y, token, d)

    def reference(ids: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
        return {"y": weight_values(layout, weight[np.clip(ids, 0, vocab - 1)], hidden)}

    name, result = f"gpu_embed_{codec}_{T}_{vocab}x{hidden}", TensorType((T, hidden), F32)
    return GpuKernel(name, operands, {"y": result}, T * blocks, write, reference=reference, threads=THREADS, single_store=True)
