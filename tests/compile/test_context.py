"""One bundle serves every context up to the model's limit, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import castiron
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine.memory import needed
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.run.session import Session, SessionError
from tests.support.tiny_gguf import write_llama

FEW = {"batch": (2,), "verify_widths": (), "prefill": (8,), "threads": 1}
PROMPT = list(range(1, 12))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("context") / "tiny.gguf")


def bundle_with(checkpoint, folder, **options):
    return open_bundle(compile_model(checkpoint, folder, Options(**FEW | options)).bundle)


def logits(bundle) -> np.ndarray:
    session = Session(bundle, 1)
    session.prefill(PROMPT)
    return session.logits()


def test_a_bundle_has_the_positions_that_the_model_allows(checkpoint, tmp_path):
    bundle = bundle_with(checkpoint, tmp_path / "out", context=16)
    limit = bundle.manifest.max_context
    assert (bundle.manifest.context, limit) == (16, bundle.manifest.config["max_position_embeddings"])
    longer = bundle.with_context(limit)
    assert Session(longer, 1).context == limit and longer.path == bundle.path
    assert needed(longer.manifest).state == needed(bundle.manifest).state * limit // 16
    with pytest.raises(SessionError, match="past the context of 16; shorten the prompt or give a larger --context"):
        Session(bundle, 1).prefill([1] * 17)
    Session(longer, 1).prefill([1] * 17)
    for wrong in (0, limit + 1):
        with pytest.raises(BundleError, match=f"^--context is {wrong}; tiny supports 1 to {limit} positions$"):
            bundle.with_context(wrong)


def test_bits_do_not_depend_on_the_context(checkpoint, tmp_path):
    bundle = bundle_with(checkpoint, tmp_path / "out", context=16)
    small = bundle_with(checkpoint, tmp_path / "small", max_context=16)
    assert small.manifest.max_context == small.manifest.context == 16
    expected = logits(small).tobytes()
    assert logits(bundle).tobytes() == logits(bundle.with_context(bundle.manifest.max_context)).tobytes() == expected


def test_a_new_default_context_compiles_and_packs_nothing_new(checkpoint, tmp_path):
    texts = []
    for context in (16, 32):
        bundle = bundle_with(checkpoint, tmp_path / "out", context=context)
        texts.append((bundle.manifest.compile["text_sha256"], (bundle.path / "weights.irpa").stat().st_ino))
    assert texts[0] == texts[1]


def test_python_loads_a_model_with_a_context(checkpoint, own_cache):
    with castiron.load(checkpoint, context=24, **FEW) as model:
        assert model.context == 24
        tokens = model.generate(PROMPT, max_tokens=None, stop_tokens=()).tokens
        # The last token needs no position.
        assert len(tokens) == 24 - len(PROMPT) + 1
    with castiron.load(checkpoint, **FEW) as model:
        assert model.context > 24
        assert model.generate(PROMPT, max_tokens=8, stop_tokens=()).tokens == tokens[:8]
