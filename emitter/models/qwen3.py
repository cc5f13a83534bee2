"""Qwen3 (arXiv:2505.09388) as in HF `Qwen3ForCausalLM`: Llama with an RMS norm on every head of q and k."""

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
    windows: list[int | None]
    tied: bool
    rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers = c.take("num_hidden_layers")
        window = c.nullable("sliding_window", 4096)
        first = c.take("max_window_layers", 28, least=0)
        slides = c.flag("use_sliding_window", False) and window is not None
        hidden, heads = c.take("hidden_size"), c.take("num_attention_heads")
        head_dim = c.take("head_dim", 128)
        rotary = c.rotary(head_dim, c.take("max_position_embeddings", 32768))
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=c.take("num_key_value_heads"),
            head_dim=head_dim,
            max_positions=rotary.positions,
            eps=c.number("rms_norm_eps", 1e-6),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            attention_bias=c.flag("attention_bias", False),
            windows=c.windows(layers, window if slides else None, lambda layer: slides and layer >= first),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate = activation(linear(step, x, "gate_proj", c.intermediate), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate)
    return linear(step, multiply(gate, up), "down_proj", c.hidden)


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
