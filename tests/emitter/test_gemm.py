"""GEMM against its NumPy definition: codecs x fusions x ragged shapes and lengths, targets, threads."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.gemm import GemmTiles, default_tiles, gemm
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.body import STACK_BYTES, Body
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, ISAS, NEON
from tests.emitter.linear_cases import EVERY_WAY, Case, cases, check, draw, run_all

DRAWN = [
    case for codec in CODECS for case in draw(cases(codec, st.integers(9, 40), 70, "bias", "residual", "length", "glu"), 2)
]
LARGE = [
    # several panels and a shallower last one, several blocks of tokens and a smaller last tile
    Case(Product("q4_1", 200, 80, 608, length=True)),
    Case(Product("bf16", 130, 33, 777, glu="gelu")),
    Case(Product("q8_0", 50, 96, 320), GemmTiles(4, 1, row_blocks=2, depth=96, tokens=20, unroll=3, workgroups=5)),
    Case(Product("q6_k", 13, 64, 512), GemmTiles(rows=3, wide=2, row_blocks=2, depth=48, tokens=6, unroll=8)),
]
EACH = [Case(Product(codec, 19, 40, 512, bias=True, residual=True, glu="silu", length=True)) for codec in EVERY_WAY]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemm")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(DRAWN + LARGE, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(run_all(EACH, target, 2, directory))


@pytest.mark.parametrize("count, workgroups", [(18, 12), (30, 12), (96, 12), (5, 5), (7, 3), (1, 1)])
def test_shares_are_whole_and_the_larger_ones_come_first(count, workgroups):
    shares = [Body().share(count, n, workgroups) for n in range(workgroups)]
    assert [low for low, _ in shares] == [0, *(high for _, high in shares[:-1])] and shares[-1][1] == count
    sizes = [high - low for low, high in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("isa", ISAS.values(), ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_default_tiles_fit_the_stack_and_the_registers(codec, isa):
    for T in (9, 16, 128, 2048):
        for out, inner in ((16, 256), (24, 4096), (49152, 768)):
            for glu in (None, "silu"):
                tiles = default_tiles(Product(codec, T, out, inner, glu=glu), isa)
                sums = tiles.rows * tiles.wide * 16 // isa.lanes
                assert tiles.stack_bytes <= STACK_BYTES
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
        GemmTiles(rows=6, wide=1, row_blocks=1, depth=48, tokens=12),
        GemmTiles(rows=6, wide=1, row_blocks=1, depth=64, tokens=13),
        GemmTiles(rows=6, wide=2, row_blocks=1, depth=64, tokens=12),
        GemmTiles(rows=6, wide=1, row_blocks=2, depth=64, tokens=12),
        GemmTiles(rows=6, wide=1, row_blocks=1, depth=512, tokens=12),
        GemmTiles(rows=0, wide=1, row_blocks=1, depth=64, tokens=12),
        GemmTiles(rows=6, wide=1, row_blocks=1, depth=64, tokens=12, unroll=0),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles):
    with pytest.raises(ValueError, match="tiles .* do not fit"):
        gemm(Product("q4_1", 12, 16 * 3, 576), AVX2, tiles)
