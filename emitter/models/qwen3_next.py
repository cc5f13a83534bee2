"""Qwen3-Next as in HF `Qwen3NextForCausalLM`: gated delta nets, gated attention, experts."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import gated_mlp, linear_parts, rms_norm_plus_one, rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder
from castiron.emitter.models.delta_net import (
    FULL,
    DeltaConfig,
    Experts,
    delta_fields,
    delta_net,
    self_attention,
    sparse_mlp,
)
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.models.qwen3_moe import sparse_layers
from castiron.emitter.ops import add, concatenate
from castiron.emitter.step import Step


class Config(DeltaConfig):
    sparse: list[bool]
    experts: Experts


def read(c: ConfigReader) -> Config:
    experts = Experts.read(c, 512, 10, c.flag("norm_topk_prob", True))
    sparse = sparse_layers(c, c.take("num_hidden_layers"))
    intermediate = c.take("intermediate_size", 5632)
    return c.read(Config, intermediate=intermediate, sparse=sparse, experts=experts, **delta_fields(c))


def linear_attn(step: Step, c: Config, layer: int, x: Value) -> Value:
    """Apply a gated delta net whose projections are fused: q, k, v, z in one, b, a in the other.

    The rows of both fused weights are grouped by key head.
    """
    parts = {"q": c.keys, "k": c.keys, "v": c.values, "z": c.values}
    q, k, v, z = linear_parts(step, x, "in_proj_qkvz", parts, groups=c.key_heads)
    b, a = linear_parts(step, x, "in_proj_ba", {"b": c.value_heads, "a": c.value_heads}, groups=c.key_heads)
    return delta_net(step, c, layer, concatenate((q, k, v), 1), z, a, b)


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm_plus_one(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
    else:
        with scope("linear_attn"):
            x = add(x, linear_attn(step, c, layer, h))
    h = rms_norm_plus_one(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        if c.sparse[layer]:
            return add(x, sparse_mlp(step, c, c.experts, h))
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary), rms_norm_plus_one)
