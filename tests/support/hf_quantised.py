"""Checkpoints in the layouts of HF's quantisation methods, beside their dequantised weights.

The packing is written from the sources that `pipelines.checkpoints.hf.quantised_weights` names, and apart
from that module: each scheme returns the tensors of a layer and the weight in f32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Layer = tuple[dict[str, torch.Tensor], torch.Tensor]
# Layers that configs exclude: routers, and the output head.
EXCLUDED = re.compile(r"lm_head|.*\.(gate|router)|.*embed_tokens")


@dataclass(frozen=True)
class Scheme:
    """A scheme: `layer` quantises a weight f32 [out, in]; `config` is the quantization_config."""

    config: dict
    layer: Callable[..., Layer]
    codec: str  # codec in which castiron stores the weights
    scales: tuple[str, ...] = field(default=())  # scales of activations


def pack_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned numbers [n, m] along rows into i32 [n, m * bits / 32], the first in the lowest bits."""
    fields = numbers.numpy().astype(np.uint64).reshape(len(numbers), -1, 32 // bits)
    words = (fields << (np.arange(32 // bits, dtype=np.uint64) * bits)).sum(axis=-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def integers(weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype):
    """Return (numbers [out, in] from 0 on, scales and zero points [out, groups], weight f32)."""
    out, inner = weight.shape
    groups = weight.reshape(out, -1, group or inner)
    largest, half = (1 << bits) - 1, 1 << bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (half - 1)
        zeros = torch.full_like(scales, half)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / largest
        zeros = (-low / scales).round().clamp(1, largest)
    scales = scales.to(dtype)
    numbers = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, largest)
    values = (numbers - zeros[..., None]) * scales.float()[..., None]
    return numbers.reshape(out, inner), scales, zeros, values.reshape(out, inner)


def gptq(
    bits: int, group: int, symmetric: bool, version: int = 1, dtype: torch.dtype = torch.float16, desc_act: bool = False
) -> Scheme:
    def layer(weight: torch.Tensor, expert: int = 0) -> Layer:
        inner = weight.shape[1]
        order, g_idx = torch.arange(inner), torch.arange(inner, dtype=torch.int32) // (group or inner)
        if desc_act:
            # Layers with the same number of columns and rows have one order, as q and k with the same x, except in experts.
            order = torch.randperm(inner, generator=torch.Generator().manual_seed(sum(weight.shape) + expert))
        numbers, scales, zeros, values = integers(weight[:, order], bits, group, symmetric, dtype)
        back = order.argsort()
        numbers, values, g_idx = numbers[:, back], values[:, back], g_idx[back]
        parts = {
            "qweight": pack_words(numbers, bits).T.contiguous(),
            "qzeros": pack_words((zeros - int(version == 1)).T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": g_idx,
            "bias": torch.zeros(len(weight), dtype=dtype),
        }
        return parts, values

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": desc_act}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return Scheme(config, layer, codec_name("int", bits, group, symmetric, dtype))


def under(scheme: Scheme, **config) -> Scheme:
    """Return the scheme with other entries of its config; None removes an entry."""
    return replace(scheme, config={key: value for key, value in {**scheme.config, **config}.items() if value is not None})


def auto_round(scheme: Scheme, packing: str) -> Scheme:
    """Return AutoRound's config for the tensors of another method; it has no `g_idx`."""

    def layer(weight: torch.Tensor) -> Layer:
        parts, values = scheme.layer(weight)
        return {key: part for key, part in parts.items() if key != "g_idx"}, values

    named = under(scheme, quant_method="auto-round", packing_format=packing, checkpoint_format=None, version=None)
    return replace(named, layer=layer)


def awq(group: int) -> Scheme:
    def layer(weight: torch.Tensor) -> Layer:
        numbers, scales, zeros, values = integers(weight, 4, group, False, torch.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        pack = lambda each: pack_words(each.T.reshape(each.shape[1], -1, 8)[:, :, order].reshape(each.shape[1], -1), 4)
        return {"qweight": pack(numbers), "qzeros": pack(zeros), "scales": scales.T.contiguous()}, values

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Scheme(config, layer, codec_name("int", 4, group, False, torch.float16))


def compressed(bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16, early: bool = False) -> Scheme:
    """Return pack-quantized weights; early: with zero points in bytes, as before compressed-tensors 0.9."""

    def layer(weight: torch.Tensor) -> Layer:
        numbers, scales, zeros, values = integers(weight, bits, group, symmetric, dtype)
        parts = {"weight_packed": pack_words(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric and early:
            parts["weight_zero_point"] = (zeros - (1 << bits - 1)).to(torch.int8)
        elif not symmetric:
            parts["weight_zero_point"] = pack_words(zeros.T.contiguous(), bits).T.contiguous()
        return parts, values

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return Scheme(
        compressed_config("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy),
        layer,
        codec_name("int", bits, group, symmetric, dtype),
    )


def unpacked_int8(symmetric: bool) -> Scheme:
    """Return compressed-tensors' int-quantized: signed codes and zero points in bytes."""

    def layer(weight: torch.Tensor) -> Layer:
        numbers, scales, zeros, values = integers(weight, 8, 0, symmetric, torch.bfloat16)
        signed = lambda each: (each - 128).to(torch.int8)
        parts = {"weight": signed(numbers), "weight_scale": scales}
        return parts if symmetric else parts | {"weight_zero_point": signed(zeros)}, values

    config = compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=symmetric)
    return Scheme(config, layer, codec_name("int", 8, 0, symmetric, torch.bfloat16))


def compressed_config(kind: str, **weights) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def float8(strategy: str, method: str = "compressed-tensors", dtype: torch.dtype = torch.bfloat16) -> Scheme:
    """Return FP8 weights with a scale for each tensor, row (channel), or block of 128 x 128."""

    def layer(weight: torch.Tensor) -> Layer:
        out, inner = weight.shape
        rows, columns = {"tensor": (out, inner), "channel": (1, inner), "block": (128, 128)}[strategy]
        shape = -(-out // rows), -(-inner // columns)
        spread = lambda scales: scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :inner]
        blocks = torch.nn.functional.pad(weight.abs(), (0, shape[1] * columns - inner, 0, shape[0] * rows - out))
        largest = blocks.reshape(shape[0], rows, shape[1], columns).amax((1, 3))
        scales = (largest / 448).to(dtype)
        codes = (weight / spread(scales.float())).clamp(-448, 448).to(torch.float8_e4m3fn)
        values = codes.float() * spread(scales.float())
        scale = scales.reshape(()) if strategy == "tensor" and method == "fp8" else scales
        scale = scale.reshape(1) if strategy == "tensor" and method != "fp8" else scale
        parts = {"weight": codes, "weight_scale" + "_inv" * (method == "fp8"): scale, "input_scale": torch.tensor(0.5)}
        return parts, values

    block = [128, 128] if strategy == "block" else None
    config = compressed_config("float-quantized", num_bits=8, type="float", strategy=strategy, block_structure=block)
    if method == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "static"}
    return Scheme(config, layer, codec_name("e4m3", 8, 128, True, dtype), ("input_scale",))


def modelopt(scheme: Scheme, algorithm: str) -> Scheme:
    """Return ModelOpt's config and names for the tensors of an FP8 or NVFP4 scheme."""

    def layer(weight: torch.Tensor) -> Layer:
        parts, values = scheme.layer(weight)
        parts |= {"weight_scale": scale} if (scale := parts.pop("weight_scale_inv", None)) is not None else {}
        if algorithm == "NVFP4":
            parts["weight"] = parts.pop("weight_packed")
            parts["weight_scale_2"] = 1 / parts.pop("weight_global_scale").reshape(())
            parts["input_scale"] = parts.pop("input_global_scale").reshape(())
        elif algorithm == "FP8_PB_WO":
            parts["weight_scale"] = parts["weight_scale"][:, None, :, None]
            del parts["input_scale"]
        return parts, values

    scales = {"FP8_PB_WO": ()}.get(algorithm, ("input_scale",))
    return Scheme({"quant_method": "modelopt", "quant_algo": algorithm}, layer, scheme.codec, scales)


def nvfp4() -> Scheme:
    """Return E2M1 codes in groups of 16 with an E4M3 scale each, and a divisor of the tensor."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def layer(weight: torch.Tensor) -> Layer:
        out, inner = weight.shape
        groups = weight.reshape(out, -1, 16)
        divisor = 448 * 6 / weight.abs().max()
        scales = (groups.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
        scale = scales.float() / divisor
        codes = ((groups / scale[..., None])[..., None] - values).abs().argmin(-1).reshape(out, -1, 2)
        parts = {"weight_packed": (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8), "weight_scale": scales}
        parts |= {"weight_global_scale": divisor.reshape(1), "input_global_scale": torch.ones(1)}
        return parts, (values[codes].reshape(groups.shape) * scale[..., None]).reshape(out, inner)

    config = compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    return Scheme(config, layer, "nvfp4_scaled", ("input_global_scale",))


# bitsandbytes' table, from `bitsandbytes.functional.get_4bit_type("nf4")`.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]  # fmt: skip


# From `get_4bit_type("fp4")` in bitsandbytes 0.50.2.
FP4 = [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
TABLES = {"nf4": NF4, "fp4": FP4 + [-value or 0.0 for value in FP4]}


def four_bits(kind: str, nested: bool, size: int = 64) -> Scheme:
    def layer(weight: torch.Tensor) -> Layer:
        table, (out, inner) = torch.tensor(TABLES[kind]), weight.shape
        flat = weight.reshape(-1, size)
        absmax = flat.abs().amax(1)
        state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [out, inner]}
        parts = {"weight.absmax": absmax, "weight.quant_map": table}
        if nested:
            steps, offset = torch.linspace(-1, 1, 256), absmax.mean()
            padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            largest = padded.abs().amax(1).clamp(min=1e-6)
            codes = ((padded / largest[:, None])[..., None] - steps).abs().argmin(-1)
            absmax = (steps[codes] * largest[:, None]).reshape(-1)[: len(absmax)] + offset
            codes = codes.reshape(-1)[: len(absmax)].to(torch.uint8)
            parts |= {"weight.absmax": codes, "weight.nested_absmax": largest, "weight.nested_quant_map": steps}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        codes = ((flat / absmax[:, None])[..., None] - table).abs().argmin(-1)
        values = (table[codes] * absmax[:, None]).reshape(out, inner)
        pairs = codes.reshape(-1, 2)
        parts["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return parts, values

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Scheme(config | {"bnb_4bit_use_double_quant": nested}, layer, f"{kind}_{size}_f32")


def int8() -> Scheme:
    def layer(weight: torch.Tensor) -> Layer:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, codes.float() * (largest / 127)[:, None]

    return Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True}, layer, "int8_128_f32")


def codec_name(kind: str, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> str:
    """Return the name of the codec for rows of 128 elements or more."""
    if kind == "int":
        kind = f"int{bits}" if symmetric else f"uint{bits}"
    scale = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    return {"int4_32_f16": "q4_0", "int8_32_f16": "q8_0"}.get(name := f"{kind}_{group or 128}_{scale}", name)


SCHEMES: dict[str, Scheme] = {
    "gptq 4": gptq(4, 128, True),
    "gptq 4 asymmetric": gptq(4, 64, False),
    "gptq 4 v2": gptq(4, 32, False, version=2),
    "gptq 4 as q4_0": gptq(4, 32, True),
    "gptq 4 v2 named gptq": under(gptq(4, 64, True, version=2), checkpoint_format="gptq"),
    "gptq 4 without a version": under(gptq(4, 64, True, version=2), checkpoint_format=None),
    "gptq 8": gptq(8, 128, True, dtype=torch.bfloat16),
    "auto-round": auto_round(gptq(4, 128, True), "auto_round:auto_gptq"),
    "auto-round asymmetric": auto_round(gptq(4, 64, False), "auto_round:auto_gptq:exllamav2"),
    "auto-round asymmetric v2": auto_round(gptq(8, 128, False, version=2), "auto_round"),
    "auto-round awq": auto_round(awq(128), "auto_round:auto_awq"),
    "auto-round nvfp4": auto_round(nvfp4(), "auto_round:llm_compressor"),
    "modelopt fp8": modelopt(float8("tensor", "fp8", dtype=torch.float32), "FP8"),
    "modelopt fp8 channel": modelopt(float8("channel", dtype=torch.float32), "FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt fp8 block": modelopt(float8("block", "fp8", torch.float32), "FP8_PB_WO"),
    "modelopt nvfp4": modelopt(nvfp4(), "NVFP4"),
    "gptq 8 asymmetric": gptq(8, 128, False, version=2),
    "gptq channel": gptq(4, 0, True),
    "gptq desc_act": gptq(4, 32, True, desc_act=True),
    "gptq desc_act asymmetric": gptq(8, 64, False, version=2, desc_act=True),
    "awq": awq(128),
    "awq 64": awq(64),
    "awq 32": awq(32),
    "compressed-tensors int4": compressed(4, 128, True),
    "compressed-tensors int4 asymmetric": compressed(4, 32, False),
    "compressed-tensors int4 channel": compressed(4, 0, True, torch.float32),
    "compressed-tensors int8": compressed(8, 64, True),
    "compressed-tensors int8 asymmetric": compressed(8, 0, False),
    "compressed-tensors int4 early": compressed(4, 64, False, early=True),
    "compressed-tensors int8 early": compressed(8, 64, False, early=True),
    "compressed-tensors int-quantized": unpacked_int8(True),
    "compressed-tensors int-quantized asymmetric": unpacked_int8(False),
    "compressed-tensors fp8": float8("channel"),
    "compressed-tensors fp8 tensor": float8("tensor", dtype=torch.float32),
    "compressed-tensors fp8 block": float8("block"),
    "fp8": float8("block", "fp8", torch.float32),
    "fp8 tensor": float8("tensor", "fp8"),
    "nvfp4": nvfp4(),
    "nf4": four_bits("nf4", False),
    "nf4 nested": four_bits("nf4", True),
    "nf4 in blocks of 128": four_bits("nf4", True, 128),
    "fp4": four_bits("fp4", False),
    "fp4 nested": four_bits("fp4", True),
    "bitsandbytes int8": int8(),
}


def quantise(directory: Path, scheme: Scheme) -> tuple[Path, Path]:
    """Write two copies of an HF directory, and return them: quantised, and with the weights in f32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    stored, packed, plain = load_file(directory / "model.safetensors"), {}, {}
    for name, weight in stored.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or module == name or EXCLUDED.fullmatch(module):
            packed[name] = plain[name] = weight
            continue
        expert = re.search(r"experts\.(\d+)", name)
        own = {"expert": int(expert[1])} if expert and scheme.config.get("desc_act") else {}
        parts, plain[name] = scheme.layer(weight, **own)
        packed |= {
            f"{module}.{part}": tensor for part, tensor in parts.items() if f"{module}.{part}" not in stored or part == "weight"
        }
    for kind, tensors, own in (("quantised", packed, {"quantization_config": scheme.config}), ("plain", plain, {})):
        path = directory.parent / f"{directory.name}-{kind}"
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    return directory.parent / f"{directory.name}-quantised", directory.parent / f"{directory.name}-plain"
