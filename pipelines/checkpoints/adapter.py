"""A LoRA adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors), merged into
its base checkpoint.

The merge is that of `peft.tuners.lora`: weight + scale * B A, where scale is alpha / r, or alpha /
sqrt(r) of rank-stabilised adapters (arXiv:2312.03732). It is computed in f32 and stored in the
tensor's own format.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.quantise import convert
from castiron.emitter.shorten import shorten, shorten_list, shorten_text
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.pipelines.checkpoints.hf_directory import chat_template
from castiron.pipelines.checkpoints.hf_files import json_object, read_safetensors
from castiron.vmfb.archive import Part

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# "<module>.lora_A.weight" and "<module>.lora_B.weight" of a linear layer,
# "<module>.lora_embedding_A" and _B of an embedding.
_PART = re.compile(r"(.+)\.lora_(embedding_)?(A|B)(\.weight)?")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Config keys that are read, and those that describe the training or repeat what the tensors show.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
_IGNORED = set(
    """
    alora_offset auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core
    modules_to_save parent_library peft_version qalora_group_size revision runtime_config target_modules task_type
    """.split()
)
_MAX_NUMBER = 2**31
# Initialisations that don't change the base weights; others (pissa, olora, ...) subtract the
# initial matrices.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    pairs: name of an adapted weight -> (B, A, scale), where B is f32 [out, r] and A is f32 [r, in];
    scale * B A is added to the weight.
    replaced: complete tensors that replace the checkpoint's tensors, by name.
    tokenizer, chat_template: saved with the adapter, or None.
    """

    path: Path
    rank: int  # the config's `r`
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
    replaced: Mapping[str, Tensor]
    tokenizer: dict | None = None
    chat_template: str | None = None

    @property
    def names(self) -> set[str]:
        """Return the names of the checkpoint's tensors that the adapter changes or replaces."""
        return {*self.pairs, *self.replaced}


def adapter_sha256(path: Path) -> str:
    """Return one sha256, in hex, over the config and the weights of an adapter; CheckpointError if
    they can't be read."""
    try:
        hashes = [bytes.fromhex(Part.of(path / name).sha256()) for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def open_adapter(path: Path) -> Adapter:
    """Return the adapter in the directory `path`; CheckpointError for anything but plain LoRA."""
    config = _config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}; save the adapter as safetensors")
    parts: dict[str, dict[str, np.ndarray]] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in read_safetensors(path / WEIGHTS).items():
        own = name.removeprefix(_PREFIX)
        part = _PART.fullmatch(own)
        if part is None:
            if ".lora_" in own:
                raise CheckpointError(f"{path}: {shorten_text(name)} is not a plain LoRA matrix; {_MERGE}")
            # The weight or bias of an adapted layer is one module deeper.
            own = own.replace(".base_layer.", ".")
            replaced[own] = replace(tensor, name=own)
            continue
        module, embedding, side, _ = part.groups()
        values = tensor.dequantise()
        if values.ndim != 2:
            raise CheckpointError(f"{path}: {shorten_text(name)} has the shape {shorten(list(tensor.shape))}, not a matrix's")
        # An embedding adds (B A)' = A' B'.
        key, values = ("AB"[side == "A"], values.T) if embedding else (side, values)
        parts.setdefault(module, {})[key] = values
    pairs = {f"{module}.weight": _pair(path, config, module, sides) for module, sides in parts.items()}
    return Adapter(path, config["r"], pairs, replaced, json_object(path / "tokenizer.json"), chat_template(path))


