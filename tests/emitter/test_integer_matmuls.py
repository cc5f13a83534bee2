"""Matmuls with x quantised to integers against their NumPy definition, with every instruction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import codec_of
from castiron.emitter.codecs.fixed_point import MAX_INTEGER
from castiron.emitter.kernels.matmul.schedule import GemmIntegerTiles, SmallBatchIntegerTiles
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.quantise_x import dequantised, quantise_x, quantised
from castiron.vmfb.targets import missing_features, resolve
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import EVERY_WAY, FUSED, QUANTISED, Case, cases, check, run_all

TARGETS = ["x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni", "aarch64", "aarch64-i8mm"]
NUMERICS = ("int8", "int16", "int24")
# The quick suite runs the first draw of each codec in int24.
DRAWN = [case for codec in QUANTISED for case in draw(cases(codec, st.integers(2, 40), 100, *FUSED, numerics="int8"), 2)]
EXACT, *REST = zip(
    *(draw(cases(codec, st.integers(1, 40), 100, *FUSED, "rms_eps", numerics="int24"), 3) for codec in QUANTISED), strict=True
)
SHAPED = [
    case
    for numerics in NUMERICS
    for case in (
        # several panels and a shallower last one, several blocks of tokens and a smaller last tile
        Case(Matmul("q4_1", 200, 80, 1120, length=True, numerics=numerics)),
        Case(Matmul("q8_0", 50, 96, 320, numerics=numerics), GemmIntegerTiles(4, 1, 2, depth=96, tokens=20, workgroups=5)),
        Case(Matmul("q6_k", 13, 64, 512, numerics=numerics), GemmIntegerTiles(3, 2, 2, depth=96, tokens=6)),
        Case(Matmul("q4_k", 7, 64, 512, glu="silu", numerics=numerics), SmallBatchIntegerTiles(3, workgroups=3)),
        Case(Matmul("q5_1", 5, 64, 64, numerics=numerics), SmallBatchIntegerTiles(2, workgroups=1)),
        # units of several groups, codes with zero points
        Case(Matmul("int4_128_f16", 30, 48, 384, numerics=numerics)),
        Case(Matmul("uint8_64_f16", 11, 48, 256, numerics=numerics)),
        # one token, as in decode_step
        Case(Matmul("q4_0", 1, 50, 96, bias=True, residual=True, numerics=numerics)),
        Case(Matmul("q4_1", 1, 50, 96, glu="silu", numerics=numerics)),
    )
]
# A codec for each kind of sums.
KINDS = ("q4_1", "q8_0", "q6_k", "q1_0")
EACH = [
    Case(Matmul(codec, tokens, 24, 256, bias=True, residual=True, glu=glu, length=tokens > 1, numerics=numerics))
    for i, codec in enumerate(codec for codec in EVERY_WAY if codec in QUANTISED)
    for tokens, glu, numerics in (
        (7, None if i % 2 else "silu", "int8"),
        (19, "silu" if i % 2 else None, "int24"),
        (1, "silu" if i % 2 else None, "int24"),
        (3 + i % 3, None if i % 2 else "silu", "int24"),
    )
]


@pytest.mark.parametrize("of", ["int8", "exact", "shaped", "rest"])
def test_host_matches_the_definition(of, directory):
    rest = [case for drawn in REST for case in drawn]
    check(run_all({"int8": DRAWN, "exact": list(EXACT), "shaped": SHAPED, "rest": rest}[of], "host", 2, directory))


@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_matches_the_definition(directory, target):
    # Unpacking is the same as on `aarch64`: one codec for each kind of sums and one with a table are enough.
    codecs = (*KINDS, "iq4_xs") if target == "aarch64-i8mm" else QUANTISED
    check(run_all([case for case in EACH if case.matmul.codec in codecs], target, 2, directory))


X = {
    "normal": np.random.default_rng(5).standard_normal((9, 96)),
    "outliers": np.random.default_rng(6).standard_normal((9, 96)) * np.where(np.arange(96) % 17, 1, 300),
    # ties, zeros, values next to zero, and groups of one sign
    "ties": np.tile(np.arange(-48, 48) / 2, (9, 1)) * np.array([[0, 1, 2.5, 127, 1e-38, 1e-32, 1e30, -1, 1e-9]]).T,
}


@pytest.mark.parametrize("target", TARGETS)
def test_x_is_quantised_as_defined(tmp_path, target):
    """With the same bits, so that kernels that quantise x themselves compute what others read."""
    isa = ISAS[resolve(target).isa]
    made = [quantise_x(9, 256, codec_of(codec), digits, isa=isa) for codec in KINDS for digits in (1, 2, 3)]
    kernels = list({kernel.name: kernel for kernel in made}.values())
    runner = Runner(runnable(kernels, target, tmp_path), 2)
    for kernel in kernels:
        for name, x in X.items():
            x = np.resize(x, (9, 256)).astype(np.float32)
            found, want = runner(kernel, source=x), kernel.reference(source=x)
            assert found.keys() == want.keys()
            for part in want:
                # Threads may flush subnormal scales to zero, whose integers are zero anyway.
                normal = np.where(np.abs(want[part]) < np.finfo(np.float32).tiny, 0, want[part])
                assert (np.where(normal == 0, 0, found[part]) == normal).all(), (kernel.name, name, part)


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("codec", KINDS)
def test_quantised_x_is_within_half_a_step(codec, digits):
    for x in X.values():
        x, codec_ = np.resize(x, (9, 256)).astype(np.float32), codec_of(codec)
        made = quantised(x, codec_, digits)
        again, step = dequantised(made["x"], made["x_scales"], digits), np.repeat(made["x_scales"], codec_.unit(digits), axis=1)
        # x times the inverse of a step, which is rounded, may be off by a few units in the last place.
        assert (np.abs(again - x) <= (0.5001 + MAX_INTEGER[digits] * 2.0**-23) * step + 1e-30).all()
        sums = again.reshape(9, -1, codec_.group).sum(axis=2)
        if "x_sums" in made:
            np.testing.assert_allclose(made["x_sums"], sums, rtol=1e-5, atol=1e-6 * np.abs(x).max())


# A table with negative entries; units of 128 elements; bits of one: the same matmul for any number of tokens, on every CPU.
SAME = (
    "q4_0",
    "q4_k",
    "q5_k",
    "q6_k",
    "q8_0",
    "q3_k",
    "q1_0",
    "tq2_0",
    "iq4_xs",
    "mxfp4",
    "uint8_64_f16",
    "int4_128_f16",
    "uint4_32_f16",
    "uint4_128_f32",
    "int8_64_bf16",
)
TOKENS = (1, 2, 5, 8, 20)


def results_on(target: str, directory) -> dict[tuple[str, int], np.ndarray]:
    """Return y of every row of one x, by codec and number of tokens in a call."""
    isa, found = ISAS[resolve(target).isa], {}
    cases = {(c, t): Case(Matmul(c, t, 40, 512, glu="silu", numerics="int24")) for c in SAME for t in TOKENS}
    kernels = {key: kernel_of(case.matmul, isa, 2) for key, case in cases.items()}
    makers = {key: quantise_x(key[1], 512, case.matmul.format, 3, isa=isa) for key, case in cases.items() if key[1] > 1}
    unique = {kernel.name: kernel for kernel in [*kernels.values(), *makers.values()]}
    runner = Runner(runnable(list(unique.values()), target, directory), 2)
    rows = np.random.default_rng(3).standard_normal((20, 512)).astype(np.float32)
    for (codec, tokens), case in cases.items():
        parts = [rows[i : i + tokens] for i in range(0, len(rows), tokens)]
        parts = [np.concatenate([part, rows[: tokens - len(part)]]) for part in parts]
        key, packed = (codec, tokens), case.packed()
        made = [runner(makers[key], source=part) if tokens > 1 else {"x": part} for part in parts]
        found[key] = np.concatenate([runner(kernels[key], **each, weight=packed)["y"] for each in made])[: len(rows)]
    return found


def test_bits_depend_on_neither_tokens_nor_the_cpu(tmp_path):
    every = {}
    for target in ("x86-64-v3", "x86-64-v4", "x86-64-v4-vnni"):
        if not missing_features(resolve(target)):
            (tmp_path / target).mkdir()
            every[target] = results_on(target, tmp_path / target)
    first = next(iter(every.values()))
    for target, found in every.items():
        for (codec, tokens), y in found.items():
            assert (y == first[codec, 1]).all(), f"{codec} with {tokens} tokens on {target}"
