"""Phi-3 (arXiv:2404.14219), Phi-3.5 and Phi-4-mini as in HF `Phi3ForCausalLM`: Llama with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    activation,
    attention,
    embedding,
    linear,
    linear_parts,
    lm_head,
    rms_norm,
    rope,
    rotary_tables,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add, multiply
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


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
    window: int | None
    tied: bool
    rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.require("attention_bias", False)
        c.require("mlp_bias", False)
        c.require("lm_head_bias", False)
        c.unused("full_attn_mod", "interpolate_factor")
        hidden, heads = c.take("hidden_size"), c.take("num_attention_heads")
        head_dim = c.take("head_dim", hidden // heads)
        rotary = c.rotary(head_dim, c.take("max_position_embeddings", 4096), partial=1.0)
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=c.take("num_hidden_layers"),
            heads=heads,
            kv_heads=c.take("num_key_value_heads", heads),
            head_dim=head_dim,
            max_positions=rotary.positions,
            eps=c.number("rms_norm_eps", 1e-5),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            window=c.nullable("sliding_window", None),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    kv = c.kv_heads * c.head_dim
    q, k, v = linear_parts(step, x, "qkv_proj", {"q_proj": c.heads * c.head_dim, "k_proj": kv, "v_proj": kv})
    q, k, v = split_heads(q, c.heads), split_heads(k, c.kv_heads), split_heads(v, c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.window)
    return linear(step, out, "o_proj", c.hidden)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate, up = linear_parts(step, x, "gate_up_proj", {"gate_proj": c.intermediate, "up_proj": c.intermediate})
    return linear(step, multiply(activation(gate, c.hidden_act), up), "down_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, mlp(step, c, h))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    tables = rotary_tables(step, c.rotary)
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, tables)
        x = rms_norm(step, wanted_rows(step, x), "norm", c.eps)
    return lm_head(step, x, c.vocab, c.tied)
