"""Rotary embedding with append: against the definition and HF's own rotation, and what it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from castiron.emitter.caches import CACHES
from castiron.emitter.kernels.attention.heads import rotated
from tests.emitter.attention_cases import CONTEXT, REAL, check_append, drawn, running, stored_as

CASES = drawn(8) + REAL


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rope_append")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads, cache):
    found = stored_as(cache, CASES[1::4] if cache == "q8_0" else CASES)
    runner, kernels = running(found, "host", threads, directory)
    for case, (_, append, _) in kernels:
        for start in (0, 47, CONTEXT - case.tokens):
            for length in {1, case.tokens // 2, case.tokens}:
                check_append(runner, case, append, start, length)


def test_definition_is_that_of_hf():
    rng, T, heads, hd = np.random.default_rng(0), 6, 3, 16
    x = rng.standard_normal((T, heads, hd))
    angles = rng.standard_normal((T, hd // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    q = torch.from_numpy(x).transpose(0, 1)[None]
    both = [torch.from_numpy(np.concatenate([t, t], -1))[None] for t in (cos, sin)]
    want = apply_rotary_pos_emb(q, q, *both)[0][0].transpose(0, 1).numpy()
    np.testing.assert_allclose(rotated(x, cos, sin, hd), want, atol=1e-6)
