"""DeepSeek V3 (arXiv:2412.19437) as in HF `DeepseekV3ForCausalLM`: latent attention and experts."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder, residual_block
from castiron.emitter.models.latent_attention import LatentConfig, latent_fields, mlp, self_attention


class Config(LatentConfig):
    moe_intermediate_size: int = 2048
    routed_scaling_factor: float = 2.5


def read(c: ConfigReader) -> Config:
    layers, dense = c.take("num_hidden_layers"), c.take("first_k_dense_replace", 3, minimum=0)
    count, per_token = c.take("n_routed_experts"), c.take("num_experts_per_tok", 8)
    return c.read(
        Config,
        sparse=[layer >= dense for layer in range(layers)],
        experts=count,
        experts_per_token=per_token,
        groups=c.expert_groups(count, per_token, 8, 4),
        scores="sigmoid",
        **latent_fields(c, kv_heads=128, positions=4096, q_lora_rank=1536, nope=128),
    )


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
