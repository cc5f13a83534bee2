"""DeepSeek V2 (arXiv:2405.04434) as in HF `DeepseekV2ForCausalLM`.

It is DeepSeek V3 with a softmax over experts, and groups ranked by their best expert.
"""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder, residual_block
from castiron.emitter.models.latent_attention import LatentConfig, latent_fields, mlp, self_attention


class Config(LatentConfig):
    mlp_bias: bool = False
    n_shared_experts: int = 2
    moe_intermediate_size: int = 1407
    routed_scaling_factor: float = 1.0


def read(c: ConfigReader) -> Config:
    # DeepSeek's own code normalises the weights of experts with this key; HF's never does.
    c.require("norm_topk_prob", False)
    layers, dense = c.take("num_hidden_layers"), c.take("first_k_dense_replace", 0, minimum=0)
    count, per_token = c.take("n_routed_experts"), c.take("num_experts_per_tok")
    grouped = c.choice("topk_method", {"greedy": "", "group_limited_greedy": "grouped"}, "greedy")
    c.unused("n_group", "topk_group")
    return c.read(
        Config,
        sparse=[layer >= dense for layer in range(layers)],
        experts=count,
        experts_per_token=per_token,
        norm_topk_prob=False,
        groups=c.expert_groups(count, per_token) if grouped else (1, 1),
        scores="softmax",
        rope_interleave=True,
        **latent_fields(c, kv_heads=None, positions=2048, q_lora_rank=1536, nope=128),
    )


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
