"""Merge a LoRA adapter in PEFT's layout into its base checkpoint.

As in `peft.tuners.lora`, the result is weight + scale * B A. The scale is alpha / r, or
alpha / sqrt(r) for a rank-stabilised adapter (arXiv:2312.03732). The merge is computed in f32, and
the result is converted back to the element type or quantisation of the weight.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import codec_of
from castiron.emitter.codecs.quantise import convert
from castiron.emitter.shorten import shorten, shorten_list, shorten_text
from castiron.pipelines.checkpoints.checkpoint import EMBEDDINGS, HEAD, Checkpoint, CheckpointError, Tensor, inconsistent
from castiron.pipelines.checkpoints.hf.read_files import json_object, read_safetensors
from castiron.pipelines.checkpoints.hf.tensor_layouts import adapter_tensors, is_transposed
from castiron.pipelines.checkpoints.hf.tokenizer_files import HfTokenizer, read_tokenizer
from castiron.pipelines.errors import similar_path
from castiron.vmfb.bundle.archive import Part

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Names of matrices: <module>.lora_A.weight for a linear layer, <module>.lora_embedding_A for an embedding.
_PART = re.compile(r"(.+)\.lora_(embedding_)?(A|B)(\.weight)?")

# Config keys that are read, and keys that only describe the training or follow from the tensors.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
_IGNORED = set(
    """
    alora_offset auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core
    modules_to_save parent_library peft_version qalora_group_size revision runtime_config target_modules task_type
    """.split()
)
# Initialisations that do not change the base weights; others (pissa, olora, ...) subtract the initial B A.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder that PEFT wrote.

    pairs: B f32 [out, r], A f32 [r, in] and scale by weight; scale * B A is added to it.
    replaced: tensors that replace those of the base, with the names of the trained model.
    text: the adapter's tokenizer and chat template, as far as it has them.
    """

    path: Path
    rank: int
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
    replaced: Mapping[str, Tensor]
    text: HfTokenizer = HfTokenizer()


