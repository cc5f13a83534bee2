"""Norms against their definition and torch's: odd sizes, padding, threads, targets."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.norm import norm
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

UNIT = 2.0**-24
SIZES = [(1, 576), (1, 97), (13, 640), (13, 20), (4, 2048)]
EPS = 1e-5


def kernels(target: str) -> list[Kernel]:
    isa = ISAS[resolve(target).isa]
    makers = [partial(norm, "rms_norm"), partial(norm, "layer_norm", bias=True), partial(norm, "layer_norm")]
    return [
        maker(T, hidden, EPS, isa=isa, length=length) for T, hidden in SIZES for maker in makers for length in {False, T > 1}
    ]


def arguments(kernel: Kernel, seed: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: np.int32(length) if name == "length" else rng.standard_normal(t.shape).astype(np.float32)
        for name, t in kernel.tensors.items()
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("norm")


def check(target: str, threads: int, directory) -> None:
    found = kernels(target)
    runner = Runner(runnable(found, target, directory), threads)
    for kernel in found:
        for length in {1, 3, kernel.tensors["x"].shape[0]}:
            given = arguments(kernel, length, length)
            got, want = runner(kernel, **given)["y"], kernel.reference(**given)["y"]
            assert np.array_equal(got == 0, want == 0), f"{kernel.name}: padding is not zero"
            limit = UNIT * (8 * np.abs(want) + 8)
            assert (np.abs(got.astype(np.float64) - want) <= limit).all(), kernel.name


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check("host", threads, directory)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(target, 2, directory)


def test_definitions_are_those_of_torch():
    isa = ISAS["avx2"]
    given = arguments(norm("layer_norm", 5, 48, EPS, isa=isa, bias=True), 0, 0)
    tensors = [torch.from_numpy(given[name]) for name in ("x", "weight", "bias")]
    want = torch.nn.functional.layer_norm(tensors[0], (48,), *tensors[1:], eps=EPS).numpy()
    np.testing.assert_allclose(norm("layer_norm", 5, 48, EPS, isa=isa, bias=True).reference(**given)["y"], want, atol=2e-6)
    del given["bias"]
    want = torch.nn.functional.rms_norm(tensors[0], (48,), tensors[1], eps=EPS).numpy()
    np.testing.assert_allclose(norm("rms_norm", 5, 48, EPS, isa=isa).reference(**given)["y"], want, atol=2e-6)


def test_large_means_do_not_cancel():
    """The variance is that of the centred row: a mean of 1000 over a spread of 1 costs no more than the input's rounding."""
    kernel = norm("layer_norm", 1, 64, EPS, isa=ISAS["avx2"])
    x = (np.random.default_rng(0).standard_normal((1, 64)) + 1000).astype(np.float32)
    got = kernel.reference(x=x, weight=np.ones(64, np.float32))["y"]
    assert abs(float(got.std()) - 1) < 1e-4
