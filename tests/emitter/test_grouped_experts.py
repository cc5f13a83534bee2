"""Products of experts whose pairs come together: against their definition, and bit for bit a GEMM with each expert's weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.choosing import default_tiles, kernel_of
from castiron.emitter.kernels.products.grouped import LEAST, GroupedBytesTiles, GroupedTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.weights.panel import units
from castiron.emitter.kernels.writing.isa import AVX2, ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import Case, Experts, check_pairs, draw, expert_cases, run_all

BLOCKED = [name for name, codec in CODECS.items() if codec.quantised]
SMALL, SMALL_BYTES = GroupedTiles(4, 1, 1, 32, 12, 8, 5, 2, 2, 4), GroupedBytesTiles(4, 1, 1, 32, 12, 5, 2, 2, 4)


def drawn(codec: str, numerics: str) -> list[Case]:
    """One product with the default tiles, two with small ones, which make small kernels."""
    small = SMALL_BYTES if numerics == "bytes" else replace(SMALL, depth=4 * units(codec))
    cases = draw(expert_cases(codec, st.integers(1, 5), [18, 36, 66], numerics=numerics), 3)
    shared = lambda case: case.product.epilogue.row_blocks
    return cases[:1] + [replace(case, tiles=replace(small, row_blocks=shared(case))) for case in cases[1:]]


# One of every kind of records.
CASES = [
    *(case for codec in ("bf16", "q4_1", "q6_k") for case in drawn(codec, "exact")),
    *(case for codec in ("q4_k", "q6_k", "q8_0") for case in drawn(codec, "bytes")),
    # several panels and a shallower last one; more workgroups than there is work
    Experts(Product("q4_1", 96, 80, 1120, experts=3, length=True), GroupedTiles(6, 1, 5, 32, 36, 8, 7, 2, 3, 3)),
    Experts(Product("q4_0", 16, 16, 32, experts=5, per_row=4, length=True), replace(SMALL, workgroups=40)),
]
# Of 80 pairs that are no padding one expert has more than are computed without a panel.
EACH = [
    Experts(Product(codec, 160, 40, 256, experts=3, per_row=2, length=True, numerics=numerics))
    for codec, numerics in (("q4_k", "exact"), ("bf16", "exact"), ("q4_1", "bytes"), ("q6_k", "bytes"))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("grouped_experts")


def test_host_matches_the_definition(directory):
    check_pairs(run_all(CASES, "host", 2, directory))


@pytest.mark.parametrize(("target", "cases"), [("host", EACH), ("x86-64-v3", EACH), ("aarch64", EACH[::2])])
def test_default_tiles_of_every_lane_width_match_the_definition(directory, target, cases):
    check_pairs(run_all(cases, target, 2, directory))


def test_a_pair_has_the_bits_of_a_gemm_with_its_experts_weight_whatever_came_with_it(directory):
    isa = ISAS[resolve("host").isa]
    alone = {case: kernel_of(replace(case.product, tokens=9, experts=0, per_row=1, length=False), isa) for case in EACH}
    compile_kernels(list(alone.values()), directory / "alone.vmfb", "host")
    runner = Runner(directory / "alone.vmfb", 1)
    for case, given, y, _ in run_all(EACH, "host", 2, directory):
        for pair in range(0, 2 * int(given["length"]), 3):
            x = {
                name: np.repeat(given[name][pair // 2][None], 9, axis=0)
                for name in ("x", "x_scales", "x_sums")
                if name in given
            }
            want = runner(alone[case], **x, weight=case.of(given["chosen"][pair]).packed())["y"]
            assert np.array_equal(y[pair], want[0]), f"{case}, pair {pair}"


def test_pairs_come_together_where_they_are_many_to_an_expert():
    names = [kernel_of(Product("q4_1", pairs, 16, 64, experts=8), AVX2).name for pairs in (8 * LEAST - 1, 8 * LEAST)]
    assert [name.split("_")[0] for name in names] == ["gemv", "grouped"]


@pytest.mark.parametrize("isa", ISAS.values(), ids=str)
@pytest.mark.parametrize("numerics", ["exact", "bytes"])
def test_default_tiles_fit(numerics, isa):
    for codec in BLOCKED if numerics == "bytes" else CODECS:
        for experts, pairs in (2, 8), (8, 256), (32, 512), (128, 8192), (512, 4096):
            for out, inner in ((16, 256), (24, 4096), (2048, 768)):
                for glu in (None, "silu"):
                    product = Product(codec, pairs, out, inner, experts=experts, glu=glu, numerics=numerics)
                    assert default_tiles(product, isa).fit(product)
