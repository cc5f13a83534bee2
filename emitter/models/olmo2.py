"""OLMo 2 (arXiv:2501.00656) as in HF `Olmo2ForCausalLM`: norms after attention and MLP, and on the rows of q and k."""

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
    attention_bias: bool
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
            eps=c.number("rms_norm_eps", 1e-5),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            attention_bias=c.flag("attention_bias", False),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = rms_norm(step, linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), "q_norm", c.eps)
    k = rms_norm(step, linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), "k_norm", c.eps)
    q, k = split_heads(q, c.heads), split_heads(k, c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate = activation(linear(step, x, "gate_proj", c.intermediate), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate)
    return linear(step, multiply(gate, up), "down_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    with scope("self_attn"):
        h = self_attention(step, c, layer, x, tables)
    x = add(x, rms_norm(step, h, "post_attention_layernorm", c.eps))
    with scope("mlp"):
        h = mlp(step, c, x)
    return add(x, rms_norm(step, h, "post_feedforward_layernorm", c.eps))


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
