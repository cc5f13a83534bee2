"""Small models of every architecture of llama.cpp, whose config a GGUF file can express."""

from __future__ import annotations

import numpy as np

from tests.support.hf_to_gguf import GGUF_NAMES

# Powers of two, with which a quantised block stays one when the converter multiplies the weights.
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 4.0,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 1.0, 0.5, 2.0],
    "mlp_multipliers": [0.5, 0.25],
}
# Config keys that a GGUF file cannot state, with the values that it implies.
IMPLIED: dict[str, dict] = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": None},
    "lfm2": {"block_auto_adjust_ff_dim": False, "block_multiple_of": 256},
    "phi3": {"sliding_window": 24, "partial_rotary_factor": 0.75},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "cohere2": {"num_hidden_layers": 4, "layer_types": None},
    "exaone4": {"num_hidden_layers": 4, "layer_types": None},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_moe": {"moe_intermediate_size": 96, "norm_topk_prob": True},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 10,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "lfm2_moe": {"moe_intermediate_size": 96, "routed_scaling_factor": 1.0},
    "falcon_h1": {
        "mamba_norm_before_gate": False,
        "lm_head_multiplier": 1.0,
        **{key: np.ones_like(value).tolist() for key, value in FALCON_MULTIPLIERS.items()},
    },
    "granitemoehybrid": {"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
    "nemotron_h": {"moe_intermediate_size": 96, "time_step_min": 0.001, "chunk_size": 128},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "qwen3_next": {"moe_intermediate_size": 96, "norm_topk_prob": True},
    # Heads that are blocks of out_proj's columns, and heads of which a block spans two.
    "qwen3_5_text": {"linear_value_head_dim": 32},
    "qwen3_5_moe_text": {"linear_value_head_dim": 16, "moe_intermediate_size": 96},
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ODD_LLAMA3 = LLAMA3 | {"factor": 4.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 128,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 9.0, "factor": 1.0}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# More models: family and config keys.
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, odd head_dim, one kv head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama, tied, llama 3 rope": ("llama", {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": LLAMA3}),
    "llama, other numbers of llama 3": ("llama", {"head_dim": 32, "rope_parameters": ODD_LLAMA3}),
    "llama, other theta": ("llama", {"rope_parameters": DEFAULT_ROPE}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "gemma3, linear": ("gemma3_text", {"rope_parameters": GEMMA3_ROPES}),
    "gemma4, experts": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.5,
            "rope_parameters": LONGROPE,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "arcee, yarn": ("arcee", {"mlp_bias": True, "rope_parameters": YARN}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4, llama 3 rope": ("exaone4", {"rope_parameters": ODD_LLAMA3}),
    "hunyuan, alpha": ("hunyuan_v1_dense", {"attention_bias": True, "rope_parameters": ALPHA}),
    "gpt_oss, yarn": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "olmo3, yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "granitemoehybrid, dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3, no groups": (
        "deepseek_v3",
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "rope_parameters": YARN | {"mscale": 1, "mscale_all_dim": 1}},
    ),
    "qwen3_5, as many key heads": ("qwen3_5_text", {"linear_num_key_heads": 4}),
}
# Families whose files are read as those of another, with other names of tensors or config keys.
READ_AS = {"qwen3_next": "qwen3_5_moe_text", "glm4_moe_lite": "deepseek_v3"}
MODELS = {family: (family, IMPLIED.get(family, {})) for family in GGUF_NAMES if family not in READ_AS}
MODELS |= {name: (family, IMPLIED.get(family, {}) | config) for name, (family, config) in VARIANTS.items()}
