"""Qwen 3.5 MoE as in HF `Qwen3_5MoeForCausalLM`: Qwen 3.5 with routed and shared experts."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.delta_net import MoeConfig, delta_decoder, delta_fields, sparse_mlp
from castiron.emitter.models.delta_net import states as states
from castiron.emitter.models.qwen3_5_text import linear_attn


def read(c: ConfigReader) -> MoeConfig:
    c.unused("intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
    return c.read(
        MoeConfig,
        # No layer has an MLP without experts.
        intermediate=0,
        experts=c.take("num_experts", c.take("num_local_experts", 256)),
        num_experts_per_tok=c.take("num_experts_per_tok", 8),
        norm_topk_prob=True,
        **delta_fields(c),
    )


def forward(step: Step, c: MoeConfig) -> Value:
    return delta_decoder(step, c, linear_attn, sparse_mlp)
