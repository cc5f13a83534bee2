"""Canonical numerics: a token's row has the same bits in every kernel, on every vector unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from castiron.emitter.codecs import codec_of
from castiron.emitter.kernels.attention.decode import DecodeTokens, attention_decode
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.matmul.prepared_x import group_sums
from castiron.emitter.kernels.matmul.selection import kernel_of, numerics_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body
from castiron.emitter.kernels.mlir.isa import AVX2, AVX512, NEON, Isa
from castiron.emitter.kernels.mlir.vector_math import lane_sums
from castiron.emitter.kernels.norm import norm
from tests.emitter.attention_cases import CONTEXT, LAYER, LAYERS, fill
from tests.emitter.attention_cases import Case as AttentionCase
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import Case, allowed_error

UNITS = {isa.name: isa.in_canonical_form for isa in (AVX512, AVX2, NEON)}
TOKENS, IN, OUT = 21, 512, 40
# Codecs of each kind of sums: floats, minima, offsets, neither, groups with scales, a table.
CODECS = {"avx512": ("bf16", "q4_1", "q8_0", "q6_k", "q4_k", "iq4_xs"), "avx2": ("q4_1", "q6_k"), "neon": ("bf16", "q4_k")}
# Heads that share keys; a window and norms of heads; norms of rows, a soft cap and a q8_0 cache.
ATTENTION = [
    AttentionCase(9, 3, 64, 64, splits=4, tokens=6),
    AttentionCase(4, 1, 64, 64, {"qk_norm": 1e-3}, {"window": 64}, splits=2, tokens=6),
    AttentionCase(4, 2, 64, 64, {"qk_norm": 1e-5, "qk_norm_row": True}, {"softcap": 50.0}, splits=4, tokens=6, cache="q8_0"),
]


class Sums:
    """A stand-in for `Body` whose vectors are lists of expressions; equal expressions are equal sums."""

    def addf(self, a, b):
        return Lanes(f"({'+'.join(sorted(pair))})" for pair in zip(a, b, strict=True))

    def shuffle(self, a, b, lanes):
        return Lanes([*a, *b][lane] for lane in lanes)


class Lanes(list):
    @property
    def width(self) -> int:
        return len(self)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_order_of_lane_sums_does_not_depend_on_the_number_of_vectors(width):
    vector = lambda n: Lanes(f"{lane:02d}of{n}" for lane in range(width))
    (single,) = lane_sums(Sums(), [vector(0)])
    for count in (2, 4, 8, 16)[: width.bit_length() - 1]:
        found = lane_sums(Sums(), [vector(n) for n in range(count)])
        assert found == [single.replace("of0", f"of{n}") for n in range(count)]


def test_no_multiplication_is_fused_with_a_sum():
    """In canonical kernels; the compiler may fuse them in others."""
    for isa, fenced in ((AVX2, False), (AVX2.in_canonical_form, True)):
        text = norm("rms_norm", 3, 64, 1e-5, isa=isa).text
        assert text.count("llvm.arithmetic.fence") == (text.count("arith.mulf") if fenced else 0)
        assert text.count("arith.mulf") > 2
    assert "fence" not in Body().text()


def matmul_of(codec: str, tokens: int, isa: Isa, **options) -> Matmul:
    matmul = Matmul(codec, tokens, OUT, IN, **options)
    return replace(matmul, numerics=numerics_of(matmul, isa, False))


def rows_of(runner: Runner, codec: str, isa: Isa, **options) -> dict[int, np.ndarray]:
    """Return the rows of x times a weight, computed one, three and all at a time."""
    case = Case(matmul_of(codec, TOKENS, isa, **options))
    given = Case(Matmul(codec, TOKENS, OUT, IN, **options)).arguments()
    found = {}
    for tokens in (1, 3, TOKENS):
        matmul = matmul_of(codec, tokens, isa, **options)
        kernel, parts = kernel_of(matmul, isa), []
        for first in range(0, TOKENS, tokens):
            own = {**given, "x": given["x"][first : first + tokens]}
            if matmul.summed_groups:
                own["x_sums"] = runner(group_sums(tokens, IN, codec_of(codec), isa=isa), x=own["x"])["sums"]
            parts.append(runner(kernel, **own)["y"])
        found[tokens] = np.concatenate(parts)
    want = case.matmul.define(**given)["y"]
    assert (np.abs(found[TOKENS] - want) <= allowed_error(case, given, want)).all(), case
    return found


def kernels_of(codec: str, isa: Isa, **options) -> list:
    made = [kernel_of(matmul_of(codec, tokens, isa, **options), isa) for tokens in (1, 3, TOKENS)]
    return made + ([group_sums(TOKENS, IN, codec_of(codec), isa=isa)] if codec_of(codec).summed else [])


def test_a_row_of_a_matmul_has_the_same_bits_in_every_kernel(directory):
    """One token, few and many, for codecs of every kind, on every vector unit."""
    seen: dict[str, np.ndarray] = {}
    for unit, codecs in CODECS.items():
        isa = UNITS[unit]
        kernels = {k.name: k for codec in codecs for k in kernels_of(codec, isa)}
        runner = Runner(compile_kernels(list(kernels.values()), directory / f"{unit}.vmfb"), 2)
        for codec in codecs:
            found = rows_of(runner, codec, isa)
            for tokens, rows in found.items():
                assert rows.tobytes() == found[1].tobytes(), f"{codec} on {unit}: {tokens} tokens at once"
            assert found[1].tobytes() == seen.setdefault(codec, found[1]).tobytes(), f"{codec} on {unit}"


def attention(case: AttentionCase, isa: Isa, chunk: int | None) -> object:
    options = {"splits": 4, "split_from": 24, "cache": case.rows}
    tokens = DecodeTokens() if chunk is None else DecodeTokens("chunk", chunk)
    return attention_decode(LAYERS, CONTEXT, case.layout, case.how, tokens, isa=isa, **options)


@pytest.fixture(scope="module")
def attending(directory):
    """Return the kernels of each vector unit and case, and a module with all of them."""
    kernels = {}
    for unit in ("avx512", "avx2"):
        for case in ATTENTION:
            one, chunk = (attention(case, UNITS[unit], tokens) for tokens in (None, case.tokens))
            append = rope_append(LAYERS, CONTEXT, case.tokens, case.layout, isa=UNITS[unit], cache=case.rows)
            kernels[unit, case] = one, chunk, append
    every = {k.name: k for made in kernels.values() for k in made}
    return kernels, compile_kernels(list(every.values()), directory / "attention.vmfb")


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_a_chunk_has_the_bits_of_single_tokens(attending, threads):
    """Before and after the first split position, on two vector units; rows of padding are zero."""
    kernels, path = attending
    runner = Runner(path, threads)
    seen: dict[tuple, bytes] = {}
    for (unit, case), (one, chunk, append) in kernels.items():
        for start, length in ((0, 6), (20, 6), (150, 4)):
            own = {"start": np.int32(start), "length": np.int32(length)}
            given = fill(np.random.default_rng(3), append, start, **own)
            appended = runner(append, **given)
            shared = {n: given[n] for n in chunk.tensors if n in given} | {n: appended[n] for n in ("k_cache", "v_cache")}
            shared |= {"counters": np.zeros(chunk.tensors["counters"].shape, np.int32), "layer": LAYER}
            got = runner(chunk, **shared)["out"]
            want = chunk.reference(**shared)["out"]
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
            for t in range(case.tokens):
                if t >= length:
                    assert not got[t].any()
                    continue
                at = {**given, "qkv": given["qkv"][t : t + 1], "position": np.int32(start + t), "layer": LAYER}
                at |= {n: appended[n] for n in ("k_cache", "v_cache")}
                at |= {"counters": np.zeros(one.tensors["counters"].shape, np.int32)}
                single = runner(one, **{n: at[n] for n in one.operands})["out"]
                assert got[t].tobytes() == single.tobytes(), f"{chunk.name}: token {t} from {start}"
            key = (case, start)
            assert got.tobytes() == seen.setdefault(key, got.tobytes()), f"{unit} at {start}"
