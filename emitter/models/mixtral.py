"""Mixtral (arXiv:2401.04088) as in HF `MixtralForCausalLM`: Mistral whose MLP is a few experts out of many."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    attention,
    embedding,
    experts,
    linear,
    lm_head,
    rms_norm,
    rope,
    rotary_tables,
    route,
    split_heads,
    wanted_rows,
)
from castiron.emitter.models.config import ACTIVATION_NAMES, ConfigReader
from castiron.emitter.ops import add
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
    experts: int
    experts_per_token: int
    window: int | None
    tied: bool
    rotary: Rotary

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        hidden, heads = c.take("hidden_size"), c.take("num_attention_heads")
        head_dim = c.take("head_dim", hidden // heads)
        rotary = c.rotary(head_dim, c.take("max_position_embeddings", 131072), theta=1000000.0)
        read = cls(
            vocab=c.take("vocab_size"),
            hidden=hidden,
            intermediate=c.take("intermediate_size"),
            layers=c.take("num_hidden_layers"),
            heads=heads,
            kv_heads=c.take("num_key_value_heads"),
            head_dim=head_dim,
            max_positions=rotary.positions,
            eps=c.number("rms_norm_eps", 1e-5),
            hidden_act=c.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            experts=c.take("num_local_experts"),
            experts_per_token=c.take("num_experts_per_tok", 2),
            window=c.nullable("sliding_window", None),
            tied=c.flag("tie_word_embeddings", False),
            rotary=rotary,
        )
        c.finish()
        return read


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = split_heads(linear(step, x, "q_proj", c.heads * c.head_dim), c.heads)
    k = split_heads(linear(step, x, "k_proj", c.kv_heads * c.head_dim), c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.window)
    return linear(step, out, "o_proj", c.hidden)


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.experts_per_token, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act, names=("w1", "w3", "w2"))


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("block_sparse_moe"):
        return add(x, block_sparse_moe(step, c, h))


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
