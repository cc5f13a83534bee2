"""GEMM against its NumPy definition: codecs x fusions x ragged shapes and lengths, targets, threads."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.gemm import GemmTiles, default_tiles, gemm
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, ISAS, NEON
from tests.emitter.linear_cases import Case, check, draw, in_features, run_all


def cases_of(codec: str) -> st.SearchStrategy[Case]:
    options = st.fixed_dictionaries(
        {},
        optional={
            "bias": st.just(True),
            "residual": st.just(True),
            "length": st.just(True),
            "glu": st.sampled_from(list(ACTIVATIONS)),
        },
    )
    sizes = st.tuples(st.integers(1, 40), st.integers(1, 70), in_features(codec))
    return st.builds(Case, st.just(gemm), st.just(codec), sizes, options, st.integers(0, 1000))


DRAWN = [case for codec in CODECS for case in draw(cases_of(codec), 2)]
EVERYTHING = {"bias": True, "residual": True, "glu": "silu", "length": True}
LARGE = [
    # several panels and a shallower last one, several blocks of tokens and a smaller last tile
    Case(gemm, "q4_1", (200, 80, 608), {"length": True}),
    Case(gemm, "bf16", (130, 33, 777), {"glu": "gelu"}),
    Case(gemm, "q8_0", (50, 96, 320), {"tiles": GemmTiles(4, 1, blocks=2, depth=96, tokens=20, unroll=3, workgroups=5)}),
    Case(gemm, "q6_k", (13, 64, 512), {"tiles": GemmTiles(rows=3, wide=2, blocks=2, depth=48, tokens=6, unroll=8)}),
]
EACH = [Case(gemm, codec, (19, 40, 512), EVERYTHING) for codec in CODECS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemm")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(DRAWN + LARGE, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(run_all(EACH, target, 2, directory))


@pytest.mark.parametrize("isa", ISAS.values(), ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_default_tiles_fit_the_stack_and_the_registers(codec, isa):
    for T in (1, 7, 16, 128, 2048):
        for out, inner in ((16, 256), (24, 4096), (49152, 768)):
            for blocks in (1, 2):
                tiles = default_tiles(codec, T, out, inner, isa, blocks)
                sums = tiles.rows * tiles.wide * 16 // isa.lanes
                assert tiles.stack_bytes <= 30 << 10
                assert sums + tiles.wide * 16 // isa.lanes + 1 <= isa.registers


def test_text_differs_where_names_differ():
    texts = {}
    for case in DRAWN + LARGE + EACH:
        for isa in (AVX2, AVX512, NEON):
            kernel = case.kernel(isa)
            assert texts.setdefault(kernel.name, kernel.text) == kernel.text


@pytest.mark.parametrize(
    "tiles",
    [
        GemmTiles(rows=6, wide=1, blocks=1, depth=48, tokens=12),
        GemmTiles(rows=6, wide=1, blocks=1, depth=64, tokens=13),
        GemmTiles(rows=6, wide=2, blocks=1, depth=64, tokens=12),
        GemmTiles(rows=6, wide=1, blocks=2, depth=64, tokens=12),
        GemmTiles(rows=6, wide=1, blocks=1, depth=512, tokens=12),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles):
    with pytest.raises(ValueError, match="tiles .* do not fit"):
        gemm("q4_1", 12, 16 * 3, 576, isa=AVX2, tiles=tiles)
