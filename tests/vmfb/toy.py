"""A toy language model with the very functions of a castiron module, small enough to know by heart.

Every value is a small integer held in f32, so NumPy and IREE agree to the last bit whatever the order of a sum, and every
position's output depends on every earlier position of both caches.
"""

from __future__ import annotations

import numpy as np

LAYERS, HEAD_DIM, VOCAB = 2, 4, 32


def weights() -> dict[str, np.ndarray]:
    """`embed` and `head`, f32 [VOCAB, HEAD_DIM] of integers in -4..4."""
    rng = np.random.default_rng(7)
    return {name: rng.integers(-4, 5, (VOCAB, HEAD_DIM)).astype(np.float32) for name in ("embed", "head")}


def coefficients(context: int) -> np.ndarray:
    """What position p weighs in every sum over the cache: f32 [context], integers in -3..3."""
    return ((np.arange(context) * 5 + 3) % 7 - 3).astype(np.float32)


class Toy:
    """The model in NumPy, one token at a time, with caches of `[LAYERS, context, 1, HEAD_DIM]`."""

    def __init__(self, context: int):
        self.context, self.position, self.weights = context, 0, weights()
        self.k = np.zeros((LAYERS, context, 1, HEAD_DIM), np.float32)
        self.v = np.zeros_like(self.k)

    def step(self, token: int) -> np.ndarray:
        """Appends `token` and returns its logits, f32 [VOCAB]."""
        p, c = self.position, coefficients(self.context)
        x = self.weights["embed"][token]
        for layer in range(LAYERS):
            self.k[layer, p, 0], self.v[layer, p, 0] = x * 3 + layer, x * x - 2
            seen = self.v[layer, : p + 1, 0] - 2 * self.k[layer, : p + 1, 0]
            x = x + np.fmod(c[: p + 1] @ seen, np.float32(8))
        self.position += 1
        return self.weights["head"] @ x

    def run(self, tokens) -> np.ndarray:
        """Logits after the last of `tokens`."""
        for token in tokens:
            logits = self.step(int(token))
        return logits


def _dense(values: np.ndarray) -> str:
    return "dense<" + np.array2string(values, separator=", ", formatter={"all": lambda x: f"{x:.1f}"}, threshold=10**6, max_line_width=10**6) + ">"


