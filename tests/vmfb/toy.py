"""A toy language model with the functions of a castiron module, in NumPy and in MLIR.

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
from castiron.vmfb.bundle import Bundle, BundleWriter
from castiron.vmfb.compiler import compile_mlir, compiler_version
from castiron.vmfb.manifest import MODEL, WEIGHTS, Manifest, Versions
from castiron.vmfb.targets import TARGETS
from castiron.vmfb.weights import write_irpa

LAYERS, HEAD_DIM, VOCAB = 2, 4, 32
# The context and the prefill widths of most toy bundles.
CONTEXT, WIDTHS = 24, (4, 8)


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


# L: layers, T: tokens of a call, C: context, V: vocabulary, D: numbers of a position.
TYPES = """
!rows_{T} = tensor<{T}x{D}xf32>
!update_{T} = tensor<1x{T}x1x{D}xf32>
!mask_{T} = tensor<{T}x{C}xi1>
!positions_{T} = tensor<{T}x{C}xi32>
!weights_{T} = tensor<{T}x{C}xf32>
"""
SHARED_TYPES = """
!id = tensor<i32>
!scalar = tensor<f32>
!ids = tensor<{V}xi32>
!logits = tensor<{V}xf32>
!table = tensor<{V}x{D}xf32>
!cache = tensor<{L}x{C}x1x{D}xf32>
!slab = tensor<1x{C}x1x{D}xf32>
!plane = tensor<{C}x{D}xf32>
"""
OPENING = """
    %embed = util.global.load @embed : !table
    %head = util.global.load @head : !table
    %x0 = "stablehlo.gather"(%embed, %tokens) {{dimension_numbers = #stablehlo.gather<offset_dims = [1],
      collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, {D}>}}
      : (!table, tensor<{T}xi32>) -> !rows_{T}
    %zero = stablehlo.constant dense<0> : !id
    %coef = stablehlo.constant dense<{coefficients}> : tensor<{C}xf32>
    %coefs = stablehlo.broadcast_in_dim %coef, dims = [1] : (tensor<{C}xf32>) -> !weights_{T}
    %column = stablehlo.iota dim = 1 : !positions_{T}
    %row = stablehlo.iota dim = 0 : !positions_{T}
    %start = stablehlo.broadcast_in_dim %pos, dims = [] : (!id) -> !positions_{T}
    %last = stablehlo.add %start, %row : !positions_{T}
    %seen = stablehlo.compare LE, %column, %last : (!positions_{T}, !positions_{T}) -> !mask_{T}
    %none = stablehlo.constant dense<0.0> : !weights_{T}
    %w = stablehlo.select %seen, %coefs, %none : !mask_{T}, !weights_{T}
    %two = stablehlo.constant dense<2.0> : !plane
    %twos = stablehlo.constant dense<2.0> : !rows_{T}
    %three = stablehlo.constant dense<3.0> : !rows_{T}
    %eight = stablehlo.constant dense<8.0> : !rows_{T}
"""
LAYER = """
    %n{n} = stablehlo.constant dense<{n}.0> : !rows_{T}
    %layer{n} = stablehlo.constant dense<{n}> : !id
    %kx{n} = stablehlo.multiply %x{n}, %three : !rows_{T}
    %kn{n} = stablehlo.add %kx{n}, %n{n} : !rows_{T}
    %vx{n} = stablehlo.multiply %x{n}, %x{n} : !rows_{T}
    %vn{n} = stablehlo.subtract %vx{n}, %twos : !rows_{T}
    %kr{n} = stablehlo.reshape %kn{n} : (!rows_{T}) -> !update_{T}
    %vr{n} = stablehlo.reshape %vn{n} : (!rows_{T}) -> !update_{T}
    %k{m} = stablehlo.dynamic_update_slice %k{n}, %kr{n}, %layer{n}, %pos, %zero, %zero
      : (!cache, !update_{T}, !id, !id, !id, !id) -> !cache
    %v{m} = stablehlo.dynamic_update_slice %v{n}, %vr{n}, %layer{n}, %pos, %zero, %zero
      : (!cache, !update_{T}, !id, !id, !id, !id) -> !cache
    %ks{n} = stablehlo.slice %k{m} [{n}:{m}, 0:{C}, 0:1, 0:{D}] : (!cache) -> !slab
    %vs{n} = stablehlo.slice %v{m} [{n}:{m}, 0:{C}, 0:1, 0:{D}] : (!cache) -> !slab
    %kp{n} = stablehlo.reshape %ks{n} : (!slab) -> !plane
    %vp{n} = stablehlo.reshape %vs{n} : (!slab) -> !plane
    %kk{n} = stablehlo.multiply %kp{n}, %two : !plane
    %kv{n} = stablehlo.subtract %vp{n}, %kk{n} : !plane
    %o{n} = stablehlo.dot_general %w, %kv{n}, contracting_dims = [1] x [0] : (!weights_{T}, !plane) -> !rows_{T}
    %om{n} = stablehlo.remainder %o{n}, %eight : !rows_{T}
    %x{m} = stablehlo.add %x{n}, %om{n} : !rows_{T}
