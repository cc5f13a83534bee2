"""Granite 4 as in HF `GraniteMoeHybridForCausalLM`: Granite's multipliers, most layers Mamba 2 (arXiv:2405.21060), the others
attention without rotary embedding, and a shared expert beside the routed ones."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    experts,
    linear,
    linear_parts,
    rms_norm,
    rope,
    rotary_tables,
    route,
    scaled,
    split_heads,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import HybridConfig, decoder
from castiron.emitter.models.mamba2 import Mamba, scan
from castiron.emitter.ops import add, constant, divide, multiply
from castiron.emitter.states import State, kv_cache
from castiron.emitter.step import Step
from castiron.emitter.types import F32

MAMBA, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class Config(HybridConfig):
    """intermediate: of a routed expert; experts: how many of those there are, or 0."""

    attention_bias: bool
    rotates: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    experts: int
    experts_per_token: int
    shared_intermediate: int
    mamba: Mamba

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers = c.take("num_hidden_layers")
        kinds = c.take("layers_block_type", [MAMBA] * layers, list)
        read = cls(
            **c.decoder(max_positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads"))),
            layer_types=c.layer_types(layers, (MAMBA, FULL), kinds),
            attention_bias=c.flag("attention_bias", False),
            rotates=c.take("position_embedding_type", "", str) == "rope",
            embedding_multiplier=c.number("embedding_multiplier", 1.0),
            attention_multiplier=c.number("attention_multiplier", 1.0),
            residual_multiplier=c.number("residual_multiplier", 1.0),
            logits_scaling=c.number("logits_scaling", 1.0),
            experts=c.take("num_local_experts", 8, least=0),
            experts_per_token=c.take("num_experts_per_tok", 2),
            shared_intermediate=c.take("shared_intermediate_size", 1024),
            mamba=Mamba.read(c),
        )
        c.finish()
        return read


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*kv_cache(c.count(FULL), context, c.kv_heads, c.head_dim), *c.mamba.states(c.count(MAMBA)))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    if tables:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, c.place(layer), q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    m = c.mamba
    sizes = {"gate": m.features, "conv_in": m.features + 2 * m.shared, "dt": m.heads}
    gate, rows, dt = linear_parts(step, x, "in_proj", sizes, m.proj_bias)
    out = multiply(scan(step, m, c.place(layer), rows, dt, c.hidden_act), activation(gate, "silu"))
    return linear(step, rms_norm(step, out, "norm", c.eps, groups=m.groups), "out_proj", c.hidden, m.proj_bias)


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    with scope("router"):
        logits = linear(step, x, "layer", c.experts)
    # HF's softmax over the chosen logits is that over all of them, divided by the chosen ones' sum.
    routing = route(logits, c.experts_per_token, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act)


def shared_mlp(step: Step, c: Config, x: Value) -> Value:
    sizes = {"gate": c.shared_intermediate, "up": c.shared_intermediate}
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
            y = add(block_sparse_moe(step, c, h), y)
    return add(x, scaled(y, c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = rotary_tables(step, c.rotary) if c.rotates else None
    logits = decoder(step, c, block, tables, embedding_scale=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
