"""Qwen3 (arXiv:2505.09388) as in HF `Qwen3ForCausalLM`: Llama with norms on heads of q and k."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, gated_mlp, linear, qkv_heads, rms_norm, rope, rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DecoderConfig):
    attention_bias: bool = False
    windows: list[int | None]


def read(c: ConfigReader) -> Config:
    layers = c.take("num_hidden_layers")
    window = c.nullable("sliding_window", 4096)
    first = c.take("max_window_layers", 28, minimum=0)
    slides = c.flag("use_sliding_window", False) and window is not None
    return c.read(
        Config,
        positions=32768,
        head_dim=c.take("head_dim", 128),
        windows=c.windows(layers, window if slides else None, lambda layer: slides and layer >= first),
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("self_attn"):
        x = add(x, self_attention(step, c, layer, h, tables))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary))
