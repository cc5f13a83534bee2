"""Small random HF models of every family, written as checkpoint directories without a tokenizer.

HF's own initialisation (0.02) gives nearly equal logits, so that greedy tokens hang on rounding. Here every weight
matters and the logits are spread: an exact implementation gets the tokens right with a margin, a wrong one does not.
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

_DELTA = {
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}
_SHARED = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
}  # fmt: skip

# What each family has besides, so that a tiny model uses it: windows shorter than a test's prompt, factors unlike 1.
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
    "gemma3_text": {
        "head_dim": 24,
        "query_pre_attn_scalar": 5,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    },
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
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
    },
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gemma": {"head_dim": 24},
    "olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "exaone4": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
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
    "cohere2": {
        "sliding_window": 24,
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
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
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "gpt2": {"n_inner": 96},
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "head_dim": 24,
        "sliding_window": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_next": {**_DELTA, **_SHARED},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 40},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
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
        # HF asks for no less in prompts, and for nothing in single tokens.
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
    """Write a small random model of this type (config.json, safetensors) to `directory`, which is returned.

    `config` overrides any key of the HF config; `dtype` is how weights are stored. The same arguments give the same
    weights. Raises ValueError for a type without a row in FAMILIES.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"no tiny model of type {model_type!r}; there are {', '.join(FAMILIES)}")
    settings = {**COMMON, **FAMILIES[model_type], **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    _spread(model, seed)
    directory = Path(directory)
    logging.disable_progress_bar()
    model.to(dtype).save_pretrained(directory)
    return directory


def _spread(model: torch.nn.Module, seed: int) -> None:
    """Random weights for which the greedy tokens vary.

    Matrices keep the scale of what they multiply, except that those writing to the residual stream are larger: else the
    embedding of the last token outweighs them, and a tied head repeats that token for ever. Norms and biases, which HF
    starts at a constant, move around it.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    # Where a norm follows the writer (Gemma, LFM3), its weight alone decides how much is written.
    after = ("pre_feedforward_layernorm", "post_operator_norm")
    normed_writers = any(norm in name for name, _ in model.named_parameters() for norm in after)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                # HF's rates forget within a token or two, and what is left then is rounding.
                weight.copy_(noise - 2.0)
            elif weight.ndim == 1:
                if name.endswith(_UNSET):
                    weight.zero_()
                weight += 0.3 * noise
                if normed_writers and "post_" in name:
                    weight += 8.0
                # Gemma 4 scales no scores, and leaves their size to the norms.
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
                # What an MLP squares is large by itself.
                gain = 1.0 if model.config.model_type == "nemotron_h" and "down_proj" in name else gain
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
        # What is no parameter and yet in the checkpoint.
        for name in sorted(model.state_dict().keys() - dict(model.named_parameters()).keys() - {"lm_head.weight"}):
            buffer = model.get_buffer(name)
            # A bias that chooses among experts is as large as their scores differ.
            spread = 0.5 if name.endswith("expert_bias") else 0.1
            buffer.copy_(0.4 * buffer + spread * torch.randn(buffer.shape, generator=generator))


# What HF leaves as memory was, or draws from steps of time as short as may be.
_UNSET = ("sinks", "router.bias", "mixer.dt_bias")
_WRITERS = ("o_proj", "attn.out_proj", "mamba.out_proj", "mixer.out_proj", "down_proj", "c_proj", "w2", "output_linear")
