"""Mixtral (arXiv:2401.04088) as in HF `MixtralForCausalLM`: Mistral with experts."""

from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.layers import experts, linear, route
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig, decoder, residual_block
from castiron.emitter.models.llama import self_attention


class Config(DecoderConfig):
    experts: int
    num_experts_per_tok: int = 2


def read(c: ConfigReader) -> Config:
    return c.read(
        Config,
        positions=131072,
        theta=1000000.0,
        eps=c.number("rms_norm_eps", 1e-5),
        experts=c.take("num_local_experts"),
        windows=[c.nullable("sliding_window", None)] * c.take("num_hidden_layers"),
    )


def block_sparse_moe(step: Step, c: Config, layer: int, x: Value) -> Value:
    routing = route(linear(step, x, "gate", c.experts), c.num_experts_per_tok, normalised=True)
    with scope("experts"):
        return experts(step, x, routing, c.experts, c.intermediate, c.hidden_act, names=("w1", "w3", "w2"))


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, block_sparse_moe, mlp_name="block_sparse_moe"))
