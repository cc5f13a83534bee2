"""Llama 2 to 3.2, SmolLM2, TinyLlama (arXiv:2307.09288, 2407.21783) as in HF `LlamaForCausalLM`."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


def read(c: ConfigReader) -> Config:
    c.unused("pretraining_tp")
    c.require("rope_interleaved", False)
    return c.read(Config, positions=2048, kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")))


def self_attention(step: Step, c: DecoderConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
