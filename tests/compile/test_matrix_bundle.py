"""A bundle for a CPU with matrix instructions, in their plain form, gives the same logits as another."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from castiron.emitter.kernels.mlir import isa
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.vmfb import targets
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.support import tiny_gguf

TYPES = gguf.GGMLQuantizationType
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model with each kind of packed panel: codecs with minima and without, bf16, f16 and f32."""
    matrices = [(n, a) for n, a in tiny_gguf.llama_tensors().items() if a.ndim == 2 and a.shape[-1] % 32 == 0]
    stored = [TYPES.Q4_1, TYPES.BF16, TYPES.F16, TYPES.F32, TYPES.Q8_0]
    tensors = {name: (0.1 * array, stored[i % len(stored)]) for i, (name, array) in enumerate(matrices)}
    return tiny_gguf.write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", tensors=tensors)


@pytest.fixture
def on_matrix_units(monkeypatch):
    """Let the host be a CPU with AMX."""
    monkeypatch.setitem(isa.ISAS, "amx", isa.AMX.plain)
    monkeypatch.setitem(targets.TARGETS, "host", replace(targets.TARGETS["host"], isa="amx"))


def logits(bundle) -> np.ndarray:
    session = Session(bundle, 2)
    found = []
    session.prefill(PROMPT)
    found.append(np.array(session.logits()))
    for token in PROMPT[:3]:
        session.step(token)
        found.append(np.array(session.logits()))
    return np.stack(found)


@pytest.mark.usefixtures("on_matrix_units")
def test_a_bundle_on_matrix_units_gives_the_logits_of_others(checkpoint, tmp_path, monkeypatch):
    options = Options(context=16, batch=(4,), speculate=())
    matrix = open_bundle(compile_model(checkpoint, tmp_path / "matrix", options).bundle)
    arithmetic = matrix.manifest.compile["arithmetic"]
    assert list(arithmetic) == ["x in exact pieces of bf16 by plain"] and arithmetic.popitem()[1] > 5
    monkeypatch.undo()
    exact = open_bundle(compile_model(checkpoint, tmp_path / "exact", options).bundle)
    found, want = logits(matrix), logits(exact)
    assert not exact.manifest.compile["arithmetic"] or exact.manifest.target.isa == "amx"
    assert 0 < np.abs(found - want).max() < 2e-5 * np.abs(want).max()
    assert (found.argmax(axis=1) == want.argmax(axis=1)).all()
