"""Matmuls with x in int8 against their NumPy definition, with every instruction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.fixed_point import GROUP
from castiron.emitter.kernels.matmul.gemm_int8 import GemmInt8Tiles, SmallBatchInt8Tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.round_x import of_bytes, round_x, rounded
from castiron.vmfb.targets import resolve
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import EVERY_WAY, FUSED, QUANTISED, Case, cases, check, run_all

TARGETS = ["x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni", "aarch64", "aarch64-i8mm"]
DRAWN = [case for codec in QUANTISED for case in draw(cases(codec, st.integers(2, 40), 100, *FUSED, numerics="int8"), 2)]
SHAPED = [
    # several panels and a shallower last one, several blocks of tokens and a smaller last tile
    Case(Matmul("q4_1", 200, 80, 1120, length=True, numerics="int8")),
    Case(Matmul("q8_0", 50, 96, 320, numerics="int8"), GemmInt8Tiles(4, 1, 2, depth=96, tokens=20, workgroups=5)),
    Case(Matmul("q6_k", 13, 64, 512, numerics="int8"), GemmInt8Tiles(3, 2, 2, depth=96, tokens=6)),
    Case(Matmul("q4_k", 7, 64, 512, glu="silu", numerics="int8"), SmallBatchInt8Tiles(3, workgroups=3)),
    Case(Matmul("q5_1", 5, 64, 64, numerics="int8"), SmallBatchInt8Tiles(2, workgroups=1)),
    # one token, as in decode_step
    Case(Matmul("q4_0", 1, 50, 96, bias=True, residual=True, numerics="int8")),
    Case(Matmul("q4_1", 1, 50, 96, glu="silu", numerics="int8")),
]
# A codec for each kind of sums.
KINDS = ("q4_1", "q8_0", "q6_k")
EACH = [
    Case(Matmul(codec, tokens, 24, 256, bias=True, residual=True, glu=glu, length=True, numerics="int8"))
    for i, codec in enumerate(codec for codec in EVERY_WAY if codec in QUANTISED)
    for tokens, glu in ((7, None if i % 2 else "silu"), (19, "silu" if i % 2 else None))
]


def test_host_matches_the_definition(directory):
    check(run_all(DRAWN + SHAPED, "host", 2, directory))


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
def test_x_is_rounded_as_defined(tmp_path, target):
    kernels = [round_x(9, 96, CODECS[codec], isa=ISAS[resolve(target).isa]) for codec in KINDS]
    runner = Runner(runnable(kernels, target, tmp_path), 2)
    for kernel in kernels:
        for name, x in X.items():
            x = x.astype(np.float32)
            found, want = runner(kernel, x=x), kernel.reference(x=x)
            assert (found["y"] == want["y"]).all(), name
            np.testing.assert_allclose(found["scales"], want["scales"], rtol=3e-7, atol=1e-37)
            np.testing.assert_allclose(found["sums"], want["sums"], rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("codec", KINDS)
def test_rounded_x_is_within_half_a_step(codec):
    for x in X.values():
        x, group = x.astype(np.float32), CODECS[codec].group
        made = rounded(x, CODECS[codec])
        again, step = of_bytes(made["y"], made["scales"]), np.repeat(made["scales"], GROUP, axis=1)
        assert (np.abs(again - x) <= 0.5001 * step + 1e-30).all()
        sums = made["sums"] * (1 if CODECS[codec].minimum else np.repeat(made["scales"], GROUP // group, axis=1))
        np.testing.assert_allclose(again.reshape(9, -1, group).sum(axis=2), sums, rtol=1e-5, atol=1e-6 * np.abs(x).max())
