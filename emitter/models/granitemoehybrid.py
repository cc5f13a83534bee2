"""Granite 4 as in HF `GraniteMoeHybridForCausalLM`: Granite's multipliers, most layers Mamba 2 (arXiv:2405.21060), the others
attention without rotary embedding, and a shared expert beside the routed ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

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
from castiron.emitter.ops import add, constant, divide, multiply, reshape, slice_
from castiron.emitter.recurrences import causal_conv, selective_scan
from castiron.emitter.states import State, kv_cache
from castiron.emitter.step import Step
from castiron.emitter.types import F32, EmitError

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
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    mamba_state: int
    conv_positions: int
    conv_bias: bool
    proj_bias: bool

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers = c.take("num_hidden_layers")
        kinds = c.take("layers_block_type", [MAMBA] * layers, list)
        # HF's chunks would clamp the steps of time, its single tokens would not.
        c.require("time_step_limit", [0.0, inf], (0.0, inf), [0.0, {"__float__": "Infinity"}])
        # Changes no result but by rounding.
        c.unused("mamba_chunk_size")
        heads = c.take("mamba_n_heads", 128)
        features = c.take("mamba_expand", 2) * c.take("hidden_size")
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
            mamba_heads=heads,
            mamba_head_dim=head_dim(c, features, heads),
            mamba_groups=c.take("mamba_n_groups", 1),
            mamba_state=c.take("mamba_d_state", 256),
            conv_positions=c.take("mamba_d_conv", 4, least=2),
            conv_bias=c.flag("mamba_conv_bias", True),
            proj_bias=c.flag("mamba_proj_bias", False),
        )
        c.finish()
        return read

    @property
    def mamba_features(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_features(self) -> int:
        """x, B and C, which are convolved together."""
        return self.mamba_features + 2 * self.mamba_groups * self.mamba_state


def head_dim(c: ConfigReader, features: int, heads: int) -> int:
    stated = c.take("mamba_d_head", "auto", (int, str))
    size = features // heads if stated == "auto" else stated
    if size * heads != features:
        raise EmitError(
            f"the {c.model_type} config has {heads} Mamba heads of {stated} where its layers have {features} features"
        )
    return size


def states(c: Config, context: int) -> tuple[State, ...]:
    layers = c.count(MAMBA)
    conv = State("conv", (layers, c.conv_positions - 1, c.conv_features), kind="recurrent")
    scan = State("scan", (layers, c.mamba_heads, c.mamba_head_dim, c.mamba_state), kind="recurrent")
    return (*kv_cache(c.count(FULL), context, c.kv_heads, c.head_dim), conv, scan)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    if tables:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, c.place(layer), q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    place, tokens, features = c.place(layer), x.shape[0], c.mamba_features
    sizes = {"gate": features, "conv_in": c.conv_features, "dt": c.mamba_heads}
    gate, rows, dt = linear_parts(step, x, "in_proj", sizes, c.proj_bias)
    rows = activation(causal_conv(step, place, rows, "conv1d", c.conv_bias), c.hidden_act)
    x = split_heads(slice_(rows, (0, 0), (tokens, features)), c.mamba_heads)
    b, c_ = (
        split_heads(slice_(rows, (0, first), (tokens, first + c.mamba_groups * c.mamba_state)), c.mamba_groups)
        for first in (features, features + c.mamba_groups * c.mamba_state)
    )
    out = reshape(selective_scan(step, place, x, dt, b, c_), (tokens, features))
    out = rms_norm(step, multiply(out, activation(gate, "silu")), "norm", c.eps, groups=c.mamba_groups)
    return linear(step, out, "out_proj", c.hidden, c.proj_bias)


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
