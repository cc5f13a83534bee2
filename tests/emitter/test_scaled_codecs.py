"""Codecs of quantised HF checkpoints: layout, packing, and every kernel that reads them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from castiron.emitter.codecs import codec_of, dequantise, row_bytes
from castiron.emitter.codecs.finite import are_finite
from castiron.emitter.codecs.scaled import SCALED, join, scaled_codec
from castiron.emitter.kernels.embed import embed
from castiron.emitter.kernels.matmul.selection import numerics_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import AMX, ISAS
from castiron.emitter.kernels.weights.packing import pack, packed_shape, unpack
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import Case, Experts, check, check_pairs, run_all
from tests.emitter.test_canonical import UNITS, kernels_of, rows_of

# Every kind of code with one scale for one group and for several, and every type of a scale.
WAYS = (
    "int4_128_bf16",
    "uint4_32_f16",
    "uint4_128_f32",
    "int8_64_bf16",
    "uint8_128_f16",
    "e4m3_32_bf16",
    "e4m3_128_f32",
    "nf4_64_f32",
    "fp4_32_bf16",
)
INT8 = [codec for codec in WAYS if not codec_of(codec).e4m3]
# The numerics of `--numerics fast` for 7 tokens, for 40 tokens and for experts, by instruction sets and kinds of code.
# docs/kernels.md (What fast speeds up) has the same table.
FAST = {
    ("avx2",): {
        ("int4", "uint4"): ("int8", "int8", "int8"),
        ("int8", "uint8", "nf4", "fp4", "e4m3"): ("f32", "f32", "f32"),
    },
    ("avxvnni", "avx512", "avx512vnni", "neon"): {
        ("int4", "uint4", "int8", "uint8", "nf4", "fp4"): ("int8", "int8", "int8"),
        ("e4m3",): ("f32", "f32", "f32"),
    },
    ("avx512bf16", "neoni8mm"): {
        ("int4", "uint4", "int8", "uint8", "nf4", "fp4"): ("int8", "int8", "int8"),
        ("e4m3",): ("f32", "bf16_pairs", "f32"),
    },
    ("amx",): {
        ("int4", "uint4", "int8", "uint8", "nf4", "fp4"): ("int8", "bf16_matrix", "int8"),
        ("e4m3",): ("f32", "bf16_matrix", "f32"),
    },
}
FUSED = {"bias": True, "residual": True, "glu": "silu"}


def cases(codecs, numerics: str = "f32", widths=(1, 7, 19)) -> list[Case]:
    return [
        Case(Matmul(codec, tokens, 40, 256, length=tokens > 1, numerics=numerics, **FUSED))
        for codec, tokens in product(codecs, widths)
    ]


def experts(codecs, numerics: str = "f32") -> list[Experts]:
    """Return matmuls of a GEMV for each pair, and of pairs grouped by expert."""
    each = {"experts": 3, "per_row": 2, "glu": "silu", "length": True}
    return [Experts(Matmul(codec, tokens, 33, 256, numerics=numerics, **each)) for codec, tokens in product(codecs, (4, 160))]


@pytest.mark.parametrize("name", SCALED)
def test_packing_is_lossless(name):
    raw = raw_rows(name, 20, 256, 3)
    assert raw.shape == (20, row_bytes(name, 256)) and are_finite(name, raw)
    packed = pack(name, raw)
    assert packed.shape == packed_shape(name, 20, 256)
    np.testing.assert_array_equal(unpack(name, packed, 20, 256).view(np.uint32), dequantise(name, raw).view(np.uint32))


@pytest.mark.parametrize(("kind", "offset"), [("int4", 8), ("uint4", 0), ("int8", 0), ("uint8", 0)])
def test_a_weight_is_exactly_the_scale_times_the_code_minus_the_zero_point(kind, offset):
    rng, codec = np.random.default_rng(5), codec_of(scaled_codec(kind, 384, "f16"))
    assert codec.block == 128
    codes = rng.integers(0, 1 << codec.bits, (6, 128)).astype(np.uint8)
    zeros = rng.integers(-128, 128, 6).astype(np.int8) if codec.zeros else None
    scales = rng.standard_normal(6).astype(np.float16)
    signed = codes.view(np.int8).astype(np.float64) - offset - (0 if zeros is None else zeros[:, None])
    found = dequantise(codec.name, join(codec, codes, scales, zeros))
    np.testing.assert_array_equal(found, (signed * scales[:, None].astype(np.float64)).astype(np.float32))


def test_codecs_of_gguf_are_used_where_they_are_the_same():
    assert [scaled_codec(kind, 32, "f16") for kind in ("int4", "int8", "uint4")] == ["q4_0", "q8_0", "uint4_32_f16"]
    assert scaled_codec("int4", 48, "f16") is None


def test_scales_and_numbers_that_are_not_finite_are_found():
    for scale, dtype in (("f32", np.float32), ("f16", np.float16)):
        codec = codec_of(f"e4m3_32_{scale}")
        for d, code, finite in ((1, 0x7E, True), (np.inf, 0, False), (np.nan, 0, False), (1, 0x7F, False), (1, 0xFF, False)):
            raw = join(codec, np.full((1, 32), code, np.uint8), np.full(1, d, dtype), None)
            assert are_finite(codec.name, raw) == finite, (scale, d, code)


def test_host_matches_the_definition(tmp_path):
    check(run_all(cases(WAYS), "host", 2, tmp_path))


def test_experts_match_the_definition(tmp_path):
    check_pairs(run_all(experts(WAYS), "host", 2, tmp_path))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_match_the_definition(target, tmp_path):
    check(run_all(cases(WAYS), target, 2, tmp_path))


@pytest.mark.parametrize("target", ["host", "x86-64-v4", "x86-64-v4-vnni", "aarch64-i8mm"])
def test_int8_activations_match_the_definition(target, tmp_path):
    check(run_all(cases(INT8, "int8", (7, 19)), target, 2, tmp_path))


@pytest.mark.parametrize("target", ["x86-64-v4-bf16", "aarch64-i8mm"])
def test_bf16_pairs_match_the_definition(target, tmp_path):
    check(run_all(cases(["e4m3_32_bf16", "e4m3_128_f32", "nf4_64_f32"], "bf16_pairs", (7, 19)), target, 2, tmp_path))


def test_fast_experts_match_the_definition(tmp_path):
    check_pairs(run_all(experts(INT8, "int8"), "host", 2, tmp_path))


def test_each_kind_of_code_has_the_fast_form_of_the_table():
    assert {name for names in FAST for name in names} == ISAS.keys()
    for names, rows in FAST.items():
        assert sorted(kind for kinds in rows for kind in kinds) == sorted({name.split("_")[0] for name in SCALED})
        for isa, (kinds, wanted) in product(names, rows.items()):
            for codec in (f"{kind}_128_f16" for kind in kinds):
                shapes = {"few": (7, 0), "gemm": (40, 0), "experts": (160, 3)}.values()
                matmuls = [Matmul(codec, tokens, 16, 128, experts=experts) for tokens, experts in shapes]
                assert tuple(numerics_of(matmul, ISAS[isa], "fast") for matmul in matmuls) == wanted, (codec, isa)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_table_in_int8_is_as_near_as_int8_activations(kind):
    """The rounding error of x in int8 is 0.5 % of its standard deviation."""
    codec = codec_of(f"{kind}_64_f32")
    table, rounded = np.array(codec.table), np.array(codec.in_int8.table)
    assert np.sqrt(((table - rounded) ** 2).mean() / (table**2).mean()) < 0.005
    codes = rounded * codec.int8_scale
    assert np.abs(codes).max() <= 127 and np.allclose(codes, np.rint(codes))


@pytest.mark.parametrize("numerics", ["bf16_split", "bf16_matrix"])
def test_a_matrix_unit_matches_the_definition(numerics, tmp_path):
    found = {numerics_of(Matmul(codec, 40, 16, 128), AMX, "fast" if numerics == "bf16_matrix" else "exact") for codec in WAYS}
    # Not every quantile of NF4 is a bf16 number.
    assert found == ({"f32", numerics} if numerics == "bf16_split" else {numerics})
    codecs = [codec for codec in WAYS if codec_of(codec).has_bf16_codes or numerics == "bf16_matrix"]
    check(run_all(cases(codecs, numerics, (19,)), "sapphirerapids", 2, tmp_path))


@pytest.mark.parametrize("target", ["host", "aarch64"])
def test_embedding_rows_are_those_of_the_definition(target, tmp_path):
    isa = ISAS[resolve(target).isa]
    kernels, plain = ([embed(codec, 50, 256, 3, isa=each) for codec in WAYS] for each in (isa, isa.plain))
    runner, ids = Runner(runnable(kernels, target, tmp_path, plain), 2), np.array([0, 17, 49], np.int32)
    for codec, kernel in zip(WAYS, kernels, strict=True):
        raw = raw_rows(codec, 50, 256, 3)
        found = runner(kernel, ids=ids, weight=pack(codec, raw).view(np.int8))["y"]
        # With an f32 scale and a zero point, two terms are rounded, and their sum.
        atol = 1e-6 * np.abs(found).max() if codec == "uint4_128_f32" else 0
        np.testing.assert_allclose(found, dequantise(codec, raw)[ids], rtol=0, atol=atol)


def test_a_row_has_the_same_bits_in_every_kernel(tmp_path):
    """`test_integer_matmuls` has those of integer codes."""
    isa, codecs = UNITS["avx2"], [codec for codec in WAYS if not codec_of(codec).has_integers]
    kernels = {kernel.name: kernel for codec in codecs for kernel in kernels_of(codec, isa)}
    runner = Runner(runnable(list(kernels.values()), "x86-64-v3", tmp_path), 2)
    for codec in codecs:
        found = rows_of(runner, codec, isa)
        assert len({rows.tobytes() for rows in found.values()}) == 1, codec
