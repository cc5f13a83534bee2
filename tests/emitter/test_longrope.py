"""LongRoPE: the functions for sequences on either side of the original length have HF's logits."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.lowering import lower
from castiron.pipelines.evaluate.diff import compare
from castiron.reference import hf
from tests.emitter.family_harness import LENGTH, WIDTHS, Agreement, Model, pair, prompt

ORIGINAL = 24
LONGROPE = {
    "num_hidden_layers": 2,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1 + 0.2 * i for i in range(8)],
        "long_factor": [3 + 0.5 * i for i in range(8)],
    },
}


@pytest.fixture(scope="module", params=[None, 12], ids=["full", "window"])
def both(request, tmp_path_factory):
    return pair("phi3", tmp_path_factory.mktemp("longrope"), sliding_window=request.param, **LONGROPE)


@pytest.mark.parametrize("lowering", ["portable", "kernels", "gpu"])
def test_functions_of_either_side_have_the_logits_of_hf(both, lowering):
    tokens, agreement = prompt(211, LENGTH), Agreement()
    wanted = hf.logits(both.oracle, tokens)
    ours = Model(both.checkpoint, lower(both.layers(verify=(4,)), lowering))

    def call(function: str, start: int, *inputs) -> np.ndarray:
        return ours.call(function, *inputs[:1], np.int32(start), *inputs[1:])[1]

    for start in (0, 16):
        found = call("prefill_16_long", start, np.array(tokens[start : start + 16], np.int32), np.int32(16))
        agreement.add(found, wanted[start + 15])
    for row, expected in zip(call("verify_4_long", 32, np.array(tokens[32:36], np.int32)), wanted[32:36], strict=True):
        agreement.add(row, expected)
    agreement.add(call("decode_step_long", 36, np.int32(tokens[36])), wanted[36])
    # The table of the other functions has the long factors from the original length on.
    agreement.add(call("decode_step", 37, np.int32(tokens[37])), wanted[37])
    ours.reset()
    short = hf.logits(both.oracle, tokens[:ORIGINAL])
    agreement.add(ours.prefill(tokens[: ORIGINAL - 1], WIDTHS[1])[1], short[-2])
    agreement.add(ours.step(tokens[ORIGINAL - 1])[1], short[-1])
    agreement.check()


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1, LENGTH])
def test_diff_compares_a_prompt_of_any_length(both, length):
    assert compare(both.checkpoint, prompt(211, length), 1e-3)["equal"]
