"""Rules: functions that set HF config values which the table in architectures.py cannot express.

Sources: llama.cpp's converter and src/models; HF's config classes and modeling_rope_utils.
"""

import math

import numpy as np

from castiron.pipelines.checkpoints.gguf.architectures import PERIOD
from castiron.pipelines.checkpoints.gguf.metadata import Metadata

_PERIOD = 4  # llama.cpp's default: every fourth layer has full attention, or no rotary embedding
_LOCAL_ROPE_BASE = 10000.0  # llama.cpp's default for Gemma 4
# Rotary scaling of Llama 3.1 and later; a GGUF file has a factor for each frequency instead.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Keys of YaRN that must have these values, because HF's code has them as constants.
_YARN_FIXED = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}
_NO_ROTATION = 1e29  # a frequency divided by more than this does not rotate
_FACTOR_TOLERANCE = 1e-4  # max relative difference of factors; rounding in f32 causes about 1e-6

# By name of a tensor whose values go into the config: the rules that read it.
RULES_OF_ROPE_TENSOR = {
    "rope_freqs.weight": {"rope_factors", "gemma4_ropes"},
    "rope_factors_long.weight": {"phi3_rope"},
    "rope_factors_short.weight": {"phi3_rope"},
}


def _factors(metadata: Metadata, name: str) -> np.ndarray | None:
    tensor = metadata.file.tensors.get(name)
    return None if tensor is None else tensor.dequantise().reshape(-1)


def head_dim(config: dict) -> int:
    """Return the size of an attention head: `head_dim`, or hidden size / heads."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def llama3_factors(rotary_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Return the divisors of rotary frequencies, f64 [rotary_dim / 2], for HF's `rope_scaling`."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))


def rope_factors(config: dict, metadata: Metadata) -> None:
    """Set `rope_scaling` to llama3, or to longrope if rope_freqs.weight has other divisors."""
    factors = _factors(metadata, "rope_freqs.weight")
    if factors is None or np.all(factors == 1):
        return
    if config.get("rope_scaling"):
        raise metadata.inconsistent("it has both rope_freqs.weight and rope.scaling")
    factor = float(factors.max())
    if len(factors) * 2 == head_dim(config):
        expected = llama3_factors(head_dim(config), config["rope_theta"], factor, *_LLAMA3.values())
        if np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
            return
    config["rope_scaling"] = {
        "rope_type": "longrope",
        **dict.fromkeys(("long_factor", "short_factor"), factors.tolist()),
        **dict.fromkeys(("factor", "attention_factor"), 1.0),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def rope_scaling(config: dict, metadata: Metadata) -> None:
    """Set `rope_scaling`, linear or YaRN."""
    kind = metadata.string("rope.scaling.type", "none")
    factor = metadata.real("rope.scaling.factor") or metadata.real("rope.scale_linear") or 1.0
    original = metadata.integer("rope.scaling.original_context_length")
    if kind == "none" and metadata.get("rope.scale_linear") is not None:
        kind = "linear"
    if kind == "linear" and factor != 1.0:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(config, metadata, factor, original)
    elif kind not in ("none", "linear"):
        raise metadata.invalid("rope.scaling.type", "none, linear or yarn")


def _yarn(config: dict, metadata: Metadata, factor: float, original: int | None) -> dict:
    for key, only in _YARN_FIXED.items():
        if metadata.real(f"rope.scaling.{key}", only) != only:
            raise metadata.invalid(f"rope.scaling.{key}", f"{only}, the only value supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
    }
    betas = {name: metadata.real(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return scaling | {name: value for name, value in betas.items() if value is not None}


def full_rotary(config: dict, metadata: Metadata) -> None:
    """Raise CheckpointError if the rotary embedding covers only a part of each head."""
    if metadata.integer("rope.dimension_count") not in (None, head_dim(config)):
        raise metadata.invalid(
            "rope.dimension_count", f"{head_dim(config)}, because {config['model_type']} rotates complete heads"
        )


def partial_rotary(config: dict, metadata: Metadata) -> None:
    rotary = metadata.integer("rope.dimension_count")
    config["partial_rotary_factor"] = 1.0 if rotary is None else rotary / head_dim(config)


def phi3_rope(config: dict, metadata: Metadata) -> None:
    """Set Phi-3's sliding window, original context, and longrope factors if the file has them."""
    config["sliding_window"] = config.get("sliding_window") or None
    original = metadata.integer("rope.scaling.original_context_length") or config["max_position_embeddings"]
    attention_factor = metadata.real("rope.scaling.attn_factor")
    config["original_max_position_embeddings"] = original
    long, short = (_factors(metadata, f"rope_factors_{length}.weight") for length in ("long", "short"))
    if (long is None) != (short is None):
        absent = "long" if long is None else "short"
        raise metadata.inconsistent(f"rope_factors_{absent}.weight is missing")
    if long is not None:
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        if attention_factor is not None:
            config["rope_scaling"]["attention_factor"] = attention_factor


