"""Tensors and metadata of DeepSeek V2, V3 and GLM-4.7-Flash, as llama.cpp's converter writes them."""

from __future__ import annotations

import numpy as np

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def split_key_values(state: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Split `kv_b_proj` into keys [heads, latent, key] and values [heads, value, latent]."""
    found = {}
    for name, values in state.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = values
            continue
        heads = values.reshape(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, values.shape[1])
        keys, own = np.split(heads, [config.qk_nope_head_dim], axis=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        found[name.replace("kv_b_proj", "v_b_proj")] = own
    return found


def metadata(config) -> dict:
    """Return the metadata that other models lack, keys without their prefix."""
    rotated, latent = config.qk_rope_head_dim, config.kv_lora_rank
    rope = config.rope_parameters
    dense = getattr(config, "first_k_dense_replace", None)
    keys = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "rope.freq_base": float(rope["rope_theta"]),
        "leading_dense_block_count": config.mlp_layer_types.count("dense") if dense is None else dense,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.n_group is not None:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.norm_topk_prob:
        keys["expert_weights_norm"] = True
    if rope.get("mscale_all_dim") is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys
