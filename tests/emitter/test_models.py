"""Every family against HF transformers on small random models: logits and greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from castiron.emitter.graph.types import EmitError
from castiron.emitter.lowering import lower
from castiron.emitter.models import FAMILIES, build
from castiron.reference import hf, tiny
from tests.emitter.family_harness import CONTEXT, LENGTH, WIDTHS, Agreement, Model, Pair, assert_same_logits, pair, prompt

# Sizes that divide nothing, one KV head, the other choice of a tied head.
ODD = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 70, "vocab_size": 131}
ODD_TIED = {**ODD, "tie_word_embeddings": True}
ODD_UNTIED = {**ODD, "tie_word_embeddings": False}
WIDE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 20}
BIASED = {"attention_bias": True, "mlp_bias": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1 + 0.2 * i for i in range(8)], "long_factor": [3.0] * 8}
LATENT_ODD = {**ODD_TIED, "num_key_value_heads": 3, "q_lora_rank": None, "n_routed_experts": 9}
LATENT_YARN = {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.7}}
GROWING = {"llama_4_scaling_beta": 0.2}
WINDOWED = {"use_sliding_window": True, "sliding_window": 24}

# family: what differs from castiron.reference.tiny's model of it, one model each.
SHAPES: dict[str, list[dict]] = {
    "llama": [
        {**BIASED, "tie_word_embeddings": True},
        {**ODD_UNTIED, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
        {**WIDE_HEADS, "rope_parameters": YARN},
    ],
    "mistral": [{}, {**ODD_TIED, "sliding_window": None}, {**WIDE_HEADS, "sliding_window": 2}],
    "qwen2": [
        {"max_window_layers": 2, **WINDOWED},
        {**ODD_TIED, "sliding_window": 8},
        {**ODD_UNTIED, **WINDOWED, "max_window_layers": 0, "hidden_act": "gelu"},
    ],
    "qwen3": [
        {"max_window_layers": 1, **WINDOWED},
        {**ODD_TIED, "head_dim": 10, "attention_bias": True},
        {**WIDE_HEADS, "layer_types": ["full_attention", "sliding_attention", "full_attention"], **WINDOWED},
    ],
    "gemma2": [
        {},
        {**ODD_UNTIED, "head_dim": 16, "attention_bias": True, "attn_logit_softcapping": None},
        {**WIDE_HEADS, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
    ],
    "gemma3_text": [
        {},
        # Rings of 19 rows, which turn three times.
        {**ODD_UNTIED, "head_dim": 16, "attention_bias": True, "final_logit_softcapping": 7.0, "sliding_window": 3},
        {
            **WIDE_HEADS,
            "num_hidden_layers": 4,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ],
    "lfm2": [
        {"conv_bias": True},
        {**ODD_UNTIED, "full_attn_idxs": [1], "layer_types": None, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.7, "conv_L_cache": 2, "layer_types": ["conv", "conv", "full_attention"]},
    ],
    "phi3": [
        {"sliding_window": 24},
        {**ODD_TIED, "partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 1.0, "original_max_position_embeddings": CONTEXT, "rope_parameters": LONGROPE},
    ],
    "olmo2": [{}, {**ODD_TIED, "attention_bias": True}],
    "smollm3": [
        BIASED,
        {**ODD_UNTIED, **WINDOWED},
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "num_hidden_layers": 4, "sliding_window": 24},
    ],
    "granite": [{}, {**ODD_TIED, **BIASED, "embedding_multiplier": 12.0}],
    "falcon_h1": [
        {"mamba_proj_bias": True, "projectors_bias": True, **BIASED},
        {**ODD_TIED, "mamba_rms_norm": False, "mamba_d_conv": 2, "mamba_conv_bias": False},
        {"mamba_norm_before_gate": False, "mamba_n_groups": 2, "mamba_d_ssm": None, "mamba_n_heads": 8},
    ],
    "granitemoehybrid": [
        {"mamba_proj_bias": True, "attention_bias": True, "position_embedding_type": "rope"},
        {**ODD_TIED, "mamba_n_heads": 4, "mamba_d_conv": 2, "mamba_conv_bias": False},
        {
            "mamba_n_groups": 4,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ],
    "nemotron_h": [
        {"use_bias": True, "mlp_bias": True, "moe_latent_size": 32, "n_group": 3, "topk_group": 1},
        {
            **ODD_UNTIED,
            "layers_block_type": None,
            "hybrid_override_pattern": "ME*-M",
            "mamba_num_heads": 4,
            "conv_kernel": 2,
            "use_conv_bias": False,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_hidden_act": "silu",
        },
        {"n_groups": 1, "layers_block_type": ["mlp", "full_attention", "linear_attention"], "mamba_head_dim": 10},
    ],
    "lfm2_moe": [
        {},
        {**ODD_UNTIED, "conv_L_cache": 4, "norm_topk_prob": False, "num_experts": 7, "num_experts_per_tok": 3},
        {"num_dense_layers": 0, "use_expert_bias": False, "conv_bias": True, "num_experts_per_tok": 1},
    ],
    "lfm3": [
        {"conv_bias": True},
        {**ODD_UNTIED, "head_dim": 10, "layer_types": None, "num_hidden_layers": 5, "attention_bias": True},
        {
            **WIDE_HEADS,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
        },
    ],
    "stablelm": [
        {"use_qkv_bias": True},
        {**ODD_TIED, "partial_rotary_factor": 0.5, "use_parallel_residual": True},
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 1.0},
    ],
    "starcoder2": [{}, {**ODD_UNTIED, "use_bias": False, "sliding_window": None}],
    "mixtral": [{}, {**ODD_TIED, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 24}],
    "qwen3_5_text": [
        {"attention_bias": True},
        {
            **ODD_TIED,
            "head_dim": 10,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "hidden_act": "gelu",
        },
        {
            **WIDE_HEADS,
            "num_hidden_layers": 4,
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "rope_parameters": None,
        },
    ],
    "qwen3_5_moe_text": [
        {},
        {**ODD_TIED, "head_dim": 10, "linear_num_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 3},
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "shared_expert_intermediate_size": 7},
    ],
    "qwen3_next": [
        {"mlp_only_layers": [1]},
        {**ODD_TIED, "head_dim": 10, "linear_num_value_heads": 2, "norm_topk_prob": False, "decoder_sparse_step": 2},
        {"linear_num_key_heads": 1, "attention_bias": True, "num_experts_per_tok": 1},
    ],
    "qwen3_moe": [
        {"norm_topk_prob": True},
        {**ODD_TIED, "head_dim": 10, "num_experts": 9, "num_experts_per_tok": 4, "attention_bias": True},
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4, **WINDOWED, "num_experts_per_tok": 1},
    ],
    "gemma": [{}, {**ODD_UNTIED, "head_dim": 16}, {"num_key_value_heads": 4, "attention_bias": True, "hidden_act": "gelu"}],
    "olmo3": [
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}},
        {**ODD_TIED, "attention_bias": True, "layer_types": None, "num_hidden_layers": 4},
        {**WIDE_HEADS, "layer_types": ["full_attention"] * 3},
    ],
    "exaone4": [
        {"layer_types": None, "sliding_window_pattern": 2},
        {**ODD_TIED, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
        {**WIDE_HEADS, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ],
    "arcee": [BIASED, {**ODD_TIED, "head_dim": 16, "rope_parameters": YARN}, {**WIDE_HEADS, "hidden_act": "silu"}],
    "ministral3": [{}, {**ODD_TIED, "sliding_window": None}, {**WIDE_HEADS, "rope_parameters": {**GROWING, **YARN}}],
    "cohere2": [{}, {**ODD_UNTIED, "attention_bias": True}, {**WIDE_HEADS, "layer_types": None, "num_hidden_layers": 4}],
    "ernie4_5": [{"use_bias": True}, {**ODD_UNTIED, "head_dim": 16}],
    "hunyuan_v1_dense": [
        {"attention_bias": True},
        {
            **ODD_TIED,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "rope_theta": 1e4, "factor": 1.0},
        },
    ],
    "granitemoe": [{}, {**ODD_TIED, "attention_bias": True, "num_local_experts": 5, "num_experts_per_tok": 3}],
    "gpt_oss": [
        {},
        {
            **ODD_TIED,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_bias": False,
            "sliding_window": 5,
        },
        {**WIDE_HEADS, "rope_parameters": {**YARN, "truncate": False}, "swiglu_alpha": 1.0, "layer_types": None},
    ],
    "gemma4_text": [
        {},
        {
            **ODD_UNTIED,
            "vocab_size_per_layer_input": 131,
            "attention_bias": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "final_logit_softcapping": 7.0,
            "use_double_wide_mlp": True,
            "sliding_window": 4,
        },
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
        },
    ],
    "deepseek_v2": [
        BIASED,
        {**LATENT_ODD, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        {**LATENT_YARN, "first_k_dense_replace": 0, "n_shared_experts": 1, "num_experts_per_tok": 3},
    ],
    "deepseek_v3": [
        {"attention_bias": True},
        {**LATENT_ODD, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        {**LATENT_YARN, "rope_interleave": False, "first_k_dense_replace": 2, "n_shared_experts": 2},
    ],
    "glm4_moe_lite": [
        {"attention_bias": True},
        {**LATENT_ODD, "norm_topk_prob": False, "n_group": 3, "topk_group": 2},
        {**LATENT_YARN, "rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2},
    ],
    "gpt2": [
        {},
        {**ODD_UNTIED, "n_inner": None, "scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "relu", "scale_attn_weights": False},
    ],
}
# An epsilon that matters, and its key in families that do not call it `rms_norm_eps`.
EPSILON = 1.0
EPSILON_KEYS = {
    "cohere2": "layer_norm_eps",
    "gpt2": "layer_norm_epsilon",
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "norm_eps"),
    "nemotron_h": "layer_norm_epsilon",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
CASES = [(family, i) for family, shapes in SHAPES.items() for i in range(len(shapes))]
# Prompts of these lengths also go in chunks: around the borders of both widths, and past the window.
CHUNKED = (1, 3, 4, 5, 15, 16, 17, 23, 24, 25, 33, LENGTH)


def shape(family: str, index: int = 0) -> dict:
    """Return the config keys of a family's model; the first model has a large epsilon."""
    epsilon = {} if index else {EPSILON_KEYS.get(family, "rms_norm_eps"): EPSILON}
    return {**SHAPES[family][index], **epsilon}


