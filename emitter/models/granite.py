"""Granite 3 as in HF `GraniteForCausalLM`: Llama with multipliers (muP, arXiv:2203.03466) on four of its values."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    attention,
    embedding,
    gated_mlp,
    linear,
    lm_head,
    rms_norm,
    rope,
    rotary_tables,
    scaled,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig
from castiron.emitter.ops import add, constant, divide
from castiron.emitter.step import Step
from castiron.emitter.types import F32


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        read = cls(
            **c.decoder(max_positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads"))),
            attention_bias=c.flag("attention_bias", False),
            mlp_bias=c.flag("mlp_bias", False),
            embedding_multiplier=c.number("embedding_multiplier", 1.0),
            attention_multiplier=c.number("attention_multiplier", 1.0),
            residual_multiplier=c.number("residual_multiplier", 1.0),
            logits_scaling=c.number("logits_scaling", 1.0),
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


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, scaled(gated_mlp(step, h, c.intermediate, c.hidden_act, c.mlp_bias), c.residual_multiplier))


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
