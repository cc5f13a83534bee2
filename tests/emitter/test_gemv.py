"""GEMV against its NumPy definition: codecs x fusions x ragged shapes, targets, threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.gemv import GemvTiles, gemv
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, NEON
from tests.emitter.linear_cases import EVERY_WAY, Case, cases, check, draw, run_all

DRAWN = [case for codec in CODECS for case in draw(cases(codec, st.just(1), 90, "rms_eps", "bias", "residual", "glu"), 3)]
EVERYTHING = Product("q8_0", 1, 1000, 256, rms_eps=1e-5, bias=True, residual=True, glu="silu")
WIDE = [
    # x does not fit on the stack: sums are kept between its parts, in every kind of record
    Case(Product("q4_1", 1, 40, 8192, rms_eps=1e-5)),
    Case(Product("q5_k", 1, 17, 7168, glu="gelu")),
    Case(Product("f16", 1, 20, 9001, residual=True)),
    # and of more rows than may wait at once
    Case(Product("q8_0", 1, 1100, 7168), GemvTiles(workgroups=1)),
    # more workgroups than one, unequal shares
    Case(EVERYTHING),
    Case(Product("q4_0", 1, 300, 96), GemvTiles(workgroups=7, chains=3, ahead=2)),
]
# activations away from zero, where their terms tell
WIDE += [Case(Product("f32", 1, 48, 3000, glu=activation)) for activation in ACTIVATIONS]
EACH = [Case(replace(EVERYTHING, codec=codec, out_features=33, in_features=512)) for codec in EVERY_WAY]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemv")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(DRAWN + WIDE, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(run_all(EACH, target, 2, directory))


def test_text_differs_where_names_differ():
    kernels = [case.kernel(isa) for case in DRAWN + WIDE + EACH for isa in (AVX2, AVX512, NEON)]
    texts = {}
    for kernel in kernels:
        assert texts.setdefault(kernel.name, kernel.text) == kernel.text


def test_a_pair_of_blocks_ends_at_the_last_one():
    """Of an odd number, where a store past the end of y would show in no result."""
    clamped = {n: "minsi" in gemv(Product("q8_0", 1, 16 * n, 32), AVX2, GemvTiles(1)).text for n in (1, 2, 3, 4, 5)}
    assert clamped == {1: False, 2: False, 3: True, 4: False, 5: True}


@pytest.mark.parametrize("change", [{"workgroups": 0}, {"together": 0}, {"chains": -1}, {"ahead": 0}, {"unroll": 2.0}], ids=str)
def test_tiles_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="tiles .* do not fit q4_1_1x64x576: see GemvTiles"):
        gemv(Product("q4_1", 1, 64, 576), AVX2, replace(GemvTiles(2), **change))


def test_a_glu_has_its_two_row_blocks_together_or_in_turn():
    with pytest.raises(ValueError, match="tiles .* do not fit"):
        gemv(Product("q4_1", 1, 64, 576, glu="silu"), AVX2, GemvTiles(2, together=3))