def _function(name: str, width: int | None, context: int) -> str:
    """`decode_step` (width None) or `prefill_T` as StableHLO text."""
    t, c, d, cache = width or 1, context, HEAD_DIM, f"tensor<{LAYERS}x{context}x1x{HEAD_DIM}xf32>"
    head = "%token: tensor<i32>, %pos: tensor<i32>" if width is None else f"%tokens: tensor<{t}xi32>, %pos: tensor<i32>, %length: tensor<i32>"
    out = [
        f"  func.func @{name}({head}, %k0: {cache} {{iree.abi.output = 2 : index}}, %v0: {cache} {{iree.abi.output = 3 : index}})"
        f" -> (tensor<i32>, tensor<{VOCAB}xf32>, {cache}, {cache}) {{"
    ]
    if width is None:
        out += ["%tokens = stablehlo.reshape %token : (tensor<i32>) -> tensor<1xi32>", "%length = stablehlo.constant dense<1> : tensor<i32>"]
    out += [
        f"%embed = util.global.load @embed : tensor<{VOCAB}x{d}xf32>",
        f"%head = util.global.load @head : tensor<{VOCAB}x{d}xf32>",
        f"%x0 = \"stablehlo.gather\"(%embed, %tokens) {{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0],"
        f" start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, {d}>}} : (tensor<{VOCAB}x{d}xf32>, tensor<{t}xi32>) -> tensor<{t}x{d}xf32>",
        "%zero = stablehlo.constant dense<0> : tensor<i32>",
        f"%coef = stablehlo.constant {_dense(coefficients(context))} : tensor<{c}xf32>",
        f"%coefs = stablehlo.broadcast_in_dim %coef, dims = [1] : (tensor<{c}xf32>) -> tensor<{t}x{c}xf32>",
        f"%column = stablehlo.iota dim = 1 : tensor<{t}x{c}xi32>",
        f"%row = stablehlo.iota dim = 0 : tensor<{t}x{c}xi32>",
        f"%start = stablehlo.broadcast_in_dim %pos, dims = [] : (tensor<i32>) -> tensor<{t}x{c}xi32>",
        f"%last = stablehlo.add %start, %row : tensor<{t}x{c}xi32>",
        f"%seen = stablehlo.compare LE, %column, %last : (tensor<{t}x{c}xi32>, tensor<{t}x{c}xi32>) -> tensor<{t}x{c}xi1>",
        f"%none = stablehlo.constant dense<0.0> : tensor<{t}x{c}xf32>",
        f"%w = stablehlo.select %seen, %coefs, %none : tensor<{t}x{c}xi1>, tensor<{t}x{c}xf32>",
        f"%two = stablehlo.constant dense<2.0> : tensor<{c}x{d}xf32>",
        f"%twos = stablehlo.constant dense<2.0> : tensor<{t}x{d}xf32>",
        f"%three = stablehlo.constant dense<3.0> : tensor<{t}x{d}xf32>",
        f"%eight = stablehlo.constant dense<8.0> : tensor<{t}x{d}xf32>",
    ]
    row, plane, slab = f"tensor<{t}x{d}xf32>", f"tensor<{c}x{d}xf32>", f"tensor<1x{c}x1x{d}xf32>"
    for n in range(LAYERS):
        m = n + 1
        out += [
            f"%n{n} = stablehlo.constant dense<{n}.0> : {row}",
            f"%layer{n} = stablehlo.constant dense<{n}> : tensor<i32>",
            f"%kx{n} = stablehlo.multiply %x{n}, %three : {row}",
            f"%kn{n} = stablehlo.add %kx{n}, %n{n} : {row}",
            f"%vx{n} = stablehlo.multiply %x{n}, %x{n} : {row}",
            f"%vn{n} = stablehlo.subtract %vx{n}, %twos : {row}",
        ]
        for s in "kv":
            out += [
                f"%{s}r{n} = stablehlo.reshape %{s}n{n} : ({row}) -> tensor<1x{t}x1x{d}xf32>",
                f"%{s}{m} = stablehlo.dynamic_update_slice %{s}{n}, %{s}r{n}, %layer{n}, %pos, %zero, %zero"
                f" : ({cache}, tensor<1x{t}x1x{d}xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> {cache}",
                f"%{s}s{n} = stablehlo.slice %{s}{m} [{n}:{m}, 0:{c}, 0:1, 0:{d}] : ({cache}) -> {slab}",
                f"%{s}p{n} = stablehlo.reshape %{s}s{n} : ({slab}) -> {plane}",
            ]
        out += [
            f"%kk{n} = stablehlo.multiply %kp{n}, %two : {plane}",
            f"%kv{n} = stablehlo.subtract %vp{n}, %kk{n} : {plane}",
            f"%o{n} = stablehlo.dot_general %w, %kv{n}, contracting_dims = [1] x [0] : (tensor<{t}x{c}xf32>, {plane}) -> {row}",
            f"%om{n} = stablehlo.remainder %o{n}, %eight : {row}",
            f"%x{m} = stablehlo.add %x{n}, %om{n} : {row}",
        ]
    logits, i, f = f"tensor<{VOCAB}xf32>", f"tensor<{VOCAB}xi32>", "tensor<f32>"
    out += [
        "%one = stablehlo.constant dense<1> : tensor<i32>",
        "%end = stablehlo.subtract %length, %one : tensor<i32>",
        f"%xe = stablehlo.dynamic_slice %x{LAYERS}, %end, %zero, sizes = [1, {d}] : ({row}, tensor<i32>, tensor<i32>) -> tensor<1x{d}xf32>",
        f"%xl = stablehlo.reshape %xe : (tensor<1x{d}xf32>) -> tensor<{d}xf32>",
        f"%logits = stablehlo.dot_general %head, %xl, contracting_dims = [1] x [0] : (tensor<{VOCAB}x{d}xf32>, tensor<{d}xf32>) -> {logits}",
        f"%ids = stablehlo.iota dim = 0 : {i}",
        "%low = stablehlo.constant dense<0xFF800000> : tensor<f32>",
        f"%best, %argmax = stablehlo.reduce(%logits init: %low), (%ids init: %zero) across dimensions = [0] : ({logits}, {i}, {f}, tensor<i32>) -> ({f}, tensor<i32>)",
        f" reducer(%a: {f}, %b: {f}) (%ai: tensor<i32>, %bi: tensor<i32>) {{",
        f"  %gt = stablehlo.compare GT, %a, %b : ({f}, {f}) -> tensor<i1>",
        f"  %eq = stablehlo.compare EQ, %a, %b : ({f}, {f}) -> tensor<i1>",
        "  %lt = stablehlo.compare LT, %ai, %bi : (tensor<i32>, tensor<i32>) -> tensor<i1>",
        "  %tie = stablehlo.and %eq, %lt : tensor<i1>",
        "  %take = stablehlo.or %gt, %tie : tensor<i1>",
        f"  %m = stablehlo.select %take, %a, %b : tensor<i1>, {f}",
        "  %mi = stablehlo.select %take, %ai, %bi : tensor<i1>, tensor<i32>",
        f"  stablehlo.return %m, %mi : {f}, tensor<i32>",
        " }",
        f"return %argmax, %logits, %k{LAYERS}, %v{LAYERS} : tensor<i32>, {logits}, {cache}, {cache}",
        "}",
    ]
    return "\n    ".join(out)


def module_text(context: int, widths: tuple[int, ...]) -> str:
    """The module with `decode_step` and one `prefill_T` for each of `widths`."""
    out = ["module @toy {"]
    for name in weights():
        out.append(f'  util.global private @{name} = #flow.parameter.named<"model"::"{name}"> : tensor<{VOCAB}x{HEAD_DIM}xf32>')
    out.append(_function("decode_step", None, context))
    out += [_function(f"prefill_{width}", width, context) for width in widths]
    return "\n".join(out) + "\n}\n"