def gemma4_ropes(config: dict, metadata: Metadata) -> None:
    """Set `rope_parameters`; rope_freqs.weight has 1 for rotated pairs and 1e30 for others."""
    factors, local = _factors(metadata, "rope_freqs.weight"), metadata.real("rope.freq_base_swa", _LOCAL_ROPE_BASE)
    rotated = 0 if factors is None else int((factors == 1).sum())
    if factors is None or len(factors) * 2 != config["global_head_dim"] or (factors[rotated:] < _NO_ROTATION).any():
        raise metadata.error("rope_freqs.weight is not 1s and then 1e30s, one for every two features of a global head")
    for key, length in (("", "global_head_dim"), ("_swa", "head_dim")):
        if metadata.integer(f"rope.dimension_count{key}") not in (None, config[length]):
            raise metadata.invalid(f"rope.dimension_count{key}", f"{config[length]}, the size of a head")
    full = {"partial_rotary_factor": rotated / len(factors), "rope_theta": config.pop("rope_theta")}
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "proportional", **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def olmo3_ropes(config: dict, metadata: Metadata) -> None:
    """Set OLMo 3's `rope_parameters`, in which only full attention is scaled."""
    theta = {"rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    config["rope_parameters"] = {"full_attention": scaling | theta, "sliding_attention": {"rope_type": "default"} | theta}


def mistral3_ropes(config: dict, metadata: Metadata) -> None:
    """Set Ministral 3's `rope_parameters`, which scale queries by position, unlike Mistral's."""
    beta, multiplier = metadata.real("attention.temperature_scale"), metadata.real("rope.scaling.yarn_log_multiplier")
    if beta is None:
        config["model_type"] = "mistral"
        return
    scales = {} if multiplier is None else {"mscale": multiplier, "mscale_all_dim": multiplier}
    scaling = config.pop("rope_scaling", {"rope_type": "default"}) | scales
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": beta}


def _periodic_layers(layers: int, period: int, other: str = "sliding_attention") -> list[str]:
    return [other if (layer + 1) % period else "full_attention" for layer in range(layers)]


def layer_types(config: dict, metadata: Metadata) -> None:
    """Set `layer_types` from flags or n: every n-th layer has full attention, others a window."""
    layers, period = config["num_hidden_layers"], config.pop(PERIOD, _PERIOD)
    pattern = metadata.get("attention.sliding_window_pattern", period)
    if not config.get("sliding_window"):
        config["sliding_window"] = None
        config["layer_types"] = ["full_attention"] * layers
    elif isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == layers:
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        config["layer_types"] = _periodic_layers(layers, pattern)
    else:
        raise metadata.invalid("attention.sliding_window_pattern", "an integer above 0, or true or false for each layer")


def gpt_oss_yarn(config: dict, metadata: Metadata) -> None:
    """Set `truncate` to false in gpt-oss's YaRN, which GGUF files do not store."""
    scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False


def smollm3_layers(config: dict, metadata: Metadata) -> None:
    """Set `no_rope_layers`, in which 1 stands for a rotary embedding and every fourth is 0."""
    config["no_rope_layer_interval"] = _PERIOD
    config["no_rope_layers"] = [int((layer + 1) % _PERIOD != 0) for layer in range(config["num_hidden_layers"])]


def _kv_heads(config: dict, metadata: Metadata) -> list[int]:
    """Set num_key_value_heads, and return it by layer: 0 for a layer without attention."""
    kv_heads, heads = metadata.by_layer("attention.head_count_kv"), config["num_attention_heads"]
    counts = {count for count in kv_heads if count}
    if len(counts) > 1 or any(heads % count for count in counts):
        raise metadata.invalid("attention.head_count_kv", f"the same divisor of {heads} heads in every attention layer")
    config["num_key_value_heads"] = counts.pop() if counts else heads
    return kv_heads


def lfm2_layers(config: dict, metadata: Metadata) -> None:
    """Set LFM2's `layer_types`: layers without KV heads are convolutions."""
    heads = _kv_heads(config, metadata)
    if not any(heads):
        raise metadata.invalid("attention.head_count_kv", "a list with a number above 0")
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]


