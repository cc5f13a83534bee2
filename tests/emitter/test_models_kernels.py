"""Every family through the kernels lowering, its kernels by their NumPy definitions: HF's logits again.

No family knows a kernel: what is checked here is that whatever a family writes is fused, or left alone, correctly.
"""

from __future__ import annotations

import pytest

from castiron.reference import hf
from tests.emitter.family_harness import WIDTHS, Agreement, pair, prompt
from tests.emitter.test_models import CASES, SHAPES


@pytest.mark.parametrize(("family", "index"), CASES, ids=[f"{family}-{index}" for family, index in CASES])
def test_the_kernels_lowering_gives_the_logits_of_hf(family, index, tmp_path):
    models = pair(family, tmp_path, seed=index, **SHAPES[family][index])
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
