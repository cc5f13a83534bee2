"""Qwen3 MoE (arXiv:2505.09388) as in HF `Qwen3MoeForCausalLM`: Qwen3 with experts."""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.layers import experts, gated_mlp, linear, route
from castiron.emitter.layers.step import Step
from castiron.emitter.models import qwen3
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder, residual_block
from castiron.emitter.models.qwen3 import self_attention


class Config(qwen3.Config):
    sparse: list[bool]
    experts: int
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False


def read(c: ConfigReader) -> Config:
    c.unused("max_window_layers")
    layers = c.take("num_hidden_layers")
    window = c.nullable("sliding_window", 4096)
    return c.read(
        Config,
        positions=32768,
        windows=[window if c.flag("use_sliding_window", False) else None] * layers,
        sparse=sparse_layers(c, layers),
        experts=c.take("num_experts", c.take("num_local_experts", 128)),
    )


def sparse_layers(c: ConfigReader, layers: int) -> list[bool]:
    dense, step = c.take("mlp_only_layers", [], list), c.take("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def mlp(step: Step, c: Config, layer: int, x: Value) -> Value:
    if not c.sparse[layer]:
        return gated_mlp(step, x, c.intermediate, c.hidden_act)
    routing = route(linear(step, x, "gate", c.experts), c.num_experts_per_tok, c.norm_topk_prob)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.moe_intermediate_size, c.hidden_act)


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
