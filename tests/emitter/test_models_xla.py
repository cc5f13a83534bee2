"""Every family's StableHLO through a second compiler, XLA on the CPU, which knows nothing of castiron: HF's logits."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.lowering import lower
from castiron.emitter.models import FAMILIES
from castiron.emitter.printer import argument_params, print_module
from castiron.pipelines.casting.compile import packed_parameter
from castiron.reference import hf
from castiron.reference.xla import run_stablehlo
from tests.emitter.family_harness import Agreement, pair, prompt
from tests.emitter.test_models import SHAPES

# Shorter than the context that the other tests compile for: past the window of 24 with two chunks.
CONTEXT, WIDTH = 32, 16


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_xla_gives_the_logits_of_hf(family, tmp_path):
    models = pair(family, tmp_path, **SHAPES[family][0])
    module = lower(models.layers(CONTEXT, (WIDTH,)), "portable")
    text = print_module(module, weights="arguments")
    params = {p.name: packed_parameter(models.checkpoint, p) for p in module.params.values()}
    caches = [np.zeros(state.shape, np.float32) for state in module.functions["decode_step"].states]

    def run(function: str, *inputs: np.ndarray) -> np.ndarray:
        weights = [params[name] for name in argument_params(module, module.functions[function])]
        _, logits, *caches[:] = run_stablehlo(text, function, [*inputs, *caches, *weights])
        return logits

    tokens = prompt(models.checkpoint.config["vocab_size"], 30)
    expected = hf.logits(models.oracle, tokens)
    agreement = Agreement()
    for start in (0, WIDTH):
        chunk = np.zeros(WIDTH, np.int32)
        real = tokens[start : min(start + WIDTH, 28)]
        chunk[: len(real)] = real
        agreement.add(run(f"prefill_{WIDTH}", chunk, np.int32(start), np.int32(len(real))), expected[start + len(real) - 1])
    for position in (28, 29):
        agreement.add(run("decode_step", np.int32(tokens[position]), np.int32(position)), expected[position])
    agreement.check()
