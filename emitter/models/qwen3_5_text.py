"""Qwen 3.5 as in HF `Qwen3_5ForCausalLM`: gated delta nets, and some layers of gated attention."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import gated_mlp, linear, rms_norm_plus_one, rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder
from castiron.emitter.models.delta_net import FULL, DeltaConfig, delta_fields, delta_net, self_attention
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.ops import add
from castiron.emitter.step import Step


def read(c: ConfigReader) -> DeltaConfig:
    return c.read(DeltaConfig, **delta_fields(c))


def linear_attn(step: Step, c: DeltaConfig, layer: int, x: Value) -> Value:
    qkv, z = linear(step, x, "in_proj_qkv", 2 * c.keys + c.values), linear(step, x, "in_proj_z", c.values)
    a, b = linear(step, x, "in_proj_a", c.value_heads), linear(step, x, "in_proj_b", c.value_heads)
    return delta_net(step, c, layer, qkv, z, a, b)


def block(step: Step, c: DeltaConfig, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm_plus_one(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
    else:
        with scope("linear_attn"):
            x = add(x, linear_attn(step, c, layer, h))
    h = rms_norm_plus_one(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, gated_mlp(step, h, c.intermediate, c.hidden_act))


def forward(step: Step, c: DeltaConfig) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary), rms_norm_plus_one)
