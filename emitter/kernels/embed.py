"""Look up rows of an embedding table on a CPU; a tied output head can use the same table.

The table is packed: its rows are in blocks of 16 rows, one for each lane of a vector. So the kernel
decodes all 16 rows, a few hundred (`depth`) columns at a time, and copies one of them:

    for token in tokens of the workgroup:
      id = ids[token], clamped to the vocabulary
      for k in 0, depth, 2 * depth, ...:
        panel [depth, 16] = columns k .. k + depth - 1 of the 16 rows of block id / 16, decoded
        y[token, k .. k + depth - 1] = panel[:, id % 16]
"""

from functools import cache

import numpy as np

from castiron.emitter.codecs import codec_of
from castiron.emitter.graph.types import F32, I8, I32, TensorType
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.body import Body, Index, Ssa
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.weights.packing import LANES, packed_shape, unpack
from castiron.emitter.kernels.weights.panel import Panel, units

DEPTH = 256  # elements of a row that are decoded at a time, for 16 rows: 16 KB on the stack
MAX_WORKGROUPS = 64


@cache
def embed(codec_name: str, vocab: int, hidden: int, T: int, *, isa: Isa) -> Kernel:
    """Return the kernel that looks up T rows of a packed embedding table, dequantised to f32.

    codec_name: format of the table, such as "q4_k".

    Operands:
        ids: i32 [T]; ids outside the vocabulary are clamped to it.
        weight: the table [vocab, hidden], packed in blocks of 16 rows: i8, see `packed_shape`.
    Result:
        y: f32 [T, hidden].
    """
    codec = codec_of(codec_name)
    shape = packed_shape(codec_name, vocab, hidden)
    operands = {"ids": TensorType((T,), I32), "weight": TensorType(shape, I8)}
    result = TensorType((T, hidden), F32)
    workgroups = min(T, MAX_WORKGROUPS)
    unit = units(codec_name)
    depth = min(DEPTH, -(-hidden // unit) * unit)

    def write(b: Body, ids: Ssa, weight: Ssa, y: Ssa) -> None:
        panel = Panel(b, codec, isa, weight, depth, 1)
        low, high = b.share(T, b.workgroup(), workgroups)
        full = hidden // depth * depth
        with b.loop(low, high) as token:
            id = b.max(b.min(b.to_index(b.load(ids, token.index)), vocab - 1), 0)

            def copy(k: Index, count: int) -> None:
                panel.fill(b.div(id, LANES), k, count)
                with b.loop(0, count) as j:
                    x = b.load(panel.values, j.index, b.rem(id, LANES))
                    b.store(x, y, token.index, b.add(k, j.index))

            with b.loop(0, full, depth) as k:
                copy(k.index, depth)
            if full < hidden:
                copy(full, hidden - full)

    def reference(ids: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.clip(ids, 0, vocab - 1)
        row_blocks = unpack(codec_name, weight[rows // LANES], LANES * T, hidden)
        return {"y": row_blocks.reshape(T, LANES, hidden)[np.arange(T), rows % LANES]}

    return Kernel(
        f"embed_{codec_name}_{T}_{vocab}x{hidden}_{isa.name}",
        operands,
        {"y": result},
        workgroups,
        write,
        reference=reference,
        flops=T * hidden,
        nbytes=T * shape[1] * shape[2] + result.nbytes,
    )
