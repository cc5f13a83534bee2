"""Granite 3 MoE as in HF `GraniteMoeForCausalLM`: Granite with experts instead of an MLP."""

from typing import Any

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.layers import experts, linear, route, scaled
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import residual_block
from castiron.emitter.models.granite import GraniteConfig, granite_decoder, self_attention


class Config(GraniteConfig):
    """The config of Granite 3 MoE; `intermediate` is the width of an expert's hidden layer."""

    experts: int
    num_experts_per_tok: int = 2


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=2048,
        kv_heads=c.take("num_key_value_heads", c.take("num_attention_heads")),
        experts=c.take("num_local_experts"),
    )


def sparse_mlp(step: Step, c: Any, x: Value) -> Value:
    """Apply the routed experts of Granite 3 or 4 to x [T, hidden]; return [T, hidden]."""
    with scope("router"):
        logits = linear(step, x, "layer", c.experts)
    # HF's softmax over the chosen logits equals a softmax over all logits, divided by its sum over the chosen ones.
    routing = route(logits, c.num_experts_per_tok, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act)


def block_sparse_moe(step: Step, c: Config, layer: int, x: Value) -> Value:
    return scaled(sparse_mlp(step, c, x), c.residual_multiplier)


def forward(step: Step, c: Config) -> Value:
    return granite_decoder(step, c, residual_block(self_attention, block_sparse_moe, mlp_name="block_sparse_moe"))
