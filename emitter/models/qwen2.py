"""Qwen2 (arXiv:2407.10671), Qwen2.5 as in HF `Qwen2ForCausalLM`: Llama with biases of q, k, v."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, mlp, residual_block


def read(c: ConfigReader) -> DecoderConfig:
    c.require("use_mrope", False)
    return c.read(DecoderConfig, positions=32768, windows=windows(c))


def windows(c: ConfigReader) -> list[int | None]:
    window, first = c.nullable("sliding_window", 4096), c.take("max_window_layers", 28, minimum=0)
    slides = c.flag("use_sliding_window", False) and window is not None
    return c.windows(c.take("num_hidden_layers"), window if slides else None, lambda layer: slides and layer >= first)


def self_attention(step: Step, c: DecoderConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, bias=True)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def forward(step: Step, c: DecoderConfig) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
