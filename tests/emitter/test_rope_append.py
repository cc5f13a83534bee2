"""Rotary embedding with append: against the definition and HF's own rotation, and what it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from castiron.emitter.kernels.attention.rope_append import rotated
from tests.emitter.attention_cases import CONTEXT, LAYER, REAL, UNIT, close, drawn, fill, prepared, running

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
                arguments = fill(np.random.default_rng(case.seed + start), append, [start, length], CONTEXT)
                got, want = runner(append, *arguments), append.reference(*arguments)
                name = f"{append.name} from {start}, {length} tokens"
                heads = prepared(case, arguments[0], start + np.arange(case.tokens), arguments[1:-5])
                # Two products and a sum, after a norm of up to four roundings.
                for part, g, w, size in zip("qkv", got, want, heads, strict=True):
                    close(f"{name}, {part}", g, w, 0.0 if part == "v" else 16 * UNIT * float(np.abs(size).max()))
                untouched = np.ones(got[1].shape[:2], bool)
                untouched[LAYER, start : start + length] = False
                for cache, before in zip(got[1:], arguments[-3:-1], strict=True):
                    assert np.array_equal(cache[untouched], before[untouched]), f"{name}: another row was written"


def test_definition_is_that_of_hf():
    rng, T, heads, hd = np.random.default_rng(0), 6, 3, 16
    x = rng.standard_normal((T, heads, hd))
    angles = rng.standard_normal((T, hd // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    q = torch.from_numpy(x).transpose(0, 1)[None]
    both = [torch.from_numpy(np.concatenate([t, t], -1))[None] for t in (cos, sin)]
    want = apply_rotary_pos_emb(q, q, *both)[0][0].transpose(0, 1).numpy()
    np.testing.assert_allclose(rotated(x, cos, sin, hd, interleaved=False), want, atol=1e-6)
    pairs = x.reshape(T, heads, hd // 2, 2) @ np.array([1, 1j])
    turned = pairs * (cos + 1j * sin)[:, None]
    apart = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    np.testing.assert_allclose(rotated(x, cos, sin, hd, interleaved=True), apart, atol=1e-6)
