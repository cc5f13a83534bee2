"""A LoRA adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors), merged into the checkpoint that it adapts.

The merge is that of `peft.tuners.lora`: weight + scale * B A, with the scale alpha / r, or alpha / sqrt(r) of rank-stabilised
adapters (arXiv:2312.03732). It is computed in f32 and stored as the checkpoint stores that tensor.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.quantise import convert
from castiron.emitter.shown import shown, shown_list, shown_text
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.pipelines.checkpoints.hf_directory import chat_template
from castiron.pipelines.checkpoints.json_files import json_object
from castiron.pipelines.checkpoints.safetensors_file import CODEC_OF_DTYPE, StoredTensor, read_safetensors
from castiron.vmfb.archive import Part

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# "<module>.lora_A.weight" and "<module>.lora_B.weight" of a linear layer, "<module>.lora_embedding_A" and _B of an embedding.
_PART = re.compile(r"(.+)\.lora_(embedding_)?(A|B)(\.weight)?")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Keys of the config that are read, and those that say how it was trained, or repeat what the tensors show.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
_PASSED = set(
    """
    alora_offset auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core
    modules_to_save parent_library peft_version qalora_group_size revision runtime_config target_modules task_type
    """.split()
)
# Of a number; of a pattern or a name in characters; where a pattern may go on in several ways; to look for all of them.
_LARGEST, _LONGEST, _CHOICES, _SECONDS = 2**31, 200, 3, 2.0
# Ways to begin that leave the checkpoint's weights alone; others (pissa, olora, ...) subtract what they begin with.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors: pairs of B [out, r] and A [r, in] with their scale, by the name of the weight that they add to
    (transposed for an embedding), and tensors that take the place of the
    checkpoint's. rank: the config's. tokenizer, chat_template: those that the training used, where it left them beside it."""

    path: Path
    rank: int
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray, float]]
    whole: Mapping[str, Tensor]
    tokenizer: dict | None = None
    chat_template: str | None = None

    @property
    def names(self) -> set[str]:
        """Of the checkpoint's tensors that it changes, or holds as they were."""
        return {*self.pairs, *self.whole}


