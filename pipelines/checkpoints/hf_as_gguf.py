"""An HF checkpoint in llama.cpp's words: the table of `gguf_architectures` read from right to left.

What is written is read back by `hf_config`, and refused unless the family then reads the same model: a config that GGUF's
metadata cannot say, or that no rule here writes, is an error and not another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.models import family
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.pipelines.checkpoints.gguf_architectures import ARCHITECTURES
from castiron.pipelines.checkpoints.gguf_config import hf_config
from castiron.pipelines.checkpoints.gguf_file import GgufFile, GgufTensor
from castiron.pipelines.checkpoints.gguf_rope import head_dim, llama3_factors
from castiron.pipelines.checkpoints.gguf_words import Architecture
from castiron.pipelines.checkpoints.gguf_writer import Stored, Value, as_read

# Model types that llama.cpp holds for another.
_HELD_FOR = {"mistral": "llama"}
# Sizes as GPT-2's config calls them.
_SIZES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
# Matrices that llama.cpp reads in f32 alone, or leaves so: routers, filters of convolutions, learnt positions.
_SMALL = re.compile(r".*(ffn_gate_inp|shortconv\.conv|position_embd)\.weight")
_TOP = re.compile(r"(.+)\.(weight|bias)")
_FACTOR_TOLERANCE = 1e-5  # of what goes through f32 on the way

Codecs = Mapping[str, str]


def architecture_for(checkpoint: Checkpoint) -> tuple[str, Architecture]:
    """`general.architecture` of the checkpoint's model and its row; CheckpointError for a model that has none."""
    model_type = checkpoint.config["model_type"]
    held_for = _HELD_FOR.get(model_type, model_type)
    for name, row in ARCHITECTURES.items():
        if row.model_type == held_for and row.written:
            return name.partition(" ")[0], row
    known = ", ".join(sorted({row.model_type for row in ARCHITECTURES.values() if row.written} | set(_HELD_FOR)))
    raise CheckpointError(f"{checkpoint.path} holds a {model_type} model, which is not written as GGUF; {known} are")


def metadata_of(checkpoint: Checkpoint, config: dict) -> dict[str, Value]:
    """The architecture's own metadata; `config` is the checkpoint's, made `plain`."""
    name, row = architecture_for(checkpoint)
    size, read = head_dim(config), family(checkpoint.config).Config.read(checkpoint.config)
    keys: dict[str, Value] = {}
    if "rope.freq_base" in row.floats:
        keys["rope.dimension_count"] = int(size * config.get("partial_rotary_factor", 1.0))
    keys |= {key: int(config[own]) for key, own in row.ints.items() if config.get(own) is not None}
    keys |= {key: float(config[own]) for key, own in row.floats.items() if config.get(own) is not None}
    if "llama_head_dim" in row.rules or "attention.key_length" in keys:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    keys["attention.head_count_kv"] = read.kv_heads
    if "lfm2_layers" in row.rules:
        # Layers that convolve have no heads, and the size that the config says is rounded.
        keys["attention.head_count_kv"] = [read.kv_heads * (kind == "full_attention") for kind in read.layer_types]
        keys["feed_forward_length"] = read.intermediate
    if "use_parallel_residual" in config:
        keys["use_parallel_residual"] = bool(config["use_parallel_residual"])
    keys |= _rope_keys(config)
    return {f"{name}.{key}": value for key, value in keys.items()}


