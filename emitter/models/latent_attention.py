"""Layers of DeepSeek V2, V3 and GLM-4.7-Flash: latent attention (arXiv:2405.04434) and experts.

The KV cache stores one latent vector c for a token, with the keys K c and the values V c. As q . (K
c) equals (q K) . c, c is key and value, and V multiplies the result of attention.
"""

from __future__ import annotations

import math
from typing import Any

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, concatenate, dot_general, reshape, slice_, transpose
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import attention, experts, gated_mlp, linear, rms_norm, rope, route, scaled, split_heads, values
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig

# HF always uses this epsilon in the norms of latent vectors.
_LATENT_EPS = 1e-6


class LatentConfig(DecoderConfig):
    """The config of a decoder with latent attention.

    head_dim: features that the KV cache stores for a token: the latent vector (`kv_lora_rank`),
        then the rotated key (`qk_rope_head_dim`), both for all heads.
    sparse: for each layer, whether it has experts.
    groups: the number of expert groups, and how many groups the router chooses for a token.
    scores: "sigmoid" as in DeepSeek V3, or "softmax" as in DeepSeek V2.
    """

    attention_bias: bool = False
    q_lora_rank: int | None
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    scale: float
    rope_interleave: bool = True
    sparse: list[bool]
    experts: int
    experts_per_token: int
    n_shared_experts: int = 1
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    groups: tuple[int, int]
    scores: str


def latent_fields(c: ConfigReader, kv_heads: int | None, positions: int, q_lora_rank: int, nope: int) -> dict[str, Any]:
    """Return fields of `LatentConfig`, by name; the other parameters are HF's defaults of keys.

    kv_heads: None if the default is the value of `num_attention_heads`.
    """
    # HF computes `qk_head_dim` from its parts, and never reads `pretraining_tp`.
    c.unused("qk_head_dim", "pretraining_tp")
    heads = c.take("num_attention_heads")
    if (found := c.take("num_key_value_heads", kv_heads or heads)) != heads:
        raise EmitError(
            f"'num_key_value_heads' in the {c.model_type} config is {found}; it must equal 'num_attention_heads' ({heads})"
        )
    rotated, not_rotated = c.take("qk_rope_head_dim", 64), c.take("qk_nope_head_dim", nope)
    c.require("head_dim", rotated)
    return {
        "head_dim": c.take("kv_lora_rank", 512) + rotated,
        "kv_heads": 1,
        "rotary": c.rotary(rotated, c.take("max_position_embeddings", positions)),
        "q_lora_rank": c.nullable("q_lora_rank", q_lora_rank),
        "scale": (rotated + not_rotated) ** -0.5 * yarn_scale(c) ** 2,
    }


def yarn_scale(c: ConfigReader) -> float:
    """Return YaRN's factor of q and of k, as in HF's `yarn_apply_mscale`; 1.0 without YaRN."""
    entry = c.take("rope_scaling", None, dict) or c.take("rope_parameters", {}, dict)
    kind, share = entry.get("rope_type") or entry.get("type") or "default", entry.get("mscale_all_dim")
    if kind == "default" or not share or entry.get("factor", 1) <= 1:
        return 1.0
    return 0.1 * share * math.log(entry["factor"]) + 1.0


def self_attention(step: Step, c: LatentConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    tokens, rows = x.shape[0], c.heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.q_lora_rank is None:
        q = linear(step, x, "q_proj", rows)
    else:
        q = linear(step, x, "q_a_proj", c.q_lora_rank, c.attention_bias)
        q = linear(step, rms_norm(step, q, "q_a_layernorm", _LATENT_EPS), "q_b_proj", rows)
    q = split_heads(q, c.heads)
    both = linear(step, x, "kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.attention_bias)
    latent = rms_norm(step, slice_(both, (0, 0), (tokens, c.kv_lora_rank)), "kv_a_layernorm", _LATENT_EPS)
    k = rope(step, split_heads(slice_(both, (0, c.kv_lora_rank), both.shape), 1), tables, c.rope_interleave)
    k = concatenate((split_heads(latent, 1), k), 2)

    with scope("kv_b_proj"):
        w = values(step, "weight", (c.heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank))
        w = reshape(w, (c.heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank))
        of_keys = slice_(w, (0, 0, 0), (c.heads, c.qk_nope_head_dim, c.kv_lora_rank))
        of_values = slice_(w, (0, c.qk_nope_head_dim, 0), w.shape)
    turned = rope(step, slice_(q, (0, 0, c.qk_nope_head_dim), q.shape), tables, c.rope_interleave)
    # [T, heads, plain] . [heads, plain, latent] -> [heads, T, latent]
    q = dot_general(slice_(q, (0, 0, 0), (tokens, c.heads, c.qk_nope_head_dim)), of_keys, ((2,), (1,)), ((1,), (0,)))
    q = concatenate((transpose(q, (1, 0, 2)), turned), 2)

    out = split_heads(attention(step, layer, q, k, k, c.scale), c.heads)
    out = slice_(out, (0, 0, 0), (tokens, c.heads, c.kv_lora_rank))
    # [T, heads, latent] . [heads, value, latent] -> [heads, T, value]
    out = transpose(dot_general(out, of_values, ((2,), (2,)), ((1,), (0,))), (1, 0, 2))
    return linear(step, reshape(out, (tokens, c.heads * c.v_head_dim)), "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: LatentConfig, layer: int, x: Value) -> Value:
    if not c.sparse[layer]:
        return gated_mlp(step, x, c.intermediate, c.hidden_act, c.mlp_bias)
    logits, by_sigmoid = linear(step, x, "gate", c.experts), c.scores == "sigmoid"
    with scope("gate"):
        correction = step.vector("e_score_correction_bias", (c.experts,)) if by_sigmoid else None
    rated = 2 if by_sigmoid else 1
    chosen, weights = route(logits, c.experts_per_token, c.norm_topk_prob, c.scores, correction, c.groups, rated)
    with scope("experts"):
        routing = chosen, scaled(weights, c.routed_scaling_factor)
        routed = experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act)
    with scope("shared_experts"):
        return add(routed, gated_mlp(step, x, c.moe_intermediate_size * c.n_shared_experts, c.hidden_act, c.mlp_bias))
