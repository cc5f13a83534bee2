"""A toy language model with the functions of a castiron module, in NumPy and as StableHLO.

Every value is a small integer stored as f32, so that NumPy and IREE agree to the last bit in any
order of summation. The output of a position depends on all earlier positions of both caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.abi import State, functions
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Param, Source, Value, current_function, parameter
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.vmfb.bundle.bundle import Bundle, BundleWriter
from castiron.vmfb.bundle.irpa import write_irpa
from castiron.vmfb.bundle.manifest import MODEL, WEIGHTS, Manifest, Versions
from castiron.vmfb.compiler.iree_compile import compile_mlir, compiler_version
from castiron.vmfb.targets import TARGETS

LAYERS, HEAD_DIM, VOCAB = 2, 4, 32
# The context and the prefill widths of most toy bundles.
CONTEXT, WIDTHS = 24, (4, 8)
_STORED = Source((), lambda: None)


def weights() -> dict[str, np.ndarray]:
    """Return `embed` and `head`, f32 `[VOCAB, HEAD_DIM]` of integers from -4 to 4."""
    rng = np.random.default_rng(7)
    return {name: rng.integers(-4, 5, (VOCAB, HEAD_DIM)).astype(np.float32) for name in ("embed", "head")}


def coefficients(context: int) -> np.ndarray:
    """Return the weight of each position in sums over a cache: f32 `[context]`, -3 to 3."""
    return ((np.arange(context) * 5 + 3) % 7 - 3).astype(np.float32)


class Toy:
    """The model in NumPy, one token at a time, with caches `[LAYERS, context, 1, HEAD_DIM]`."""

    def __init__(self, context: int):
        self.context, self.position, self.weights = context, 0, weights()
        self.k = np.zeros((LAYERS, context, 1, HEAD_DIM), np.float32)
        self.v = np.zeros_like(self.k)

    def step(self, token: int) -> np.ndarray:
        """Append `token` and return its logits, f32 `[VOCAB]`."""
        p, c = self.position, coefficients(self.context)
        x = self.weights["embed"][token]
        for layer in range(LAYERS):
            self.k[layer, p, 0], self.v[layer, p, 0] = x * 3 + layer, x * x - 2
            seen = self.v[layer, : p + 1, 0] - 2 * self.k[layer, : p + 1, 0]
            x = x + np.fmod(c[: p + 1] @ seen, np.float32(8))
        self.position += 1
        return self.weights["head"] @ x

    def run(self, tokens) -> np.ndarray:
        """Append `tokens` and return the logits after the last one."""
        for token in tokens:
            logits = self.step(int(token))
        return logits


def module_text(context: int, widths: tuple[int, ...]) -> str:
    """Return the module with `decode_step` and a `prefill_T` for each of `widths`."""
    module = Module("toy")
    number, cache = TensorType((), I32), TensorType((LAYERS, context, 1, HEAD_DIM), F32)
    caches = {"k": cache, "v": cache}
    with module.function("decode_step", token=number, position=number, **caches) as (token, position, k, v):
        _append(ops.reshape(token, (1,)), position, ops.constant(1, I32), k, v)
    for width in widths:
        numbers = {"tokens": TensorType((width,), I32), "position": number, "length": number}
        with module.function(f"prefill_{width}", **numbers, **caches) as inputs:
            _append(*inputs)
    return print_module(module)


def _append(tokens: Value, position: Value, length: Value, k: Value, v: Value) -> None:
    """Append what `Toy.step` computes for the first `length` of `tokens`."""
    states, (width,), context = {2: k, 3: v}, tokens.shape, k.shape[1]
    embed, head = (parameter(Param(name, TensorType((VOCAB, HEAD_DIM), F32), _STORED)) for name in ("embed", "head"))
    filled = lambda value, like: ops.constant(value, F32, like.shape)
    index = lambda value: ops.constant(value, I32, ())
    x, square = ops.gather_rows(embed, tokens), (width, context)
    last = ops.add(ops.broadcast_in_dim(position, square, ()), ops.iota(square, 0))
    weights = ops.broadcast_in_dim(ops.constant(coefficients(context), F32), square, (1,))
    weights = ops.select(ops.compare("LE", ops.iota(square, 1), last), weights, filled(0, weights))
    for layer in range(LAYERS):
        new_k = ops.add(ops.multiply(x, filled(3, x)), filled(layer, x))
        new_v = ops.subtract(ops.multiply(x, x), filled(2, x))
        start = (index(layer), position, index(0), index(0))
        k, v = (
            ops.dynamic_update_slice(cache, ops.reshape(rows, (1, width, 1, HEAD_DIM)), start)
            for cache, rows in ((k, new_k), (v, new_v))
        )
        keys, values = (
            ops.reshape(ops.slice_(cache, (layer, 0, 0, 0), (layer + 1, context, 1, HEAD_DIM)), (context, HEAD_DIM))
            for cache in (k, v)
        )
        seen = ops.subtract(values, ops.multiply(keys, filled(2, keys)))
        total = ops.dot_general(weights, seen, ((1,), (0,)))
        # Conversion to integers truncates, as fmod does.
        eighths = ops.convert(ops.convert(ops.divide(total, filled(8, total)), I32), F32)
        x = ops.add(x, ops.subtract(total, ops.multiply(eighths, filled(8, total))))
    row = ops.dynamic_slice(x, (ops.subtract(length, index(1)), index(0)), (1, HEAD_DIM))
    logits = ops.dot_general(head, ops.reshape(row, (HEAD_DIM,)), ((1,), (0,)))
    current_function().returns(states, argmax=ops.argmax(logits), logits=logits, after_k=k, after_v=v)


def manifest(context: int = CONTEXT, widths: tuple[int, ...] = WIDTHS) -> Manifest:
    """Return the manifest of a toy bundle without its files."""
    states = tuple(State(name, (LAYERS, context, 1, HEAD_DIM)) for name in "kv")
    return Manifest(
        name="toy", config={"model_type": "toy"}, vocab=VOCAB, context=context, max_context=context,
        states=states,
        functions=functions({"decode": (1,), "prefill": widths}), numerics="exact", lowering="portable", weights="native",
        codecs={"f32": 2}, target=TARGETS["host"], versions=Versions("0", compiler_version()),
    )  # fmt: skip


def write(
    directory: Path, context: int = CONTEXT, widths: tuple[int, ...] = WIDTHS, *, cache_dir: Path | None = None,
    files: Mapping[str, str] = {}, **changes: Any,
) -> Bundle:  # fmt: skip
    """Compile and write a toy bundle with more `files`, and `changes` to its manifest."""
    with BundleWriter(directory) as writer:
        compile_mlir(module_text(context, widths), TARGETS["host"], writer.path(MODEL), cache_dir=cache_dir)
        entries = [(name, array, (array.shape, array.dtype)) for name, array in weights().items()]
        written = write_irpa(writer.path(WEIGHTS), entries)
        for name, data in files.items():
            writer.write(name, data)
        return writer.commit(replace(manifest(context, widths), **changes), {WEIGHTS: written})
