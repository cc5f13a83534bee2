"""Granite 4 as in HF `GraniteMoeHybridForCausalLM`: Granite with Mamba 2 in most layers.

The other layers have attention without rotary embedding. Every token also uses a shared expert.
"""

from castiron.emitter.abi import State
from castiron.emitter.ir import Value, scope
from castiron.emitter.kv_cache import kv_cache
from castiron.emitter.layers import (
    activation,
    attention,
    experts,
    linear,
    linear_parts,
    qkv_heads,
    rms_norm,
    rope,
    rotary_tables,
    route,
    scaled,
)
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import HybridConfig, decoder
from castiron.emitter.models.mamba2 import Mamba, scan
from castiron.emitter.ops import add, constant, divide, multiply
from castiron.emitter.step import Step
from castiron.emitter.types import F32

MAMBA, FULL = "linear_attention", "full_attention"


class Config(HybridConfig):
    """The config. intermediate: width of a routed expert's hidden layer.

    experts: the number of routed experts.
    """

    attention_bias: bool = False
    rotates: bool
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    experts: int
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    mamba: Mamba


def read(c: ConfigReader) -> Config:
    layers = c.take("num_hidden_layers")
    kinds = c.take("layers_block_type", [MAMBA] * layers, list)
    return c.read(
        Config,
        positions=2048,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        layer_types=c.layer_types(layers, (MAMBA, FULL), kinds),
        rotates=c.take("position_embedding_type", "", str) == "rope",
        experts=c.take("num_local_experts", 8, minimum=0),
        mamba=Mamba.read(c),
    )


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*kv_cache(c.count(FULL), context, c.kv_heads, c.head_dim), *c.mamba.states(c.count(MAMBA)))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    if tables:
        q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, c.slot(layer), q, k, v, scale=c.attention_multiplier)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    m = c.mamba
    sizes = {"gate": m.features, "conv_in": m.features + 2 * m.shared, "dt": m.heads}
    gate, rows, dt = linear_parts(step, x, "in_proj", sizes, m.proj_bias)
    out = multiply(scan(step, m, c.slot(layer), rows, dt, c.hidden_act), activation(gate, "silu"))
    return linear(step, rms_norm(step, out, "norm", c.eps, groups=m.groups), "out_proj", c.hidden, m.proj_bias)


def block_sparse_moe(step: Step, c: Config, x: Value) -> Value:
    with scope("router"):
        logits = linear(step, x, "layer", c.experts)
    # HF's softmax over the chosen logits equals a softmax over all, divided by the sum of the
    # chosen.
    routing = route(logits, c.num_experts_per_tok, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act)


def shared_mlp(step: Step, c: Config, x: Value) -> Value:
    sizes = {"gate": c.shared_intermediate_size, "up": c.shared_intermediate_size}
    gate, up = linear_parts(step, x, "input_linear", sizes)
    return linear(step, multiply(activation(gate, c.hidden_act), up), "output_linear", c.hidden)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value] | None) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, scaled(self_attention(step, c, layer, h, tables), c.residual_multiplier))
    else:
        with scope("mamba"):
            x = add(x, scaled(mamba(step, c, layer, h), c.residual_multiplier))
    h = rms_norm(step, x, "post_attention_layernorm", c.eps)
    with scope("shared_mlp"):
        y = shared_mlp(step, c, h)
    if c.experts:
        with scope("block_sparse_moe"):
            y = add(block_sparse_moe(step, c, h), y)
    return add(x, scaled(y, c.residual_multiplier))


def forward(step: Step, c: Config) -> Value:
    tables = rotary_tables(step, c.rotary) if c.rotates else None
    logits = decoder(step, c, block, tables, embedding_multiplier=c.embedding_multiplier)
    return divide(logits, constant(c.logits_scaling, F32, logits.shape))
