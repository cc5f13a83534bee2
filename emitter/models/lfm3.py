"""LFM3 as in HF `Lfm3ForCausalLM`: LFM2 with norms before and after each operator and MLP.

Attention may have a gate for each head, and has a sliding window in some layers.
"""

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.ops import broadcast_in_dim, logistic, multiply, reshape
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers import attention, linear, qkv_heads, rms_norm, rope, split_heads
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.step import Step
from castiron.emitter.models import lfm2
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import Norms, SlidingConfig, decoder, residual_block
from castiron.emitter.models.lfm2 import CONV, FULL, NORMS, feed_forward, short_conv

SLIDING = "sliding_attention"
# HF's defaults for `rope_parameters`: of layers with full attention, and of those with a sliding window.
_ROPES = (
    {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4},
)


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
        raise EmitError("the lfm3 config lacks 'sliding_window' for its layers")
    of_full, of_sliding = c.rotaries([head_dim] * 2, c.take("max_position_embeddings", 128000), *_ROPES)
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
    windows = {layer: c.windows[layer] for layer, kind in enumerate(c.layer_types) if kind != CONV}
    convs = c.of_type(CONV)
    conv = State("conv", (len(convs), c.conv_positions - 1, c.hidden), "recurrent", layers=convs)
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


OPERATORS = {kind: ("self_attn", self_attention) for kind in (FULL, SLIDING)} | {CONV: ("conv", short_conv)}
SANDWICH_NORMS: Norms = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")


def forward(step: Step, c: Config) -> Value:
    norms = SANDWICH_NORMS if c.use_sandwich_norm else NORMS
    block = residual_block(OPERATORS, feed_forward, norms, mlp_name="feed_forward")
    return decoder(step, c, block, last_norm="embedding_norm")
