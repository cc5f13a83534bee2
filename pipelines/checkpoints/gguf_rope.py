"""The rotary embedding's variants: GGUF's keys and factor tensors as HF's config keys.

HF's names and formulas: transformers.modeling_rope_utils. transformers itself drops all of this when it reads a
GGUF file.
"""

import math

import numpy as np

from castiron.emitter.codecs import dequantise
from castiron.emitter.shown import shown
from castiron.pipelines.checkpoints.gguf_file import GgufFile

# Llama 3.1 and later; the GGUF keeps their effect, one factor a frequency, and not these numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GEMMA4_LOCAL_BASE, _STILL = 10000.0, 1e29  # where a file is silent; what divides a frequency that is none
_FACTOR_TOLERANCE = 1e-4  # factors are f32 of an f32 computation: about 1e-6 apart


def _factors(file: GgufFile, name: str) -> np.ndarray | None:
    """f32 [rotary_dim / 2], or None if the file has no such tensor."""
    tensor = file.tensors.get(name)
    return None if tensor is None else dequantise(tensor.codec, file.rows(tensor)).reshape(-1)


def head_dim(config: dict) -> int:
    """Elements of one attention head: the config's own, or hidden size over heads."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def llama3_factors(rotary_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by, f64 [rotary_dim / 2] (HF: _compute_llama3_parameters)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))


def _rope_factors(config: dict, metadata) -> None:
    """rope_freqs.weight: Llama 3's scaling where its numbers explain the factors, else the factors themselves.

    HF's longrope with equal long and short factors and an attention factor of 1 divides by any factors given.
    """
    factors = _factors(metadata.file, "rope_freqs.weight")
    if factors is None or np.all(factors == 1):
        return
    if config.get("rope_scaling"):
        raise metadata.fail("it has both rope_freqs.weight and rope.scaling keys, and only one of them can apply")
    low, high, original = _LLAMA3.values()
    factor = float(factors.max())
    if len(factors) * 2 == head_dim(config):
        expected = llama3_factors(head_dim(config), config["rope_theta"], factor, low, high, original)
        if np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
            return
    listed = factors.tolist()
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "long_factor": listed,
        "short_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _rope_scaling(config: dict, metadata) -> None:
    kind = metadata.word("rope.scaling.type", "none")
    factor = metadata.real("rope.scaling.factor") or metadata.real("rope.scale_linear") or 1.0
    original = metadata.integer("rope.scaling.original_context_length")
    metadata.get("rope.scaling.finetuned")
    if kind == "none" and metadata.get("rope.scale_linear") is not None:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return
    if kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(config, metadata, factor, original)
    else:
        raise metadata.fail(f"{metadata.prefix}rope.scaling.type is {shown(kind)}; supported are none, linear and yarn")


# What yarn has besides its factor: keys whose other values HF cannot express.
_YARN_FIXED = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}


def _yarn(config: dict, metadata, factor: float, original: int | None) -> dict:
    for key, only in _YARN_FIXED.items():
        value = metadata.real(f"rope.scaling.{key}", only)
        if value != only:
            raise metadata.fail(f"{metadata.prefix}rope.scaling.{key} is {value}; only {only} is supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
    }
    betas = {name: metadata.real(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return scaling | {name: value for name, value in betas.items() if value is not None}


def _full_rotary(config: dict, metadata) -> None:
    rotary, whole = metadata.integer("rope.dimension_count"), head_dim(config)
    if rotary not in (None, whole):
        raise metadata.fail(f"it rotates {rotary} of {whole} elements of a head; {config['model_type']} rotates all")


def _partial_rotary(config: dict, metadata) -> None:
    rotary = metadata.integer("rope.dimension_count")
    config["partial_rotary_factor"] = 1.0 if rotary is None else rotary / head_dim(config)


def _phi3_rope(config: dict, metadata) -> None:
    """longrope where the file has the two factor tensors; a window of 0 means none."""
    config["sliding_window"] = config.get("sliding_window") or None
    original = metadata.integer("rope.scaling.original_context_length") or config["max_position_embeddings"]
    attention_factor = metadata.real("rope.scaling.attn_factor")
    config["original_max_position_embeddings"] = original
    long, short = (_factors(metadata.file, f"rope_factors_{length}.weight") for length in ("long", "short"))
    if (long is None) != (short is None):
        raise metadata.fail("it has only one of rope_factors_long.weight and rope_factors_short.weight")
    if long is not None:
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        if attention_factor is not None:
            config["rope_scaling"]["attention_factor"] = attention_factor


def _gemma4_ropes(config: dict, metadata) -> None:
    """Full layers turn their first frequencies, of which rope_freqs.weight has 1, and not the others, of which it has 1e30."""
    factors, local = _factors(metadata.file, "rope_freqs.weight"), metadata.real("rope.freq_base_swa", _GEMMA4_LOCAL_BASE)
    turned = 0 if factors is None else int((factors == 1).sum())
    if factors is None or len(factors) * 2 != config["global_head_dim"] or (factors[turned:] < _STILL).any():
        raise metadata.fail("its rope_freqs.weight does not say which frequencies of a full layer's heads turn")
    for key, length in (("", "global_head_dim"), ("_swa", "head_dim")):
        rotary = metadata.integer(f"rope.dimension_count{key}")
        if rotary not in (None, config[length]):
            raise metadata.fail(f"{metadata.prefix}rope.dimension_count{key} is {rotary}, not the {config[length]} of a head")
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turned / len(factors),
            "rope_theta": config.pop("rope_theta"),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


# Tensors that end in the config, and the rules that put them there.
RULES_OF_ROPE_TENSOR = {
    "rope_freqs.weight": {"rope_factors", "gemma4_ropes"},
    "rope_factors_long.weight": {"phi3_rope"},
    "rope_factors_short.weight": {"phi3_rope"},
}

ROPE_RULES = {
    "rope_factors": _rope_factors,
    "rope_scaling": _rope_scaling,
    "full_rotary": _full_rotary,
    "partial_rotary": _partial_rotary,
    "phi3_rope": _phi3_rope,
    "gemma4_ropes": _gemma4_ropes,
}
