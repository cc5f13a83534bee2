"""Every family through the kernels lowering, its kernels by their NumPy definitions: HF's logits again.

No family knows a kernel: what is checked here is that whatever a family writes is fused, or left alone, correctly.
"""

from __future__ import annotations

import pytest

from castiron.emitter.lowering import lower
from castiron.reference import hf
from tests.emitter.family_harness import WIDTHS, Agreement, Pair, pair, prompt
from tests.emitter.test_models import CASES, SHAPES
from tests.emitter.test_models_spoilt import EPSILON, EPSILON_KEYS


@pytest.mark.parametrize(("family", "index"), CASES, ids=[f"{family}-{index}" for family, index in CASES])
def test_the_kernels_lowering_gives_the_logits_of_hf(family, index, tmp_path):
    # The first with an epsilon that shows, wherever a norm is fused.
    epsilon = {} if index else {EPSILON_KEYS.get(family, "rms_norm_eps"): EPSILON}
    check(pair(family, tmp_path, seed=index, **SHAPES[family][index], **epsilon))


def test_heads_that_fit_no_workgroup_together_are_taken_in_parts(tmp_path):
    """Eight query heads of 512 elements to a kv head, as Gemma 4 has them; here with the sinks of each head besides."""
    models = pair("gpt_oss", tmp_path, num_hidden_layers=2, num_attention_heads=16, head_dim=512)
    decode = lower(models.layers(), "kernels").functions["decode_step"]
    names = [op.attrs["kernel"].name for op in decode.ops if op.kind == "kernel"]
    assert sum(name.startswith("attention_decode") for name in names) == 2 * 2
    check(models)


def check(models: Pair) -> None:
    tokens = prompt(models.checkpoint.config["vocab_size"], 30)
    expected = hf.logits(models.oracle, tokens)
    ours = models.ours("kernels")
    agreement = Agreement()
    agreement.add(ours.prefill(tokens[:28], WIDTHS[1])[1], expected[27])
    for position in (28, 29):
        argmax, logits = ours.step(tokens[position])
        assert argmax == int(expected[position].argmax())
        agreement.add(logits, expected[position])
    agreement.check()
