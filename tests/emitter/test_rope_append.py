"""Rotary embedding with append: against the definition and HF's own rotation, and what it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from castiron.emitter.kernels.attention.heads import prepared_heads, rotated
from tests.emitter.attention_cases import CONTEXT, LAYER, REAL, UNIT, close, drawn, fill, running

CASES = drawn(8) + REAL


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rope_append")


@pytest.mark.parametrize("threads", [1, 2])
def test_host_matches_the_definition(directory, threads):
    runner, kernels = running(CASES, "host", threads, directory)
    for case, (_, append, _) in kernels:
        for start in (0, 47, CONTEXT - case.tokens):
            for length in {1, case.tokens // 2, case.tokens}:
                operands = fill(np.random.default_rng(case.seed + start), append, CONTEXT, start=start, length=length)
                got, want = runner(append, **operands), append.reference(**operands)
                name = f"{append.name} from {start}, {length} tokens"
                heads = prepared_heads(case.layout, operands["qkv"], start + np.arange(case.tokens), operands)
                # Two products and a sum, after a norm of up to four roundings.
                for part, size in zip(want, heads, strict=True):
                    limit = 0.0 if part == "v_cache" else 16 * UNIT * float(np.abs(size).max())
                    close(f"{name}, {part}", got[part], want[part], limit)
                for cache in ("k_cache", "v_cache"):
                    untouched = np.ones(got[cache].shape[:2], bool)
                    untouched[LAYER, start : start + length] = False
                    same = np.array_equal(got[cache][untouched], operands[cache][untouched])
                    assert same, f"{name}: another row was written"


def test_definition_is_that_of_hf():
    rng, T, heads, hd = np.random.default_rng(0), 6, 3, 16
    x = rng.standard_normal((T, heads, hd))
    angles = rng.standard_normal((T, hd // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    q = torch.from_numpy(x).transpose(0, 1)[None]
    both = [torch.from_numpy(np.concatenate([t, t], -1))[None] for t in (cos, sin)]
    want = apply_rotary_pos_emb(q, q, *both)[0][0].transpose(0, 1).numpy()
    np.testing.assert_allclose(rotated(x, cos, sin, hd), want, atol=1e-6)
