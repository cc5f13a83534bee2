"""LFM2 MoE as in HF `Lfm2MoeForCausalLM`: LFM2 with experts in all but the first layers."""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.ops import add, broadcast_in_dim, constant, divide, reduce
from castiron.emitter.graph.types import F32
from castiron.emitter.layers import experts, linear, route, scaled
from castiron.emitter.layers.step import Step
from castiron.emitter.models import lfm2
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.lfm2 import CONV, FULL
from castiron.emitter.models.lfm2 import states as states

# HF divides the experts' weights by their sum plus this number.
_SUM_EPS = 1e-6


class Config(lfm2.Config):
    """The config of LFM2 MoE; the first `dense` layers have an MLP of width `intermediate`."""

    dense: int
    experts: int
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1792
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


def read(c: ConfigReader) -> Config:
    layers = c.take("num_hidden_layers")
    return c.read(
        Config,
        positions=128000,
        theta=1e6,
        eps=c.number("norm_eps", 1e-5),
        hidden_act="silu",
        tied=c.flag("tie_embedding", c.flag("tie_word_embeddings", True)),
        layer_types=c.layer_types(layers, (CONV, FULL), c.take("layer_types", kinds=(list, tuple))),
        conv_positions=c.take("conv_L_cache", 3, minimum=2),
        dense=c.take("num_dense_layers", 2, minimum=0),
        experts=c.take("num_experts", c.take("num_local_experts", 32)),
    )


def feed_forward(step: Step, c: Config, layer: int, x: Value) -> Value:
    if layer < c.dense:
        return lfm2.feed_forward(step, c, layer, x)
    logits = linear(step, x, "gate", c.experts)
    bias = step.vector("expert_bias", (c.experts,)) if c.use_expert_bias else None
    chosen, weights = route(logits, c.num_experts_per_tok, False, "sigmoid", bias)
    if c.norm_topk_prob:
        total = reduce("add", weights, (1,))
        total = add(total, constant(_SUM_EPS, F32, total.shape))
        weights = divide(weights, broadcast_in_dim(total, weights.shape, (0,)))
    with scope("experts"):
        routing = chosen, scaled(weights, c.routed_scaling_factor)
        return experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act, ("w1", "w3", "w2"))


def forward(step: Step, c: Config) -> Value:
    return lfm2.forward(step, c, feed_forward)