def plain(config: dict) -> dict:
    """The config in one form of those that transformers has had: `rope_theta` and `rope_scaling` of its own, as before
    version 5, GPT-2's sizes under the names of others, and the number of experts under both of its own."""
    entry = config.get("rope_parameters") or {}
    local = entry.get("sliding_attention", {})
    entry = {**entry.get("full_attention", entry), **(config.get("rope_scaling") or {})}
    entry.setdefault("rope_type", entry.pop("type", None) or "default")
    flat = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    for key in ("rope_theta", "partial_rotary_factor"):
        if entry.get(key) is not None:
            flat[key] = entry.pop(key)
    if local.get("rope_theta") is not None:
        flat["rope_local_base_freq"] = local["rope_theta"]
    original = config.get("original_max_position_embeddings")
    if original is not None:
        entry.setdefault("original_max_position_embeddings", original)
    flat |= {own: flat[short] for short, own in _SIZES.items() if short in flat}
    if "n_embd" in flat:
        flat["n_inner"] = flat.get("n_inner") or 4 * flat["n_embd"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    flat |= {"num_experts": experts, "num_local_experts": experts}
    return flat | ({} if entry["rope_type"] == "default" else {"rope_scaling": entry})


def _rope_keys(config: dict) -> dict[str, Value]:
    entry = config.get("rope_scaling") or {}
    keys: dict[str, Value] = {}
    kind, original = entry.get("rope_type"), entry.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(entry["factor"])}
        keys |= {f"rope.scaling.yarn_{key}": float(entry[key]) for key in ("beta_fast", "beta_slow") if entry.get(key)}
    if kind in ("yarn", "longrope") and original is not None:
        keys["rope.scaling.original_context_length"] = int(original)
    if kind == "longrope" and (factor := _attention_factor(config, entry)) is not None:
        keys["rope.scaling.attn_factor"] = factor
    return keys


def _attention_factor(config: dict, entry: dict) -> float | None:
    """What HF multiplies longrope's cosines by (_compute_longrope_parameters)."""
    if entry.get("attention_factor") is not None:
        return float(entry["attention_factor"])
    original = entry.get("original_max_position_embeddings")
    factor = entry.get("factor") or (config["max_position_embeddings"] / original if original else 1.0)
    return 1.0 if factor <= 1 or not original else float(np.sqrt(1 + np.log(factor) / np.log(original)))


