"""Argmax against NumPy's: ties, infinities, NaN, maxima at every border of blocks, threads, targets."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.kernels.argmax import argmax
from castiron.emitter.kernels.writing.isa import AVX2, ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable

VOCABS = [1, 5, 97, 512, 1000, 1024 + 64, 32001, 49152]


def kernels(target: str) -> list:
    isa = ISAS[resolve(target).isa]
    return [argmax(vocab, isa=isa, rows=rows) for vocab in VOCABS for rows in (None, 1, 3)]


def logits(vocab: int) -> list[np.ndarray]:
    """Rows of logits, each a way to be wrong."""
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
    for place in {0, 1, 7, 8, 511, 512, 513, vocab // 2, vocab - 2, vocab - 1}:
        if 0 <= place < vocab:
            row = np.full(vocab, -3.5, np.float32)
            row[place:] = -1.25
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("argmax")


def check(target: str, threads: int, directory) -> None:
    found = kernels(target)
    runner = Runner(runnable(found, target, directory), threads)
    for kernel in found:
        shape = kernel.tensors["logits"].shape
        rows = np.array(logits(shape[-1]))
        for i in range(len(rows)):
            given = rows[i] if len(shape) == 1 else np.roll(rows, -i, axis=0)[: shape[0]]
            got, want = runner(kernel, logits=given)["index"], kernel.reference(logits=given)["index"]
            assert np.array_equal(got, want), f"{kernel.name}, row {i}: {got}, not {want}"


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    check("host", threads, directory)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_match_the_definition(directory, target):
    check(target, 2, directory)


def test_definition_prefers_the_lowest_index_and_never_nan():
    reference = argmax(4, isa=AVX2).reference
    assert reference(np.array([1, 3, 3, 2], np.float32))["index"] == 1
    assert reference(np.array([np.nan, -7, np.nan, -7], np.float32))["index"] == 1
