"""Write a transformers model as the GGUF file that llama.cpp's converter would write.

Names come from gguf's own tensor map; changes of rows, norms and experts, and the metadata, follow
the converter's classes. Nothing here is shared with castiron's reader, which is tested with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support import deepseek_as_gguf, gemma4_as_gguf
from tests.support.deepseek_as_gguf import LATENT
from tests.support.tiny_gguf import write_gguf

GGUF_NAMES = {
    "llama": "llama", "mixtral": "llama", "smollm3": "smollm3", "granite": "granite", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "olmo2": "olmo2", "stablelm": "stablelm", "starcoder2": "starcoder2", "gemma": "gemma", "arcee": "arcee",
    "exaone4": "exaone4", "cohere2": "cohere2", "ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense",
    "granitemoe": "granitemoe", "gpt_oss": "gpt-oss", "gpt2": "gpt2", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe", "olmo3": "olmo2", "falcon_h1": "falcon-h1", "granitemoehybrid": "granitehybrid",
    "ministral3": "mistral3", "nemotron_h": "nemotron_h_moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4", "qwen3_next": "qwen3next", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}  # fmt: skip
_PERMUTED = {"llama", "mixtral", "smollm3", "granite", "granitemoe", "granitemoehybrid", "arcee", "ministral3"}
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
_EXPERTS = {
    "mixtral", "qwen3_moe", "granitemoe", "granitemoehybrid", "gpt_oss", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text",
    "qwen3_next", *LATENT,
}  # fmt: skip
_HYBRID = {"falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
_STACKED = re.compile(r"(.*\.(?:experts|layernorm\.norms|q_layernorm\.norms|k_layernorm\.norms))\.(\d+)(\..*)")


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp's converter does (LlamaModel.permute)."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _stacked(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the tensors that HF numbers, such as experts, under the name without the number."""
    merged, groups = {}, {}
    for name, values in state.items():
        numbered = _STACKED.fullmatch(name)
        if numbered:
            stem = numbered[1].removesuffix(".norms")
            groups.setdefault(stem + numbered[3], {})[int(numbered[2])] = values
        else:
            merged[name] = values
    for name, group in groups.items():
        merged[name] = np.stack([group[number] for number in sorted(group)])
    return merged


def _split(kind: str, state: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Split or transpose tensors as the converters of these models do."""
    found: dict[str, np.ndarray] = {}
    if kind in LATENT:
        state = deepseek_as_gguf.split_key_values(state, config)
    for name, values in state.items():
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            found[name] = np.ascontiguousarray(values.T)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            stem = name.removesuffix("input_linear.weight")
            gate, up = np.split(values, 2, axis=1)
            found |= {f"{stem}experts.w1.weight": gate, f"{stem}experts.w3.weight": up}
        elif ".shared_mlp." in name:
            # It is the shared expert if the model has experts, else the MLP.
            stem, experts = name.partition("shared_mlp.")[0], any("block_sparse_moe" in other for other in state)
            own = "mlp.shared_expert" if experts else "mlp"
            if "output_linear" in name:
                found[f"{stem}{own}.down_proj.weight"] = values
            else:
                gate, up = np.split(values, 2)
                found |= {f"{stem}{own}.gate_proj.weight": gate, f"{stem}{own}.up_proj.weight": up}
        elif kind == "lfm2_moe" and ".experts." in name:
            leaf = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[name.split(".")[-2]]
            found[f"{name.partition('feed_forward')[0]}mlp.experts.{leaf}.weight"] = values
        elif kind == "lfm2_moe" and name.endswith(".expert_bias"):
            found[f"{name}.bias"] = values
        elif kind == "nemotron_h" and ".experts." in name:
            found["model." + name.removeprefix("backbone.").replace(".mixer.", ".mlp.")] = values
        elif name.endswith("e_score_correction_bias"):
            found[f"{name.removesuffix('_bias')}.bias"] = values
        elif kind == "gpt_oss" and ".experts." in name:
            stem, leaf = name.rsplit(".", 1)
            leaf, ending = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
            values = values if ending == "bias" else values.swapaxes(1, 2)
            parts = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]} if leaf == "gate_up_proj" else {leaf: values}
            found |= {f"{stem}.{part}.{ending}": np.ascontiguousarray(own) for part, own in parts.items()}
        elif name.endswith(".in_proj_qkvz.weight"):
            qkv, z = _split_qkvz(values, config)
            found |= {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z}
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found


def _split_qkvz(weight: np.ndarray, config) -> tuple[np.ndarray, np.ndarray]:
    """Split Qwen3-Next's `in_proj_qkvz` into the rows of q, k and v, and those of z."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = weight.reshape(keys, 2 * size + 2 * each, -1)
    q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in np.split(heads, np.cumsum([size, size, each]), axis=1))
    return np.concatenate([q, k, v]), z


