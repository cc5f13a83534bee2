"""Norm kernels against their definition: odd sizes and padding."""

from __future__ import annotations

from functools import partial

import numpy as np

from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.norm import norm
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


def test_kernels_match_the_definition(directory, target):
    found = kernels(target)
    runner = Runner(runnable(found, target, directory), 2)
    for kernel in found:
        for length in {1, 3, kernel.tensors["x"].shape[0]}:
            given = arguments(kernel, length, length)
            got, want = runner(kernel, **given)["y"], kernel.reference(**given)["y"]
            assert np.array_equal(got == 0, want == 0), f"{kernel.name}: padding is not zero"
            limit = UNIT * (8 * np.abs(want) + 8)
            assert (np.abs(got.astype(np.float64) - want) <= limit).all(), kernel.name


def test_large_means_do_not_cancel():
    """A mean of 1000 with a deviation of 1 adds no error: the variance is that of the centred row."""
    kernel = norm("layer_norm", 1, 64, EPS, isa=ISAS["avx2"])
    x = (np.random.default_rng(0).standard_normal((1, 64)) + 1000).astype(np.float32)
    got = kernel.reference(x=x, weight=np.ones(64, np.float32))["y"]
    assert abs(float(got.std()) - 1) < 1e-4
