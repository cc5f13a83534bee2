"""GEMV against its NumPy definition: codecs x fusions x ragged shapes, targets, threads."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.gemv import GemvTiles, gemv
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, NEON
from tests.emitter.linear_cases import Case, check, draw, in_features, run_all


def cases_of(codec: str) -> st.SearchStrategy[Case]:
    options = st.fixed_dictionaries(
        {},
        optional={
            "rms_eps": st.sampled_from([1e-5, 1e-6]),
            "bias": st.just(True),
            "residual": st.just(True),
            "glu": st.sampled_from(list(ACTIVATIONS)),
        },
    )
    sizes = st.tuples(st.integers(1, 90), in_features(codec))
    return st.builds(Case, st.just(gemv), st.just(codec), sizes, options, st.integers(0, 1000))


DRAWN = [case for codec in CODECS for case in draw(cases_of(codec), 3)]
EVERYTHING = {"rms_eps": 1e-5, "bias": True, "residual": True, "glu": "silu"}
WIDE = [
    # x does not fit on the stack: sums are kept between its parts, in every kind of record
    Case(gemv, "q4_1", (40, 8192), {"rms_eps": 1e-5}),
    Case(gemv, "q5_k", (17, 7168), {"glu": "gelu"}),
    Case(gemv, "f16", (20, 9001), {"residual": True}),
    # and of more rows than may wait at once
    Case(gemv, "q8_0", (1100, 7168), {"tiles": GemvTiles(workgroups=1)}),
    # more workgroups than one, unequal shares
    Case(gemv, "q8_0", (1000, 256), EVERYTHING),
    Case(gemv, "q4_0", (300, 96), {"tiles": GemvTiles(workgroups=7, chains=3, ahead=2)}),
]
# activations away from zero, where their terms tell
WIDE += [Case(gemv, "f32", (48, 3000), {"glu": activation}) for activation in ACTIVATIONS]
EACH = [Case(gemv, codec, (33, 512), EVERYTHING) for codec in CODECS]


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
    clamped = {blocks: "minsi" in gemv("q8_0", 16 * blocks, 32, isa=AVX2).text for blocks in (1, 2, 3, 4, 5)}
    assert clamped == {1: False, 2: False, 3: True, 4: False, 5: True}


def test_wrong_options_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="activation 'relu' is unknown: use one of silu, gelu_tanh, gelu"):
        gemv("q4_1", 16, 32, isa=AVX2, glu="relu")
    with pytest.raises(ValueError, match="q4_1 row has 33 elements"):
        gemv("q4_1", 16, 33, isa=AVX2)