def _tiled(name: str, values: np.ndarray, config) -> np.ndarray:
    """Order Qwen 3.5's value heads as the converter does: the first of each key head comes first."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim

    def turned(part: np.ndarray, each: int) -> np.ndarray:
        return part.reshape(keys, heads // keys, each, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate([values[:first], turned(values[first:], size)])
    if ".in_proj_z." in name:
        return turned(values, size)
    if ".out_proj." in name:
        return np.ascontiguousarray(turned(values.T, size).T)
    return turned(values, 1) if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")) else values


def _multiplied(name: str, values: np.ndarray, config) -> np.ndarray:
    """Multiply Falcon-H1's weights by the config's multipliers."""
    shared = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads]
    rows = np.repeat(np.array(config.ssm_multipliers, np.float32) * np.float32(config.ssm_in_multiplier), sizes)
    for leaf, factor in {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": rows[:, None],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }.items():
        if name.endswith(f"{leaf}.weight"):
            return (values * factor).astype(np.float32)
    return values


def _of_recurrences(name: str, values: np.ndarray, config) -> np.ndarray:
    """Change tensors of hybrid models as their converters do before they rename them."""
    if config.model_type.startswith("qwen3_5") and ".linear_attn." in name:
        values = _tiled(name, values, config)
    if config.model_type == "falcon_h1":
        values = _multiplied(name, values, config)
    if name.endswith(".conv1d.weight"):
        return values.squeeze(1)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", ".D")) and config.model_type in ("falcon_h1", "granitemoehybrid", "nemotron_h"):
        return values.reshape(-1, 1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return values.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    return values


def tensors_of(directory: Path, config) -> dict[str, np.ndarray]:
    """Return the model's saved f32 tensors under GGUF's names, changed as the converter does."""
    kind = config.model_type
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == GGUF_NAMES[kind])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    state = _split(kind, _stacked(load_file(directory / "model.safetensors")), config)
    for name, values in (gemma4_as_gguf.renamed(state) if kind == "gemma4_text" else state).items():
        if kind in _HYBRID:
            values = _of_recurrences(name, values, config)
            name = name.replace(".dt_bias", ".dt_proj.bias")
        name = name.replace("pre_ff_layernorm", "pre_feedforward_layernorm") if kind == "falcon_h1" else name
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias")) or gemma4_as_gguf.scale_name(name)
        if mapped is None:
            raise KeyError(f"gguf has no name for {name}")
        if kind in _PERMUTED and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if kind in _PERMUTED and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if kind in NORMS_PLUS_ONE and name.endswith("norm.weight") and ".linear_attn." not in name:
            values = values + np.float32(1)
        if name.endswith(".conv.conv.weight"):
            values = values.squeeze(1)
        tensors[mapped] = values
    return tensors


# GGUF's key -> names of HF's config attribute, of which a model has one.
_NUMBERS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "n_inner intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps norm_epsilon layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling logit_scale", "shortconv.l_cache": "conv_L_cache",
}  # fmt: skip
_EXPERT_NUMBERS = {
    "expert_count": "num_local_experts num_experts n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "num_dense_layers",
    "expert_shared_feed_forward_length":
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size",
}  # fmt: skip
_HYBRID_NUMBERS = {
    "ssm.conv_kernel": "mamba_d_conv linear_conv_kernel_dim conv_kernel",
    "ssm.state_size": "mamba_d_state linear_key_head_dim ssm_state_size",
    "ssm.group_count": "mamba_n_groups linear_num_key_heads n_groups",
    "ssm.time_step_rank": "mamba_n_heads linear_num_value_heads mamba_num_heads",
    "ssm.inner_size": "mamba_d_head linear_value_head_dim mamba_head_dim",
}
_WINDOWS = ("gemma2", "gemma3_text", "phi3", "cohere2", "gpt_oss", "exaone4", "olmo3")


def metadata_of(config) -> dict:
    """Return the metadata that TextModel.set_gguf_parameters and the model's own class write."""
    kind = config.model_type
    special: dict = {}
    if kind == "gemma4_text":
        special = gemma4_as_gguf.metadata(config)
    elif kind in LATENT:
        special = deepseek_as_gguf.metadata(config) | _rope_scaling(config.rope_parameters, config)
    names = _NUMBERS | (_EXPERT_NUMBERS if kind in _EXPERTS else {}) | (_HYBRID_NUMBERS if kind in _HYBRID else {})
    found = {key: [getattr(config, name, None) for name in own.split()] for key, own in names.items() if key not in special}
    keys = {key: next((value for value in values if value is not None), None) for key, values in found.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    keys |= special
    if not special and kind != "gpt2":
        keys |= _rope_metadata(config)
    if kind in _WINDOWS:
        keys["attention.sliding_window"] = config.sliding_window or 0
    if kind in ("exaone4", "olmo3"):
        keys["attention.sliding_window_pattern"] = [type_ == "sliding_attention" for type_ in config.layer_types]
    if kind in ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h"):
        attends = [type_ == "full_attention" for type_ in config.layer_types]
        keys["attention.head_count_kv"] = [config.num_key_value_heads * here for here in attends]
    if kind in _HYBRID:
        keys["ssm.inner_size"] *= keys["ssm.time_step_rank"]
    if kind == "phi3":
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if kind == "stablelm":
        keys["use_parallel_residual"] = config.use_parallel_residual
        del keys["rope.freq_base"]
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if kind == "lfm2_moe":
        keys["expert_gating_func"] = 2
    if kind == "falcon_h1":
        # The converter multiplies the weights by the multipliers.
        del keys["embedding_scale"]
    if kind == "qwen3_next":
        keys |= {"full_attention_interval": 2}
    if kind.startswith("qwen3_5"):
        keys |= {"full_attention_interval": 2, "rope.dimension_sections": [2, 2, 2, 0]}
    if kind == "qwen3_5_moe_text":
        keys.pop("feed_forward_length", None)
    if kind in ("granitemoehybrid", "nemotron_h"):
        keys["rope.scaling.finetuned"] = False
    if kind == "nemotron_h":
        keys["attention.layer_norm_rms_epsilon"] = keys.pop("attention.layer_norm_epsilon")
        keys["feed_forward_length"] = [
            config.intermediate_size * (type_ == "mlp") or config.moe_intermediate_size * (type_ == "moe")
            for type_ in config.layer_types
        ]
        keys |= {"expert_shared_count": config.n_shared_experts, "expert_weights_norm": config.norm_topk_prob}
        keys |= {"expert_weights_scale": float(config.routed_scaling_factor), "expert_group_count": config.n_group}
        keys |= {} if config.moe_latent_size is None else {"moe_latent_size": config.moe_latent_size}
    return {f"{GGUF_NAMES[kind]}.{key}": value for key, value in keys.items()}


def _rope_metadata(config) -> dict:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    rope = ropes.get("full_attention", ropes)
    keys = {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "dynamic":
        # Hunyuan's scaling changes the base only.
        keys["rope.freq_base"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
        keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262144}
    if "llama_4_scaling_beta" in rope:
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return keys | _rope_scaling(rope, config)


def _rope_scaling(rope: dict, config) -> dict:
    match rope["rope_type"]:
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
        case "yarn":
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope["factor"]),
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            }
        case "longrope":
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            attention = float(np.sqrt(1 + np.log(scale) / np.log(config.original_max_position_embeddings)))
            return {"rope.scaling.attn_factor": attention}
    return {}


def rope_tensors(config) -> dict[str, np.ndarray]:
    if config.model_type == "gemma4_text":
        return gemma4_as_gguf.rope_tensors(config)
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32) for length in ("long", "short")}
    if rope.get("rope_type") == "llama3":
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        return {"rope_freqs.weight": _llama3_factors(rope, head_dim)}
    return {}


def _llama3_factors(rope: dict, dim: int) -> np.ndarray:
    """LlamaModel.generate_extra_tensors of the converter."""
    factors = []
    low_wavelength = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wavelength = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def convert(directory: Path, config, path: Path) -> Path:
    """Write the model saved in `directory` to the GGUF file `path`."""
    tensors = tensors_of(directory, config) | rope_tensors(config)
    return write_gguf(path, GGUF_NAMES[config.model_type], metadata_of(config), tensors)
