"""LFM2 with experts as in HF `Lfm2MoeForCausalLM`: LFM2 whose MLP, but in the first layers, is a few experts out of many."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import experts, linear, rms_norm, rotary_tables, route, scaled
from castiron.emitter.models import lfm2
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder
from castiron.emitter.models.lfm2 import CONV, FULL, feed_forward, self_attention, short_conv
from castiron.emitter.models.lfm2 import states as states
from castiron.emitter.ops import add, broadcast_in_dim, constant, divide, reduce
from castiron.emitter.step import Step
from castiron.emitter.types import F32

# HF adds it to the sum that weights of experts are divided by.
_SUM_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Config(lfm2.Config):
    """intermediate: of the first `dense` layers."""

    dense: int
    experts: int
    experts_per_token: int
    moe_intermediate: int
    expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float

    @classmethod
    def read(cls, config: dict) -> Config:
        """From a `config.json`; raises EmitError for anything that is not understood."""
        c = ConfigReader(config)
        layers = c.take("num_hidden_layers")
        read = cls(
            **c.decoder(
                max_positions=128000,
                theta=1e6,
                eps=c.number("norm_eps", 1e-5),
                hidden_act="silu",
                tied=c.flag("tie_embedding", c.flag("tie_word_embeddings", True)),
            ),
            layer_types=c.layer_types(layers, (CONV, FULL), c.take("layer_types", kinds=(list, tuple))),
            conv_bias=c.flag("conv_bias", False),
            conv_positions=c.take("conv_L_cache", 3, least=2),
            dense=c.take("num_dense_layers", 2, least=0),
            experts=c.take("num_experts", c.take("num_local_experts", 32)),
            experts_per_token=c.take("num_experts_per_tok", 4),
            moe_intermediate=c.take("moe_intermediate_size", 1792),
            expert_bias=c.flag("use_expert_bias", True),
            norm_topk_prob=c.flag("norm_topk_prob", True),
            routed_scaling_factor=c.number("routed_scaling_factor", 1.0),
        )
        c.finish()
        return read


def sparse_moe(step: Step, c: Config, x: Value) -> Value:
    logits = linear(step, x, "gate", c.experts)
    bias = step.vector("expert_bias", (c.experts,)) if c.expert_bias else None
    chosen, weights = route(logits, c.experts_per_token, False, "sigmoid", bias)
    if c.norm_topk_prob:
        total = reduce("add", weights, (1,))
        total = add(total, constant(_SUM_EPS, F32, total.shape))
        weights = divide(weights, broadcast_in_dim(total, weights.shape, (0,)))
    with scope("experts"):
        routing = chosen, scaled(weights, c.routed_scaling_factor)
        return experts(step, x, routing, c.experts, c.moe_intermediate, c.hidden_act, ("w1", "w3", "w2"))


def block(step: Step, c: Config, layer: int, x: Value, tables: tuple[Value, Value]) -> Value:
    h = rms_norm(step, x, "operator_norm", c.eps)
    if c.layer_types[layer] == FULL:
        with scope("self_attn"):
            x = add(x, self_attention(step, c, layer, h, tables))
    else:
        with scope("conv"):
            x = add(x, short_conv(step, c, layer, h))
    h = rms_norm(step, x, "ffn_norm", c.eps)
    with scope("feed_forward"):
        return add(x, feed_forward(step, c, h) if layer < c.dense else sparse_moe(step, c, h))


def forward(step: Step, c: Config) -> Value:
    """Logits [rows, vocab] of the rows that the step wants."""
    return decoder(step, c, block, rotary_tables(step, c.rotary), last_norm="embedding_norm")