def test_every_family_is_compared_with_hf():
    assert set(SHAPES) == set(FAMILIES) == set(tiny.FAMILIES)


@dataclass
class Case:
    """A tiny model, ours of it, a prompt, and HF's logits [LENGTH, vocab] and ours after each token."""

    models: Pair
    ours: Model
    tokens: list[int]
    expected: np.ndarray
    stepped: list[np.ndarray]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory):
    family, index = request.param
    models = pair(family, tmp_path_factory.mktemp(family), seed=index, **shape(family, index))
    tokens = prompt(models.checkpoint.config["vocab_size"])
    ours = models.ours()
    return Case(models, ours, tokens, hf.logits(models.oracle, tokens), [ours.step(token)[1] for token in tokens])


def test_logits_are_those_of_hf_after_every_token(case, record_property):
    agreement = Agreement()
    for logits, expected in zip(case.stepped, case.expected, strict=True):
        agreement.add(logits, expected)
    record_property("largest_error", agreement.error)
    record_property("smallest_margin", agreement.margin)
    agreement.check()


def test_a_prompt_may_be_cut_anywhere(case):
    """In padded chunks of either width, and in chunks of both with a single token between."""
    agreement = Agreement()
    for i, length in enumerate(CHUNKED):
        case.ours.reset()
        agreement.add(case.ours.prefill(case.tokens[:length], WIDTHS[i % 2])[1], case.expected[length - 1])
    case.ours.reset()
    case.ours.prefill(case.tokens[:7], WIDTHS[0])
    case.ours.prefill(case.tokens[7:28], WIDTHS[1])
    case.ours.step(case.tokens[28])
    agreement.add(case.ours.prefill(case.tokens[29:], WIDTHS[1])[1], case.expected[-1])
    agreement.check()


