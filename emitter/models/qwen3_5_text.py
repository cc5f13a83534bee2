"""Qwen 3.5 as in HF `Qwen3_5ForCausalLM`: gated delta nets, and some layers of gated attention."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers import linear
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import mlp
from castiron.emitter.models.delta_net import DeltaConfig, delta_decoder, delta_fields, delta_net
from castiron.emitter.models.delta_net import states as states


def read(c: ConfigReader) -> DeltaConfig:
    return c.read(DeltaConfig, **delta_fields(c))


def linear_attn(step: Step, c: DeltaConfig, layer: int, x: Value, tables: object) -> Value:
    qkv, z = linear(step, x, "in_proj_qkv", 2 * c.keys + c.values), linear(step, x, "in_proj_z", c.values)
    a, b = linear(step, x, "in_proj_a", c.value_heads), linear(step, x, "in_proj_b", c.value_heads)
    return delta_net(step, c, layer, qkv, z, a, b)


def forward(step: Step, c: DeltaConfig) -> Value:
    return delta_decoder(step, c, linear_attn, mlp)
