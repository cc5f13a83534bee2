"""Products and their tiles: which kernel a lowering takes when it is told."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from castiron.emitter.kernels.products.choosing import default_tiles, kernel_of, read_tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import AVX2, NEON
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from tests.emitter.test_lowering import CONFIG, CONTEXT

GEMV = Product("q4_1", 1, 64, 96, rms_eps=1e-5)
FEW = Product("q4_1", 5, 64, 96, length=True)
GEMM = replace(FEW, tokens=12)
VARIED = [
    *(replace(product, **change)
      for product in (GEMV, FEW, GEMM)
      for change in ({"codec": "q8_0"}, {"out_features": 80}, {"in_features": 64}, {"bias": True}, {"residual": True},
                     {"glu": "silu"}, {"glu": "gelu"})),
    GEMV, FEW, GEMM, replace(GEMV, rms_eps=1e-6), replace(GEMV, rms_eps=None), replace(GEMM, tokens=13),
    replace(GEMM, length=False), replace(FEW, length=False), replace(FEW, tokens=4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"glu": "relu"}, "activation 'relu' is unknown: use one of silu, gelu_tanh, gelu"),
        ({"in_features": 33}, "q4_1 row has 33 elements"),
        ({"numerics": "s8"}, "numerics 's8' are unknown: use exact"),
        ({"rms_eps": None, "tokens": 5, "experts": 4, "per_row": 2}, "has 5 pairs, of which each row of x cannot have 2"),
        ({"tokens": 2}, "no kernel fuses rms_eps with 2 tokens"),
        ({"length": True}, "no kernel fuses length with 1 tokens"),
        ({"rms_eps": None, "experts": 4, "bias": True}, "no kernel fuses bias with 1 tokens and 4 experts"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        replace(GEMV, **change)


def test_operands_stand_in_one_order_whatever_is_fused():
    order = ["x", "norm", "weight", "chosen", "bias", "residual", "length"]
    experts = Product("q4_1", 4, 64, 96, experts=3, per_row=2, length=True)
    for product in [*VARIED, experts]:
        names = list(product.operands())
        assert names == [name for name in order if name in names] and names == list(kernel_of(product, AVX2).operands)
    assert list(experts.operands()) == ["x", "weight", "chosen", "length"]


def test_every_option_is_in_the_name_and_reaches_the_kernel():
    assert len({product.name for product in VARIED}) == len(VARIED)
    kernels = [kernel_of(product, AVX2) for product in VARIED]
    assert len({kernel.name for kernel in kernels}) == len(VARIED)
    for product, kernel in zip(VARIED, kernels, strict=True):
        assert kernel.product == product
        assert kernel.results["y"].shape == (product.tokens, product.out_features)


@pytest.mark.parametrize("product", VARIED, ids=lambda product: product.name)
def test_a_kernel_has_the_default_tiles_unless_others_are_given(product):
    default = default_tiles(product, NEON, 4)
    other = replace(default, workgroups=default.workgroups + 1)
    assert default.name in kernel_of(product, NEON, 4).name
    assert other.name in kernel_of(product, NEON, 4, other).name
    assert read_tiles(product, asdict(other)) == other


@pytest.mark.parametrize("change", [{"unroll": 2.0}, {"unroll": True}, {"unroll": "2"}, {"speed": 9}])
def test_tiles_are_whole_numbers_by_the_names_of_their_fields(change):
    values = asdict(default_tiles(GEMM, AVX2, 2))
    with pytest.raises(ValueError, match="GemmTiles"):
        read_tiles(GEMM, values | change)
    for product, kind in (GEMV, "GemvTiles"), (FEW, "FewTiles"):
        with pytest.raises(ValueError, match=kind):
            read_tiles(product, values)


def test_a_lowering_takes_the_tiles_given_and_otherwise_the_default_for_the_threads():
    model = build({**CONFIG, "intermediate_size": 512}, lambda name: "q4_1", CONTEXT, [8])

    def products(threads, tiles):
        module = lower(model, threads=threads, tiles=tiles.get)
        calls = [op.attrs["kernel"] for f in module.functions.values() for op in f.ops if op.kind == "kernel"]
        return {kernel.product: kernel for kernel in calls if kernel.product}

    defaults = products(4, {})
    assert {product.tokens for product in defaults} == {1, 8}
    chosen = {product: replace(default_tiles(product, AVX2, 4), unroll=3) for product in list(defaults)[::2]}
    found = products(4, chosen)
    assert set(found) == set(defaults) and 0 < len(chosen) < len(found)
    for product, kernel in found.items():
        assert kernel.name == kernel_of(product, AVX2, 4, chosen.get(product)).name
        assert (kernel.name == defaults[product].name) == (product not in chosen)
    assert any(kernel.name != defaults[product].name for product, kernel in products(1, {}).items())
