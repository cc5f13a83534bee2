"""Matmuls and their tiles: names, operands, tile records, and the kernels that a lowering selects."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import pytest

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.matmul.schedule import GemmTiles, SmallBatchTiles
from castiron.emitter.kernels.matmul.selection import default_tiles, kernel_of, read_tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import AMX, AVX2, ISAS, NEON
from tests.emitter.linear_cases import QUANTISED

GEMV = Matmul("q4_1", 1, 64, 96, rms_eps=1e-5)
FEW = Matmul("q4_1", 5, 64, 96, length=True)
GEMM = replace(FEW, tokens=12)
VARIED = [
    *(replace(matmul, **change)
      for matmul in (GEMV, FEW, GEMM)
      for change in ({"codec": "q8_0"}, {"out_features": 80}, {"in_features": 64}, {"bias": True}, {"residual": True},
                     {"glu": "silu"}, {"glu": "gelu"})),
    GEMV, FEW, GEMM, replace(GEMV, rms_eps=1e-6), replace(GEMV, rms_eps=None), replace(GEMM, tokens=13),
    replace(GEMM, length=False), replace(FEW, length=False), replace(FEW, tokens=4),
]  # fmt: skip


def test_operands_have_the_same_order_for_all_fusions():
    order = ["x", "norm", "weight", "chosen", "bias", "residual", "length"]
    experts = Matmul("q4_1", 4, 64, 96, experts=3, per_row=2, length=True)
    for matmul in [*VARIED, experts]:
        names = list(matmul.operands())
        assert names == [name for name in order if name in names] and names == list(kernel_of(matmul, AVX2).operands)
    assert list(experts.operands()) == ["x", "weight", "chosen", "length"]


def test_every_option_is_in_the_name_and_reaches_the_kernel():
    assert len({matmul.name for matmul in VARIED}) == len(VARIED)
    kernels = [kernel_of(matmul, AVX2) for matmul in VARIED]
    assert len({kernel.name for kernel in kernels}) == len(VARIED)
    for matmul, kernel in zip(VARIED, kernels, strict=True):
        assert kernel.matmul == matmul
        assert kernel.results["y"].shape == (matmul.tokens, matmul.out_features)


@pytest.mark.parametrize("matmul", VARIED, ids=lambda matmul: matmul.name)
def test_a_kernel_has_the_default_tiles_unless_others_are_given(matmul):
    default = default_tiles(matmul, NEON, 4)
    other = replace(default, workgroups=default.workgroups + 1)
    assert default.name in kernel_of(matmul, NEON, 4).name
    assert other.name in kernel_of(matmul, NEON, 4, other).name
    assert read_tiles(matmul, asdict(other)) == other


SHAPES = [(tokens, 0) for tokens in (2, 4, 7, 9, 16, 17, 128, 2048)]  # tokens, experts
EXPERTS = [(8, 2), (256, 8), (512, 32), (8192, 128), (4096, 512)]
FITTING = {  # numerics: codecs, tokens and experts, instruction sets
    "f32": (CODECS, SHAPES + EXPERTS, ISAS.values()),
    "int8": (QUANTISED, SHAPES + EXPERTS, ISAS.values()),
    "int24": (QUANTISED, SHAPES + EXPERTS, ISAS.values()),
    "bf16_split": (CODECS, SHAPES[1:], [AMX]),
    "bf16_matrix": (CODECS, SHAPES[1:], [AMX]),
    "bf16_pairs": (CODECS, SHAPES, [AMX]),
}


@pytest.mark.parametrize(("numerics", "isa"), [(name, isa) for name, row in FITTING.items() for isa in row[2]], ids=str)
def test_default_tiles_fit_the_stack_and_the_registers(numerics, isa):
    codecs, shapes, _ = FITTING[numerics]
    sizes = (16, 256), (24, 4096), (576, 1536), (49152, 768)
    for codec, (tokens, experts), (out, inner), glu in product(codecs, shapes, sizes, (None, "silu")):
        matmul = Matmul(codec, tokens, out, inner, glu=glu, experts=experts, numerics=numerics)
        tiles = default_tiles(matmul, isa)
        assert tiles.fit(matmul), matmul.name
        if isinstance(tiles, GemmTiles):
            assert (tiles.rows + 1) * tiles.wide * 16 // isa.lanes + 1 <= isa.registers
        if isinstance(tiles, SmallBatchTiles):
            assert tiles.rows * tiles.vectors + tiles.vectors + 2 <= isa.registers


@pytest.mark.parametrize("change", [{"unroll": 2.0}, {"unroll": True}, {"unroll": "2"}, {"speed": 9}])
def test_rejects_tiles_that_are_not_integers_by_field_name(change):
    values = asdict(default_tiles(GEMM, AVX2, 2))
    with pytest.raises(ValueError, match="invalid tiles of matmul .*; give integers for workgroups"):
        read_tiles(GEMM, values | change)
    for matmul in GEMV, FEW:
        with pytest.raises(ValueError, match=f"invalid tiles of matmul {matmul.name}: .*; give integers for workgroups"):
            read_tiles(matmul, values)
