"""Granite 3 as in HF `GraniteForCausalLM`: Llama with multipliers (muP, arXiv:2203.03466) on four of its values."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    linear,
    lm_head,
    rms_norm,
    rope,
    rotary_tables,
    scaled,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add, constant, divide, multiply
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step
from castiron.emitter.types import F32


@dataclass(frozen=True, eq=False)
class Config:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    tied: bool
    rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        hidden, heads = c.take("hidden_size"), c.take("num_attention_heads")
        head_dim = c.take("head_dim", hidden // heads)
        rotary = c.rotary(head_dim, c.take("max_position_embeddings", 2048))
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=c.take("num_hidden_layers"),
            heads=heads,
            kv_heads=c.take("num_key_value_heads", heads),
            head_dim=head_dim,
            max_positions=rotary.positions,
            eps=c.number("rms_norm_eps", 1e-6),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
            embedding_multiplier=c.number("embedding_multiplier", 1.0),
            attention_multiplier=c.number("attention_multiplier", 1.0),
            residual_multiplier=c.number("residual_multiplier", 1.0),
            logits_scaling=c.number("logits_scaling", 1.0),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate = activation(linear(step, x, "gate_proj", c.intermediate, c.mlp_bias), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate, c.mlp_bias)
    return linear(step, multiply(gate, up), "down_proj", c.hidden, c.mlp_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, scaled(mlp(step, c, h), c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = rotary_tables(step, c.rotary)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden)
        x = scaled(x, c.embedding_multiplier)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables)
        x = rms_norm(step, wanted_rows(step, x), "norm", c.eps)
    logits = lm_head(step, x, c.vocab, c.tied)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
