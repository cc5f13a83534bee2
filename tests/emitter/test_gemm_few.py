"""The product for a few tokens against its NumPy definition: codecs x fusions x ragged shapes and lengths, targets."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.gemm_few import FewTiles, default_tiles, gemm_few
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import AVX2, AVX512, ISAS, NEON
from tests.emitter.linear_cases import EVERY_WAY, Case, cases, check, draw, run_all

DRAWN = [
    case for codec in CODECS for case in draw(cases(codec, st.integers(2, 8), 100, "bias", "residual", "length", "glu"), 3)
]
LARGE = [
    # x in several parts, the last one shorter; batches of sets, the last one shorter, in few workgroups
    Case(Product("q4_1", 8, 400, 1568), FewTiles(4, 2, workgroups=1)),
    Case(Product("q5_1", 7, 250, 2080, length=True), FewTiles(4, 2, workgroups=2)),
    Case(Product("q6_k", 8, 300, 2304, glu="silu"), FewTiles(3, 2, workgroups=2)),
    # tiles across blocks, whose last set is filled up
    Case(Product("q8_0", 6, 112, 320), FewTiles(3, 3, workgroups=3)),
    Case(Product("bf16", 5, 80, 77, residual=True), FewTiles(2, 3, workgroups=2, unroll=3)),
]
EACH = [Case(Product(codec, 7, 40, 512, bias=True, residual=True, glu="silu", length=True)) for codec in EVERY_WAY]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemm_few")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(DRAWN + LARGE, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(run_all(EACH, target, 2, directory))


@pytest.mark.parametrize("isa", ISAS.values(), ids=str)
@pytest.mark.parametrize("T", range(2, 9))
def test_default_tiles_fit_the_registers(T, isa):
    tiles = default_tiles(Product("q4_1", T, 576, 1536), isa)
    assert tiles.rows * tiles.vectors + tiles.vectors + 2 <= isa.registers


def test_text_differs_where_names_differ():
    texts = {}
    for case in DRAWN + LARGE + EACH:
        for isa in (AVX2, AVX512, NEON):
            kernel = case.kernel(isa)
            assert texts.setdefault(kernel.name, kernel.text) == kernel.text


@pytest.mark.parametrize("tiles", [FewTiles(5, 2, 1), FewTiles(0, 2, 1), FewTiles(4, 0, 1), FewTiles(4, 2, 0)], ids=str)
def test_tiles_that_do_not_fit_are_refused(tiles):
    with pytest.raises(ValueError, match="tiles .* do not fit"):
        gemm_few(Product("q4_1", 4, 64, 576), AVX2, tiles)
