"""OLMo 2 (arXiv:2501.00656) as in HF `Olmo2ForCausalLM`: norms after attention, MLP, q and k."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, rms_norm, rope, split_heads
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import POST_NORM, DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    attention_bias: bool = False


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=2048,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        eps=c.number("rms_norm_eps", 1e-5),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q = rms_norm(step, linear(step, x, "q_proj", c.heads * c.head_dim, c.attention_bias), "q_norm", c.eps)
    k = rms_norm(step, linear(step, x, "k_proj", c.kv_heads * c.head_dim, c.attention_bias), "k_norm", c.eps)
    q, k = split_heads(q, c.heads), split_heads(k, c.kv_heads)
    v = split_heads(linear(step, x, "v_proj", c.kv_heads * c.head_dim, c.attention_bias), c.kv_heads)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp, POST_NORM))
