"""Granite 3 as in HF `GraniteForCausalLM`: Llama with four multipliers (muP, arXiv:2203.03466)."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, qkv_heads, rms_norm, rope, rotary_tables, scaled
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add, constant, divide
from castiron.emitter.step import Step
from castiron.emitter.types import F32


class Config(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def read(c: ConfigReader) -> Config:
    return c.read(Config, positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, scaled(gated_mlp(step, h, c.intermediate, c.hidden_act, c.mlp_bias), c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    logits = decoder(step, c, block, rotary_tables(step, c.rotary), embedding_multiplier=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
