"""Granite 4 as in HF `GraniteMoeHybridForCausalLM`: Granite with Mamba 2 in most layers.

The other layers have attention without rotary embedding. Every token also uses a shared expert.
"""

from collections.abc import Sequence
from typing import Any

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, multiply
from castiron.emitter.layers import activation, attention, linear, linear_parts, qkv_heads, rms_norm, rope, scaled
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import HybridConfig
from castiron.emitter.models.granite import GraniteConfig, granite_decoder
from castiron.emitter.models.granitemoe import sparse_mlp
from castiron.emitter.models.mamba2 import Mamba, gated_scan

MAMBA, FULL = "linear_attention", "full_attention"


class Config(GraniteConfig, HybridConfig):
    """The config of Granite 4; `intermediate` is the width of a routed expert's hidden layer."""

    rotates: bool
    experts: int
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    mamba: Mamba

    def tables(self, step: Step) -> Sequence[Any]:
        return super().tables(step) if self.rotates else [None] * self.layers


def read(c: ConfigReader) -> Config:
    layers = c.take("num_hidden_layers")
    kinds = c.take("layers_block_type", [MAMBA] * layers, list)
    return c.read(
        Config,
        positions=2048,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        layer_types=c.layer_types(layers, (MAMBA, FULL), kinds),
        rotates=c.take("position_embedding_type", "", str) == "rope",
        experts=c.take("num_local_experts", 8, minimum=0),
        mamba=Mamba.read(c),
    )


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*layer_caches(dict.fromkeys(c.of_type(FULL)), context, c.kv_heads, c.head_dim), *c.mamba.states(c.of_type(MAMBA)))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    if tables:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    out = gated_scan(step, c.mamba, layer, x, c.hidden_act, c.eps)
    return linear(step, out, "out_proj", c.hidden, c.mamba.proj_bias)


def shared_mlp(step: Step, c: Config, x: Value) -> Value:
    sizes = {"gate": c.shared_intermediate_size, "up": c.shared_intermediate_size}
    gate, up = linear_parts(step, x, "input_linear", sizes)
    return linear(step, multiply(activation(gate, c.hidden_act), up), "output_linear", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    else:
        with scope("mamba"):
            x = add(x, scaled(mamba(step, c, layer, h), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("shared_mlp"):
        y = shared_mlp(step, c, h)
    if c.experts:
        with scope("block_sparse_moe"):
            y = add(sparse_mlp(step, c, h), y)
    return add(x, scaled(y, c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    return granite_decoder(step, c, block)