def _inner_head_dim(metadata: Metadata, heads: int) -> int:
    features = metadata.required("ssm.inner_size")
    if features % heads:
        raise metadata.invalid("ssm.inner_size", f"a multiple of {heads} heads (ssm.time_step_rank)")
    return features // heads


def mamba_heads(config: dict, metadata: Metadata) -> None:
    """Set the size of a Mamba head and, for Granite 4, `mamba_expand`."""
    config["mamba_d_head"] = _inner_head_dim(metadata, config["mamba_n_heads"])
    if config["model_type"] == "granitemoehybrid":
        config["mamba_expand"] = metadata.required("ssm.inner_size") // config["hidden_size"]


def granite_layers(config: dict, metadata: Metadata) -> None:
    """Set Granite 4's `layer_types`: layers without KV heads are Mamba layers."""
    metadata.get("rope.dimension_count")  # the model has no rotary embedding
    config["layer_types"] = kinds = ["full_attention" if n else "linear_attention" for n in _kv_heads(config, metadata)]
    first = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    config["mamba_conv_bias"] = metadata.has(first, "ssm_conv1d.bias")
    config.setdefault("num_local_experts", 0)
    config.setdefault("shared_intermediate_size", config["intermediate_size"])


def nemotron_layers(config: dict, metadata: Metadata) -> None:
    """Set Nemotron-H's layer types: attention, MLP, experts or Mamba."""
    metadata.get("rope.dimension_count")  # the model has no rotary embedding
    heads, widths = _kv_heads(config, metadata), metadata.by_layer("feed_forward_length")
    layers = range(len(heads))
    fed = ["moe" if metadata.has(layer, "ffn_gate_inp.weight") else "mlp" for layer in layers]
    kinds = ["full_attention" if h else fed[i] if w else "linear_attention" for i, (h, w) in enumerate(zip(heads, widths))]
    dense = [width for width, kind in zip(widths, kinds) if kind == "mlp"]
    config["layers_block_type"] = kinds
    if dense:
        config["intermediate_size"] = dense[0]
    if config.get("moe_latent_size") == 0:
        del config["moe_latent_size"]
    config["mamba_head_dim"] = _inner_head_dim(metadata, config["mamba_num_heads"])
    config["use_conv_bias"] = any(metadata.has(layer, "ssm_conv1d.bias") for layer in layers)
    config["norm_topk_prob"] = metadata.get("expert_weights_norm", True) is True
    del config["rope_theta"]
    metadata.get("rope.freq_base")


def delta_layers(config: dict, metadata: Metadata) -> None:
    """Set Qwen 3.5's layer types, without the layers for multi-token prediction."""
    further = metadata.integer("nextn_predict_layers", 0) or 0
    if further >= config["num_hidden_layers"]:
        raise metadata.invalid("nextn_predict_layers", f"less than {config['num_hidden_layers']} (block_count)")
    config["num_hidden_layers"] -= further
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise metadata.invalid("ssm.time_step_rank", f"a multiple of {keys} key heads (ssm.group_count)")
    config["linear_value_head_dim"] = _inner_head_dim(metadata, values)
    interval = config.get("full_attention_interval") or _PERIOD
    config["layer_types"] = _periodic_layers(config["num_hidden_layers"], interval, "linear_attention")


