"""Falcon-H1 (arXiv:2507.22448) as in HF `FalconH1ForCausalLM`: attention and Mamba 2 side by side in each layer, with
multipliers (muP, arXiv:2203.03466) on most of its values."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    linear,
    linear_parts,
    rms_norm,
    rope,
    rotary_tables,
    scaled,
    split_heads,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.models.mamba2 import Mamba, scan
from castiron.emitter.ops import add, concatenate, multiply
from castiron.emitter.states import State, kv_cache
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    """ssm_multipliers: of the gate, x, B, C and dt. mlp_multipliers: of the gate and of what comes out."""

    attention_bias: bool
    mlp_bias: bool
    out_bias: bool
    mamba: Mamba
    mamba_norm: bool
    norm_before_gate: bool
    embedding_multiplier: float
    head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    ssm_multipliers: list[float]
    mlp_multipliers: list[float]

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("num_logits_to_keep", "layers_block_type", "layer_types")
        read = cls(
            **c.decoder(max_positions=8192, eps=c.number("rms_norm_eps", 1e-5)),
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
            out_bias=c.flag("projectors_bias", False),
            mamba=Mamba.read(c, c.nullable("mamba_d_ssm", 1024)),
            mamba_norm=c.flag("mamba_rms_norm", False),
            norm_before_gate=c.flag("mamba_norm_before_gate", True),
            embedding_multiplier=c.number("embedding_multiplier", 1.0),
            head_multiplier=c.number("lm_head_multiplier", 1.0),
            key_multiplier=c.number("key_multiplier", 1.0),
            attention_in_multiplier=c.number("attention_in_multiplier", 1.0),
            attention_out_multiplier=c.number("attention_out_multiplier", 1.0),
            ssm_in_multiplier=c.number("ssm_in_multiplier", 1.0),
            ssm_out_multiplier=c.number("ssm_out_multiplier", 1.0),
            ssm_multipliers=c.numbers("ssm_multipliers", [1.0] * 5),
            mlp_multipliers=c.numbers("mlp_multipliers", [1.0] * 2),
        )
        c.finish()
        return read


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*kv_cache(c.layers, context, c.kv_heads, c.head_dim), *c.mamba.states(c.layers))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.key_multiplier * c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    m = c.mamba
    sizes = {"gate": m.features, "x": m.features, "b": m.shared, "c": m.shared, "dt": m.heads}
    parts = linear_parts(step, x, "in_proj", sizes, m.proj_bias)
    gate, *rows, dt = (scaled(part, factor) for part, factor in zip(parts, c.ssm_multipliers, strict=True))
    out, gate = scan(step, m, layer, concatenate(rows, 1), dt, c.hidden_act), activation(gate, "silu")
    if not (c.mamba_norm and c.norm_before_gate):
        out = multiply(out, gate)
    if c.mamba_norm:
        out = rms_norm(step, out, "norm", c.eps, groups=m.groups)
        out = multiply(out, gate) if c.norm_before_gate else out
    return linear(step, out, "out_proj", c.hidden, c.out_bias)


def feed_forward(step: Step, c: Config, x: Value) -> Value:
    of_gate, of_down = c.mlp_multipliers
    gate = activation(scaled(linear(step, x, "gate_proj", c.intermediate, c.mlp_bias), of_gate), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate, c.mlp_bias)
    return scaled(linear(step, multiply(up, gate), "down_proj", c.hidden, c.mlp_bias), of_down)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("mamba"):
        y = scaled(mamba(step, c, layer, scaled(h, c.ssm_in_multiplier)), c.ssm_out_multiplier)
    with scope("self_attn"):
        attended = self_attention(step, c, layer, scaled(h, c.attention_in_multiplier), tables)
        y = add(y, scaled(attended, c.attention_out_multiplier))
    x = add(x, y)
    h = rms_norm(step, x, "pre_ff_layernorm", c.eps)
    with scope("feed_forward"):
        return add(x, feed_forward(step, c, h))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = rotary_tables(step, c.rotary)
    logits = decoder(step, c, block, tables, embedding_scale=c.embedding_multiplier, last_norm="final_layernorm")
    return scaled(logits, c.head_multiplier)
