"""The names of quantisation methods in configs, and the layouts of weights that they stand for.

Some libraries write the layout of another one: AutoRound's is GPTQ's, AWQ's or compressed-tensors'.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError

METHODS = ("auto-round", "awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
# Other names of these methods.
_SYNONYMS = {
    **dict.fromkeys(("auto_round", "autoround", "intel/auto-round"), "auto-round"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"), "modelopt"),
}
# Formats of compressed-tensors.
_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "nvfp4-pack-quantized"),
    "pack-quantized",
)
# By version of GPTQ's zero points: the number that it subtracts from them.
ZERO_POINTS = {"gptq": 1, "gptq_v2": 0}
# Parts of AutoRound's `packing_format`, and the layouts that they stand for, which is the format of zero points for GPTQ.
# Of several parts, the first one with a layout counts; the last part may name a library that can run the format.
_PACKINGS = {
    **dict.fromkeys(("auto_awq", "awq"), "awq"),
    **dict.fromkeys(("llm_compressor", "fp8_static"), "compressed-tensors"),
    **dict.fromkeys(("auto_gptq", "gptq"), "gptq"),
    **dict.fromkeys(("gptqmodel", "exllamav2", "tritonv2", "triton", "torch"), "gptq_v2"),
    **dict.fromkeys(("auto_round", "autoround", "auto"), None),
}
# ModelOpt's `quant_algo` of weights that castiron reads; others also scale the inputs of layers, or have other codes.
_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "NVFP4", "W4A16_NVFP4")
# Keys of a config that `describe` returns, if they have a value.
_DESCRIBED = (
    *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "version", "zero_point", "weight_block_size"),
    *("packing_format", "quant_algo", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("format", "num_bits", "type", "strategy", "symmetric", "actorder"),
)


def weights_of(config: Mapping) -> Mapping:
    """Return how compressed-tensors quantised weights, from its first config group; else {}."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def describe(config: Mapping) -> str:
    """Return a quantization_config as text, such as `gptq, bits 4, group_size 128, sym true`."""
    values = {**config, **{key: value for key, value in weights_of(config).items() if value is not None}}
    stated = [(key, values[key]) for key in _DESCRIBED if values.get(key) is not None]
    listed = [f"{key} {shorten_text(value if isinstance(value, str) else json.dumps(value), 30)}" for key, value in stated]
    return ", ".join([str(config.get("quant_method")), *listed])


def layout_of(path: Path, config: Mapping) -> dict:
    """Return a config whose quant_method is the layout of the tensors, if it is supported.

    For GPTQ, checkpoint_format is a key of ZERO_POINTS, or None if the config does not name it.
    """
    method = config.get("quant_method")
    method = _SYNONYMS.get(method, method) if isinstance(method, str) else method
    _check(path, "quant_method", method, METHODS)
    layout = {**config, "quant_method": method}
    if method == "auto-round":
        return _auto_round(path, layout)
    if method == "gptq":
        layout["checkpoint_format"] = version = layout.get("checkpoint_format") or layout.get("format")
        _check(path, "checkpoint_format", version or "gptq", ZERO_POINTS)
    elif method == "awq":
        _check(path, "version", str(layout.get("version") or layout.get("format") or "gemm").lower(), ("gemm",))
    elif method == "modelopt":
        _check(path, "quant_algo", layout.get("quant_algo") or "MIXED_PRECISION", _ALGORITHMS)
    elif method == "compressed-tensors":
        sparse = layout.get("sparsity_config")
        for each in (layout, sparse if isinstance(sparse, dict) else {}):
            _check(path, "format", each.get("format", "dense"), _FORMATS)
    return layout


def _auto_round(path: Path, config: dict) -> dict:
    packing = str(config.get("packing_format") or config.get("backend") or "auto")
    parts = packing.split(":")
    if any(part not in _PACKINGS for part in parts):
        _check(path, "packing_format", packing, ("auto_round", *(f"auto_round:{part}" for part in _PACKINGS)))
    # AutoRound's own format has zero points of version 2; "auto" names no version.
    version = next((_PACKINGS[part] for part in parts if _PACKINGS[part]), None if parts == ["auto"] else "gptq_v2")
    if version not in (None, *ZERO_POINTS):
        return {**config, "quant_method": version}
    return {"sym": True, **config, "quant_method": "gptq", "checkpoint_format": version}


def _check(path: Path, key: str, value: object, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"{path}: unsupported {key}: {shorten(value)}; supported are {', '.join(known)}")
