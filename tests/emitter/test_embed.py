"""Rows of the embedding are exactly the weights that the checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.embed import embed
from castiron.emitter.kernels.weights.packing import pack
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.vmfb.targets import resolve
from tests.emitter.kernel_runner import Runner, runnable
from tests.emitter.linear_cases import raw_rows

VOCAB = 50
SIZES = {codec: 512 if CODECS[codec].block == 256 else 288 if CODECS[codec].quantised else 301 for codec in CODECS}


def kernels_of(codec: str, isa) -> list:
    return [embed(codec, VOCAB, SIZES[codec], T, isa=isa) for T in (1, 9)]


def compiled_for(target: str, directory, codecs=CODECS) -> tuple[dict, Path]:
    isa = ISAS[resolve(target).isa]
    kernels, plain = ({codec: kernels_of(codec, each) for codec in codecs} for each in (isa, isa.plain))
    every, plainly = ([k for pair in found.values() for k in pair] for found in (kernels, plain))
    return kernels, runnable(every, target, directory, plainly)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_for("host", tmp_path_factory.mktemp("embed"))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_bit_equal_to_the_dequantised_ones(compiled, threads):
    check(*compiled, threads)


@pytest.mark.parametrize("target", ["x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_give_the_same(target, tmp_path):
    check(*compiled_for(target, tmp_path, ("bf16", "q4_1", "q5_k", "q8_0", "q3_k", "iq4_xs", "mxfp4", "tq2_0")), 2)


def check(kernels: dict, path: Path, threads: int) -> None:
    runner, rng = Runner(path, threads), np.random.default_rng(1)
    for codec, (one, many) in kernels.items():
        raw = raw_rows(codec, VOCAB, SIZES[codec], 3)
        packed, rows = pack(codec, raw).view(np.int8), dequantise(codec, raw)
        for kernel in (one, many):
            (T,) = kernel.tensors["ids"].shape
            ids = np.append(rng.integers(0, VOCAB, T - 1), VOCAB - 1).astype(np.int32)
            y = runner(kernel, ids=ids, weight=packed)["y"]
            np.testing.assert_array_equal(y, rows[ids])
            np.testing.assert_array_equal(kernel.reference(ids=ids, weight=packed)["y"], y)


def test_ids_outside_the_vocabulary_read_nothing_outside_the_weight(compiled):
    kernels, path = compiled
    one, _ = kernels["q8_0"]
    raw = raw_rows("q8_0", VOCAB, SIZES["q8_0"], 3)
    runner, packed, rows = Runner(path), pack("q8_0", raw).view(np.int8), dequantise("q8_0", raw)
    for token, row in ((-1, 0), (-(2**31), 0), (VOCAB, VOCAB - 1), (2**31 - 1, VOCAB - 1)):
        np.testing.assert_array_equal(runner(one, ids=np.array([token], np.int32), weight=packed)["y"], rows[[row]])
