"""A small module with a parameter, a cache that is updated in place, a kernel and scopes."""

from __future__ import annotations

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Param, Source, Value, current_function, parameter, scope
from castiron.emitter.graph.types import BF16, F32, I32, TensorType, to_f32
from castiron.emitter.kernels.kernel import INDEX, Kernel, kernel_call

LAYERS, CONTEXT, WIDTH, VOCAB = 2, 6, 8, 5
CACHE = TensorType((LAYERS, CONTEXT, WIDTH), F32)
ROW = TensorType((WIDTH,), F32)
SCALAR = TensorType((), I32)


def append_kernel() -> Kernel:
    """Return a simple kernel that writes a row of a cache at (layer, position)."""

    def reference(row, position, cache, layer):
        cache = cache.copy()
        cache[layer, int(position)] = row
        return {"cache": cache}

    def write(b, row, position, cache, layer):
        b.vstore(b.vload(row, WIDTH, 0), cache, layer, b.to_index(b.load(position)), 0)

    operands = {"row": ROW, "position": SCALAR, "cache": CACHE, "layer": INDEX}
    return Kernel("append_row", operands, {"cache": CACHE}, 1, write, reference, 0, 2 * ROW.nbytes, {"cache": "cache"})


def small_module(with_kernel: bool) -> Module:
    """Return a module with the function `step(token, pos, cache)`.

    It writes the token's row of a bf16 table to layer 1, sums the cache, and multiplies by the
    table. Without the kernel, the cache is first multiplied by 0.1.
    """
    module = Module("small")
    table = Param("embed.weight", TensorType((VOCAB, WIDTH), BF16), Source((("embed.weight", "bf16"),), lambda raw: raw))
    kernel = append_kernel()
    with module.function("step", token=SCALAR, pos=SCALAR, cache=CACHE) as (token, pos, cache):
        with scope("model"):
            with scope("embed_tokens"):
                weight = parameter(table)
                rows = ops.gather_rows(weight, ops.reshape(token, (1,)))
                row = ops.reshape(ops.convert(rows, F32), (WIDTH,))
            with scope("layers.1"):
                if with_kernel:
                    cache = kernel_call(kernel, row=row, position=pos, cache=cache, layer=1)["cache"]
                else:
                    cache = _write(ops.multiply(cache, ops.constant(0.1, F32, CACHE.shape)), row, pos)
                total = ops.reduce("add", cache, (0, 1))
        logits = ops.dot_general(ops.convert(weight, F32), total, ((1,), (0,)))
        current_function().returns({2: current_function().inputs[2]}, argmax=ops.argmax(logits), logits=logits, cache=cache)
    return module


def _write(cache: Value, row: Value, pos: Value) -> Value:
    one, zero = (ops.constant(n, I32, ()) for n in (1, 0))
    return ops.dynamic_update_slice(cache, ops.reshape(row, (1, 1, WIDTH)), (one, pos, zero))


def small_arguments() -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return the inputs of `step` and the parameter, as they are stored."""
    rng = np.random.default_rng(3)
    table = (rng.standard_normal((VOCAB, WIDTH)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    cache = rng.standard_normal(CACHE.shape).astype(np.float32)
    return [np.array(3, np.int32), np.array(4, np.int32), cache], {"embed.weight": table}


def small_results(with_kernel: bool) -> list[np.ndarray]:
    """Return the results of `step` for `small_arguments`, computed with NumPy."""
    (token, pos, cache), params = small_arguments()
    table = to_f32(params["embed.weight"], BF16)
    cache = cache.copy() if with_kernel else cache * np.float32(0.1)
    cache[1, int(pos)] = table[int(token)]
    logits = table @ cache.sum((0, 1))
    return [np.asarray(logits.argmax(), np.int32), logits, cache]
