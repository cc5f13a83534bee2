"""Rotary frequencies equal those of transformers, and invalid rope entries are rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers.rotary import Rotary, rotary

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "llama3 without its original length": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, not truncated": {"factor": 8.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 16.0},
    "yarn with mscale": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn with attention factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
}
POSITIONS = 512


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 130000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, theta, head_dim):
    entry = {"rope_type": name.replace(",", "").split()[0], "rope_theta": theta, **SCALINGS[name]}
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        rope_parameters=dict(entry),
        max_position_embeddings=POSITIONS,
    )
    # A last bit of a frequency is a turn of position * 1e-7.
    check(rotary(theta, head_dim, entry, POSITIONS), LlamaRotaryEmbedding(config), POSITIONS, 1e-4)


def check(ours: Rotary, theirs: torch.nn.Module, positions: int, atol: float) -> None:
    """Compare the frequencies and tables of the first positions with transformers'."""
    assert ours.positions == positions
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-7)
    assert _last_bits(ours.inv_freq, theirs.inv_freq.numpy()) <= 2
    tables = theirs(torch.zeros(1), torch.arange(positions)[None])
    for function, table in zip((np.cos, np.sin), tables, strict=True):
        np.testing.assert_allclose(ours.table(positions, function), table[0, :, : len(ours.inv_freq)], atol=atol)


@pytest.mark.parametrize("partial", [1.0, 0.5, 0.75])
@pytest.mark.parametrize("given", [{}, {"factor": 8.0}, {"attention_factor": 1.1}])
def test_longrope_takes_other_factors_past_the_original_length(partial, given):
    dim = int(32 * partial)
    entry = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(dim // 2)],
        "long_factor": [2 + 0.3 * i for i in range(dim // 2)],
        "partial_rotary_factor": partial,
        **given,
    }
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=1024,
        original_max_position_embeddings=128,
        rope_parameters=dict(entry),
    )
    theirs = Phi3RotaryEmbedding(config)
    entry["original_max_position_embeddings"] = 128
    ours = rotary(10000.0, dim, entry, 1024)
    check(ours, theirs, 128, 1e-5)
    assert ours.positions == 128
    # A longer sequence replaces their frequencies.
    theirs(torch.zeros(1), torch.arange(129)[None])
    check(ours.long, theirs, 1024, 1e-4)
    # The rows from 128 on are those of the longer sequence.
    for function in (np.cos, np.sin):
        table = ours.table(200, function)
        assert np.array_equal(table[:128], ours.table(128, function))
        assert np.array_equal(table[128:], ours.long.table(200, function)[128:])


def test_longrope_holds_everywhere_if_its_factors_agree():
    entry = {"rope_type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    assert rotary(1e4, 16, {**entry, "original_max_position_embeddings": 32}, 1024).positions == 1024


def test_a_frequency_of_an_odd_rotary_dim_counts_as_a_pair():
    assert rotary(1e4, 5, None, 64).inv_freq.shape == (3,)


def test_far_away_the_angle_is_rounded_as_hf_rounds_it():
    """f32 stores 100,000 radians with two decimals, so that the exact angle would differ."""
    positions = 100_001
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=positions)
    theirs = LlamaRotaryEmbedding(config)
    ours = Rotary(theirs.inv_freq.numpy(), positions)
    sample = np.arange(0, positions, 7919)
    found = theirs(torch.zeros(1), torch.from_numpy(sample)[None])
    for function, table in zip((np.cos, np.sin), found, strict=True):
        np.testing.assert_allclose(ours.table(positions, function)[sample], table[0, :, :8], atol=1e-6)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"rope_type": "unheard"}, "'unheard' is not supported; supported are default"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 1}, "unknown key beta_fast"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8},
            "1 numbers in 'short_factor' and 8 in 'long_factor'; each must have 8",
        ),
    ],
)
def test_an_entry_that_is_not_understood_is_refused(entry, words):
    with pytest.raises(EmitError, match=words):
        rotary(1e4, 16, entry, 64)


def test_every_kind_of_transformers_that_is_left_out_is_refused():
    for kind in set(ROPE_INIT_FUNCTIONS) - {"linear", "dynamic", "yarn", "longrope", "llama3"}:
        with pytest.raises(EmitError, match="is not supported"):
            rotary(1e4, 16, {"rope_type": kind, "factor": 1.0}, 64)


def _last_bits(a: np.ndarray, b: np.ndarray) -> int:
    """Return the max number of representable numbers between the two."""
    return int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max())
