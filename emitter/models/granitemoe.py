"""Granite 3 MoE as in HF `GraniteMoeForCausalLM`: Granite whose MLP is a few experts out of many."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, experts, linear, rms_norm, rope, rotary_tables, route, scaled, split_heads
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add, constant, divide
from castiron.emitter.step import Step
from castiron.emitter.types import F32


@dataclass(frozen=True, eq=False)
class Config(DecoderConfig):
    """intermediate: of an expert."""

    attention_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    experts: int
    experts_per_token: int

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        read = cls(
            **c.decoder(max_positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads"))),
            attention_bias=c.flag("attention_bias", False),
            embedding_multiplier=c.number("embedding_multiplier", 1.0),
            attention_multiplier=c.number("attention_multiplier", 1.0),
            residual_multiplier=c.number("residual_multiplier", 1.0),
            logits_scaling=c.number("logits_scaling", 1.0),
            experts=c.take("num_local_experts"),
            experts_per_token=c.take("num_experts_per_tok", 2),
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


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    with scope("router"):
        logits = linear(step, x, "layer", c.experts)
    # HF's softmax over the chosen logits is that over all of them, divided by the chosen ones' sum.
    routing = route(logits, c.experts_per_token, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("block_sparse_moe"):
        return add(x, scaled(block_sparse_moe(step, c, h), c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    logits = decoder(step, c, block, rotary_tables(step, c.rotary), embedding_scale=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