def gemma4_layers(config: dict, metadata: Metadata) -> None:
    """Set the values that differ between Gemma 4's layers: types, heads, widths, shared K and V."""
    heads, kv_heads = config["num_attention_heads"], metadata.by_layer("attention.head_count_kv")
    config["layer_types"] = kinds = _gemma4_kinds(config["num_hidden_layers"], metadata)
    by_kind = dict(zip(kinds, kv_heads))
    if kv_heads != [by_kind[kind] for kind in kinds] or any(not n or heads % n for n in kv_heads):
        raise metadata.invalid("attention.head_count_kv", f"a divisor of {heads} heads, equal in layers of one type")
    config["num_global_key_value_heads"] = by_kind["full_attention"]
    config["num_key_value_heads"] = by_kind.get("sliding_attention", by_kind["full_attention"])
    config["attention_k_eq_v"] = not metadata.has(kinds.index("full_attention"), "attn_v.weight")
    if not config["attention_k_eq_v"] and len(set(kv_heads)) > 1:
        numbers = f"{sorted(set(kv_heads))} KV heads; with attn_v.weight in layers with full attention"
        raise metadata.error(f"layers have {numbers}, castiron supports only one number")
    _gemma4_widths(config, metadata)
    config["head_dim"], config["global_head_dim"] = (_gemma4_head(metadata, ending) for ending in ("_swa", ""))
    config.setdefault("hidden_size_per_layer_input", 0)
    if (embedding := metadata.file.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = embedding.shape[0]
    config["enable_moe_block"] = bool(config.get("num_experts"))


def _gemma4_kinds(layers: int, metadata: Metadata) -> list[str]:
    slides = metadata.get("attention.sliding_window_pattern")
    stated = isinstance(slides, np.ndarray) and slides.dtype == bool and len(slides) == layers
    if not stated or slides[-1]:
        raise metadata.invalid("attention.sliding_window_pattern", f"a flag for each of {layers} layers, false for the last")
    if slides.any():
        metadata.required("attention.sliding_window")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _gemma4_widths(config: dict, metadata: Metadata) -> None:
    layers, widths = config["num_hidden_layers"], metadata.by_layer("feed_forward_length")
    shared = config.setdefault("num_kv_shared_layers", 0)
    if shared >= layers:
        raise metadata.invalid("attention.shared_kv_layers", f"less than {layers}, the number of layers")
    width = config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = wide = widths[-1] == 2 * width
    if not width or widths != [width] * (layers - shared) + [width * (2 if wide else 1)] * shared:
        raise metadata.invalid(
            "feed_forward_length", "the same in all layers, or twice as much in all that share keys and values"
        )


def _gemma4_head(metadata: Metadata, ending: str) -> int:
    length = metadata.required(f"attention.key_length{ending}")
    if metadata.integer(f"attention.value_length{ending}", length) != length:
        raise metadata.invalid(f"attention.value_length{ending}", f"{length}, as attention.key_length{ending}")
    return length


def llama_head_dim(config: dict, metadata: Metadata) -> None:
    config["head_dim"] = head_dim(config)


def gemma_scale(config: dict, metadata: Metadata) -> None:
    """Set `query_pre_attn_scalar`: hidden size / heads for the 27B models, else `head_dim`."""
    # GGUF has no key for it, so the number of layers decides (llama.cpp, src/models/gemma2.cpp and gemma3.cpp).
    large = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == large else head_dim(config)


def stablelm_residual(config: dict, metadata: Metadata) -> None:
    """Set `use_parallel_residual`: true if a block has one norm, false if it has two."""
    metadata.get("use_parallel_residual")  # repeats what the tensors show
    config["use_parallel_residual"] = not metadata.has(0, "ffn_norm.weight")


def latent_attention(config: dict, metadata: Metadata) -> None:
    """Set the head sizes of latent attention (MLA), which older files have under other keys."""
    rotated, latent = metadata.required("rope.dimension_count"), metadata.required("attention.kv_lora_rank")
    key, value = (metadata.integer(f"attention.{side}_length") for side in ("key", "value"))
    mla_lengths = [metadata.integer(f"attention.{side}_length_mla") for side in ("key", "value")]
    if any(mla_lengths):
        for side, size, expected in (("key", key, latent + rotated), ("value", value, latent)):
            if size != expected:
                wanted = f"{expected}, which attention.kv_lora_rank {latent} requires"
                raise metadata.invalid(f"attention.{side}_length", wanted)
        key, value = mla_lengths
    if not key or not value or key <= rotated:
        sizes = f"keys of {key or 0} features, of which {rotated} rotate, and values of {value or 0}"
        raise metadata.inconsistent(f"a head has {sizes}")
    config |= {"qk_nope_head_dim": key - rotated, "v_head_dim": value, "head_dim": rotated}
    config["num_key_value_heads"] = config["num_attention_heads"]


def latent_experts(config: dict, metadata: Metadata) -> None:
    """Set `norm_topk_prob` and, for DeepSeek V2, `topk_method`."""
    metadata.get("expert_gating_func")  # chooses_by_sigmoid reads it
    config["norm_topk_prob"] = metadata.flag("expert_weights_norm", False)
    if config["model_type"] == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def latent_yarn(config: dict, metadata: Metadata) -> None:
    """Set `mscale` and `mscale_all_dim` in `rope_scaling`."""
    tenth = metadata.real("rope.scaling.yarn_log_multiplier")
    if tenth is not None and config.get("rope_scaling", {}).get("rope_type") == "yarn":
        # The converter multiplies by 0.1. Round off what f32 adds.
        config["rope_scaling"] |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{tenth * 10:.6g}"))
