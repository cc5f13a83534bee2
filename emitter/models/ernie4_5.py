"""ERNIE 4.5 (dense) as in HF `Ernie4_5ForCausalLM`: Llama with interleaved rotary pairs."""

from castiron.emitter.ir import Value
from castiron.emitter.layers import attention, gated_mlp, linear, qkv_heads, rope
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, pre_norm_block
from castiron.emitter.step import Step


class Config(DecoderConfig):
    use_bias: bool = False


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=131072,
        theta=500000.0,
        head_dim=c.nullable("head_dim", 128) or c.take("hidden_size") // c.take("num_attention_heads"),
        kv_heads=c.nullable("num_key_value_heads", 2) or c.take("num_attention_heads"),
        eps=c.number("rms_norm_eps", 1e-5),
        tied=c.flag("tie_word_embeddings", True),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.use_bias)
    q, k = rope(step, q, tables, interleaved=True), rope(step, k, tables, interleaved=True)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.use_bias)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    return gated_mlp(step, x, c.intermediate, c.hidden_act, c.use_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, pre_norm_block(self_attention, mlp))
