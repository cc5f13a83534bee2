"""EXAONE 4.0 (arXiv:2507.11407) as in HF `Exaone4ForCausalLM`: norms after attention and MLP.

In the hybrid models, most layers have a sliding window, and only these layers use rope.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm, rope
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import POST_NORM, DecoderConfig, decoder, mlp, residual_block


class Config(DecoderConfig):
    """The config of EXAONE 4.0. hybrid: whether only layers with a sliding window use rope."""

    hybrid: bool


def read(c: ConfigReader) -> Config:
    window, pattern = c.nullable("sliding_window", 4096), c.take("sliding_window_pattern", 4, (int, str))
    if window is None or isinstance(pattern, str):
        # HF derives layer types only if this key is a number and there is a window.
        c.take("layer_types", kinds=list)
        pattern = 1
    return c.read(
        Config,
        positions=2048,
        eps=c.number("rms_norm_eps", 1e-5),
        windows=c.windows(c.take("num_hidden_layers"), window, lambda layer: (layer + 1) % pattern != 0),
        hybrid=window is not None,
    )


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    if c.windows[layer] or not c.hybrid:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5, window=c.windows[layer])
    return linear(step, out, "o_proj", c.hidden)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp, POST_NORM))
