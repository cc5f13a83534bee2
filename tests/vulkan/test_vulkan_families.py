"""Every family in one shape on a Vulkan device: HF's greedy tokens."""

from __future__ import annotations

import os

import numpy as np
import pytest

from castiron.emitter.models import FAMILIES
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.reference import hf
from castiron.vmfb.run.session import Session
from tests.emitter.family_harness import LENGTH, pair, prompt
from tests.emitter.test_models import SHAPES

# A KV cache, a window, experts, and each kind of recurrent layer.
COMMON = ("llama", "gemma3_text", "gpt_oss", "falcon_h1", "qwen3_5_moe_text")
CHOSEN = sorted(SHAPES) if os.environ.get("CASTIRON_VULKAN") == "all" else COMMON


def test_the_table_has_every_generating_family():
    assert set(SHAPES) <= set(FAMILIES)


@pytest.mark.parametrize("family", CHOSEN)
def test_greedy_tokens_are_those_of_hf(family, tmp_path):
    made = pair(family, tmp_path / "checkpoint", **SHAPES[family][0])
    options = Options(context=64, prefill=(16,), batch=(), verify_widths=(), target="vulkan")
    session = Session(compile_model(made.checkpoint.path, tmp_path / "bundle", options).bundle)
    tokens = prompt(session.vocab)
    wanted = hf.greedy(made.oracle, tokens[:-12], 12)
    found = [session.prefill(tokens[:-12])]
    while len(found) < 12:
        found.append(session.step(found[-1]))
    assert found == wanted.tokens, min(wanted.margins)
    # The logits of given tokens, so that a repeated token hides nothing.
    session.rewind(0)
    session.prefill(tokens)
    expected = hf.logits(made.oracle, tokens)[LENGTH - 1]
    assert np.abs(session.logits() - expected).max() < 1e-4 * np.abs(expected).max()
