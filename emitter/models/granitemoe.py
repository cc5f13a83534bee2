"""Granite 3 MoE as in HF `GraniteMoeForCausalLM`: Granite with experts instead of an MLP."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import (
    attention,
    experts,
    linear,
    qkv_heads,
    rms_norm,
    rope,
    rotary_tables,
    route,
    scaled,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add, constant, divide
from castiron.emitter.step import Step
from castiron.emitter.types import F32


class Config(DecoderConfig):
    """The config. intermediate: width of an expert's hidden layer."""

    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    experts: int
    num_experts_per_tok: int = 2


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=2048,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        experts=c.take("num_local_experts"),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    with scope("router"):
        logits = linear(step, x, "layer", c.experts)
    # HF's softmax over the chosen logits equals a softmax over all, divided by the sum of the
    # chosen.
    routing = route(logits, c.num_experts_per_tok, normalised=True)
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
    logits = decoder(step, c, block, rotary_tables(step, c.rotary), embedding_multiplier=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
