"""Every kernel of the lowering `gpu` on llvmpipe against its definition in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from castiron.emitter.codecs import codec_of, row_bytes
from castiron.emitter.codecs.quantise import encode
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, current_function
from castiron.emitter.graph.types import BF16, F16, F32, I8, I32, TensorType, from_f32
from castiron.emitter.kernels.attention.decode import DecodeTokens
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.gpu.argmax import best_of_parts, best_of_rows
from castiron.emitter.kernels.gpu.attention import append, attention
from castiron.emitter.kernels.gpu.embed import embed
from castiron.emitter.kernels.gpu.gemm import gemm
from castiron.emitter.kernels.gpu.heads import QkvRows
from castiron.emitter.kernels.gpu.matvec import matvec
from castiron.emitter.kernels.gpu.norm import norm
from castiron.emitter.kernels.gpu.recurrent import causal_conv, gated_delta, selective_scan
from castiron.emitter.kernels.gpu.route import route
from castiron.emitter.kernels.gpu.words import NATIVE, layout_of
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.lowering.gpu_fusion import fuse_kernels
from tests.vulkan.kernel_runner import GpuRunner, check

# One codec of each form that no checkpoint's blocks have: f32 scales, with minima, 16-bit codes.
CODECS = (*NATIVE, "q3_k", "q5_1", "e4m3_32_f32")


def weight_words(codec: str, rows: int, inner: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random weight in words, i32 [rows, words]."""
    values = rng.normal(size=(rows, inner)).astype(np.float32)
    if codec == "bf16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif not codec_of(codec).quantised:
        raw = values.astype(np.dtype({"f32": "f4", "f16": "f2"}[codec])).view(np.uint8)
    elif codec in NATIVE:
        raw = encode(codec, values)
    else:
        raw = rng.integers(0, 256, (rows, row_bytes(codec, inner)), dtype=np.uint8)
        words = layout_of(codec).pack(raw, inner)
        low, high, scales = layout_of(codec).parts(inner)
        words[:, low + high : low + high + scales] = rng.uniform(1e-3, 1e-2, (rows, scales)).astype(np.float32).view(np.int32)
        # Codes that are floats may be NaN.
        return words if layout_of(codec).bits < 16 else np.where(np.arange(words.shape[1]) < low, words & 0x3FFF3FFF, words)
    return layout_of(codec).pack(raw, inner)


def matmul_case(kernel: Kernel, matmul: Matmul, seed: int) -> dict[str, np.ndarray]:
    rng, given = np.random.default_rng(seed), {}
    for name, type_ in kernel.tensors.items():
        if name == "weight":
            given[name] = weight_words(matmul.codec, type_.shape[0], matmul.in_features, rng)
        elif name == "chosen":
            given[name] = rng.integers(0, matmul.experts, type_.shape).astype(np.int32)
        else:
            given[name] = rng.normal(size=type_.shape).astype(np.float32)
    return given


@pytest.mark.parametrize("codec", CODECS)
def test_a_weight_of_any_codec(codec, tmp_path):
    """In decoding, in a batch and in tiles; rows that fill no workgroup."""
    inner = 512
    one = Matmul(codec, 1, 70, inner, rms_eps=1e-5, residual=True)
    made = [(matvec(one), one)]
    batch = replace(one, tokens=3, rms_eps=None, residual=False, bias=True)
    made += [(matvec(batch), batch), (gemm(replace(batch, tokens=20)), replace(batch, tokens=20))]
    table = embed(codec, 33, inner, 4)
    run = GpuRunner([*(kernel for kernel, _ in made), table], tmp_path)
    for seed, (kernel, matmul) in enumerate(made):
        check(run, kernel, matmul_case(kernel, matmul, seed))
    ids, words = np.array([0, 32, 99, -4], np.int32), weight_words(codec, 33, inner, np.random.default_rng(5))
    check(run, table, {"ids": ids, "weight": words}, 1e-6)


def test_gated_units_experts_and_odd_sizes(tmp_path):
    matmuls = [
        Matmul("f32", 1, 131, 60, rms_eps=1e-5, glu="silu"),
        Matmul("f32", 8, 31, 70, bias=True),
        Matmul("q8_0", 8, 40, 96, rms_eps=1e-5, glu="silu"),
        Matmul("q4_k", 8, 64, 256, glu="gelu_tanh"),
        Matmul("q8_0", 6, 64, 96, experts=4, per_row=2, glu="gelu"),
        Matmul("f32", 3, 20, 36, experts=3),
        Matmul("f32", 33, 131, 60, glu="silu"),
        Matmul("q4_0", 100, 131, 96, bias=True),
        Matmul("q8_0", 70, 64, 32, residual=True),
    ]
    made = [matvec(m) if m.experts or m.tokens <= 8 else gemm(m) for m in matmuls]
    matmuls += [Matmul("q8_0", 6, 70, 96, experts=4, residual=True), Matmul("f32", 4, 20, 36, experts=3)]
    made += [matvec(matmuls[-2], 3), matvec(matmuls[-1], 2)]
    run = GpuRunner(made, tmp_path)
    for seed, (kernel, matmul) in enumerate(zip(made, matmuls)):
        check(run, kernel, matmul_case(kernel, matmul, seed))