@pytest.mark.parametrize("length", [1, 18])
def test_greedy_tokens_are_those_of_hf(case, length):
    """Past the window, each with its own cache."""
    greedy = hf.greedy(case.models.oracle, case.tokens[:length], 12)
    case.ours.reset()
    found = [case.ours.prefill(case.tokens[:length], WIDTHS[1])[0]]
    while len(found) < len(greedy.tokens):
        found.append(case.ours.step(found[-1])[0])
    assert found == greedy.tokens


def test_the_last_position_of_a_context_is_usable(case):
    tokens = prompt(len(case.expected[0]), CONTEXT, seed=13)
    assert_same_logits(case.ours, tokens, hf.logits(case.models.oracle, tokens), steps=0)


def test_the_kernels_lowering_gives_the_logits_of_hf(case):
    assert_same_logits(case.models.ours("kernels"), case.tokens[:30], case.expected)


def test_heads_that_fit_no_workgroup_together_are_taken_in_parts(tmp_path):
    """Eight query heads of 512 elements per kv head, as in Gemma 4, with the sinks of gpt-oss."""
    models = pair("gpt_oss", tmp_path, num_hidden_layers=2, num_attention_heads=16, head_dim=512)
    decode = lower(models.layers(), "kernels").functions["decode_step"]
    names = [op.attrs["kernel"].name for op in decode.ops if op.kind == "kernel"]
    assert sum(name.startswith("attention_decode") for name in names) == 2 * 2
    tokens = prompt(models.checkpoint.config["vocab_size"], 30)
    assert_same_logits(models.ours("kernels"), tokens, hf.logits(models.oracle, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_are_widened_where_vectors_are_f32(dtype, tmp_path):
    models = pair("qwen3_5_text", tmp_path, dtype=dtype)
    tokens = prompt(211, 9)
    assert_same_logits(models.ours("kernels"), tokens, hf.logits(models.oracle, tokens), steps=0)


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_steps_of_time_are_limited_where_hf_does_so(family, tmp_path):
    """In a prompt, whatever its chunks; the tokens after it take the steps they take."""
    limit = {"time_step_min": 0.6} if family == "nemotron_h" else {"time_step_limit": [0.6, 1.1]}
    models, free = pair(family, tmp_path / "limited", **limit), pair(family, tmp_path / "free")
    tokens, agreement = prompt(211, 18), Agreement()
    expected = hf.logits(models.oracle, tokens)
    ours = models.ours("kernels")
    agreement.add(ours.prefill(tokens[:9], WIDTHS[1])[1], expected[8])
    token, logits = ours.prefill(tokens[9:], WIDTHS[0])
    agreement.add(logits, expected[17])
    agreement.check()
    assert np.abs(logits - hf.logits(free.oracle, tokens)[17]).max() > 0.01 * np.abs(logits).max()
    found = [token]
    while len(found) < 12:
        found.append(ours.step(found[-1])[0])
    assert found == hf.greedy(models.oracle, tokens, 12).tokens


def test_rejects_an_unknown_model_type():
    with pytest.raises(EmitError, match="'bloom' is not supported; supported are arcee, .* and [0-9]+ more"):
        build({"model_type": "bloom"}, lambda name: "f32", 8, ())
