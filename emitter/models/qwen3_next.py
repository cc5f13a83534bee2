"""Qwen3-Next as in HF `Qwen3NextForCausalLM`: gated delta nets, gated attention, experts."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.ops import concatenate
from castiron.emitter.layers import gated_mlp, linear_parts
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.delta_net import MoeConfig, delta_decoder, delta_fields, delta_net, sparse_mlp
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.models.qwen3_moe import sparse_layers


class Config(MoeConfig):
    sparse: list[bool]


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        intermediate=c.take("intermediate_size", 5632),
        sparse=sparse_layers(c, c.take("num_hidden_layers")),
        experts=c.take("num_experts", c.take("num_local_experts", 512)),
        num_experts_per_tok=c.take("num_experts_per_tok", 10),
        **delta_fields(c),
    )


def linear_attn(step: Step, c: Config, layer: int, x: Value, tables: object) -> Value:
    """Apply a gated delta net to two fused projections of x, whose rows are grouped by key head."""
    parts = {"q": c.keys, "k": c.keys, "v": c.values, "z": c.values}
    q, k, v, z = linear_parts(step, x, "in_proj_qkvz", parts, groups=c.key_heads)
    b, a = linear_parts(step, x, "in_proj_ba", {"b": c.value_heads, "a": c.value_heads}, groups=c.key_heads)
    return delta_net(step, c, layer, concatenate((q, k, v), 1), z, a, b)


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    return sparse_mlp(step, c, layer, x) if c.sparse[layer] else gated_mlp(step, x, c.intermediate, c.hidden_act)


def forward(step: Step, c: Config) -> Value:
    return delta_decoder(step, c, linear_attn, mlp)
