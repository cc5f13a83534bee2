"""Layers of Qwen3-Next and Qwen 3.5: gated delta nets (arXiv:2412.06464) and gated attention."""

from __future__ import annotations

from typing import Any

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, broadcast_in_dim, logistic, multiply, reshape, slice_
from castiron.emitter.layers import (
    activation,
    attention,
    experts,
    gated_mlp,
    linear,
    linear_parts,
    rms_norm,
    rms_norm_plus_one,
    rope,
    route,
    split_heads,
)
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.recurrences import causal_conv, gated_delta
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import Block, HybridConfig, Mlp, decoder, residual_block

LINEAR, FULL = "linear_attention", "full_attention"


class DeltaConfig(HybridConfig):
    attention_bias: bool = False
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_positions: int

    @property
    def keys(self) -> int:
        """Return the width of q, which is also that of k: key_heads * key_dim."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the width of v, which is also that of the output gate: value_heads * value_dim."""
        return self.value_heads * self.value_dim


def delta_fields(c: ConfigReader) -> dict[str, Any]:
    layers, interval = c.take("num_hidden_layers"), c.take("full_attention_interval", 4)
    types = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
    return {
        "positions": 32768,
        "partial": 0.25,
        "head_dim": c.take("head_dim", 256),
        "layer_types": c.layer_types(layers, (LINEAR, FULL), types),
        "key_heads": c.take("linear_num_key_heads", 16),
        "value_heads": c.take("linear_num_value_heads", 32),
        "key_dim": c.take("linear_key_head_dim", 128),
        "value_dim": c.take("linear_value_head_dim", 128),
        "conv_positions": c.take("linear_conv_kernel_dim", 4, minimum=2),
    }


class MoeConfig(DeltaConfig):
    """A `DeltaConfig` with routed experts, and a gated shared expert that every token uses."""

    experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True


def states(c: DeltaConfig, context: int) -> tuple[State, ...]:
    layers = c.of_type(LINEAR)
    conv = State("conv", (len(layers), c.conv_positions - 1, 2 * c.keys + c.values), "recurrent", layers=layers)
    delta = State("delta", (len(layers), c.value_heads, c.key_dim, c.value_dim), "recurrent", layers=layers)
    return (*layer_caches(dict.fromkeys(c.of_type(FULL)), context, c.kv_heads, c.head_dim), conv, delta)


def self_attention(step: Step, c: DeltaConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    size = c.heads * c.head_dim
    q, gate = linear_parts(step, x, "q_proj", {"query": size, "gate": size}, c.attention_bias, groups=c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rms_norm_plus_one(step, split_heads(q, c.heads), "q_norm", c.eps), rms_norm_plus_one(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, multiply(out, logistic(gate)), "o_proj", c.hidden, c.attention_bias)


def delta_net(step: Step, c: DeltaConfig, layer: int, qkv: Value, z: Value, a: Value, b: Value) -> Value:
    """Apply a gated delta net with its output norm and `out_proj`; return [T, hidden].

    qkv: q, k and v before the convolution, [T, 2 * c.keys + c.values].
    z: the output gate, [T, c.values].
    a: input of the state's decay exp(-exp(A_log) * softplus(a + dt_bias)), [T, value_heads].
    b: input of the update's strength sigmoid(b), [T, value_heads].
    """
    tokens = qkv.shape[0]
    qkv = activation(causal_conv(step, layer, qkv, "conv1d", bias=False), c.hidden_act)
    q, k = (split_heads(slice_(qkv, (0, i * c.keys), (tokens, (i + 1) * c.keys)), c.key_heads) for i in range(2))
    v = split_heads(slice_(qkv, (0, 2 * c.keys), qkv.shape), c.value_heads)
    out = rms_norm(step, gated_delta(step, layer, q, k, v, a, b), "norm", c.eps)
    out = multiply(out, activation(split_heads(z, c.value_heads), "silu"))
    return linear(step, reshape(out, (tokens, c.values)), "out_proj", c.hidden)


def delta_decoder(step: Step, c: DeltaConfig, linear_attn: Block[Any], mlp: Mlp[Any]) -> Value:
    mixers = {FULL: ("self_attn", self_attention), LINEAR: ("linear_attn", linear_attn)}
    return decoder(step, c, residual_block(mixers, mlp, norm=rms_norm_plus_one), rms_norm_plus_one)


def sparse_mlp(step: Step, c: MoeConfig, layer: int, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.num_experts_per_tok, c.norm_topk_prob)
    with scope("experts"):
        y = experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act)
    with scope("shared_expert"):
        shared = gated_mlp(step, x, c.shared_expert_intermediate_size, c.hidden_act)
    gate = logistic(linear(step, x, "shared_expert_gate", 1))
    return add(y, multiply(broadcast_in_dim(gate, x.shape, (0, 1)), shared))