def adapter_sha256(path: Path) -> str:
    """Return one SHA-256 (hex) of an adapter's config and weights."""
    _check_directory(path)
    hashes = [bytes.fromhex(Part.of(path / name).sha256()) for name in (CONFIG, WEIGHTS)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _check_directory(path: Path) -> None:
    if path.is_file():
        raise CheckpointError(f"{path} is a file of an adapter; give its directory, {path.absolute().parent}")
    if not path.exists():
        raise CheckpointError(f"{path}: no such directory{similar_path(path) or '; give the directory of an adapter'}")


def open_adapter(path: Path) -> Adapter:
    """Read the adapter in a directory; CheckpointError for variants of LoRA such as DoRA."""
    _check_directory(path)
    config = _config(path)
    if not (path / WEIGHTS).exists():
        raise CheckpointError(f"{path} has no {WEIGHTS}; save the adapter as safetensors")
    parts: dict[str, dict[str, np.ndarray]] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in read_safetensors(path / WEIGHTS).items():
        base_name = name.removeprefix(_PREFIX)
        part = _PART.fullmatch(base_name)
        if part is None:
            if ".lora_" in base_name:
                raise CheckpointError(f"{path}: {shorten_text(name)} is not a plain LoRA matrix; {_MERGE}")
            # In an adapted layer, the original weight or bias is in the submodule base_layer.
            base_name = base_name.replace(".base_layer.", ".")
            replaced[base_name] = replace(tensor, name=base_name)
            continue
        module, embedding, side, _ = part.groups()
        values = tensor.dequantise()
        if values.ndim != 2:
            raise CheckpointError(f"{path}: LoRA tensor {shorten_text(name)} has {values.ndim} dimensions, not 2; {_MERGE}")
        if embedding:  # the update of an embedding is the transpose of B A
            side, values = "B" if side == "A" else "A", values.T
        parts.setdefault(module, {})[side] = values
    pairs = {f"{module}.weight": _pair(path, config, module, sides) for module, sides in parts.items()}
    return Adapter(path, config["r"], pairs, replaced, read_tokenizer(path, {}))


def merge(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return the checkpoint with the adapter, which is merged into a weight when it is read."""
    tensors, model_type = dict(checkpoint.tensors), checkpoint.config["model_type"]
    changes = {name: _change(name, *pair, is_transposed(model_type, name)) for name, pair in adapter.pairs.items()}
    changes, other_changes = adapter_tensors(model_type, changes)
    replaced, other_tensors = adapter_tensors(model_type, adapter.replaced)
    # Ignore saved tensors that equal the base: peft saves embeddings even if they were not trained.
    replaced = {
        name: tensor
        for name, tensor in replaced.items()
        if name not in tensors or not np.array_equal(tensor.dequantise(), tensors[name].dequantise())
    }
    shapes = [(name, tensor.shape) for own in (changes, replaced) for name, tensor in own.items()]
    for name, shape in shapes:
        if name not in tensors:
            raise CheckpointError(
                f"{adapter.path} adapts {shorten_text(name)}, which {checkpoint.path} lacks; {_GIVE_ITS_BASE}"
            )
        own = tensors[name]
        if codec_of(own.codec).quantised:
            raise CheckpointError(f"{checkpoint.path}: {name} is quantised ({own.codec}); give a base in f32, bf16 or f16")
        if own.shape != shape:
            raise CheckpointError(
                f"{adapter.path} adapts {name} as {list(shape)}, but the base has {list(own.shape)}; {_GIVE_ITS_BASE}"
            )
    shared = sorted({name for name, _ in shapes} & {*EMBEDDINGS, HEAD})
    if shared and checkpoint.config.get("tie_word_embeddings"):
        # Training changed only one of the two, so they can no longer share a weight.
        raise CheckpointError(
            f"{adapter.path} adapts {shared[0]}, which is shared by embedding and output head of {checkpoint.path}; {_MERGE}"
        )
    tensors |= {name: replace(tensor, source=f"{name} of the adapter") for name, tensor in replaced.items()}
    tensors |= {name: _adapted(tensors[name], change) for name, change in changes.items()}
    others = Counter(other_changes) + Counter(other_tensors)
    left_out = {**checkpoint.left_out, **{f"{part} of the adapter": count for part, count in others.items()}}
    text, changed = adapter.text, replace(checkpoint, tensors=tensors, left_out=left_out)
    if text.content:
        ends = (*text.ids("eos_token"), *checkpoint.eos_token_ids)
        changed = replace(
            changed,
            tokenizer=text.content,
            special_tokens=text.special_tokens or checkpoint.special_tokens,
            eos_token_ids=tuple(dict.fromkeys(ends)),
        )
    return replace(changed, chat_template=text.chat_template or checkpoint.chat_template)


_GIVE_ITS_BASE = "give the base model that the adapter was trained on"
_MERGE = "merge the adapter with peft (merge_and_unload, save_pretrained) and give the merged directory"


def _config(path: Path) -> dict:
    config = json_object(path / CONFIG)
    if config is None:
        raise CheckpointError(f"{path} has no {CONFIG}; give an adapter's directory, as peft's save_pretrained writes it")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} is an adapter of type {shorten(config.get('peft_type'))}, not LORA; {_MERGE}")
    if used := sorted(key for key in config.keys() - _READ - _IGNORED if config[key]):
        raise CheckpointError(f"{path} uses {shorten_list(used, max_length=100)}; castiron supports only plain LoRA; {_MERGE}")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        start = shorten_text(str(config["init_lora_weights"]))
        raise CheckpointError(f"{path} was initialised by {start}, which changes the base weights; {_MERGE}")
    for key, default in (("r", 8), ("lora_alpha", 8), ("rank_pattern", {}), ("alpha_pattern", {}), ("use_rslora", False)):
        config[key] = default if config.get(key) is None else config[key]
    numbers = {"r": [config["r"]], "lora_alpha": [config["lora_alpha"]]}
    for key in ("rank_pattern", "alpha_pattern"):
        numbers[key] = list(config[key].values()) if isinstance(config[key], dict) else [None]
    for key, entries in numbers.items():
        if not all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 2**31 for n in entries):
            wanted = "an object of numbers" if key.endswith("pattern") else "a number"
            raise CheckpointError(f"{path / CONFIG}: {key} is {shorten(config[key])}, not {wanted} below 2**31")
    return config


def _of_pattern(patterns: Mapping[str, float], module: str, default: float, path: Path) -> float:
    for key, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except (re.error, OverflowError) as error:
            why = shorten_text(str(error))
            raise CheckpointError(f"{path / CONFIG} has the invalid pattern {shorten(key)} ({why})") from None
    return default


def _pair(path: Path, config: dict, module: str, sides: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
    if sides.keys() != {"A", "B"}:
        raise inconsistent(path, f"it has only one of the two LoRA matrices of {shorten_text(module)}")
    rank = _of_pattern(config["rank_pattern"], module, config["r"], path)
    alpha = _of_pattern(config["alpha_pattern"], module, config["lora_alpha"], path)
    a, b = sides["A"], sides["B"]
    if not len(a) == b.shape[1] == rank:
        ranks = f"of rank {len(a)} and {b.shape[1]}, but {CONFIG} states {rank}"
        raise inconsistent(path, f"{shorten_text(module)} has LoRA matrices {ranks}")
    return b, a, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def _change(name: str, b: np.ndarray, a: np.ndarray, scale: float, transposed: bool) -> Tensor:
    def read() -> np.ndarray:
        delta = (b @ a) * np.float32(scale)
        return np.ascontiguousarray(delta.T if transposed else delta).view(np.uint8)

    shape = len(b), a.shape[1]
    return Tensor(name, shape[::-1] if transposed else shape, "f32", name, read)


def _adapted(tensor: Tensor, change: Tensor) -> Tensor:
    def read() -> np.ndarray:
        values = tensor.dequantise() + change.dequantise()
        return convert("f32", values.view(np.uint8), tensor.codec)

    return replace(tensor, read=read)
