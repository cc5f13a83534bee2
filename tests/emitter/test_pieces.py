"""Products of bf16 against their NumPy definition, on vector and matrix units: exact out of pieces, and rounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.choosing import default_tiles
from castiron.emitter.kernels.products.gemm_matrix import GemmMatrixTiles
from castiron.emitter.kernels.products.gemm_pairs import GemmPairsTiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.x_pieces import EXACT, joined, nearest, split
from castiron.emitter.kernels.writing.body import STACK_BYTES
from castiron.emitter.kernels.writing.isa import AMX, ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import Case, cases, check, draw, run_all

FUSED = ("bias", "residual", "length", "glu")


def of_numerics(numerics: str, codec: str, tokens: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    drawn = cases(codec, tokens, 70, *FUSED)
    return drawn.map(lambda case: Case(Product(**{**vars(case.product), "numerics": numerics}), seed=case.seed))


DRAWN = [("pieces", codec) for codec in CODECS] + [("matrix", codec) for codec in ("q5_1", "q6_k", "f16", "bf16")]
MATRIX = [case for drawn in DRAWN for case in draw(of_numerics(*drawn, st.integers(4, 15)), 1)] + [
    # several panels and a shallower last one, several blocks of tokens and a last tile with rows past x
    Case(Product("q4_1", 150, 48, 608, length=True, numerics="pieces")),
    Case(Product("q6_k", 70, 32, 512, numerics="pieces"), GemmMatrixTiles(16, 2, 2, 2, depth=96, tokens=32, workgroups=3)),
    Case(Product("f32", 37, 64, 129, glu="silu", numerics="pieces"), GemmMatrixTiles(16, 1, 2, 2, depth=32, tokens=16)),
    Case(Product("bf16", 21, 48, 71, bias=True, numerics="matrix"), GemmMatrixTiles(16, 2, 1, 3, depth=32, tokens=32)),
    Case(Product("q4_k", 33, 64, 256, numerics="matrix")),
]
PAIRS = draw(of_numerics("pairs", "bf16", st.integers(2, 40)), 8) + [
    Case(Product("bf16", 150, 48, 601, length=True, numerics="pairs")),
    Case(Product("bf16", 13, 64, 129, glu="gelu_tanh", numerics="pairs"), GemmPairsTiles(5, 1, 2, depth=64, tokens=13)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("pieces")


@pytest.mark.parametrize("threads", [1, 2])
def test_matrix_matches_the_definition(directory, threads):
    check(run_all(MATRIX, "sapphirerapids", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v4-bf16", "aarch64-i8mm"])
@pytest.mark.parametrize("threads", [1, 2])
def test_pairs_match_the_definition(directory, target, threads):
    check(run_all(PAIRS, target, threads, directory))


@pytest.mark.parametrize("codec", CODECS)
def test_default_tiles_fit(codec):
    for T in (4, 7, 16, 17, 128, 2048):
        for out, inner in ((16, 256), (24, 4096), (49152, 768)):
            for glu in (None, "silu"):
                for numerics in ("pieces", "matrix", *(["pairs"] if codec == "bf16" else [])):
                    product = Product(codec, T, out, inner, glu=glu, numerics=numerics)
                    tiles = default_tiles(product, AMX)
                    assert tiles.fit(product)
                    found = tiles.stack_bytes(product) if isinstance(tiles, GemmMatrixTiles) else tiles.stack_bytes
                    assert found <= STACK_BYTES


@pytest.mark.parametrize("codec", ["q4_1", "q8_0", "f32"])
def test_pieces_are_as_exact_as_f32(directory, codec):
    """Their mean square error against f64 is no more than that of the kernels that multiply f32."""
    errors = {}
    for numerics, target in (("pieces", "sapphirerapids"), ("exact", "host")):
        place = directory / f"{numerics}_{codec}"
        place.mkdir()
        case = Case(Product(codec, 16, 64, 2048, numerics=numerics))
        ((_, _, y, want),) = run_all([case], target, 1, place)
        errors[numerics] = np.sqrt(((y - want) ** 2).mean()) / want.std()
    assert 0 < errors["pieces"] <= errors["exact"] < 3e-6, errors


X = np.random.default_rng(9).standard_normal((19, 101)).astype(np.float32) * np.where(np.arange(101) % 17, 1, 300)
SPLIT = [(3, 96, 32), (3, 64, 16), (3, 101, 0), (1, 101, 0)]


@pytest.mark.parametrize("target", ["sapphirerapids", "x86-64-v4-bf16", "x86-64-v3", "aarch64"])
def test_x_is_split_as_defined(directory, target):
    kernels = {case: split_x(19, case[1], case[0], case[2], isa=ISAS[resolve(target).isa]) for case in SPLIT}
    (directory / "x").mkdir(exist_ok=True)
    runner = Runner(runnable(list(kernels.values()), target, directory / "x"), 2)
    for (_, width, group), kernel in kernels.items():
        x = X[:, :width].astype(np.float32)
        found, want = runner(kernel, x=x), kernel.reference(x=x)
        assert (found["y"] == want["y"]).all()
        if group:
            np.testing.assert_allclose(found["sums"], want["sums"], atol=2e-7 * np.abs(x).sum(axis=1).max())


def test_three_pieces_are_x_and_one_is_the_nearest():
    assert (joined(split(X.astype(np.float32), EXACT), *X.shape) == X.astype(np.float32)).all()
    step = 2.0 ** (np.floor(np.log2(np.abs(X))) - 7)
    assert (np.abs(joined(split(X.astype(np.float32), 1), *X.shape) - X) <= step / 2).all()
    ties = np.array([1 + 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 - 2.0**-23], np.float32)
    assert nearest(ties).tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1]
