"""Gemma 3 text (arXiv:2503.19786) as in HF `Gemma3ForCausalLM`: two rotary bases, norms on q and k, most layers slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    softcapped,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add, multiply
from castiron.emitter.rotary import Rotary
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError


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
    hidden_activation: str
    attention_bias: bool
    query_pre_attn_scalar: float
    windows: list[int | None]
    final_logit_softcapping: float | None
    tied: bool
    full_rotary: Rotary
    sliding_rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.require("use_bidirectional_attention", False)
        layers, head_dim = c.take("num_hidden_layers"), c.take("head_dim", 256)
        # HF reads it and leaves it out of its attention.
        c.require("attn_logit_softcapping")
        pattern = c.take("sliding_window_pattern", c.take("_sliding_window_pattern", 6))
        full, sliding = rotaries(c, head_dim, c.take("max_position_embeddings", 131072))
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=c.take("hidden_size"),
            intermediate=c.take("intermediate_size"),
            layers=layers,
            heads=c.take("num_attention_heads"),
            kv_heads=c.take("num_key_value_heads"),
            head_dim=head_dim,
            max_positions=min(full.positions, sliding.positions),
            eps=c.number("rms_norm_eps", 1e-6),
            hidden_activation=c.choice("hidden_activation", ACTIVATION_NAMES, "gelu_pytorch_tanh"),
            attention_bias=c.flag("attention_bias", False),
            query_pre_attn_scalar=c.number("query_pre_attn_scalar", 256),
            windows=c.windows(layers, c.nullable("sliding_window", 4096), lambda layer: (layer + 1) % pattern != 0),
            final_logit_softcapping=c.nullable("final_logit_softcapping", None, (int, float)),
            tied=c.flag("tie_word_embeddings", True),
            full_rotary=full,
            sliding_rotary=sliding,
        )
        c.finish()
        return read


def rotaries(c: ConfigReader, head_dim: int, max_positions: int) -> tuple[Rotary, Rotary]:
    """Of full and of sliding layers: nested in `rope_parameters`, or three keys of their own before transformers 5.

    A rope scaling without a layer type is that of the full layers.
    """
    nested = c.take("rope_parameters", {}, dict)
    entries = [nested.get(f"{kind}_attention") or {} for kind in ("full", "sliding")]
    entries[0] = {**entries[0], **c.take("rope_scaling", {}, dict)}
    if set(nested) - {"full_attention", "sliding_attention"}:
        kinds = "'full_attention' and 'sliding_attention'"
        raise EmitError(f"'rope_parameters' in the gemma3_text config must hold {kinds} alone")
    thetas = c.number("rope_theta", 1000000.0), c.number("rope_local_base_freq", 10000.0)
    full, sliding = (c.frequencies(entry, head_dim, max_positions, theta) for entry, theta in zip(entries, thetas))
    return full, sliding


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Gemma's norms store w and multiply by 1 + w."""
    return np.float32(1.0) + weight


def norm(step: Step, c: Config, x: Value, name: str) -> Value:
    return rms_norm(step, x, name, c.eps, plus_one)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = norm(step, c, q, "q_norm"), norm(step, c, k, "k_norm")
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, c.query_pre_attn_scalar**-0.5, c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mlp(step: Step, c: Config, x: Value) -> Value:
    gate = activation(linear(step, x, "gate_proj", c.intermediate), c.hidden_activation)
    return linear(step, multiply(gate, linear(step, x, "up_proj", c.intermediate)), "down_proj", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, c, x, "input_layernorm")
    with scope("self_attn"):
        h = self_attention(step, c, layer, h, tables)
    x = add(x, norm(step, c, h, "post_attention_layernorm"))
    h = norm(step, c, x, "pre_feedforward_layernorm")
    with scope("mlp"):
        h = mlp(step, c, h)
    return add(x, norm(step, c, h, "post_feedforward_layernorm"))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    full = rotary_tables(step, c.full_rotary, "rotary.full")
    sliding = rotary_tables(step, c.sliding_rotary, "rotary.sliding")
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden, scale=c.hidden**0.5)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = block(step, c, layer, x, sliding if c.windows[layer] else full)
        x = norm(step, c, wanted_rows(step, x), "norm")
    return softcapped(lm_head(step, x, c.vocab, c.tied), c.final_logit_softcapping)
