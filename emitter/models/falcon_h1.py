"""Falcon-H1 (arXiv:2507.22448) as in HF `FalconH1ForCausalLM`.

Each layer has attention and Mamba 2 in parallel, with multipliers (muP, arXiv:2203.03466).
"""

from castiron.emitter.abi import State
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, concatenate, multiply
from castiron.emitter.layers import activation, attention, linear, linear_parts, qkv_heads, rms_norm, rope, scaled
from castiron.emitter.layers.kv_cache import layer_caches
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder
from castiron.emitter.models.mamba2 import Mamba, scan


class Config(DecoderConfig):
    """The config of Falcon-H1.

    ssm_multipliers: of Mamba's gate, x, B, C and dt. mlp_multipliers: of the MLP's gate and output.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba: Mamba
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    mlp_multipliers: tuple[float, ...] = (1.0,) * 2


def read(c: ConfigReader) -> Config:
    c.unused("num_logits_to_keep", "layers_block_type", "layer_types")
    return c.read(
        Config,
        positions=8192,
        eps=c.number("rms_norm_eps", 1e-5),
        mamba=Mamba.read(c, c.nullable("mamba_d_ssm", 1024)),
    )


def states(c: Config, context: int) -> tuple[State, ...]:
    return (*layer_caches(dict(enumerate(c.windows)), context, c.kv_heads, c.head_dim), *c.mamba.states(range(c.layers)))


def self_attention(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    q, k, v = qkv_heads(step, x, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
    q, k = rope(step, q, tables), rope(step, k, tables)
    out = attention(step, layer, q, k, v, scale=c.key_multiplier * c.head_dim**-0.5)
    return linear(step, out, "o_proj", c.hidden, c.attention_bias)


def mamba(step: Step, c: Config, layer: int, x: Value) -> Value:
    m = c.mamba
    sizes = {"gate": m.features, "x": m.features, "b": m.shared, "c": m.shared, "dt": m.heads}
    parts = linear_parts(step, x, "in_proj", sizes, m.proj_bias)
    gate, *rows, dt = (scaled(part, factor) for part, factor in zip(parts, c.ssm_multipliers, strict=True))
    out, gate = scan(step, m, layer, concatenate(rows, 1), dt, c.hidden_act), activation(gate, "silu")
    if not (c.mamba_rms_norm and c.mamba_norm_before_gate):
        out = multiply(out, gate)
    if c.mamba_rms_norm:
        out = rms_norm(step, out, "norm", c.eps, groups=m.groups)
        out = multiply(out, gate) if c.mamba_norm_before_gate else out
    return linear(step, out, "out_proj", c.hidden, c.projectors_bias)


def feed_forward(step: Step, c: Config, x: Value) -> Value:
    of_gate, of_down = c.mlp_multipliers
    gate = activation(scaled(linear(step, x, "gate_proj", c.intermediate, c.mlp_bias), of_gate), c.hidden_act)
    up = linear(step, x, "up_proj", c.intermediate, c.mlp_bias)
    return scaled(linear(step, multiply(up, gate), "down_proj", c.hidden, c.mlp_bias), of_down)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "input_layernorm", c.eps)
    with scope("mamba"):
        y = scaled(mamba(step, c, layer, scaled(h, c.ssm_in_multiplier)), c.ssm_out_multiplier)
    with scope("self_attn"):
        attended = self_attention(step, c, layer, scaled(h, c.attention_in_multiplier), tables)
        y = add(y, scaled(attended, c.attention_out_multiplier))
    x = add(x, y)
    h = rms_norm(step, x, "pre_ff_layernorm", c.eps)
    with scope("feed_forward"):
        return add(x, feed_forward(step, c, h))


def forward(step: Step, c: Config) -> Value:
    logits = decoder(step, c, block, embedding_multiplier=c.embedding_multiplier, last_norm="final_layernorm")
    return scaled(logits, c.lm_head_multiplier)
