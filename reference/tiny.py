"""Small random HF models of every family, as checkpoint directories without a tokenizer.

HF's own initialisation (0.02) gives nearly equal logits, so that greedy tokens depend on rounding.
Here every weight matters and logits differ clearly: a correct implementation returns the right
greedy tokens in spite of rounding, and a wrong one does not.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DELTA = {
    "head_dim": 24,
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2], "mrope_interleaved": True},
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Keys of each family whose details must matter: windows shorter than a test's prompt, factors other than 1.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"head_dim": 24, "query_pre_attn_scalar": 5, **_SLIDING},
    "phi3": {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": _GRANITE,
    "falcon_h1": {
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_state": 12,
        "mamba_rms_norm": True,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.9, 1.2, 0.8, 0.7, 1.1],
        "mlp_multipliers": [0.8, 0.7],
    },
    "granitemoehybrid": {
        **_GRANITE,
        "layer_types": _LINEAR,
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
    },
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": 24},
    "mixtral": _LOCAL_EXPERTS,
    "qwen3_moe": {"head_dim": 24, **_EXPERTS},
    "gemma": {"head_dim": 24},
    "olmo3": _SLIDING,
    "exaone4": _SLIDING,
    "arcee": {},
    "ministral3": {
        "head_dim": 24,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 10,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "cohere2": {"logit_scale": 0.5, **_SLIDING},
    "ernie4_5": {"head_dim": 24},
    "hunyuan_v1_dense": {"head_dim": 24},
    "gemma4_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 211,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    "glm4_moe_lite": _LATENT,
    "gpt2": {"n_inner": 96},
    "granitemoe": {**_GRANITE, **_LOCAL_EXPERTS},
    "gpt_oss": {**_LOCAL_EXPERTS, "head_dim": 24, "sliding_window": 24, "swiglu_limit": 1.0, "rope_parameters": _DEFAULT_ROPE},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_next": {**_DELTA, **_SHARED},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 40},
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "layer_types": ["conv", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "conv_L_cache": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
        "head_dim": 24,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        # HF clamps time steps to at least this, in prompts but not for single tokens.
        "time_step_min": 1e-30,
        "chunk_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
    },
}


def tiny_model(model_type: str, directory: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> Path:
    """Write a random model (config.json, safetensors) to `directory`, and return `directory`.

    config: overrides keys of the HF config. The same arguments give the same weights.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"no tiny model of type {model_type!r}; use one of {', '.join(FAMILIES)}")
    settings = {**COMMON, **FAMILIES[model_type], **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    _spread(model, seed)
    directory = Path(directory)
    logging.disable_progress_bar()
    model.to(dtype).save_pretrained(directory)
    return directory


def _spread(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    # Where a norm follows the writer (Gemma, LFM3), its weight alone decides how much is written.
    after = ("pre_feedforward_layernorm", "post_operator_norm")
    normed_writers = any(norm in name for name, _ in model.named_parameters() for norm in after)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                # HF's rates decay within a token or two, which leaves only rounding in the state.
                weight.copy_(noise - 2.0)
            elif weight.ndim == 1:
                if name.endswith(_UNSET):
                    weight.zero_()
                weight += 0.3 * noise
                if normed_writers and "post_" in name:
                    weight += 8.0
                # Gemma 4 does not scale scores; its norms determine their size.
                if model.config.model_type == "gemma4_text" and "q_norm" in name:
                    weight *= 0.2
            elif id(weight) in embeddings:
                # Gemma multiplies embeddings by the root of the hidden size.
                small = normed_writers or model.config.model_type == "gemma"
                weight.copy_((0.1 if small else 0.5) * noise)
            elif name.endswith("wpe.weight"):
                # A position outweighs the token, which a tied head would repeat.
                weight.copy_(2.0 * noise)
            else:
                gain = 4.0 if any(part in name for part in _WRITERS) else 1.5
                # The square in an MLP is large by itself.
                gain = 1.0 if model.config.model_type == "nemotron_h" and "down_proj" in name else gain
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
        # Buffers: tensors of the checkpoint that are not parameters.
        for name in sorted(model.state_dict().keys() - dict(model.named_parameters()).keys() - {"lm_head.weight"}):
            buffer = model.get_buffer(name)
            # A bias for choosing experts is as large as the differences of their scores.
            spread = 0.5 if name.endswith("expert_bias") else 0.1
            buffer.copy_(0.4 * buffer + spread * torch.randn(buffer.shape, generator=generator))


# Tensors that HF leaves uninitialised, or initialises for the shortest time steps.
_UNSET = ("sinks", "router.bias", "mixer.dt_bias")
_WRITERS = ("o_proj", "attn.out_proj", "mamba.out_proj", "mixer.out_proj", "down_proj", "c_proj", "w2", "output_linear")
