"""LFM2 (arXiv:2511.23404) as in HF `Lfm2ForCausalLM`: mostly short convolutions with gates."""

from typing import Any

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.ops import multiply, slice_
from castiron.emitter.layers import activation, attention, linear, qkv_heads, rms_norm, rope
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.recurrences import causal_conv
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import HybridConfig, Mlp, Norms, decoder, residual_block

CONV, FULL = "conv", "full_attention"


class Config(HybridConfig):
    conv_bias: bool = False
    conv_positions: int


def read(c: ConfigReader) -> Config:
    layers = c.take("num_hidden_layers")
    attends = c.take("full_attn_idxs", list(range(layers)), list)
    return c.read(
        Config,
        positions=128000,
        theta=1e6,
        intermediate=feed_forward_size(c),
        eps=c.number("norm_eps", 1e-5),
        hidden_act="silu",
        tied=c.flag("tie_embedding", c.flag("tie_word_embeddings", True)),
        layer_types=c.layer_types(layers, (CONV, FULL), [FULL if layer in attends else CONV for layer in range(layers)]),
        conv_positions=c.take("conv_L_cache", 3, minimum=2),
    )


def feed_forward_size(c: ConfigReader) -> int:
    """Return the MLP's width, which `block_auto_adjust_ff_dim` rounds as HF does."""
    stated = c.take("intermediate_size", None)
    size = c.take("block_ff_dim", stated) or c.take("intermediate_size")
    multiple, factor = c.take("block_multiple_of", 256), c.number("block_ffn_dim_multiplier", 1.0)
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def states(c: Config, context: int) -> tuple[State, ...]:
    convs = c.of_type(CONV)
    conv = State("conv", (len(convs), c.conv_positions - 1, c.hidden), "recurrent", layers=convs)
    return (*layer_caches(dict.fromkeys(c.of_type(FULL)), context, c.kv_heads, c.head_dim), conv)


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim)
    q, k = rms_norm(step, q, "q_layernorm", c.eps), rms_norm(step, k, "k_layernorm", c.eps)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
    return linear(step, out, "out_proj", c.hidden)


def short_conv(step: Step, c: Config, layer: int, x: Value, tables: object) -> Value:
    rows = linear(step, x, "in_proj", 3 * c.hidden, c.conv_bias)
    before, after, x = (slice_(rows, (0, i * c.hidden), (x.shape[0], (i + 1) * c.hidden)) for i in range(3))
    y = causal_conv(step, layer, multiply(before, x), "conv", c.conv_bias)
    return linear(step, multiply(after, y), "out_proj", c.hidden, c.conv_bias)


def feed_forward(step: Step, c: Config, layer: int, x: Value) -> Value:
    gate = activation(linear(step, x, "w1", c.intermediate), c.hidden_act)
    return linear(step, multiply(gate, linear(step, x, "w3", c.intermediate)), "w2", c.hidden)


OPERATORS = {FULL: ("self_attn", self_attention), CONV: ("conv", short_conv)}
NORMS: Norms = ("operator_norm", None, "ffn_norm", None)


def forward(step: Step, c: Config, mlp: Mlp[Any] = feed_forward) -> Value:
    block = residual_block(OPERATORS, mlp, NORMS, mlp_name="feed_forward")
    return decoder(step, c, block, last_norm="embedding_norm")
