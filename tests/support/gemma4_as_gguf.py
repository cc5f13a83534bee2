"""Gemma 4's metadata and tensors, as `Gemma4Model` of llama.cpp's converter writes them."""

from __future__ import annotations

import numpy as np


def _of_kinds(config, name: str) -> tuple[int, int]:
    """Return a config value of sliding layers and of full layers."""
    stated = config.to_dict()
    own = {int(layer): values for layer, values in stated["per_layer_config"].items()}
    return stated[name], own[config.layer_types.index("full_attention")].get(name, stated[name])


def metadata(config) -> dict:
    """Return the metadata that other models lack, keys without their prefix.

    Values that differ by layer are lists.
    """
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    ropes, shared, kv_heads = config.rope_parameters, config.num_kv_shared_layers, _of_kinds(config, "num_key_value_heads")
    keys = {
        "attention.head_count_kv": kv_heads[0],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }
    for ending, length in zip(("_swa", ""), _of_kinds(config, "head_dim")):
        keys |= {f"attention.{side}_length{ending}": length for side in ("key", "value")}
        keys[f"rope.dimension_count{ending}"] = length
    if config.use_double_wide_mlp:
        own = config.num_hidden_layers - shared
        keys["feed_forward_length"] = [config.intermediate_size * (2 if i >= own else 1) for i in range(len(slides))]
    if config.attention_k_eq_v:
        keys["attention.head_count_kv"] = [kv_heads[not slide] for slide in slides]
    if config.enable_moe_block:
        keys["expert_count"], keys["expert_used_count"] = config.num_experts, config.top_k_experts
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    return keys


def renamed(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors under names that end in .weight, as gguf's map needs them."""
    unfinished = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    return {name + ".weight" * name.endswith(unfinished): values for name, values in state.items()}


def scale_name(name: str) -> str | None:
    """Return the converter's name of a router's scales, which gguf's map lacks."""
    leaf = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    own = next((own for ending, own in leaf.items() if name.endswith(ending)), None)
    return own and f"blk.{name.split('.')[2]}.{own}.scale"


def rope_tensors(config) -> dict[str, np.ndarray]:
    half = _of_kinds(config, "head_dim")[1] // 2
    turned = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (half - turned), np.float32)}