HEADS = HeadLayout(6, 2, 64, 64)
NORMED, ROW_NORMED = HeadLayout(4, 2, 20, 10, 1e-6, v_norm=1e-5), HeadLayout(4, 4, 128, None, 1e-6, True, v_norm=1e-6)
CHUNK, BATCH, ONE = DecodeTokens("chunk", 7), DecodeTokens("batch", 3), DecodeTokens()
# (rows of a ring or None, layout, scores, tokens, position or positions, tokens that are not padding)
ATTENTIONS = [
    (None, HEADS, Scores(0.125), ONE, 70, None),
    (None, HEADS, Scores(0.125), ONE, 0, None),
    (None, NORMED, Scores(0.2, window=8, softcap=20.0, sinks=True), ONE, 70, None),
    (40, ROW_NORMED, Scores(0.125, window=33), ONE, 90, None),
    (None, HeadLayout(2, 1, 256, 256, v_norm=1e-6), Scores(0.06, sinks=True), ONE, 99, None),
    (None, HEADS, Scores(0.125), BATCH, (5, -1, 64), None),
    (None, HEADS, Scores(0.125), CHUNK, 50, 5),
    (40, HEADS, Scores(0.125, window=30), CHUNK, 50, 7),
    (None, HEADS, Scores(0.125, bidirectional=True, window=4), CHUNK, 0, 6),
    (None, ROW_NORMED, Scores(0.125, bidirectional=True), CHUNK, 0, 7),
    (None, NORMED, Scores(0.2, softcap=5.0, sinks=True), DecodeTokens("chunk", 40), 3, 40),
    # Padding after the last position of the context.
    (None, HEADS, Scores(0.125, window=4), DecodeTokens("chunk", 12), 98, 2),
]


def attention_case(kernel: Kernel, caches: Caches, layout: HeadLayout, position, length) -> dict[str, np.ndarray]:
    rng, given = np.random.default_rng(1), {}
    numbers = {"position": position, "start": position, "length": length}
    for name, type_ in kernel.tensors.items():
        if name in ("k_cache", "v_cache"):
            rows = rng.normal(size=(caches.layers, caches.positions, layout.kv_heads, layout.head_dim))
            given[name] = caches.format.stored(rows.astype(np.float32))
        elif name in numbers:
            given[name] = np.array(numbers[name], np.int32)
        else:
            given[name] = rng.normal(size=type_.shape).astype(np.float32)
    return given


@pytest.mark.parametrize("storage", ["f32", "f16", "q8_0"])
def test_attention_over_caches_of_any_type(storage, tmp_path):
    cases = []
    for ring, layout, scores, tokens, position, length in ATTENTIONS:
        if storage == "q8_0" and layout.head_dim % 8:
            continue
        caches = Caches(6 if tokens.kind == "batch" else 3, 100, CACHES[storage], ring)
        cut = (layout.keys + layout.kv_heads * layout.head_dim, layout.kv_heads * layout.head_dim)
        rows = QkvRows(cut if tokens.kind == "batch" else (layout.row,))
        kernels = [attention(caches, layout, scores, tokens, rows)]
        if tokens.in_cache:
            kernels.append(append(caches, layout, tokens.count, rows))
        cases += [(kernel, attention_case(kernel, caches, layout, position, length)) for kernel in kernels]
    run = GpuRunner(list({kernel.name: kernel for kernel, _ in cases}.values()), tmp_path)
    for kernel, given in cases:
        # A number between two numbers of f16 or two codes of q8_0 may be rounded either way.
        check(run, kernel, given, {"f32": 2e-6, "f16": 1e-3, "q8_0": 1e-2}[storage])


@pytest.mark.parametrize("tokens,position", [(ONE, 70), (BATCH, (5, -1, 64))])
@pytest.mark.parametrize("head_dim", [20, 200])
def test_attention_that_multiplies_each_head_by_a_matrix(head_dim, tokens, position, tmp_path):
    """As latent attention does; fewer and more elements than threads, and an idle sequence."""
    heads, used, n, T = 4, head_dim - 4, 7, tokens.count
    caches, layout = Caches(3 * T, 100, CACHES["f32"], None), HeadLayout(heads, 2, head_dim, None)
    kernel, module = attention(caches, layout, Scores(0.2), tokens, QkvRows((layout.row,))), Module("heads")
    types = {**kernel.tensors, "matrices": TensorType((heads, n, used), F32)}
    with module.function("f", **types) as (*values, matrices):
        found = kernel_call(kernel, **dict(zip(kernel.tensors, values)), layer=1)
        out = ops.slice_(ops.reshape(found["out"], (T, heads, head_dim)), (0, 0, 0), (T, heads, used))
        out = ops.transpose(ops.dot_general(out, matrices, ((2,), (2,)), ((1,), (0,))), (1, 0, 2))
        current_function().returns(out=ops.reshape(out, (T, heads * n)), k=found["k_cache"], v=found["v_cache"])
    (fused,) = [op.attrs["kernel"] for op in fuse_kernels(module.functions["f"]).ops]
    given = attention_case(fused, caches, layout, position, None)
    wide, matrices = kernel.reference(**{name: given[name] for name in kernel.tensors}, layer=1)["out"], given["in4"]
    wanted = np.einsum("thd,hnd->thn", wide.reshape(T, heads, head_dim)[..., :used], matrices).reshape(T, -1)
    np.testing.assert_allclose(fused.reference(**given, layer=1)["out"], wanted, rtol=1e-4, atol=1e-5)
    check(GpuRunner([fused], tmp_path), fused, given, 5e-6)


def test_norms_and_argmax(tmp_path):
    rng = np.random.default_rng(2)
    norms = [norm("rms_norm", 3, 70, 1e-6, residual=True), norm("layer_norm", 2, 256, 1e-5, bias=True)]
    rows, vocab = 3, 5000
    parts, best = best_of_parts(rows, vocab), best_of_rows(rows, 3)
    run = GpuRunner([*norms, parts, best], tmp_path)
    for kernel in norms:
        check(run, kernel, {n: rng.normal(size=t.shape).astype(np.float32) for n, t in kernel.tensors.items()})
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    logits[0, [4000, 1000, 4999]] = 9.0
    logits[1] = -np.inf
    logits[2, 77] = np.nan
    found = run(best, run(parts, {"logits": logits}))["argmax"]
    assert found.tolist() == [1000, 0, int(np.nanargmax(logits[2]))]


def test_routes(tmp_path):
    rng = np.random.default_rng(6)
    kernels = [
        route(3, 200, 8, "softmax", True, False),
        route(2, 9, 2, "softmax", False, False),
        route(2, 64, 4, "sigmoid", True, True),
        route(3, 160, 6, "sigmoid", True, True, (8, 4), 2),
        route(2, 12, 3, "softmax", False, False, (3, 2), 1),
    ]
    run = GpuRunner(kernels, tmp_path)
    for kernel in kernels:
        given = {n: rng.normal(size=t.shape).astype(np.float32) for n, t in kernel.tensors.items()}
        given["logits"][0, 3:5] = 1.0
        check(run, kernel, given)


def test_operations_that_kernels_compute(tmp_path):
    """Before a matmul in its loads, after it in its stores, and beside it in the same dispatch."""
    tokens, module = 9, Module("fused")
    types = {
        "rows": ((1, 48), F32), "other": ((1, 40), F32), "weight": ((40, 24), I32), "chosen": ((1,), I32),
        "table": ((5, 24), F16), "codes": ((4, 6, 8), I8), "keys": ((tokens, 4, 6), BF16), "many": ((40, 32), I32),
    }  # fmt: skip
    with module.function("f", **{name: TensorType(*t) for name, t in types.items()}) as (rows, other, weight, chosen, *rest):
        table, codes, keys, many = rest
        gate, up = ops.slice_(rows, (0, 0), (1, 24)), ops.slice_(rows, (0, 24), (1, 48))
        x = ops.add(ops.multiply(ops.multiply(gate, ops.logistic(gate)), up), ops.convert(ops.gather_rows(table, chosen), F32))
        y = kernel_call(matvec(Matmul("f32", 1, 40, 24)), x=x, weight=weight)["y"]
        y = ops.subtract(ops.maximum(ops.tanh(y), ops.constant(0.1, F32, y.shape)), ops.multiply(other, ops.rsqrt(ops.abs_(y))))
        # [tokens, heads, 6] . [heads, 6, 8] -> [heads, tokens, 8]
        dots = ops.dot_general(ops.convert(keys, F32), ops.convert(codes, F32), ((2,), (1,)), ((1,), (0,)))
        start = ops.reshape(chosen, ())
        cut = ops.dynamic_slice(ops.transpose(dots, (1, 0, 2)), (start, start, start), (tokens, 4, 4))
        sums = ops.broadcast_in_dim(ops.reduce("maximum", dots, (0,)), (tokens, 4, 8), (0, 2))
        wide = ops.reshape(ops.concatenate((ops.slice_(sums, (0, 0, 2), (tokens, 4, 6)), cut), 2), (tokens, 32))
        z = kernel_call(gemm(Matmul("f32", tokens, 40, 32)), x=wide, weight=many)["y"]
        current_function().returns(y=y, z=z)
    kernels = [op.attrs["kernel"] for op in fuse_kernels(module.functions["f"]).ops if op.kind == "kernel"]
    assert [list(kernel.results) for kernel in kernels] == [["a_y", "b_y0"], ["y"]]
    run, rng = GpuRunner(kernels, tmp_path), np.random.default_rng(8)
    for kernel in kernels:
        given = {}
        for name, t in kernel.tensors.items():
            values = rng.normal(size=t.shape).astype(np.float32)
            if name.endswith("weight"):
                given[name] = values.view(np.int32)
            elif t.dtype in (I8, I32):
                given[name] = rng.integers(-128 if t.dtype is I8 else 0, 127 if t.dtype is I8 else 4, t.shape).astype(
                    t.dtype.numpy
                )
            else:
                given[name] = from_f32(values, t.dtype)
        check(run, kernel, given)


