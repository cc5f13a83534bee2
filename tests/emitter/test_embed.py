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
    return [
        embed(codec, VOCAB, SIZES[codec], None, isa=isa),
        embed(codec, VOCAB, SIZES[codec], 9, isa=isa, scale=24.0, length=True),
    ]


def compiled_for(target: str, directory, codecs=CODECS) -> tuple[dict, Path]:
    kernels = {codec: kernels_of(codec, ISAS[resolve(target).isa]) for codec in codecs}
    return kernels, runnable([k for pair in kernels.values() for k in pair], target, directory)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_for("host", tmp_path_factory.mktemp("embed"))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_bit_equal_to_the_dequantised_ones(compiled, threads):
    check(*compiled, threads)


@pytest.mark.parametrize("target", ["x86-64-v4", "aarch64"])
def test_other_targets_compile_and_their_kernels_give_the_same(target, tmp_path):
    check(*compiled_for(target, tmp_path, ("bf16", "q4_1", "q5_k", "q8_0")), 2)


def check(kernels: dict, path: Path, threads: int) -> None:
    runner, rng = Runner(path, threads), np.random.default_rng(1)
    for codec, (one, many) in kernels.items():
        raw = raw_rows(codec, VOCAB, SIZES[codec], 3)
        packed, rows = pack(codec, raw).view(np.int8), dequantise(codec, raw)
        for token in (0, 17, VOCAB - 1):
            (y,) = runner(one, np.int32(token), packed)
            np.testing.assert_array_equal(y, rows[[token]])
            np.testing.assert_array_equal(one.reference(np.int32(token), packed)[0], rows[[token]])
        ids = rng.integers(0, VOCAB, 9, dtype=np.int32)
        (y,) = runner(many, ids, packed, np.int32(4))
        np.testing.assert_array_equal(y[:4], rows[ids[:4]] * np.float32(24))
        assert not y[4:].any()
        np.testing.assert_array_equal(many.reference(ids, packed, np.int32(4))[0], y)


def test_ids_outside_the_vocabulary_read_nothing_outside_the_weight(compiled):
    kernels, path = compiled
    one, _ = kernels["q8_0"]
    raw = raw_rows("q8_0", VOCAB, SIZES["q8_0"], 3)
    runner, packed, rows = Runner(path), pack("q8_0", raw).view(np.int8), dequantise("q8_0", raw)
    for token, row in ((-1, 0), (-(2**31), 0), (VOCAB, VOCAB - 1), (2**31 - 1, VOCAB - 1)):
        np.testing.assert_array_equal(runner(one, np.int32(token), packed)[0], rows[[row]])
