"""The argmax kernel against NumPy's: ties, infinities, NaN, and maxima at every border of blocks."""

from __future__ import annotations

import numpy as np

from castiron.emitter.kernels.argmax import argmax
from castiron.emitter.kernels.mlir.isa import AVX2, ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

VOCABS = [1, 5, 97, 512, 1000, 1024 + 64, 32001, 49152]


def logits(vocab: int) -> list[np.ndarray]:
    """Return rows of logits, each with another difficulty."""
    rng = np.random.default_rng(vocab)
    ties = rng.integers(-5, 5, vocab).astype(np.float32)
    rows = [
        rng.standard_normal(vocab).astype(np.float32),
        ties,
        np.where(ties == 4, np.nan, ties).astype(np.float32),
        np.full(vocab, -np.inf, np.float32),
        np.full(vocab, np.nan, np.float32),
        np.where(np.arange(vocab) == 0, np.nan, -np.inf).astype(np.float32),
        np.where(ties == 3, np.inf, ties).astype(np.float32),
        np.zeros(vocab, np.float32) * np.where(np.arange(vocab) % 2, -1, 1).astype(np.float32),
    ]
    for first in {0, 1, 7, 8, 511, 512, 513, vocab // 2, vocab - 2, vocab - 1}:
        if 0 <= first < vocab:
            row = np.full(vocab, -3.5, np.float32)
            row[first:] = -1.25
            rows.append(row)
    return rows


def test_kernels_match_the_definition(directory, target):
    isa = ISAS[resolve(target).isa]
    kernels = [argmax(vocab, isa=isa, rows=rows) for vocab in VOCABS for rows in (None, 1, 3)]
    runner = Runner(runnable(kernels, target, directory), 2)
    for kernel in kernels:
        shape = kernel.tensors["logits"].shape
        rows = np.array(logits(shape[-1]))
        for i in range(len(rows)):
            given = rows[i] if len(shape) == 1 else np.roll(rows, -i, axis=0)[: shape[0]]
            got, want = runner(kernel, logits=given)["index"], kernel.reference(logits=given)["index"]
            assert np.array_equal(got, want), f"{kernel.name}, row {i}: {got}, not {want}"


def test_definition_prefers_the_lowest_index_and_never_nan():
    reference = argmax(4, isa=AVX2).reference
    assert reference(np.array([1, 3, 3, 2], np.float32))["index"] == 1
    assert reference(np.array([np.nan, -7, np.nan, -7], np.float32))["index"] == 1