@pytest.mark.parametrize("tokens", [1, 3])
def test_matmuls_that_compute_the_norm_before_them(tokens, tmp_path):
    """One matmul, whose result continues and whose norm is used again, and two side by side."""
    module, hidden = Module("norms"), 300
    first = norm("rms_norm", tokens, hidden, 1e-6, residual=True)
    second = norm("layer_norm", tokens, 70, 1e-5, bias=True)
    small, wide, other = (Matmul("f32", tokens, out, size) for out, size in ((70, hidden), (200, 70), (31, 70)))
    types = {
        **first.tensors, "scale": TensorType((tokens, hidden), F32), "small": matvec(small).tensors["weight"],
        "second": TensorType((70,), F32), "bias": TensorType((70,), F32),
        "wide": matvec(wide).tensors["weight"], "other": matvec(other).tensors["weight"],
    }  # fmt: skip
    with module.function("f", **types) as values:
        given = dict(zip(types, values))
        y = kernel_call(first, **{name: given[name] for name in first.tensors})["y"]
        y = ops.multiply(y, given["scale"])
        x = ops.abs_(kernel_call(matvec(small), x=y, weight=given["small"])["y"])
        x = kernel_call(second, x=x, weight=given["second"], bias=given["bias"])["y"]
        parts = {m: kernel_call(matvec(by), x=x, weight=given[m])["y"] for m, by in (("wide", wide), ("other", other))}
        current_function().returns(y=y, **parts)
    kernels = [op.attrs["kernel"] for op in fuse_kernels(module.functions["f"]).ops]
    assert [list(kernel.results) for kernel in kernels] == [["y", "rows"], ["a_y", "b_y"]]
    run, rng = GpuRunner(kernels, tmp_path), np.random.default_rng(9)
    for kernel, inner in zip(kernels, (hidden, 70)):
        numbers = {name: rng.normal(size=t.shape).astype(np.float32) for name, t in kernel.tensors.items()}
        words = {name: weight_words("f32", t.shape[0], inner, rng) for name, t in kernel.tensors.items() if t.dtype is I32}
        check(run, kernel, numbers | words)


@pytest.mark.parametrize("batch", [False, True])
def test_recurrent_layers(batch, tmp_path):
    count = 4
    tokens = Tokens(count, 2 * count if batch else 2, batch=batch, length=not batch)
    columns = lambda **widths: {name: Columns(width) for name, width in widths.items()}
    kernels = [
        causal_conv(tokens, 70, 4, Columns(100, 20), bias=True, activation="silu"),
        selective_scan(tokens, (2, 4, 10, 16), columns(x=40, dt=4, B=32, C=32)),
        gated_delta(tokens, (2, 4, 16, 20), columns(q=32, k=32, v=80, alpha=4, beta=4, z=80), 1e-6),
        gated_delta(tokens, (2, 2, 8, 130), columns(q=16, k=16, v=260, alpha=2, beta=2)),
    ]
    run, rng = GpuRunner(kernels, tmp_path), np.random.default_rng(4)
    for kernel in kernels:
        given = {n: rng.normal(size=t.shape).astype(np.float32) for n, t in kernel.tensors.items() if t.dtype is F32}
        given |= {"positions": np.array([3, -1, 0, 9], np.int32)} if batch else {"length": np.array(3, np.int32)}
        given |= {"rate": -np.abs(given["rate"])} if "rate" in given else {}
        check(run, kernel, given, 5e-6)
