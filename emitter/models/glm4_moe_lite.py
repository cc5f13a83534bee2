"""GLM-4.7-Flash as in HF `Glm4MoeLiteForCausalLM`: experts, latent attention (arXiv:2405.04434).

A token's keys and values are one latent vector c, from which `kv_b_proj` computes the key K c and
the value V c of each head. As `q . (K c)` equals `(q K) . c`, this code projects queries to the
latent space, uses c as key and value, and multiplies the result by V.
"""

import math

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, experts, gated_mlp, linear, rms_norm, rope, route, scaled, split_heads, values
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, residual_block
from castiron.emitter.ops import add, concatenate, dot_general, reshape, slice_, transpose
from castiron.emitter.shorten import shorten
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError

# HF always uses this epsilon in the norms of latent vectors.
_LATENT_EPS = 1e-6


class Config(DecoderConfig):
    """The config of GLM-4.7-Flash.

    head_dim: width of the KV cache's only head, which has `kv_lora_rank` features of the latent
    vector and then `qk_rope_head_dim` rotated features. scale: the factor of attention scores.
    sparse: for each layer, whether it has experts. groups: the number of groups of experts, and how
    many groups a token may use.
    """

    attention_bias: bool = False
    q_lora_rank: int | None
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    scale: float
    rope_interleave: bool = True
    sparse: list[bool]
    experts: int
    experts_per_token: int
    n_shared_experts: int = 1
    moe_intermediate_size: int = 1536
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.8
    groups: tuple[int, int]


def read(c: ConfigReader) -> Config:
    # HF computes `qk_head_dim` from its parts, and never reads `pretraining_tp`.
    c.unused("qk_head_dim", "pretraining_tp")
    heads, layers = c.take("num_attention_heads"), c.take("num_hidden_layers")
    if (kv_heads := c.take("num_key_value_heads", 20)) != heads:
        raise EmitError(
            f"'num_key_value_heads' in the glm4_moe_lite config is {kv_heads}; it must equal 'num_attention_heads', {heads}"
        )
    rotated, not_rotated = c.take("qk_rope_head_dim", 64), c.take("qk_nope_head_dim", 192)
    c.require("head_dim", rotated)
    count, per_token = c.take("n_routed_experts"), c.take("num_experts_per_tok", 4)
    return c.read(
        Config,
        head_dim=c.take("kv_lora_rank", 512) + rotated,
        kv_heads=1,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=c.rotary(rotated, c.take("max_position_embeddings", 202752)),
        q_lora_rank=c.nullable("q_lora_rank", 768),
        scale=(rotated + not_rotated) ** -0.5 * yarn_scale(c) ** 2,
        sparse=sparse_layers(c, layers),
        experts=count,
        experts_per_token=per_token,
        groups=c.expert_groups(count, per_token),
    )


def sparse_layers(c: ConfigReader, layers: int) -> list[bool]:
    """Return for each layer whether it has experts."""
    types = c.take("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1), list)
    if len(types) != layers or any(type_ not in ("dense", "sparse") for type_ in types):
        raise EmitError(
            f"'mlp_layer_types' in the glm4_moe_lite config is {shorten(types)}; it must have 'dense' or 'sparse' for each of "
            f"{layers} layers"
        )
    return [type_ == "sparse" for type_ in types]


def yarn_scale(c: ConfigReader) -> float:
    """Return the factor by which YaRN scales both q and k (HF's `yarn_apply_mscale`)."""
    entry = c.take("rope_scaling", None, dict) or c.take("rope_parameters", {}, dict)
    kind, share = entry.get("rope_type") or entry.get("type") or "default", entry.get("mscale_all_dim")
    if kind == "default" or not share or entry.get("factor", 1) <= 1:
        return 1.0
    return 0.1 * share * math.log(entry["factor"]) + 1.0


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
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


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    if not c.sparse[layer]:
        return gated_mlp(step, x, c.intermediate, c.hidden_act)
    logits = linear(step, x, "gate", c.experts)
    with scope("gate"):
        correction = step.vector("e_score_correction_bias", (c.experts,))
    chosen, weights = route(logits, c.experts_per_token, c.norm_topk_prob, "sigmoid", correction, c.groups)
    with scope("experts"):
        routing = chosen, scaled(weights, c.routed_scaling_factor)
        routed = experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act)
    with scope("shared_experts"):
        return add(routed, gated_mlp(step, x, c.moe_intermediate_size * c.n_shared_experts, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
