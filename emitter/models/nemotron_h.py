"""Nemotron-H (arXiv:2504.03624) as in HF `NemotronHForCausalLM`.

A layer is Mamba 2, attention without rotary embedding, an MLP without a gate, or experts.
"""

from math import inf

import numpy as np

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    experts,
    linear,
    lm_head,
    qkv_heads,
    rms_norm,
    route,
    scaled,
    wanted_rows,
)
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.rotary import Rotary
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import HybridConfig
from castiron.emitter.models.mamba2 import Mamba, gated_scan

MAMBA, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}


class Config(HybridConfig):
    """The config of Nemotron-H.

    latent: features to which the routed experts' input is projected; None for no projection.
    groups: the number of expert groups, and how many groups the router chooses for a token.
    """

    mamba: Mamba
    mamba_act: str
    mlp_bias: bool = False
    experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    latent: int | None
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    groups: tuple[int, int]


def read(c: ConfigReader) -> Config:
    # The list of layers determines their number.
    c.unused("num_hidden_layers")
    # HF never ties the head of this family, and its attention reads none of the other keys.
    c.require("tie_word_embeddings", False)
    c.unused("attention_bias", "sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    # Keys of training, caches, kernels or a head for further tokens, and keys that HF ignores.
    c.unused(
        *("num_logits_to_keep", "use_mamba_kernels", "expand", "mamba_expand", "chunk_size", "mamba_chunk_size"),
        *("time_step_max", "time_step_floor", "time_step_limit", "mamba_proj_bias", "mamba_ssm_cache_dtype"),
        *("mamba_dt_limit", "mamba_dt_max", "mamba_dt_init_floor", "residual_in_fp32", "rescale_prenorm_residual"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("n_shared_experts", "moe_shared_expert_overlap"),
    )
    count, per_token = c.take("n_routed_experts", c.take("num_local_experts", 8)), c.take("num_experts_per_tok", 2)
    kinds = layer_kinds(c)
    mamba = Mamba(
        c.take("mamba_num_heads", 128),
        c.take("mamba_head_dim", 64),
        c.take("mamba_n_groups", c.take("n_groups", 8)),
        c.take("ssm_state_size", 128),
        c.take("mamba_d_conv", c.take("conv_kernel", 4, minimum=2), minimum=2),
        c.flag("mamba_conv_bias", c.flag("use_conv_bias", True)),
        c.flag("use_bias", False),
        # HF reads the min time step here, and ignores `time_step_limit` and `mamba_dt_limit`.
        (c.number("mamba_dt_min", c.number("time_step_min", 0.001)), inf),
    )
    return c.read(
        Config,
        rotary=Rotary(np.zeros(0, np.float32), c.take("max_position_embeddings", 4096)),
        intermediate=c.take("intermediate_size", 21504),
        head_dim=c.take("head_dim", 128),
        eps=c.number("layer_norm_epsilon", 1e-5),
        hidden_act=c.choice("mlp_hidden_act", ACTIVATION_NAMES, "relu2"),
        kv_heads=c.nullable("num_key_value_heads", 8) or c.take("num_attention_heads"),
        layers=len(kinds),
        layer_types=kinds,
        mamba=mamba,
        mamba_act=c.choice("mamba_hidden_act", ACTIVATION_NAMES, "silu"),
        experts=count,
        num_experts_per_tok=per_token,
        latent=c.take("moe_latent_size", None),
        groups=c.expert_groups(count, per_token),
    )


def layer_kinds(c: ConfigReader) -> tuple[str, ...]:
    """Return the types of layers: a list, or M Mamba 2, * attention, - MLP, E experts."""
    pattern = c.take("hybrid_override_pattern", "", str)
    if unknown := ", ".join(sorted(set(pattern) - set(_LETTERS))):
        raise EmitError(f"'hybrid_override_pattern' in the nemotron_h config has unknown letters: {unknown}; use M, *, - or E")
    kinds = [_LETTERS[letter] for letter in pattern] or [MAMBA, MOE, FULL, MLP]
    kinds = c.take("layers_block_type", c.take("layer_types", kinds, list), list)
    return c.layer_types(len(kinds), tuple(_LETTERS.values()), kinds)


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*layer_caches(dict.fromkeys(c.of_type(FULL)), context, c.kv_heads, c.head_dim), *c.mamba.states(c.of_type(MAMBA)))


def self_attention(step: Step, c: Config, layer: int, x: Value) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    return linear(step, attention(step, layer, q, k, v, scale=c.head_dim**-0.5), "o_proj", c.hidden)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    out = gated_scan(step, c.mamba, layer, x, c.mamba_act, c.eps)
    return linear(step, out, "out_proj", c.hidden, c.mamba.proj_bias)


def mlp(step: Step, c: Config, x: Value, intermediate: int) -> Value:
    up = activation(linear(step, x, "up_proj", intermediate, c.mlp_bias), c.hidden_act)
    return linear(step, up, "down_proj", c.hidden, c.mlp_bias)


def moe(step: Step, c: Config, x: Value) -> Value:
    logits = linear(step, x, "gate", c.experts)
    with scope("gate"):
        correction = step.vector("e_score_correction_bias", (c.experts,))
    chosen, weights = route(logits, c.num_experts_per_tok, c.norm_topk_prob, "sigmoid", correction, c.groups)
    h = x if c.latent is None else linear(step, x, "fc1_latent_proj", c.latent, c.mlp_bias)
    with scope("experts"):
        routing = chosen, scaled(weights, c.routed_scaling_factor)
        h = experts(step, h, routing, c.experts, c.moe_intermediate_size, c.hidden_act, ("up_proj", "down_proj"))
    h = h if c.latent is None else linear(step, h, "fc2_latent_proj", c.hidden, c.mlp_bias)
    with scope("shared_experts"):
        return add(h, mlp(step, c, x, c.moe_shared_expert_intermediate_size))


def mixer(step: Step, c: Config, layer: int, x: Value) -> Value:
    kind = c.layer_types[layer]
    if kind == MAMBA:
        return mamba(step, c, layer, x)
    if kind == FULL:
        return self_attention(step, c, layer, x)
    return moe(step, c, x) if kind == MOE else mlp(step, c, x, c.intermediate)


def forward(step: Step, c: Config) -> Value:
    with scope("model"):
        x = embedding(step, "embeddings", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                h = rms_norm(step, x, "norm", c.eps)
                with scope("mixer"):
                    x = add(x, mixer(step, c, layer, h))
        x = rms_norm(step, wanted_rows(step, x), "norm_f", c.eps)
    return lm_head(step, x, c.vocab, c.tied)
