"""GEMV of chosen experts: against its definition, and bit for bit a GEMV with each expert's own weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from castiron.emitter.codecs import CODECS
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.experts import gemv_experts
from castiron.emitter.kernels.products.gemv import GemvTiles, gemv
from castiron.emitter.kernels.writing.isa import AVX2, ISAS
from castiron.emitter.types import I32
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, compile_kernels
from tests.emitter.linear_cases import Case, allowed_error, draw, in_features, run_all


class Experts(Case):
    """Sizes are (experts, pairs, out, in)."""

    def of(self, expert: int) -> Case:
        """The product with one expert's weight."""
        glu = {"glu": self.options["glu"]} if "glu" in self.options else {}
        tiles = {"tiles": self.options["tiles"]} if "tiles" in self.options else {}
        return Case(gemv, self.codec, self.sizes[2:], {**glu, **tiles}, self.seed + 10 * expert)

    def arguments(self, kernel) -> list[np.ndarray]:
        """Experts that several pairs chose and that none did."""
        rng = np.random.default_rng(self.seed + 7)
        experts, pairs, _, _ = self.sizes
        x = rng.standard_normal(kernel.operands[0].shape).astype(np.float32)
        packed = np.concatenate([self.of(e).packed() for e in range(experts)])
        chosen = rng.integers(0, experts, pairs, dtype=np.int32)
        chosen[0] = experts - 1
        return [x, packed, chosen, *([np.int32((len(x) + 1) // 2)] if self.options.get("length") else [])]


def cases_of(codec: str) -> st.SearchStrategy[Case]:
    options = st.fixed_dictionaries(
        {}, optional={"glu": st.sampled_from(list(ACTIVATIONS)), "length": st.just(True), "per_row": st.sampled_from([1, 2, 3])}
    )
    sizes = st.tuples(st.integers(1, 5), st.sampled_from([6, 12]), st.integers(1, 70), in_features(codec))
    return st.builds(Experts, st.just(gemv_experts), st.just(codec), sizes, options, st.integers(0, 1000))


CASES = [case for codec in CODECS for case in draw(cases_of(codec), 2)] + [
    # x on the stack in parts, and shares of unequal size
    Experts(gemv_experts, "q4_1", (3, 4, 40, 8192), {"per_row": 2}),
    Experts(gemv_experts, "q8_0", (2, 3, 300, 96), {"tiles": GemvTiles(workgroups=3), "glu": "silu"}),
]
EACH = [Experts(gemv_experts, codec, (3, 4, 33, 512), {"per_row": 2, "glu": "silu", "length": True}) for codec in CODECS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gemv_experts")


def check(rows) -> None:
    for case, (x, _, chosen, *length), (y,), (want,) in rows:
        per_row = case.options.get("per_row", 1)
        real = per_row * int(length[0]) if length else len(y)
        assert real and not y[real:].any() and not want[real:].any(), f"{case}: padding is not zero"
        for pair in range(real):
            limit = allowed_error(case.of(chosen[pair]), [x[pair // per_row][None]], want[pair][None])[0]
            assert (np.abs(y[pair].astype(np.float64) - want[pair]) <= limit).all(), f"{case}, pair {pair}"


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check(run_all(CASES, "host", threads, directory))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(run_all(EACH, target, 2, directory))


def test_a_pair_has_the_bits_of_a_product_with_its_experts_weight(directory):
    isa = ISAS[resolve("host").isa]
    alone = {case: case.of(0).kernel(isa) for case in EACH}
    compile_kernels(list(alone.values()), directory / "alone.vmfb", "host")
    runner = Runner(directory / "alone.vmfb", 1)
    for case, (x, _, chosen, length), (y,), _ in run_all(EACH, "host", 2, directory):
        for pair in range(2 * int(length)):
            (want,) = runner(alone[case], x[pair // 2][None], case.of(chosen[pair]).packed())
            assert np.array_equal(y[pair], want[0]), f"{case}, pair {pair}"


def test_only_chosen_experts_are_read():
    """What a kernel says of its bytes, which `explain` and `bench` report."""
    few, many = (gemv_experts("q4_1", 64, pairs, 16, 64, isa=AVX2) for pairs in (2, 4))
    assert many.bytes - few.bytes == 2 * (16 * 64 * 20 // 32 + 4 * (64 + 16))
    assert few.operands[2].dtype is I32 and few.flops == 2 * 2 * 16 * 64


def test_wrong_options_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="has 5 pairs, of which each row of x cannot have 2"):
        gemv_experts("q4_1", 4, 5, 16, 32, isa=AVX2, per_row=2)
    case = replace(EACH[0], options={"glu": "relu"})
    with pytest.raises(ValueError, match="activation 'relu' is unknown"):
        case.kernel(AVX2)
