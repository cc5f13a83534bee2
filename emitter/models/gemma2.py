"""Gemma 2 (arXiv:2408.00118) as in HF `Gemma2ForCausalLM`: soft caps, every other layer slides, norms before and after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, softcapped, split_heads
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    attention_bias: bool
    query_pre_attn_scalar: float
    windows: list[int | None]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("hidden_act")
        c.require("use_bidirectional_attention", False)
        layers = c.take("num_hidden_layers")
        read = cls(
            **c.decoder(
                max_positions=8192,
                head_dim=c.take("head_dim", 256),
                hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
                tied=c.flag("tie_word_embeddings", True),
            ),
            attention_bias=c.flag("attention_bias", False),
            query_pre_attn_scalar=c.number("query_pre_attn_scalar", 256),
            windows=c.windows(layers, c.nullable("sliding_window", 4096), lambda layer: layer % 2 == 0),
            attn_logit_softcapping=c.nullable("attn_logit_softcapping", 50.0, (int, float)),
            final_logit_softcapping=c.nullable("final_logit_softcapping", 30.0, (int, float)),
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
    scale = c.query_pre_attn_scalar**-0.5
    out = attention(step, layer, q, k, v, scale, c.windows[layer], c.attn_logit_softcapping)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables)
    x = add(x, norm(step, h, "post_attention_layernorm", c.eps))
    h = norm(step, x, "pre_feedforward_layernorm", c.eps)
    with scope("mlp"):
        h = gated_mlp(step, h, c.intermediate, c.hidden_act)
    return add(x, norm(step, h, "post_feedforward_layernorm", c.eps))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    logits = decoder(step, c, block, rotary_tables(step, c.rotary), norm, embedding_scale=c.hidden**0.5)
    return softcapped(logits, c.final_logit_softcapping)