def merge(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return the checkpoint with the adapter merged into its weights, which are computed when they
    are read.

    CheckpointError for weights that are missing, of another shape, quantised, or shared by the
    embedding and the head.
    """
    tensors = dict(checkpoint.tensors)
    # peft saves the embeddings of a resized vocabulary even if they were not trained.
    replaced = {name: tensor for name, tensor in adapter.replaced.items() if not _equal(tensor, tensors.get(name))}
    touched = {*adapter.pairs, *replaced}
    for name in touched:
        if name not in tensors:
            raise CheckpointError(
                f"{adapter.path} adapts {shorten_text(name)}, which {checkpoint.path} lacks; give the adapter's own base"
            )
        if CODECS[tensors[name].codec].quantised:
            raise CheckpointError(
                f"{checkpoint.path} has {name} quantised ({tensors[name].codec}), which would round the adapter away; merge it "
                "into the checkpoint in f32, bf16 or f16"
            )
    if checkpoint.config.get("tie_word_embeddings") and (shared := sorted(touched & {_EMBEDDING, _HEAD})):
        # Training changed only one of the two.
        raise CheckpointError(
            f"{adapter.path} adapts {shared[0]}, which {checkpoint.path} shares between the embedding and the head; {_MERGE}"
        )
    for name, tensor in replaced.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{adapter.path} has {name} with the shape {list(tensor.shape)}, and {checkpoint.path} with "
                f"{list(tensors[name].shape)}; resize the model's embeddings first, or {_MERGE}"
            )
        tensors[name] = replace(tensor, source=f"{name} of the adapter")
    for name, (b, a, scale) in adapter.pairs.items():
        if tensors[name].shape != (len(b), a.shape[1]):
            raise CheckpointError(
                f"{adapter.path} adapts {name} as [{len(b)}, {a.shape[1]}], and {checkpoint.path} has it as "
                f"{list(tensors[name].shape)}; give the adapter's own base"
            )
        tensors[name] = _adapted(tensors[name], b, a, scale)
    return replace(
        checkpoint,
        tensors=tensors,
        tokenizer=adapter.tokenizer or checkpoint.tokenizer,
        chat_template=adapter.chat_template or checkpoint.chat_template,
    )


_MERGE = "merge it with peft (merge_and_unload, save_pretrained) and give the directory that this writes"


def _config(path: Path) -> dict:
    config = json_object(path / CONFIG)
    if config is None:
        raise CheckpointError(f"{path} has no {CONFIG}; give an adapter's directory, as peft's save_pretrained writes it")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} is an adapter of type {shorten(config.get('peft_type'))}, not LORA, the only one supported; {_MERGE}"
        )
    if used := sorted(key for key in config.keys() - _READ - _IGNORED if config[key]):
        raise CheckpointError(f"{path} uses {shorten_list(used, max_length=100)}, which plain LoRA does not; {_MERGE}")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        start = shorten_text(str(config["init_lora_weights"]))
        raise CheckpointError(f"{path} was initialised by {start}, which changes the base weights; {_MERGE}")
    for key, default in (("r", 8), ("lora_alpha", 8), ("rank_pattern", {}), ("alpha_pattern", {}), ("use_rslora", False)):
        config[key] = default if config.get(key) is None else config[key]
    patterns = (config["rank_pattern"], config["alpha_pattern"])
    numbers = [config["r"], config["lora_alpha"]]
    if all(isinstance(pattern, dict) for pattern in patterns):
        numbers += [number for pattern in patterns for number in pattern.values()]
    else:
        numbers.append(None)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < _MAX_NUMBER for n in numbers):
        raise CheckpointError(f"{path / CONFIG}: r, lora_alpha and their patterns are not numbers below {_MAX_NUMBER}")
    return config


def _of_pattern(patterns: Mapping[str, float], module: str, default: float, path: Path) -> float:
    """Return the value of the first pattern that matches the end of the module's name, else
    `default`, as peft does."""
    try:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
    except (re.error, OverflowError) as error:
        raise CheckpointError(
            f"{path / CONFIG} has an invalid pattern ({shorten_text(str(error))}); correct it or save the adapter again"
        ) from None


def _pair(path: Path, config: dict, module: str, sides: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
    if sides.keys() != {"A", "B"}:
        raise CheckpointError(f"{path} has only one of the two matrices of {shorten_text(module)}; save the adapter again")
    rank = _of_pattern(config["rank_pattern"], module, config["r"], path)
    alpha = _of_pattern(config["alpha_pattern"], module, config["lora_alpha"], path)
    a, b = sides["A"], sides["B"]
    if not len(a) == b.shape[1] == rank:
        raise CheckpointError(
            f"{path} has matrices of rank {len(a)} and {b.shape[1]} for {shorten_text(module)}, but {CONFIG} states {rank}; "
            "save the adapter again"
        )
    return b, a, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and np.array_equal(one.dequantise(), other.dequantise())


def _adapted(tensor: Tensor, b: np.ndarray, a: np.ndarray, scale: float) -> Tensor:
    def read() -> np.ndarray:
        values = dequantise(tensor.codec, tensor.data)
        values += (b @ a) * np.float32(scale)
        return convert("f32", values.view(np.uint8), tensor.codec)

    return replace(tensor, read=read)
