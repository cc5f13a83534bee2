"""LFM3 as in HF `Lfm3ForCausalLM`: LFM2 with norms before and after each operator and MLP.

An operator is a convolution or attention. Attention may have a gate for each head, and has a
sliding window in some layers.
"""

from castiron.emitter.abi import State
from castiron.emitter.ir import Value, scope
from castiron.emitter.kv_cache import layer_caches
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm, rope, split_heads
from castiron.emitter.models import lfm2
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import SlidingConfig, decoder
from castiron.emitter.models.lfm2 import CONV, FULL, feed_forward, short_conv
from castiron.emitter.ops import add, broadcast_in_dim, logistic, multiply, reshape
from castiron.emitter.step import Step
from castiron.emitter.types import EmitError

SLIDING = "sliding_attention"
_ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


class Config(SlidingConfig, lfm2.Config):
    attention_bias: bool = False
    use_attention_gate: bool = True
    use_sandwich_norm: bool = True


def read(c: ConfigReader) -> Config:
    layers, head_dim = c.take("num_hidden_layers"), c.take("head_dim", 128)
    kinds = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(layers)]
    types = c.layer_types(layers, (CONV, FULL, SLIDING), kinds)
    window = c.nullable("sliding_window", 256)
    if window is None and SLIDING in types:
        raise EmitError("the lfm3 config has layers with a sliding window, but no 'sliding_window'")
    entries, positions = c.take("rope_parameters", _ROPES, dict), c.take("max_position_embeddings", 128000)
    if not set(types) - {CONV} <= set(entries) <= {FULL, SLIDING}:
        raise EmitError(f"'rope_parameters' in the lfm3 config must have the keys {FULL!r} and {SLIDING!r} only")
    of_full, of_sliding = (c.frequencies(entries.get(k) or _ROPES[k], head_dim, positions, 1e6) for k in (FULL, SLIDING))
    return c.read(
        Config,
        head_dim=head_dim,
        eps=c.number("norm_eps", c.number("rms_norm_eps", 1e-5)),
        hidden_act="silu",
        tied=c.flag("tie_word_embeddings", True),
        rotary=of_full,
        layer_types=types,
        sliding_rotary=of_sliding,
        windows=[window if kind == SLIDING else None for kind in types],
        conv_positions=c.take("conv_L_cache", 7, minimum=2),
    )


def states(c: Config, context: int) -> tuple[State, ...]:
    """Return the KV caches, the rings of sliding windows, and the convolution states."""
    windows = {layer: c.windows[layer] for layer, kind in enumerate(c.layer_types) if kind != CONV}
    conv = State("conv", (c.count(CONV), c.conv_positions - 1, c.hidden), kind="recurrent")
    return (*layer_caches(windows, context, c.kv_heads, c.head_dim), conv)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rms_norm(step, q, "q_norm", c.eps), rms_norm(step, k, "k_norm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, c.head_dim**-0.5, c.windows[layer])
    if c.use_attention_gate:
        heads = split_heads(out, c.heads)
        gate = broadcast_in_dim(logistic(linear(step, x, "g_proj", c.heads)), heads.shape, (0, 1))
        out = reshape(multiply(heads, gate), out.shape)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def after(step: Step, c: Config, x: Value, name: str) -> Value:
    return rms_norm(step, x, name, c.eps) if c.use_sandwich_norm else x


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "operator_norm", c.eps)
    if c.layer_types[layer] == CONV:
        with scope("conv"):
            h = short_conv(step, c, layer, h, tables)
    else:
        with scope("self_attn"):
            h = self_attention(step, c, layer, h, tables)
    x = add(x, after(step, c, h, "post_operator_norm"))
    h = rms_norm(step, x, "ffn_norm", c.eps)
    with scope("feed_forward"):
        h = feed_forward(step, c, layer, h)
    return add(x, after(step, c, h, "post_ffn_norm"))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, last_norm="embedding_norm")
