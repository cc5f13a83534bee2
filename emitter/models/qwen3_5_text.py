"""Qwen 3.5 as in HF `Qwen3_5ForCausalLM`: most layers are gated delta nets (arXiv:2412.06464), the others gated attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    gated_mlp,
    linear,
    linear_parts,
    rms_norm,
    rope,
    rotary_tables,
    split_heads,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import HybridConfig, decoder
from castiron.emitter.ops import add, logistic, multiply, reshape, slice_
from castiron.emitter.recurrences import causal_conv, gated_delta
from castiron.emitter.states import State, kv_cache
from castiron.emitter.step import Step

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config(HybridConfig):
    attention_bias: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_positions: int

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers, interval = c.take("num_hidden_layers"), c.take("full_attention_interval", 4)
        kinds = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
        read = cls(
            **c.decoder(max_positions=32768, partial=0.25, head_dim=c.take("head_dim", 256)),
            layer_types=c.layer_types(layers, (LINEAR, FULL), kinds),
            attention_bias=c.flag("attention_bias", False),
            key_heads=c.take("linear_num_key_heads", 16),
            value_heads=c.take("linear_num_value_heads", 32),
            key_dim=c.take("linear_key_head_dim", 128),
            value_dim=c.take("linear_value_head_dim", 128),
            conv_positions=c.take("linear_conv_kernel_dim", 4, least=2),
        )
        c.finish()
        return read

    @property
    def conv_parts(self) -> tuple[tuple[int, int], ...]:
        """Heads, and features of a head, of q, k and v, which are convolved together."""
        return (self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)

    @property
    def conv_features(self) -> int:
        return sum(heads * dim for heads, dim in self.conv_parts)


def states(c: Config, context: int) -> tuple[State, ...]:
    layers = c.count(LINEAR)
    conv = State("conv", (layers, c.conv_positions - 1, c.conv_features), kind="recurrent")
    delta = State("delta", (layers, c.value_heads, c.key_dim, c.value_dim), kind="recurrent")
    return (*kv_cache(c.count(FULL), context, c.kv_heads, c.head_dim), conv, delta)


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Norms store w and multiply by 1 + w, except that of the delta net's heads."""
    return np.float32(1.0) + weight


def norm(step: Step, x: Value, name: str, eps: float) -> Value:
    return rms_norm(step, x, name, eps, plus_one)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    size = c.heads * c.head_dim
    q, gate = linear_parts(step, x, "q_proj", {"query": size, "gate": size}, c.attention_bias, groups=c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = norm(step, split_heads(q, c.heads), "q_norm", c.eps), norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, c.place(layer), q, k, v, scale=c.head_dim**-0.5)
    return linear(step, multiply(out, logistic(gate)), "o_proj", c.hidden, c.attention_bias)


def delta_net(step: Step, c: Config, layer: int, x: Value) -> Value:
    place, tokens = c.place(layer), x.shape[0]
    qkv = linear(step, x, "in_proj_qkv", c.conv_features)
    z = split_heads(linear(step, x, "in_proj_z", c.value_heads * c.value_dim), c.value_heads)
    a, b = linear(step, x, "in_proj_a", c.value_heads), linear(step, x, "in_proj_b", c.value_heads)
    qkv = activation(causal_conv(step, place, qkv, "conv1d", bias=False), c.hidden_act)
    heads, first = [], 0
    for count, dim in c.conv_parts:
        heads.append(split_heads(slice_(qkv, (0, first), (tokens, first + count * dim)), count))
        first += count * dim
    q, k, v = heads
    out = rms_norm(step, gated_delta(step, place, q, k, v, a, b), "norm", c.eps)
    out = reshape(multiply(out, activation(z, "silu")), (tokens, c.value_heads * c.value_dim))
    return linear(step, out, "out_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
    else:
        with scope("linear_attn"):
            x = add(x, delta_net(step, c, layer, h))
    h = norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary), norm)
