"""A bundle whose products go through a matrix unit, in the plain form of its instructions, answers as one without."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from castiron.emitter.kernels.writing import isa
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.vmfb import targets
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.pipelines import tiny_gguf

TYPES = gguf.GGMLQuantizationType
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Codes with minima, bf16, f16 and f32: each kind of panel there is."""
    matrices = [(n, a) for n, a in tiny_gguf.llama_tensors().items() if a.ndim == 2 and a.shape[-1] % 32 == 0]
    stored = [TYPES.Q4_1, TYPES.BF16, TYPES.F16, TYPES.F32, TYPES.Q8_0]
    tensors = {name: (0.1 * array, stored[i % len(stored)]) for i, (name, array) in enumerate(matrices)}
    return tiny_gguf.write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", tensors=tensors)


@pytest.fixture
def on_matrix_units(monkeypatch):
    """This CPU as one with AMX."""
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
