"""Qwen 3.5 with experts as in HF `Qwen3_5MoeForCausalLM`: Qwen 3.5 whose MLP is a few experts out of many, and a shared one."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import rotary_tables
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder
from castiron.emitter.models.delta_net import FULL, DeltaConfig, Experts, delta_fields, norm, self_attention, sparse_mlp
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.models.qwen3_5_text import linear_attn
from castiron.emitter.ops import add
from castiron.emitter.step import Step


@dataclass(frozen=True, eq=False)
class Config(DeltaConfig):
    experts: Experts

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        c.unused("intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
        experts = Experts.read(c, 256, 8, normalised=True)
        read = cls(**delta_fields(c, experts.intermediate), experts=experts)
        c.finish()
        return read


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = norm(step, x, "input_layernorm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
    else:
        with scope("linear_attn"):
            x = add(x, linear_attn(step, c, layer, h))
    h = norm(step, x, "post_attention_layernorm", c.eps)
    with scope("mlp"):
        return add(x, sparse_mlp(step, c, c.experts, h))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary), norm)
