"""Matmuls with experts against their definition and a matmul with the expert's weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS, codec_of
from castiron.emitter.kernels.matmul.schedule import GemvTiles, GroupedIntegerTiles, GroupedTiles
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul_spec import MIN_PAIRS, Matmul
from castiron.emitter.kernels.mlir.isa import AVX2, ISAS
from castiron.emitter.kernels.weights.panel import units
from castiron.vmfb.targets import resolve
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import EVERY_WAY, Case, Experts, check_pairs, expert_cases, run_all

GEMVS = [case for codec in CODECS for case in draw(expert_cases(codec, st.integers(3, 5), [6]), 2)] + [
    # x on the stack in parts, and shares of unequal size
    Experts(Matmul("q4_1", 4, 40, 8192, experts=3, per_row=2)),
    Experts(Matmul("q8_0", 3, 300, 96, experts=2, glu="silu"), GemvTiles(workgroups=3)),
]
SMALL, SMALL_INTEGER = (
    GroupedTiles(4, 1, 1, 32, 12, 8, 2, 2, 4, workgroups=5),
    GroupedIntegerTiles(4, 1, 1, 32, 12, 2, 2, 4, workgroups=5),
)


def drawn(codec: str, numerics: str) -> list[Case]:
    """Return a matmul with the default tiles, and two with small tiles, which make small kernels."""
    small = replace(SMALL, depth=4 * units(codec))
    if numerics.startswith("int"):
        small = replace(SMALL_INTEGER, depth=codec_of(codec).unit(3))
    cases = draw(expert_cases(codec, st.integers(1, 5), [18, 36, 66], numerics=numerics), 3)
    shared = lambda case: case.matmul.blocks_per_result
    return cases[:1] + [replace(case, tiles=replace(small, row_blocks=shared(case))) for case in cases[1:]]


X_OPERANDS = ("x", "x_scales", "x_sums", "x_integer_sums")
# One of every kind of records.
GROUPED = [
    *(case for codec in ("bf16", "q4_1", "q6_k") for case in drawn(codec, "f32")),
    *(case for codec in ("q4_k", "q6_k", "q8_0") for case in drawn(codec, "int8")),
    *(case for codec in ("q4_k", "q6_k", "q8_0", "int4_128_f16") for case in drawn(codec, "int24")),
    # several panels and a shallower last one; more workgroups than there is work
    Experts(Matmul("q4_1", 96, 80, 1120, experts=3, length=True), GroupedTiles(6, 1, 5, 32, 36, 8, 2, 3, 3, workgroups=7)),
    Experts(Matmul("q4_0", 16, 16, 32, experts=5, per_row=4, length=True), replace(SMALL, workgroups=40)),
]
EACH_GEMV = [Experts(Matmul(codec, 4, 33, 512, experts=3, per_row=2, glu="silu", length=True)) for codec in EVERY_WAY]
# Of the 80 pairs that are not padding, one expert has more than `direct`, and so uses a panel.
EACH_GROUPED = [
    Experts(Matmul(codec, 160, 40, 256, experts=3, per_row=2, length=True, numerics=numerics))
    for codec, numerics in (("q4_k", "f32"), ("bf16", "f32"), ("q4_1", "int8"), ("q6_k", "int8"), ("q4_k", "int24"))
]


@pytest.mark.parametrize("cases", [GEMVS, GROUPED], ids=["gemv", "grouped"])
def test_host_matches_the_definition(tmp_path, cases):
    check_pairs(run_all(cases, "host", 2, tmp_path))


@pytest.mark.parametrize("cases", [EACH_GEMV, EACH_GROUPED], ids=["gemv", "grouped"])
def test_kernels_match_the_definition(tmp_path, target, cases):
    check_pairs(run_all(cases, target, 2, tmp_path))


@pytest.mark.parametrize(("cases", "tokens"), [(EACH_GEMV, 1), (EACH_GROUPED, 9)], ids=["gemv", "grouped"])
def test_a_pair_has_the_bits_of_a_matmul_with_its_experts_weight(tmp_path, cases, tokens):
    """Whatever other pairs the call has."""
    isa = ISAS[resolve("host").isa]
    single = {case: kernel_of(replace(case.matmul, tokens=tokens, experts=0, per_row=1, length=False), isa) for case in cases}
    runner = Runner(compile_kernels(list(single.values()), tmp_path / "single.vmfb"), 1)
    for case, given, y, _ in run_all(cases, "host", 2, tmp_path):
        for pair in range(0, 2 * int(given["length"]), 1 if tokens == 1 else 3):
            rows = {name: given[name][pair // 2][None] for name in X_OPERANDS if name in given}
            x = {name: np.repeat(row, tokens, axis=0) for name, row in rows.items()}
            want = runner(single[case], **x, weight=case.of(given["chosen"][pair]).packed())["y"]
            assert np.array_equal(y[pair], want[0]), f"{case}, pair {pair}"


def test_pairs_are_grouped_if_there_are_many_for_each_expert():
    names = [kernel_of(Matmul("q4_1", pairs, 16, 64, experts=8), AVX2).name for pairs in (8 * MIN_PAIRS - 1, 8 * MIN_PAIRS)]
    assert [name.split("_")[0] for name in names] == ["gemv", "grouped"]


def test_the_cost_counts_only_the_weights_of_chosen_experts():
    few, many = (kernel_of(Matmul("q4_1", pairs, 16, 64, experts=64), AVX2) for pairs in (2, 4))
    assert many.nbytes - few.nbytes == 2 * (16 * 64 * 20 // 32 + 4 * (64 + 16) + 4)
    assert few.flops == 2 * 2 * 16 * 64
