"""Canonical kernels: what a token gets has the same bits in every kernel, on every vector unit, alone or with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from castiron.emitter.codecs import codec_of
from castiron.emitter.kernels.attention.decode import attention_decode
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.group_sums import group_sums
from castiron.emitter.kernels.norm import norm
from castiron.emitter.kernels.products.choosing import kernel_of, numerics_of
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import Body
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, NEON, Isa
from castiron.emitter.kernels.writing.vectors import lane_sums
from castiron.vmfb.targets import missing_features, resolve
from tests.emitter.attention_cases import CONTEXT, LAYER, LAYERS, fill
from tests.emitter.attention_cases import Case as AttentionCase
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import Case, allowed_error

UNITS = {isa.name: isa.in_canonical_form for isa in (AVX512, AVX2, NEON)}
TOKENS, IN, OUT = 21, 512, 40
# A codec of each kind of sums: floats, minima, offsets, neither, groups with scales of their own, a table.
CODECS = {"avx512": ("bf16", "q4_1", "q8_0", "q6_k", "q4_k", "iq4_xs"), "avx2": ("q4_1", "q6_k"), "neon": ("bf16", "q4_k")}
# Heads that share keys; a window, and norms of heads; norms of rows, a soft cap, and rows of bytes.
ATTENTION = [
    AttentionCase(9, 3, 64, 64, splits=4, tokens=6),
    AttentionCase(4, 1, 64, 64, {"qk_norm": 1e-3}, {"window": 64}, splits=2, tokens=6),
    AttentionCase(4, 2, 64, 64, {"qk_norm": 1e-5, "qk_norm_row": True}, {"softcap": 50.0}, splits=4, tokens=6, cache="q8_0"),
]


class Sums:
    """A stand-in for `Body` whose vectors are lists of expressions, written so that equal ones are the same sum."""

    def addf(self, a, b):
        return Lanes(f"({'+'.join(sorted(pair))})" for pair in zip(a, b, strict=True))

    def shuffle(self, a, b, lanes):
        return Lanes([*a, *b][lane] for lane in lanes)


class Lanes(list):
    @property
    def type(self) -> str:
        return f"vector<{len(self)}xf32>"


@pytest.mark.parametrize("width", [4, 8, 16])
def test_lanes_are_added_in_one_order_however_many_vectors_there_are(width):
    vector = lambda n: Lanes(f"{lane:02d}of{n}" for lane in range(width))
    (alone,) = lane_sums(Sums(), [vector(0)])
    for count in (2, 4, 8, 16)[: width.bit_length() - 1]:
        found = lane_sums(Sums(), [vector(n) for n in range(count)])
        assert found == [alone.replace("of0", f"of{n}") for n in range(count)]


def test_a_product_is_kept_from_the_sum_behind_it():
    """Only there: other kernels leave the compiler its way."""
    for isa, fenced in ((AVX2, False), (AVX2.in_canonical_form, True)):
        text = norm("rms_norm", 3, 64, 1e-5, isa=isa).text
        assert text.count("llvm.arithmetic.fence") == (text.count("arith.mulf") if fenced else 0)
        assert text.count("arith.mulf") > 2
    assert "fence" not in Body().text()


def products(codec: str, tokens: int, isa: Isa, **options) -> Product:
    product = Product(codec, tokens, OUT, IN, **options)
    return replace(product, numerics=numerics_of(product, isa, False))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("canonical")


def rows_of(runner: Runner, codec: str, isa: Isa, **options) -> dict[int, np.ndarray]:
    """The same rows of x through the same weight, one at a time, three at a time, and all in one call."""
    case = Case(products(codec, TOKENS, isa, **options))
    given = Case(Product(codec, TOKENS, OUT, IN, **options)).arguments()
    found = {}
    for tokens in (1, 3, TOKENS):
        product = products(codec, tokens, isa, **options)
        kernel, parts = kernel_of(product, isa), []
        for first in range(0, TOKENS, tokens):
            own = {**given, "x": given["x"][first : first + tokens]}
            if product.summed_groups:
                own["x_sums"] = runner(group_sums(tokens, IN, codec_of(codec), isa=isa), x=own["x"])["sums"]
            parts.append(runner(kernel, **own)["y"])
        found[tokens] = np.concatenate(parts)
    want = case.product.define(**given)["y"]
    assert (np.abs(found[TOKENS] - want) <= allowed_error(case, given, want)).all(), case
    return found


def kernels_of(codec: str, isa: Isa, **options) -> list:
    made = [kernel_of(products(codec, tokens, isa, **options), isa) for tokens in (1, 3, TOKENS)]
    return made + ([group_sums(TOKENS, IN, codec_of(codec), isa=isa)] if codec_of(codec).summed else [])


def test_a_row_of_a_product_has_the_same_bits_in_every_kernel(directory):
    """Alone, with few and with many, for codecs of every kind; and on every vector unit."""
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


def test_two_compilers_targets_give_the_same_bits(directory):
    """The form for AVX2 compiled for AVX2, and the one for AVX-512 compiled for this CPU, whatever it has."""
    found = {}
    for unit, target in (("avx2", "x86-64-v3"), ("avx512", "host")):
        if missing_features(resolve(target)):
            target = "host"
        isa, path = UNITS[unit], directory / f"{unit}-{target}.vmfb"
        runner = Runner(compile_kernels(kernels_of("q4_1", isa, glu="silu"), path, target), 2)
        found[unit] = rows_of(runner, "q4_1", isa, glu="silu")
    for tokens, rows in found["avx2"].items():
        assert rows.tobytes() == found["avx512"][tokens].tobytes()


def attention(case: AttentionCase, isa: Isa, chunk: int | None) -> object:
    options = {"splits": 4, "split_from": 24, "cache": case.rows}
    return attention_decode(LAYERS, CONTEXT, case.layout, case.how, isa=isa, chunk=chunk, **options)


@pytest.fixture(scope="module")
def attending(directory):
    """The kernels of each vector unit and case, and a module that has them all."""
    kernels = {}
    for unit in ("avx512", "avx2"):
        for case in ATTENTION:
            one, chunk = (attention(case, UNITS[unit], tokens) for tokens in (None, case.tokens))
            append = rope_append(LAYERS, CONTEXT, case.tokens, case.layout, isa=UNITS[unit], cache=case.rows)
            kernels[unit, case] = one, chunk, append
    every = {k.name: k for made in kernels.values() for k in made}
    return kernels, compile_kernels(list(every.values()), directory / "attention.vmfb")


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_a_chunk_has_the_bits_of_its_tokens_alone(attending, threads):
    """Before and past where contexts are split, on two vector units; rows of padding are zero."""
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
                alone = runner(one, **{n: at[n] for n in one.operands})["out"]
                assert got[t].tobytes() == alone.tobytes(), f"{chunk.name}: token {t} from {start}"
            key = (case, start)
            assert got.tobytes() == seen.setdefault(key, got.tobytes()), f"{unit} at {start}"
