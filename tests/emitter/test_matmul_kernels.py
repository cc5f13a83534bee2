"""GEMV, small-batch and GEMM kernels against their NumPy definitions, with every codec."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.matmul.schedule import GemmTiles, GemvTiles, SmallBatchTiles
from castiron.emitter.kernels.matmul.selection import kernel_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.body import Body
from castiron.emitter.kernels.mlir.isa import AVX2, AVX512, NEON
from tests.emitter.drawing import draw
from tests.emitter.kernel_runner import texts_by_name
from tests.emitter.linear_cases import EVERY_WAY, Case, cases, check, run_all

DRAWN = {  # tokens, largest out_features, options, how many of each codec
    "gemv": (st.just(1), 90, ("rms_eps", "bias", "residual", "glu"), 3),
    "small_batch": (st.integers(2, 8), 100, ("length", "bias", "residual", "glu"), 3),
    "gemm": (st.integers(9, 40), 70, ("length", "bias", "residual", "glu"), 2),
}
CHOSEN = {
    "gemv": [
        # x exceeds the stack: sums are stored between its parts, in every kind of record
        Case(Matmul("q4_1", 1, 20, 131072, rms_eps=1e-5)),
        Case(Matmul("q5_k", 1, 17, 131072, glu="gelu")),
        Case(Matmul("f16", 1, 20, 121001, residual=True)),
        # x exceeds the stack, and the rows exceed one batch of sums
        Case(Matmul("q1_0", 1, 530, 45056, rms_eps=1e-5), GemvTiles(together=1, workgroups=1)),
        # tables of sums of x in parts, with all kinds of groups, and an odd number of row blocks
        Case(Matmul("q2_0", 1, 40, 16384, glu="silu")),
        Case(Matmul("q2_k", 1, 40, 16384, bias=True), GemvTiles(together=1)),
        Case(Matmul("q3_k", 1, 40, 10240, rms_eps=1e-5)),
        Case(Matmul("tq1_0", 1, 250, 16384, residual=True), GemvTiles(together=4, workgroups=3)),
        # several workgroups with unequal shares
        Case(Matmul("q8_0", 1, 1000, 256, rms_eps=1e-5, bias=True, residual=True, glu="silu")),
        Case(Matmul("q4_0", 1, 300, 96), GemvTiles(workgroups=7, ahead=2)),
        # activations away from zero, where every term counts
        *(Case(Matmul("f32", 1, 48, 3000, glu=activation)) for activation in ACTIVATIONS),
    ],
    "small_batch": [
        # x in parts, the last one shorter; batches of sets, the last one shorter, in few workgroups
        Case(Matmul("q4_1", 8, 400, 1568), SmallBatchTiles(4, 2, workgroups=1)),
        Case(Matmul("q5_1", 7, 250, 2080, length=True), SmallBatchTiles(4, 2, workgroups=2)),
        Case(Matmul("q6_k", 8, 300, 2304, glu="silu"), SmallBatchTiles(3, 2, workgroups=2)),
        # tiles across row blocks, with padding in the last set
        Case(Matmul("q8_0", 6, 112, 320), SmallBatchTiles(3, 3, workgroups=3)),
        Case(Matmul("bf16", 5, 80, 77, residual=True), SmallBatchTiles(2, 3, workgroups=2, unroll=3)),
    ],
    "gemm": [
        # panels with a shallower last one, blocks of tokens and a smaller last tile
        Case(Matmul("q4_1", 200, 80, 608, length=True)),
        Case(Matmul("bf16", 130, 33, 777, glu="gelu")),
        Case(Matmul("q8_0", 50, 96, 320), GemmTiles(4, 1, row_blocks=2, depth=96, tokens=20, unroll=3, workgroups=5)),
        Case(Matmul("q6_k", 13, 64, 512), GemmTiles(rows=3, wide=2, row_blocks=2, depth=48, tokens=6, unroll=8)),
    ],
}
# The quick suite runs the first draw of each codec.
HOST: dict[str, list[Case]] = {}
for name, (tokens, out, fused, count) in DRAWN.items():
    first, *others = zip(*(draw(cases(codec, tokens, out, *fused), count) for codec in CODECS), strict=True)
    HOST |= {name: [*first, *CHOSEN[name]], f"{name} rest": [case for drawn in others for case in drawn]}
ALL_FUSED = {"bias": True, "residual": True, "glu": "silu"}
EACH = {
    "gemv": [Case(Matmul(codec, 1, 33, 512, rms_eps=1e-5, **ALL_FUSED)) for codec in EVERY_WAY],
    "small_batch": [Case(Matmul(codec, 7, 40, 512, length=True, **ALL_FUSED)) for codec in EVERY_WAY],
    "gemm": [Case(Matmul(codec, 19, 40, 512, length=True, **ALL_FUSED)) for codec in EVERY_WAY],
}


@pytest.mark.parametrize("name", HOST)
def test_host_matches_the_definition(name, tmp_path):
    check(run_all(HOST[name], "host", 2, tmp_path))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_kernels_match_the_definition(name, target, tmp_path):
    check(run_all(EACH[name], target, 2, tmp_path))


def test_kernels_of_one_name_have_one_text():
    cases = chain(*HOST.values(), *EACH.values())
    texts_by_name(case.kernel(isa) for case, isa in product(cases, (AVX2, AVX512, NEON)))


def test_a_pair_of_row_blocks_ends_at_the_last_one():
    """If their number is odd: no result would show a store past the end of y."""
    tiles = GemvTiles(workgroups=1)
    clamped = {n: "minsi" in kernel_of(Matmul("q8_0", 1, 16 * n, 32), AVX2, 2, tiles).text for n in (1, 2, 3, 4, 5)}
    assert clamped == {1: False, 2: False, 3: True, 4: False, 5: True}


@pytest.mark.parametrize("count, workgroups", [(18, 12), (30, 12), (96, 12), (5, 5), (7, 3), (1, 1)])
def test_shares_cover_all_items_and_the_larger_ones_come_first(count, workgroups):
    shares = [Body().share(count, n, workgroups) for n in range(workgroups)]
    assert [low for low, _ in shares] == [0, *(high for _, high in shares[:-1])] and shares[-1][1] == count
    sizes = [high - low for low, high in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


GEMV, GEMM = GemvTiles(workgroups=2), GemmTiles(rows=6, wide=1, row_blocks=1, depth=64, tokens=12)
MISFITS = [
    *((1, 64, replace(GEMV, **change)) for change in ({"workgroups": 0}, {"together": 0}, {"ahead": -1}, {"unroll": 2.0})),
    *((4, 64, tiles) for tiles in (SmallBatchTiles(5, 2), SmallBatchTiles(0, 2), SmallBatchTiles(4, 2, workgroups=0))),
    *((12, 48, replace(GEMM, **change)) for change in ({"depth": 48}, {"tokens": 13}, {"wide": 2}, {"row_blocks": 2})),
    *((12, 48, replace(GEMM, **change)) for change in ({"depth": 512}, {"rows": 0}, {"unroll": 0})),
]


@pytest.mark.parametrize("tokens, out, tiles", MISFITS, ids=str)
def test_rejects_tiles_that_do_not_fit(tokens, out, tiles):
    with pytest.raises(ValueError, match=f"invalid tiles of matmul q4_1_{tokens}x{out}x576.*; use positive integers"):
        kernel_of(Matmul("q4_1", tokens, out, 576), AVX2, 2, tiles)


@pytest.mark.parametrize(
    "blocks, glu, together", [(36, None, 3), (56, None, 4), (12, None, 3), (9496, None, 4), (2, None, 2), (112, "silu", 4)]
)
def test_row_blocks_read_together_divide_the_work_evenly(blocks, glu, together):
    """Two workgroups compute 36 row blocks as 6 sets of 3 each, because 9 sets of 4 would make one of them wait."""
    out = 16 * blocks // (2 if glu else 1)
    assert GemvTiles.default(Matmul("q4_1", 1, out, 576, glu=glu), AVX512, 2).together == together


def test_a_glu_processes_its_two_row_blocks_together_or_in_turn():
    with pytest.raises(ValueError, match="invalid tiles of matmul .*; use positive integers"):
        kernel_of(Matmul("q4_1", 1, 64, 576, glu="silu"), AVX2, 2, GemvTiles(together=3))
