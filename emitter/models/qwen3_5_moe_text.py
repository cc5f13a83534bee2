"""Qwen 3.5 MoE as in HF `Qwen3_5MoeForCausalLM`: Qwen 3.5 with routed and shared experts."""

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import rms_norm_plus_one, rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder
from castiron.emitter.models.delta_net import FULL, DeltaConfig, Experts, delta_fields, self_attention, sparse_mlp
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.models.qwen3_5_text import linear_attn
from castiron.emitter.ops import add
from castiron.emitter.step import Step


class Config(DeltaConfig):
    experts: Experts


def read(c: ConfigReader) -> Config:
    c.unused("intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
    experts = Experts.read(c, 256, 8, normalised=True)
    return c.read(Config, intermediate=experts.intermediate, experts=experts, **delta_fields(c))


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
        return add(x, sparse_mlp(step, c, c.experts, h))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, block, rotary_tables(step, c.rotary), rms_norm_plus_one)
