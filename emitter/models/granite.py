"""Granite 3 as in HF `GraniteForCausalLM`: Llama with four multipliers (muP, arXiv:2203.03466)."""

from typing import Any

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.ops import constant, divide
from castiron.emitter.graph.types import F32
from castiron.emitter.layers import attention, gated_mlp, linear, qkv_heads, rope, scaled
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import Block, DecoderConfig, decoder, residual_block


class GraniteConfig(DecoderConfig):
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class Config(GraniteConfig):
    mlp_bias: bool = False


def read(c: ConfigReader) -> Config:
    return c.read(Config, positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")))


def self_attention(step: Step, c: GraniteConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.attention_multiplier)
    return scaled(linear(step, out, "o_proj", c.hidden, c.attention_bias), c.residual_multiplier)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    return scaled(gated_mlp(step, x, c.intermediate, c.hidden_act, c.mlp_bias), c.residual_multiplier)


def granite_decoder(step: Step, c: Any, block: Block[Any]) -> Value:
    logits = decoder(step, c, block, embedding_multiplier=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))


def forward(step: Step, c: Config) -> Value:
    return granite_decoder(step, c, residual_block(self_attention, mlp))
