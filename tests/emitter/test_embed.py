"""The embedding kernel returns exactly the dequantised rows of the checkpoint."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.embed import embed
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.weights.packing import pack
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

VOCAB = 50
SIZES = {codec: 512 if CODECS[codec].block > 32 else 288 if CODECS[codec].quantised else 301 for codec in CODECS}
SOME = ("bf16", "q4_1", "q5_k", "q8_0", "q3_k", "iq4_xs", "mxfp4", "tq2_0")


@pytest.mark.parametrize("target", ["host", "x86-64-v4", "aarch64"])
def test_kernels_return_the_dequantised_rows(directory, target):
    """Ids outside the vocabulary are clamped."""
    isa = ISAS[resolve(target).isa]
    cases = list(product(CODECS if target == "host" else SOME, (1, 9)))
    kernels, plain = ([embed(codec, VOCAB, SIZES[codec], T, isa=each) for codec, T in cases] for each in (isa, isa.plain))
    runner, rng = Runner(runnable(kernels, target, directory, plain), 2), np.random.default_rng(1)
    for (codec, T), kernel in zip(cases, kernels, strict=True):
        raw = raw_rows(codec, VOCAB, SIZES[codec], 3)
        packed, rows = pack(codec, raw).view(np.int8), dequantise(codec, raw)
        for special in (VOCAB - 1, VOCAB, 2**31 - 1, -1, -(2**31)):
            ids = np.append(rng.integers(0, VOCAB, T - 1), special).astype(np.int32)
            y = runner(kernel, ids=ids, weight=packed)["y"]
            np.testing.assert_array_equal(y, rows[np.clip(ids, 0, VOCAB - 1)])
            np.testing.assert_array_equal(kernel.reference(ids=ids, weight=packed)["y"], y)
