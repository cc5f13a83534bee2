"""GEMV of chosen experts: against its definition, and bit for bit a GEMV with each expert's own weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.choosing import kernel_of
from castiron.emitter.kernels.products.gemv import GemvTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import AVX2, ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import EVERY_WAY, Experts, check_pairs, draw, expert_cases, run_all

CASES = [case for codec in CODECS for case in draw(expert_cases(codec, st.integers(3, 5), [6]), 2)] + [
    # x on the stack in parts, and shares of unequal size
    Experts(Product("q4_1", 4, 40, 8192, experts=3, per_row=2)),
    Experts(Product("q8_0", 3, 300, 96, experts=2, glu="silu"), GemvTiles(workgroups=3)),
]
EACH = [Experts(Product(codec, 4, 33, 512, experts=3, per_row=2, glu="silu", length=True)) for codec in EVERY_WAY]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemv_experts")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check_pairs(run_all(CASES, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check_pairs(run_all(EACH, target, 2, directory))


def test_a_pair_has_the_bits_of_a_product_with_its_experts_weight(directory):
    isa = ISAS[resolve("host").isa]
    alone = {case: case.of(0).kernel(isa) for case in EACH}
    compile_kernels(list(alone.values()), directory / "alone.vmfb", "host")
    runner = Runner(directory / "alone.vmfb", 1)
    for case, given, y, _ in run_all(EACH, "host", 2, directory):
        for pair in range(2 * int(given["length"])):
            x, weight = given["x"][pair // 2][None], case.of(given["chosen"][pair]).packed()
            want = runner(alone[case], x=x, weight=weight)["y"]
            assert np.array_equal(y[pair], want[0]), f"{case}, pair {pair}"


def test_only_chosen_experts_are_read():
    """What a kernel says of its bytes, which `explain` and `bench` report."""
    few, many = (kernel_of(Product("q4_1", pairs, 16, 64, experts=64), AVX2) for pairs in (2, 4))
    assert many.bytes - few.bytes == 2 * (16 * 64 * 20 // 32 + 4 * (64 + 16) + 4)
    assert few.flops == 2 * 2 * 16 * 64
