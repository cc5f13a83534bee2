"""Gemma 3 text (arXiv:2503.19786) as in HF `Gemma3ForCausalLM`: two rotary bases, norms on q and k, most layers slide.

EmbeddingGemma (arXiv:2509.20354) is the same with attention both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, rms_norm, rope, rotary_tables, softcapped, split_heads
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    """rotary: of full layers. sliding_rotary: of those with a window."""

    attention_bias: bool
    query_pre_attn_scalar: float
    windows: list[int | None]
    final_logit_softcapping: float | None
    sliding_rotary: Rotary

    @property
    def max_positions(self) -> int:
        return min(self.rotary.positions, self.sliding_rotary.positions)

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers, head_dim = c.take("num_hidden_layers"), c.take("head_dim", 256)
        # HF reads it and leaves it out of its attention.
        c.require("attn_logit_softcapping")
        pattern = c.take("sliding_window_pattern", c.take("_sliding_window_pattern", 6))
        thetas = c.number("rope_theta", 1000000.0), c.number("rope_local_base_freq", 10000.0)
        bidirectional, window = c.flag("use_bidirectional_attention", False), c.nullable("sliding_window", 4096)
        if bidirectional and window is not None:
            # HF's config counts both sides, its mask one.
            window = window // 2 + 1
        full, sliding = c.rotaries(head_dim, c.take("max_position_embeddings", 131072), *thetas)
        read = cls(
            **c.decoder(
                rotary=full,
                head_dim=head_dim,
                hidden_act=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
                tied=c.flag("tie_word_embeddings", True),
            ),
            attention_bias=c.flag("attention_bias", False),
            query_pre_attn_scalar=c.number("query_pre_attn_scalar", 256),
            windows=c.windows(layers, window, lambda layer: (layer + 1) % pattern != 0),
            final_logit_softcapping=c.nullable("final_logit_softcapping", None, (int, float)),
            sliding_rotary=sliding,
            bidirectional=bidirectional,
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
    q, k = norm(step, q, "q_norm", c.eps), norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    scale, window = c.query_pre_attn_scalar**-0.5, c.windows[layer]
    out = attention(step, layer, q, k, v, scale, window, bidirectional=c.bidirectional)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: list[tuple[Value, Value]]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables[layer])
    x = add(x, norm(step, h, "post_attention_layernorm", c.eps))
    h = norm(step, x, "pre_feedforward_layernorm", c.eps)
    with scope("mlp"):
        h = gated_mlp(step, h, c.intermediate, c.hidden_act)
    return add(x, norm(step, h, "post_feedforward_layernorm", c.eps))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    full = rotary_tables(step, c.rotary, "rotary.full")
    sliding = rotary_tables(step, c.sliding_rotary, "rotary.sliding")
    tables = [sliding if window else full for window in c.windows]
    logits = decoder(step, c, block, tables, norm, embedding_scale=c.hidden**0.5)
    return softcapped(logits, c.final_logit_softcapping)
