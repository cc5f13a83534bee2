"""Products of bytes against their NumPy definition, by every instruction: codecs x fusions x ragged shapes and lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.choosing import default_tiles
from castiron.emitter.kernels.products.few_bytes import FewBytesTiles
from castiron.emitter.kernels.products.gemm_bytes import GemmBytesTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.round_x import round_x
from castiron.emitter.kernels.weights.x_bytes import of_bytes, rounded
from castiron.emitter.kernels.writing.body import STACK_BYTES
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.emitter.rounding import GROUP
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import EVERY_WAY, Case, cases, check, draw, run_all

BLOCKED = [name for name, codec in CODECS.items() if codec.quantised]
TARGETS = ["x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni", "aarch64", "aarch64-i8mm"]
FUSED = ("bias", "residual", "length", "glu")


def bytes_of(codec: str, tokens: st.SearchStrategy[int], most_out: int) -> st.SearchStrategy[Case]:
    numbered = cases(codec, tokens, most_out, *FUSED)
    return numbered.map(lambda case: Case(Product(**{**vars(case.product), "numerics": "bytes"}), seed=case.seed))


DRAWN = [case for codec in BLOCKED for case in draw(bytes_of(codec, st.integers(2, 40), 100), 2)]
SHAPED = [
    # several panels and a shallower last one, several blocks of tokens and a smaller last tile
    Case(Product("q4_1", 200, 80, 1120, length=True, numerics="bytes")),
    Case(Product("q8_0", 50, 96, 320, numerics="bytes"), GemmBytesTiles(4, 1, 2, depth=96, tokens=20, workgroups=5)),
    Case(Product("q6_k", 13, 64, 512, numerics="bytes"), GemmBytesTiles(3, 2, 2, depth=96, tokens=6)),
    Case(Product("q4_k", 7, 64, 512, glu="silu", numerics="bytes"), FewBytesTiles(3, workgroups=3)),
    Case(Product("q5_1", 5, 64, 64, numerics="bytes"), FewBytesTiles(2, workgroups=1)),
]
# One of every kind of sums.
KINDS = ("q4_1", "q8_0", "q6_k")
EACH = [
    Case(Product(codec, tokens, 24, 256, bias=True, residual=True, glu=glu, length=True, numerics="bytes"))
    for i, codec in enumerate(codec for codec in EVERY_WAY if codec in BLOCKED)
    for tokens, glu in ((7, None if i % 2 else "silu"), (19, "silu" if i % 2 else None))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("bytes")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(DRAWN + SHAPED, "host", threads, directory))


@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_matches_the_definition(directory, target):
    # What takes codes apart is that of `aarch64`: one of every kind of sums, and one of a table, are enough.
    codecs = (*KINDS, "iq4_xs") if target == "aarch64-i8mm" else BLOCKED
    check(run_all([case for case in EACH if case.product.codec in codecs], target, 2, directory))


@pytest.mark.parametrize("isa", ISAS.values(), ids=str)
@pytest.mark.parametrize("codec", BLOCKED)
def test_default_tiles_fit(codec, isa):
    for T in (2, 7, 9, 16, 128, 2048):
        for out, inner in ((16, 256), (24, 4096), (49152, 768)):
            for glu in (None, "silu"):
                product = Product(codec, T, out, inner, glu=glu, numerics="bytes")
                tiles = default_tiles(product, isa)
                assert tiles.fit(product)
                if isinstance(tiles, GemmBytesTiles):
                    assert tiles.stack_bytes(product) <= STACK_BYTES


X = {
    "normal": np.random.default_rng(5).standard_normal((9, 96)),
    "outliers": np.random.default_rng(6).standard_normal((9, 96)) * np.where(np.arange(96) % 17, 1, 300),
    # ties, zeros, values next to zero, and groups of one sign
    "ties": np.tile(np.arange(-48, 48) / 2, (9, 1)) * np.array([[0, 1, 2.5, 127, 1e-38, 1e-32, 1e30, -1, 1e-9]]).T,
}


@pytest.mark.parametrize("target", TARGETS)
def test_x_is_rounded_as_defined(directory, target):
    kernels = [round_x(9, 96, CODECS[codec], isa=ISAS[resolve(target).isa]) for codec in KINDS]
    (directory / "x").mkdir(exist_ok=True)
    runner = Runner(runnable(kernels, target, directory / "x"), 2)
    for kernel in kernels:
        for name, x in X.items():
            x = x.astype(np.float32)
            found, want = runner(kernel, x=x), kernel.reference(x=x)
            assert (found["y"] == want["y"]).all(), name
            np.testing.assert_allclose(found["scales"], want["scales"], rtol=3e-7, atol=1e-37)
            np.testing.assert_allclose(found["sums"], want["sums"], rtol=3e-6, atol=1e-37)


@pytest.mark.parametrize("codec", KINDS)
def test_rounded_x_is_within_half_a_step(codec):
    for x in X.values():
        x, group = x.astype(np.float32), CODECS[codec].group
        made = rounded(x, CODECS[codec])
        again, step = of_bytes(made["y"], made["scales"]), np.repeat(made["scales"], GROUP, axis=1)
        assert (np.abs(again - x) <= 0.5001 * step + 1e-30).all()
        sums = made["sums"] * (1 if CODECS[codec].minimum else np.repeat(made["scales"], GROUP // group, axis=1))
        np.testing.assert_allclose(again.reshape(9, -1, group).sum(axis=2), sums, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.parametrize(
    "product",
    [{"tokens": 1}, {"tokens": 4, "codec": "bf16"}, {"tokens": 4, "codec": "bf16", "experts": 2}],
    ids=["one token", "bf16", "experts of bf16"],
)
def test_what_has_no_kernel_is_refused(product):
    with pytest.raises(ValueError, match="no kernel takes bytes"):
        Product(**{"codec": "q4_0", "out_features": 16, "in_features": 32, "numerics": "bytes", **product})
