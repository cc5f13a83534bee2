"""Matmuls with x and weights in one bf16, or in several, which are as exact as f32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.matmul.schedule import GemmBf16Tiles, GemmMatrixTiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.split_x import EXACT, joined, nearest, split, split_x
from castiron.vmfb.targets import resolve
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import FUSED, Case, cases, check, run_all

DRAWN = [("bf16_split", codec) for codec in CODECS] + [("bf16_matrix", codec) for codec in ("q5_1", "q6_k", "f16", "bf16")]
MATRIX = [
    case for numerics, codec in DRAWN for case in draw(cases(codec, st.integers(4, 15), 70, *FUSED, numerics=numerics), 1)
] + [
    # several panels and a shallower last one, several blocks of tokens and a last tile with rows past x
    Case(Matmul("q4_1", 150, 48, 608, length=True, numerics="bf16_split")),
    Case(Matmul("q6_k", 70, 32, 512, numerics="bf16_split"), GemmMatrixTiles(16, 2, 2, 64, 32, high=2, workgroups=3)),
    Case(Matmul("q6_k", 20, 32, 1024, numerics="bf16_split"), GemmMatrixTiles(16, 2, 2, 512, 32, high=1)),
    Case(Matmul("f32", 37, 64, 129, glu="silu", numerics="bf16_split"), GemmMatrixTiles(16, 2, 2, 32, 16, high=1)),
    Case(Matmul("bf16", 21, 48, 71, bias=True, numerics="bf16_matrix"), GemmMatrixTiles(16, 1, 3, 32, 32, high=2)),
    Case(Matmul("q4_k", 33, 64, 256, numerics="bf16_matrix")),
]
PAIRS = draw(cases("bf16", st.integers(2, 40), 70, *FUSED, numerics="bf16_pairs"), 8) + [
    Case(Matmul("bf16", 150, 48, 601, length=True, numerics="bf16_pairs")),
    Case(Matmul("f16", 150, 48, 601, length=True, numerics="bf16_pairs")),
    Case(Matmul("f32", 19, 40, 65, glu="silu", numerics="bf16_pairs")),
    Case(Matmul("e4m3_128_f32", 150, 40, 1280, length=True, numerics="bf16_pairs")),
    Case(Matmul("bf16", 13, 64, 129, glu="gelu_tanh", numerics="bf16_pairs"), GemmBf16Tiles(5, 1, 2, depth=64, tokens=13)),
]


def test_matrix_matches_the_definition(directory):
    check(run_all(MATRIX, "sapphirerapids", 2, directory))


@pytest.mark.parametrize("target", ["x86-64-v4-bf16", "aarch64-i8mm"])
def test_pairs_match_the_definition(directory, target):
    check(run_all(PAIRS, target, 2, directory))


@pytest.mark.parametrize("codec", ["q4_1", "q8_0", "f32"])
def test_a_split_is_as_exact_as_f32(tmp_path, codec):
    """The mean square error against f64 is at most that of the kernels that multiply f32."""
    errors = {}
    for numerics, target in (("bf16_split", "sapphirerapids"), ("f32", "host")):
        case = Case(Matmul(codec, 16, 64, 2048, numerics=numerics))
        ((_, _, y, want),) = run_all([case], target, 1, tmp_path)
        errors[numerics] = np.sqrt(((y - want) ** 2).mean()) / want.std()
    assert 0 < errors["bf16_split"] <= errors["f32"] < 3e-6, errors


X = np.random.default_rng(9).standard_normal((19, 101)).astype(np.float32) * np.where(np.arange(101) % 17, 1, 300)
SPLIT = [(3, 96, 32), (3, 64, 16), (3, 101, 0), (1, 101, 0)]


@pytest.mark.parametrize("target", ["sapphirerapids", "x86-64-v4-bf16", "x86-64-v3", "aarch64"])
def test_x_is_split_as_defined(tmp_path, target):
    kernels = {case: split_x(19, case[1], case[0], case[2], isa=ISAS[resolve(target).isa]) for case in SPLIT}
    runner = Runner(runnable(list(kernels.values()), target, tmp_path), 2)
    for (_, width, group), kernel in kernels.items():
        x = X[:, :width].astype(np.float32)
        found, want = runner(kernel, x=x), kernel.reference(x=x)
        assert (found["y"] == want["y"]).all()
        if group:
            np.testing.assert_allclose(found["sums"], want["sums"], atol=2e-7 * np.abs(x).sum(axis=1).max())


def test_three_bf16_are_x_and_one_is_the_nearest():
    assert (joined(split(X.astype(np.float32), EXACT), *X.shape) == X.astype(np.float32)).all()
    step = 2.0 ** (np.floor(np.log2(np.abs(X))) - 7)
    assert (np.abs(joined(split(X.astype(np.float32), 1), *X.shape) - X) <= step / 2).all()
    ties = np.array([1 + 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 - 2.0**-23], np.float32)
    assert nearest(ties).tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1]