def adapter_sha256(path: Path) -> str:
    """In hex, over the two files. CheckpointError if they cannot be read."""
    try:
        hashes = [bytes.fromhex(Part.of(path / name).sha256()) for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def open_adapter(path: Path) -> Adapter:
    """The adapter in the directory `path`; CheckpointError, one sentence, for what is not LoRA or does more than it."""
    config = _config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}: save the adapter as safetensors")
    stored = read_safetensors(path / WEIGHTS)
    parts: dict[str, dict[str, np.ndarray]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        own = name.removeprefix(_PREFIX)
        if len(own) > _LONGEST:
            raise CheckpointError(f"{path}: {shown_text(own)} is no tensor's name: save the adapter again")
        part = _PART.fullmatch(own)
        if part is None:
            if ".lora_" in own:
                raise CheckpointError(f"{path}: {shown_text(name)} belongs to a kind of LoRA that is not merged here: {_MERGE}")
            # The weight or bias of a layer that is adapted stands one module deeper.
            own = own.replace(".base_layer.", ".")
            whole[own] = _as_tensor(path, own, tensor)
            continue
        module, embedding, side, _ = part.groups()
        values = _as_tensor(path, name, tensor).dequantise()
        if values.ndim != 2:
            raise CheckpointError(
                f"{path}: {shown_text(name)} has the shape {shown(list(tensor.shape))}, and a part of LoRA is a matrix"
            )
        # An embedding adds (B A) transposed, which is A' B'.
        key, values = ("AB"[side == "A"], values.T) if embedding else (side, values)
        parts.setdefault(module, {})[key] = values
    until = time.process_time() + _SECONDS
    pairs = {f"{module}.weight": _pair(path, config, module, sides, until) for module, sides in parts.items()}
    return Adapter(path, config["r"], pairs, whole, json_object(path / "tokenizer.json"), chat_template(path))


def merge(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The checkpoint with the adapter in its weights, which are computed when they are read.

    CheckpointError for weights that it has not, of other sizes, quantised, or shared by the embedding and the head.
    """
    tensors = dict(checkpoint.tensors)
    # Of a vocabulary that grew or was thought to have, peft saves the embeddings whether they were trained or not.
    whole = {name: tensor for name, tensor in adapter.whole.items() if not _equal(tensor, tensors.get(name))}
    touched = {*adapter.pairs, *whole}
    for name in touched:
        if name not in tensors:
            raise CheckpointError(
                f"{adapter.path} adapts {shown_text(name)}, which {checkpoint.path} has not: is it of another model?"
            )
        if CODECS[tensors[name].codec].quantised:
            raise CheckpointError(
                f"{checkpoint.path} holds {name} in {tensors[name].codec}, in which an adapter would lose its digits: "
                "merge it into the checkpoint in f32, bf16 or f16"
            )
    if checkpoint.config.get("tie_word_embeddings") and (shared := sorted(touched & {_EMBEDDING, _HEAD})):
        # In training the other stayed as it was, which no one weight can say.
        raise CheckpointError(
            f"{adapter.path} adapts {shared[0]}, and in {checkpoint.path} the embedding and the head are one weight, of which "
            f"merging would change both: {_MERGE}"
        )
    for name, tensor in whole.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{adapter.path} has {name} with the shape {list(tensor.shape)}, and {checkpoint.path} with "
                f"{list(tensors[name].shape)}: resize the model's embeddings first, or {_MERGE}"
            )
        tensors[name] = replace(tensor, source=f"{name} of the adapter")
    for name, (b, a, scale) in adapter.pairs.items():
        if tensors[name].shape != (len(b), a.shape[1]):
            raise CheckpointError(
                f"{adapter.path} adapts {name} as [{len(b)}, {a.shape[1]}], and {checkpoint.path} has it as "
                f"{list(tensors[name].shape)}: is it of another model?"
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
        raise CheckpointError(f"{path} has no {CONFIG}: give an adapter's directory, as peft's save_pretrained writes it")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} is an adapter of type {shown(config.get('peft_type'))}, and only LORA is merged: {_MERGE}"
        )
    if used := sorted(key for key in config.keys() - _READ - _PASSED if config[key]):
        raise CheckpointError(f"{path} uses {shown_list(used, most=100)}, which plain LoRA does not: {_MERGE}")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        start = shown_text(str(config["init_lora_weights"]))
        raise CheckpointError(f"{path} began as {start}, which changes the weights that it is added to: {_MERGE}")
    for key, default in (("r", 8), ("lora_alpha", 8), ("rank_pattern", {}), ("alpha_pattern", {}), ("use_rslora", False)):
        config[key] = default if config.get(key) is None else config[key]
    patterns = (config["rank_pattern"], config["alpha_pattern"])
    numbers = [config["r"], config["lora_alpha"]]
    if all(isinstance(pattern, dict) for pattern in patterns):
        numbers += [number for pattern in patterns for number in pattern.values()]
    else:
        numbers.append(None)
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < _LARGEST for n in numbers):
        raise CheckpointError(f"{path / CONFIG}: r, lora_alpha and their patterns are not numbers below {_LARGEST}")
    for key in {**patterns[0], **patterns[1]}:
        # What may match in many ways may take years.
        plain = re.sub(r"\\.|\[[^]]*\]", "", key)
        if len(key) > _LONGEST or len(re.findall(r"[*+?{|]", plain)) > _CHOICES or re.search(r"\)[*+?{]", plain):
            raise CheckpointError(f"{path / CONFIG} has the pattern {shown(key)}, which may match in too many ways: {_MERGE}")
    return config


def _of_pattern(patterns: Mapping[str, float], module: str, default: float, path: Path, until: float) -> float:
    """The value of the first pattern that is the end of the module's name, as peft's `get_pattern_key` finds it."""
    try:
        for key, value in patterns.items():
            if time.process_time() > until:
                raise CheckpointError(f"{path / CONFIG} has more patterns than can be looked for: {_MERGE}")
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default
    except (re.error, OverflowError) as error:
        raise CheckpointError(
            f"{path / CONFIG} has a pattern that is no regular expression ({shown_text(str(error))})"
        ) from None


def _pair(
    path: Path, config: dict, module: str, sides: dict[str, np.ndarray], until: float
) -> tuple[np.ndarray, np.ndarray, float]:
    if sides.keys() != {"A", "B"}:
        raise CheckpointError(f"{path} has only one of the two matrices of {shown_text(module)}: save the adapter again")
    rank = _of_pattern(config["rank_pattern"], module, config["r"], path, until)
    alpha = _of_pattern(config["alpha_pattern"], module, config["lora_alpha"], path, until)
    a, b = sides["A"], sides["B"]
    if not len(a) == b.shape[1] == rank:
        raise CheckpointError(
            f"{path} has matrices of rank {len(a)} and {b.shape[1]} for {shown_text(module)}, where {CONFIG} says {rank}: "
            "save the adapter again"
        )
    return b, a, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def _as_tensor(path: Path, name: str, stored: StoredTensor) -> Tensor:
    codec = CODEC_OF_DTYPE.get(stored.dtype)
    if codec is None or not stored.shape or 0 in stored.shape:
        raise CheckpointError(
            f"{path}: {shown_text(name)} is {stored.dtype} {shown(list(stored.shape))}, not numbers: save the adapter again"
        )
    rows = stored.data.reshape(*stored.shape[:-1], -1)
    return Tensor(name, stored.shape, codec, name, lambda: rows)


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and np.array_equal(one.dequantise(), other.dequantise())


def _adapted(tensor: Tensor, b: np.ndarray, a: np.ndarray, scale: float) -> Tensor:
    def read() -> np.ndarray:
        values = dequantise(tensor.codec, tensor.data)
        values += (b @ a) * np.float32(scale)
        return convert("f32", values.view(np.uint8), tensor.codec)

    return replace(tensor, read=read)
