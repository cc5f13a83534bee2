"""Mistral (arXiv:2310.06825) as in HF `MistralForCausalLM`: Llama with a sliding window."""

from castiron.emitter.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rope
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, pre_norm_block
from castiron.emitter.step import Step


def read(c: ConfigReader) -> DecoderConfig:
    return c.read(DecoderConfig, positions=131072, windows=[c.nullable("sliding_window", 4096)] * c.take("num_hidden_layers"))


def self_attention(step: Step, c: DecoderConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def forward(step: Step, c: DecoderConfig) -> Value:
    return decoder(step, c, pre_norm_block(self_attention, mlp))
