"""Gemma (arXiv:2403.08295) as in HF `GemmaForCausalLM`.

It is Llama with GELU, and with norms that multiply by 1 + weight.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm_plus_one, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    attention_bias: bool = False


def read(c: ConfigReader) -> Config:
    # HF computes the tanh form for both names.
    c.require("hidden_act", "gelu", "gelu_pytorch_tanh")
    c.require("hidden_activation", "gelu_pytorch_tanh")
    c.require("use_bidirectional_attention", False)
    return c.read(
        Config,
        positions=8192,
        head_dim=c.take("head_dim", 256),
        hidden_act="gelu_tanh",
        tied=c.flag("tie_word_embeddings", True),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    block = residual_block(self_attention, mlp, norm=rms_norm_plus_one)
    return decoder(step, c, block, rms_norm_plus_one, embedding_scale=c.hidden**0.5)
