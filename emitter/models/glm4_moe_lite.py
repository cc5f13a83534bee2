"""GLM-4.7-Flash as in HF `Glm4MoeLiteForCausalLM`: DeepSeek V3 with other sizes."""

from castiron.emitter.graph.ir import Value
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers.step import Step
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import decoder, residual_block
from castiron.emitter.models.latent_attention import LatentConfig, latent_fields, mlp, self_attention
from castiron.emitter.shorten import shorten


class Config(LatentConfig):
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    moe_intermediate_size: int = 1536
    routed_scaling_factor: float = 1.8


def read(c: ConfigReader) -> Config:
    count, per_token = c.take("n_routed_experts"), c.take("num_experts_per_tok", 4)
    return c.read(
        Config,
        eps=c.number("rms_norm_eps", 1e-5),
        sparse=sparse_layers(c, c.take("num_hidden_layers")),
        experts=count,
        experts_per_token=per_token,
        groups=c.expert_groups(count, per_token),
        scores="sigmoid",
        **latent_fields(c, kv_heads=20, positions=202752, q_lora_rank=768, nope=192),
    )


def sparse_layers(c: ConfigReader, layers: int) -> list[bool]:
    types = c.take("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1), list)
    if len(types) != layers or any(type_ not in ("dense", "sparse") for type_ in types):
        raise EmitError(
            f"'mlp_layer_types' in the glm4_moe_lite config is {shorten(types)}; it must have 'dense' or 'sparse' for each of "
            f"{layers} layers"
        )
    return [type_ == "sparse" for type_ in types]


def forward(step: Step, c: Config) -> Value:
    return decoder(step, c, residual_block(self_attention, mlp))