"""
CLOSING = """
    %one = stablehlo.constant dense<1> : !id
    %end = stablehlo.subtract %length, %one : !id
    %xe = stablehlo.dynamic_slice %x{L}, %end, %zero, sizes = [1, {D}] : (!rows_{T}, !id, !id) -> !rows_1
    %xl = stablehlo.reshape %xe : (!rows_1) -> tensor<{D}xf32>
    %logits = stablehlo.dot_general %head, %xl, contracting_dims = [1] x [0] : (!table, tensor<{D}xf32>) -> !logits
    %ids = stablehlo.iota dim = 0 : !ids
    %low = stablehlo.constant dense<0xFF800000> : !scalar
    %best, %argmax = stablehlo.reduce(%logits init: %low), (%ids init: %zero) across dimensions = [0]
      : (!logits, !ids, !scalar, !id) -> (!scalar, !id)
      reducer(%a: !scalar, %b: !scalar) (%ai: !id, %bi: !id) {{
        %gt = stablehlo.compare GT, %a, %b : (!scalar, !scalar) -> tensor<i1>
        %eq = stablehlo.compare EQ, %a, %b : (!scalar, !scalar) -> tensor<i1>
        %lt = stablehlo.compare LT, %ai, %bi : (!id, !id) -> tensor<i1>
        %tie = stablehlo.and %eq, %lt : tensor<i1>
        %take = stablehlo.or %gt, %tie : tensor<i1>
        %m = stablehlo.select %take, %a, %b : tensor<i1>, !scalar
        %mi = stablehlo.select %take, %ai, %bi : tensor<i1>, !id
        stablehlo.return %m, %mi : !scalar, !id
      }}
    return %argmax, %logits, %k{L}, %v{L} : !id, !logits, !cache, !cache
  }}
"""
CACHES = "%k0: !cache {iree.abi.output = 2 : index}, %v0: !cache {iree.abi.output = 3 : index}"
RESULTS = "(!id, !logits, !cache, !cache)"
DECODE_STEP = f"""
  func.func @decode_step(%token: !id, %pos: !id, {CACHES}) -> {RESULTS} {{
    %tokens = stablehlo.reshape %token : (!id) -> tensor<1xi32>
    %length = stablehlo.constant dense<1> : !id
"""


def module_text(context: int, widths: tuple[int, ...]) -> str:
    """Return the module with `decode_step` and a `prefill_T` for each of `widths`."""
    sizes = {"L": LAYERS, "C": context, "V": VOCAB, "D": HEAD_DIM}
    values = [float(value) for value in coefficients(context)]
    types = [TYPES.format(T=width, **sizes) for width in (1, *widths)]
    parts = [SHARED_TYPES.format(**sizes), *types, "module @toy {\n"]
    for name in weights():
        parts.append(f'  util.global private @{name} = #flow.parameter.named<"model"::"{name}"> : !table\n')
    for width in (1, *widths):
        operands = f"%tokens: tensor<{width}xi32>, %pos: !id, %length: !id, {CACHES}"
        prefill = f"\n  func.func @prefill_{width}({operands}) -> {RESULTS} {{"
        parts.append(DECODE_STEP if width == 1 else prefill)
        parts.append(OPENING.format(T=width, coefficients=values, **sizes))
        parts += [LAYER.format(n=n, m=n + 1, T=width, **sizes) for n in range(LAYERS)]
        parts.append(CLOSING.format(T=width, **sizes))
    return "".join(parts) + "}\n"


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
