"""Gemma (arXiv:2403.08295) as in HF `GemmaForCausalLM`: Llama with scaled embeddings, GELU, and norms that add one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    attention_bias: bool

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        # HF computes the tanh form for either word.
        c.require("hidden_act", "gelu", "gelu_pytorch_tanh")
        c.require("hidden_activation", "gelu_pytorch_tanh")
        c.require("use_bidirectional_attention", False)
        read = cls(
            **c.decoder(
                max_positions=8192,
                head_dim=c.take("head_dim", 256),
                hidden_act="gelu_tanh",
                tied=c.flag("tie_word_embeddings", True),
            ),
            attention_bias=c.flag("attention_bias", False),
        )
        c.finish()
        return read


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Gemma's norms store w and multiply by 1 + w."""
    return np.float32(1.0) + weight


def norm(step: Step, x: Value, name: str, eps: float) -> Value:
    return rms_norm(step, x, name, eps, plus_one)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary), norm, embedding_scale=c.hidden**0.5)
