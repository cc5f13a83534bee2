"""ERNIE 4.5 (dense) as in HF `Ernie4_5ForCausalLM`: Llama with interleaved rotary pairs."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block


def read(c: ConfigReader) -> DecoderConfig:
    bias = c.flag("use_bias", False)
    return c.read(
        DecoderConfig,
        attention_bias=bias,
        mlp_bias=bias,
        positions=131072,
        theta=500000.0,
        head_dim=c.nullable("head_dim", 128) or c.take("hidden_size") // c.take("num_attention_heads"),
        kv_heads=c.nullable("num_key_value_heads", 2) or c.take("num_attention_heads"),
        eps=c.number("rms_norm_eps", 1e-5),
        tied=c.flag("tie_word_embeddings", True),
    )


def self_attention(step: Step, c: DecoderConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables, interleaved=True), rope(step, k, tables, interleaved=True)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: DecoderConfig) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