def _rope_tensors(config: dict) -> Iterator[Stored]:
    entry = config.get("rope_scaling") or {}
    factors: dict[str, np.ndarray] = {}
    if entry.get("rope_type") == "llama3":
        low, high, original = (entry[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        of = llama3_factors(head_dim(config), config.get("rope_theta", 10000.0), entry["factor"], low, high, original)
        factors["rope_freqs.weight"] = of
    if entry.get("rope_type") == "longrope":
        factors = {f"rope_factors_{length}.weight": np.array(entry[f"{length}_factor"]) for length in ("long", "short")}
    for name, values in factors.items():
        yield Stored(name, values.shape, "f32", lambda values=values: values.astype("<f4"))


def tensors_of(checkpoint: Checkpoint, config: dict, codecs: Codecs, read: Callable[[str, str], np.ndarray]) -> list[Stored]:
    """The tensors under GGUF's names, rows, norms and experts as llama.cpp has them; vectors and routers in f32.

    codecs: of the matrices, by HF's names; read(name, codec): a tensor's bytes in a codec.
    """
    _, row = architecture_for(checkpoint)
    leaves = {own: leaf for leaf, own in row.tensors.items()}
    stacks = {re.compile(re.escape(own).replace(r"\{\}", r"(\d+)")): leaf for leaf, own in row.per_index.items()}
    tops = {own: leaf for leaf, own in row.top.items()}
    block = re.compile(re.escape(row.block).replace(r"\{\}", r"(\d+)") + r"(.+)\.(weight|bias)")
    found: list[Stored] = list(_rope_tensors(config))
    stacked: dict[tuple[str, str], dict[int, Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        # Those that HF has no ending for are weights here.
        whole = tensor.name if tensor.name.endswith((".weight", ".bias")) else f"{tensor.name}.weight"
        layer, top = block.fullmatch(whole), _TOP.fullmatch(whole)
        if layer and layer[2] in leaves:
            leaf = leaves[layer[2]]
            heads = config[row.permuted[leaf]] if leaf in row.permuted else 0
            plus_one = row.norms_plus_one and leaf.endswith("norm")
            found.append(_stored(tensor, f"blk.{layer[1]}.{leaf}.{layer[3]}", codecs, read, heads, plus_one))
            continue
        if layer and (match := next(((m, leaf) for form, leaf in stacks.items() if (m := form.fullmatch(layer[2]))), None)):
            name = f"blk.{layer[1]}.{match[1]}.{layer[3]}"
            stacked.setdefault((name, codecs[tensor.name]), {})[int(match[0][1])] = tensor
            continue
        if top is None or top[1] not in tops:
            raise CheckpointError(f"{checkpoint.path}: {tensor.name} has no name in GGUF that castiron knows")
        if tensor.name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        plus_one = row.norms_plus_one and top[1].endswith("norm")
        found.append(_stored(tensor, f"{tops[top[1]]}.{top[2]}", codecs, read, 0, plus_one))
    return found + [_stack(name, codec, parts, read) for (name, codec), parts in stacked.items()]


def _stored(tensor: Tensor, name: str, codecs: Codecs, read, heads: int, plus_one: bool) -> Stored:
    small = len(tensor.shape) == 1 or _SMALL.fullmatch(name)
    codec = "f32" if small else codecs[tensor.name]
    # A filter of a convolution is [features, 1, n] in HF.
    shape = (tensor.shape[0], tensor.shape[2]) if _SMALL.fullmatch(name) and len(tensor.shape) == 3 else tensor.shape

    def data() -> np.ndarray:
        rows = read(tensor.name, codec)
        if plus_one:
            rows = (rows.view("<f4") + np.float32(1)).view(np.uint8)
        if heads:
            # HF's (head, half, pair) to (head, pair, half): the converter's `permute`.
            out = tensor.shape[0]
            rows = rows.reshape(heads, 2, out // heads // 2, -1).swapaxes(1, 2)
        return rows.reshape(*shape[:-1], -1) if shape != tensor.shape else rows

    return Stored(name, shape, codec, data)


def _stack(name: str, codec: str, parts: dict[int, Tensor], read) -> Stored:
    ordered = [parts[number] for number in sorted(parts)]
    vectors = len(ordered[0].shape) == 1
    codec = "f32" if vectors else codec
    return Stored(name, (len(ordered), *ordered[0].shape), codec, lambda: np.stack([read(t.name, codec) for t in ordered]))


def check_read_back(checkpoint: Checkpoint, metadata: Mapping[str, Value], tensors: list[Stored]) -> None:
    """CheckpointError unless the family reads the same model from what is to be written."""
    small = [tensor for tensor in tensors if tensor.name.startswith("rope")]
    data = b"".join(np.ascontiguousarray(tensor.read()).tobytes() for tensor in small)
    table, at = {}, 0
    for tensor in tensors:
        nbytes = tensor.nbytes if tensor in small else 0
        table[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.codec, at, nbytes)
        at += nbytes
    file = GgufFile(Path(checkpoint.path), 3, as_read(metadata), table, np.frombuffer(data, np.uint8))
    read = hf_config(file)
    ours, theirs = (family(config).Config.read(config) for config in (checkpoint.config, read))
    if differing := sorted(_differing(ours, theirs)):
        raise CheckpointError(
            f"{checkpoint.path} is a {checkpoint.config['model_type']} model whose {', '.join(differing)} would be read back "
            "otherwise: convert it with llama.cpp's convert_hf_to_gguf.py, and quantise the file that this writes"
        )


def _differing(one: Any, other: Any) -> Iterator[str]:
    """Fields of two records that are not the same; one that a record lacks must be None or False in the other, or a list of
    None."""
    for name in {field.name for record in (one, other) for field in fields(record)}:
        a, b = getattr(one, name, None), getattr(other, name, None)
        if not _same(a, b):
            yield name


def _same(a: Any, b: Any) -> bool:
    if is_dataclass(a) and is_dataclass(b):
        return not list(_differing(a, b))
    if isinstance(a, np.ndarray | float) and isinstance(b, np.ndarray | float | int):
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=_FACTOR_TOLERANCE, atol=0)
    return a == b or (_nothing(a) and _nothing(b))


def _nothing(value: Any) -> bool:
    return value in (None, False) or (isinstance(value, list) and all(one is None for one in value))
