"""Qwen3 (arXiv:2505.09388) as in HF `Qwen3ForCausalLM`: Llama with norms on heads of q and k."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block
from castiron.emitter.models.qwen2 import windows


class Config(DecoderConfig):
    attention_bias: bool = False


def read(c: ConfigReader) -> Config:
    return c.read(Config, positions=32768, head_dim=c.take("head_dim", 128), windows=windows(c))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
