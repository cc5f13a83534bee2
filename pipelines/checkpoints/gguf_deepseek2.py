"""Read llama.cpp's architecture deepseek2: DeepSeek V2, DeepSeek V3 and GLM-4.7-Flash.

Sources: llama.cpp's `DeepseekV2Model` in convert_hf_to_gguf.py, and src/models/deepseek2.cpp.
"""

from dataclasses import replace

import numpy as np

from castiron.emitter.codecs import CODECS
from castiron.emitter.shorten import shorten_text
from castiron.pipelines.checkpoints import gguf_metadata as names
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_metadata import Architecture, Metadata, experts

# By value of llama.cpp's enum llama_expert_gating_func_type.
_GATING = {1: "softmax", 2: "sigmoid"}
# Layers and tokens of GLM-4.7-Flash, whose first files have no key for the function, like those of DeepSeek V2.
_GLM_SIZES = (47, 154880)

V3 = Architecture(
    "deepseek_v3",
    tensors={
        **names.MLP, **names.PRE_NORMS, "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate",
        **{f"{name}_shexp": own.replace("mlp", "mlp.shared_experts") for name, own in names.MLP.items()},
    },
    per_index=experts("mlp"),
    ints={
        **names.SIZES, **names.EXPERT_SIZES, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace", "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group", "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
    },
    floats={**names.RMS, "expert_weights_scale": "routed_scaling_factor"},
    constants={
        **names.SILU, "attention_bias": False, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    vectors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    absorbed={("attn_k_b", "attn_v_b"): "self_attn.kv_b_proj"},
    by_layer=("attention.key_length", "attention.value_length"),
    rules=("latent_attention", "latent_experts", "rope_scaling", "latent_yarn"),
)  # fmt: skip
V2 = replace(V3, model_type="deepseek_v2", constants={**V3.constants, "mlp_bias": False})


def chooses_by_sigmoid(file: GgufFile) -> bool:
    """Return whether a deepseek2 model chooses experts by a sigmoid instead of a softmax."""
    metadata, embedding = Metadata(file), file.tensors.get("token_embd.weight")
    is_glm = embedding is not None and (metadata.integer("block_count"), embedding.shape[0]) == _GLM_SIZES
    gating = metadata.integer("expert_gating_func", 0) or (2 if is_glm else 1)
    if gating not in _GATING:
        raise metadata.invalid("expert_gating_func", " or ".join(f"{n} ({name})" for n, name in _GATING.items()))
    return _GATING[gating] == "sigmoid"


def latent_attention(config: dict, metadata: Metadata) -> None:
    """Set the config's head sizes for the latent attention (MLA) of DeepSeek V2 and V3.

    They are read from the metadata keys attention.key_length_mla and attention.value_length_mla.
    In older files, which lack these keys, they are in attention.key_length and
    attention.value_length.
    """
    rotated, latent = metadata.required("rope.dimension_count"), metadata.required("attention.kv_lora_rank")
    key, value = (metadata.integer(f"attention.{side}_length") for side in ("key", "value"))
    own = [metadata.integer(f"attention.{side}_length_mla") for side in ("key", "value")]
    if any(own):
        for side, size, expected in (("key", key, latent + rotated), ("value", value, latent)):
            if size != expected:
                wanted = f"{expected}, which attention.kv_lora_rank {latent} requires"
                raise metadata.invalid(f"attention.{side}_length", wanted)
        key, value = own
    if not key or not value or key <= rotated:
        raise metadata.error(
            f"invalid size of keys or values in a head: {key or 0} and {value or 0}; keys must have more "
            f"than {rotated} features (rope.dimension_count) and values more than 0, so download the file "
            "again"
        )
    config |= {"qk_nope_head_dim": key - rotated, "v_head_dim": value, "head_dim": rotated}
    config["num_key_value_heads"] = config["num_attention_heads"]


def latent_experts(config: dict, metadata: Metadata) -> None:
    """Set the config's options for choosing experts in DeepSeek V2 and V3.

    These are `norm_topk_prob` (whether the weights of the chosen experts are normalised) and, for
    DeepSeek V2, `topk_method` (whether experts are chosen in groups).
    """
    metadata.get("expert_gating_func")  # chooses_by_sigmoid reads it
    config["norm_topk_prob"] = metadata.flag("expert_weights_norm", False)
    if config["model_type"] == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def latent_yarn(config: dict, metadata: Metadata) -> None:
    """Set `mscale` and `mscale_all_dim` of DeepSeek V2 and V3 in the config's `rope_scaling`."""
    tenth = metadata.real("rope.scaling.yarn_log_multiplier")
    if tenth is not None and config.get("rope_scaling", {}).get("rope_type") == "yarn":
        # The converter multiplies by 0.1. Round off what f32 adds.
        config["rope_scaling"] |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{tenth * 10:.6g}"))


def joined_key_values(file: GgufFile, keys: Tensor, values: Tensor, name: str) -> Tensor:
    """Join the key and value matrices of latent attention (MLA) to HF's `kv_b_proj`.

    keys: [heads, latent, k]; k is the size of a key in one head.
    values: [heads, v, latent]; v is the size of a value in one head.
    name: HF's name of the result, which is [heads * (k + v), latent].

    Quantised matrices are converted to f32, because a quantised block of `keys` spans several rows
    of the result.
    """
    if (len(keys.shape), len(values.shape)) != (3, 3) or keys.shape[:2] != values.shape[::2]:
        k, v = (f"{shorten_text(tensor.source)} {list(tensor.shape)}" for tensor in (keys, values))
        raise CheckpointError(f"{file.path}: the shapes of {k} and {v} do not fit each other; download the file again")
    (heads, latent, key), value = keys.shape, values.shape[1]
    codec = keys.codec if keys.codec == values.codec and not CODECS[keys.codec].quantised else "f32"

    def read() -> np.ndarray:
        both = [t.data if codec == t.codec else t.dequantise().view(np.uint8) for t in (keys, values)]
        k, v = (part.reshape(*part.shape[:2], -1, CODECS[codec].block_bytes) for part in both)
        return np.concatenate([k.swapaxes(1, 2), v], 1).reshape(heads * (key + value), -1)

    return Tensor(name, (heads * (key + value), latent), codec, values.name, read)
