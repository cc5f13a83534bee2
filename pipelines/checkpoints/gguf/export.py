"""Convert an HF checkpoint to GGUF: metadata, tensors and tokenizer.

The result is read back before it is written; CheckpointError if GGUF cannot represent the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.checkpoint import HEAD, SAMPLE, Checkpoint, CheckpointError, Tensor, tokenizer_of
from castiron.pipelines.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from castiron.pipelines.checkpoints.gguf.config_rules import head_dim, llama3_factors
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile, Value, as_read
from castiron.pipelines.checkpoints.gguf.hf_config import hf_config
from castiron.pipelines.checkpoints.gguf.open_gguf import value_head_order
from castiron.pipelines.checkpoints.gguf.tokenizer_json import SPACE, tokenizer_json
from castiron.pipelines.checkpoints.gguf.vocabulary import TEMPLATE_NAMES, eos_token_ids
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS

# Model types that llama.cpp converts to the architecture of another type.
_SAME_AS = {"mistral": "llama"}
# HF's default of mrope_section in Qwen 3.5.
_QWEN35_SECTIONS = (11, 11, 10)
# From GPT-2's names of sizes to the common names.
_SIZES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
# Matrices that llama.cpp stores in f32: routers, filters of convolutions, learned positions.
_SMALL = re.compile(r".*(ffn_gate_inp|ffn_gate_inp_shexp|shortconv\.conv|ssm_conv1d|position_embd)\.weight")
_TOP = re.compile(r"(.+)\.(weight|bias)")
_TOLERANCE = 1e-5  # max relative difference of equal numbers, because GGUF stores f32

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's llama_token_type
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_END_KEYS = ("eot_token_id", "eom_token_id")
_CONVERT = "convert the model with llama.cpp's convert_hf_to_gguf.py, and quantise the resulting file"

# A function that returns a tensor's data, from its HF name, a codec, and the columns to take in this order (None: all).
Read = Callable[[str, str, np.ndarray | None], np.ndarray]


def _unwritable(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} cannot be written as GGUF: {why}; {_CONVERT}")


def architecture_for(checkpoint: Checkpoint) -> tuple[str, Architecture]:
    """Return the name of a model's GGUF architecture, and its row."""
    model_type = checkpoint.config["model_type"]
    # Of the architectures with `vectors`, only those of Qwen 3.5 are supported: this module cannot make the other changes.
    usable = ((name, row) for name, row in reversed(ARCHITECTURES.items()) if row.tiled or not row.vectors)
    rows = {row.model_type: (name.partition(" ")[0], row) for name, row in usable}
    if (named_row := rows.get(_SAME_AS.get(model_type, model_type))) is None:
        known = ", ".join(sorted(rows.keys() | _SAME_AS))
        raise CheckpointError(f"{checkpoint.path}: cannot write {model_type} models as GGUF; supported are {known}")
    return named_row


def export_metadata(checkpoint: Checkpoint, config: dict) -> dict[str, Value]:
    """Return the metadata for a config of `flat_config`, without the tokenizer."""
    name, row = architecture_for(checkpoint)
    size, read = head_dim(config), read_config(checkpoint.config)
    keys: dict[str, Value] = {}
    if "rope.freq_base" in row.floats:
        keys["rope.dimension_count"] = int(size * config.get("partial_rotary_factor", 1.0))
    keys |= {
        key: int(config[config_key])
        for key, config_key in row.ints.items()
        if config.get(config_key) is not None and key not in row.by_layer
    }
    keys |= {key: float(config[config_key]) for key, config_key in row.floats.items() if config.get(config_key) is not None}
    if "llama_head_dim" in row.rules or "attention.key_length" in keys:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    keys["attention.head_count_kv"] = read.kv_heads
    if "lfm2_layers" in row.rules:
        # Convolution layers have no heads. The config has the intermediate size before rounding, so use the rounded one.
        keys["attention.head_count_kv"] = [read.kv_heads * (kind == "full_attention") for kind in read.layer_types]
        keys["feed_forward_length"] = read.intermediate
    if "delta_layers" in row.rules:
        keys["ssm.inner_size"] = read.values
        # Other orders of layers are an error of `check_read_back`.
        keys["full_attention_interval"] = (*read.layer_types, "full_attention").index("full_attention") + 1
        ropes = checkpoint.config.get("rope_parameters") or {}
        keys["rope.dimension_sections"] = [*ropes.get("mrope_section", _QWEN35_SECTIONS), 0]
    if "use_parallel_residual" in config:
        keys["use_parallel_residual"] = bool(config["use_parallel_residual"])
    keys |= _rope_keys(config)
    return {f"{name}.{key}": value for key, value in keys.items()}


def flat_config(config: dict) -> dict:
    """Return a config with transformers 4's keys, such as rope_theta, and usual names of sizes."""
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
    flat |= {usual: flat[short] for short, usual in _SIZES.items() if short in flat}
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
    if kind == "longrope":
        # The factor by which HF multiplies cosines and sines (_compute_longrope_parameters).
        factor = entry.get("factor") or (config["max_position_embeddings"] / original if original else 1.0)
        default = 1.0 if factor <= 1 or not original else np.sqrt(1 + np.log(factor) / np.log(original))
        stated = entry.get("attention_factor")
        keys["rope.scaling.attn_factor"] = float(default if stated is None else stated)
    return keys


def _rope_tensors(config: dict) -> Iterator[Tensor]:
    entry = config.get("rope_scaling") or {}
    factors: dict[str, np.ndarray] = {}
    if entry.get("rope_type") == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        numbers = (entry[key] for key in keys)
        factors["rope_freqs.weight"] = llama3_factors(head_dim(config), config.get("rope_theta", 10000.0), *numbers)
    if entry.get("rope_type") == "longrope":
        factors = {f"rope_factors_{length}.weight": np.array(entry[f"{length}_factor"]) for length in ("long", "short")}
    for name, values in factors.items():
        yield Tensor(name, values.shape, "f32", name, lambda values=values: values.astype("<f4").view(np.uint8))


def export_tensors(checkpoint: Checkpoint, config: dict, codecs: Mapping[str, str], read: Read) -> list[Tensor]:
    """Return the tensors to write, named and ordered as by llama.cpp's converter.

    config: from `flat_config`. codecs: by HF name of a matrix.
    """
    _, row = architecture_for(checkpoint)
    leaves, tops, vectors = ({own: leaf for leaf, own in names.items()} for names in (row.tensors, row.top, row.vectors))
    stacks = {re.compile(re.escape(own).replace(r"\{\}", r"(\d+)")): leaf for leaf, own in row.per_index.items()}
    block = re.compile(re.escape(row.block).replace(r"\{\}", r"(\d+)") + r"(.+)\.(weight|bias)")
    exported: list[Tensor] = list(_rope_tensors(config))
    stacked: dict[tuple[str, str], dict[int, Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        # HF names without .weight or .bias get .weight in GGUF.
        name = tensor.name if tensor.name.endswith((".weight", ".bias")) else f"{tensor.name}.weight"
        layer, top = block.fullmatch(name), _TOP.fullmatch(name)
        own = tensor.name.removeprefix(row.block.format(layer[1])) if layer else ""
        if layer and own in vectors:
            exported.append(
                _vector(tensor, f"blk.{layer[1]}.{vectors[own]}", read, value_head_order(row, config, vectors[own]))
            )
        elif layer and (leaf := leaves.get(layer[2])):
            heads = config[row.permuted[leaf]] if leaf in row.permuted else 0
            order = value_head_order(row, config, leaf)
            exported.append(_exported(tensor, f"blk.{layer[1]}.{leaf}.{layer[3]}", codecs, read, row, heads, order))
        elif layer and (match := next(((m, leaf) for form, leaf in stacks.items() if (m := form.fullmatch(layer[2]))), None)):
            stack = f"blk.{layer[1]}.{match[1]}.{layer[3]}", codecs[tensor.name]
            stacked.setdefault(stack, {})[int(match[0][1])] = tensor
        elif top is None or top[1] not in tops:
            raise _unwritable(checkpoint, f"castiron has no GGUF name for the tensor {tensor.name}")
        elif tensor.name != HEAD or not config.get("tie_word_embeddings"):
            exported.append(_exported(tensor, f"{tops[top[1]]}.{top[2]}", codecs, read, row))
    return exported + [_stack(name, codec, parts, read) for (name, codec), parts in stacked.items()]


def _exported(
    tensor: Tensor,
    name: str,
    codecs: Mapping[str, str],
    read: Read,
    row: Architecture,
    heads: int = 0,
    order: np.ndarray | None = None,
) -> Tensor:
    stored = None if order is None else np.argsort(order)
    columns = stored if row.tiled.get(name.split(".")[-2]) == "columns" else None
    small = _SMALL.fullmatch(name)
    codec = "f32" if small or len(tensor.shape) == 1 else codecs[tensor.name]
    # A filter of a convolution is [features, 1, n] in HF.
    shape = (tensor.shape[0], tensor.shape[2]) if small and len(tensor.shape) == 3 else tensor.shape

    def data() -> np.ndarray:
        rows = read(tensor.name, codec, columns)
        if stored is not None and columns is None:
            rows = rows[stored]
        if row.norms_plus_one and name.endswith("norm.weight"):
            rows = (rows.view("<f4") + np.float32(1)).view(np.uint8)
        if heads:
            # As the converter's `permute`: from HF's order (head, half, pair) to (head, pair, half).
            rows = rows.reshape(heads, 2, tensor.shape[0] // heads // 2, -1).swapaxes(1, 2)
        return rows.reshape(*shape[:-1], -1) if shape != tensor.shape else rows

    return Tensor(name, shape, codec, tensor.name, data)


def _vector(tensor: Tensor, name: str, read: Read, order: np.ndarray | None) -> Tensor:
    def data() -> np.ndarray:
        values = read(tensor.name, "f32", None).view("<f4")
        values = values if order is None else values[np.argsort(order)]
        return (-np.exp(values) if tensor.name.endswith("A_log") else values).view(np.uint8)

    return Tensor(name, tensor.shape, "f32", tensor.name, data)


def _stack(name: str, codec: str, parts: dict[int, Tensor], read: Read) -> Tensor:
    ordered = [parts[number] for number in sorted(parts)]
    first = ordered[0]
    codec = "f32" if len(first.shape) == 1 else codec
    data = lambda: np.stack([read(tensor.name, codec, None) for tensor in ordered])
    return Tensor(name, (len(ordered), *first.shape), codec, first.name, data)


def check_read_back(checkpoint: Checkpoint, metadata: Mapping[str, Value], tensors: list[Tensor]) -> None:
    """Raise CheckpointError if a GGUF file with these contents would give another config."""
    file = GgufFile(checkpoint.path, as_read(metadata), {tensor.name: tensor for tensor in tensors})
    ours, theirs = (read_config(config) for config in (checkpoint.config, hf_config(file)))
    if names := ", ".join(sorted(_differing(ours, theirs))):
        raise _unwritable(
            checkpoint, f"GGUF has no keys for these settings of {checkpoint.config['model_type']} models: {names}"
        )


def _differing(one: Any, other: Any) -> Iterator[str]:
    for name in {field.name for record in (one, other) for field in fields(record)}:
        if not _same(getattr(one, name, None), getattr(other, name, None)):
            yield name


def _same(a: Any, b: Any) -> bool:
    if is_dataclass(a) and is_dataclass(b):
        return not list(_differing(a, b))
    if isinstance(a, np.ndarray | float) and isinstance(b, np.ndarray | float | int):
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=_TOLERANCE, atol=0)
    is_unset = lambda value: value in (None, False) or (isinstance(value, list) and all(item is None for item in value))
    return a == b or (is_unset(a) and is_unset(b))


def export_tokenizer(checkpoint: Checkpoint, vocab: int) -> dict[str, Value]:
    """Return the metadata of a tokenizer; vocab: rows of the token embedding."""
    if checkpoint.tokenizer is None:
        return {_PREFIX + "model": "no_vocab"}
    tokenizer = tokenizer_of(checkpoint.tokenizer, checkpoint.path)
    content = json.loads(tokenizer.to_str())
    model, steps = content["model"], list(_steps(content["pre_tokenizer"], "pretokenizers"))
    if model["type"] == "BPE" and model["byte_fallback"]:
        keys = _sentencepiece(content, steps, vocab)
    elif model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
        keys = _byte_level(checkpoint, content, steps, vocab)
    else:
        raise _unwritable(checkpoint, "its tokenizer is neither byte-level BPE nor SentencePiece")
    ids = {"bos": checkpoint.bos_token_id, "eos": next(iter(checkpoint.eos_token_ids), None)}
    ids |= {"padding": checkpoint.config.get("pad_token_id"), "unknown": model["vocab"].get(model["unk_token"])}
    texts = checkpoint.special_tokens or {}
    ids |= {role: tokenizer.token_to_id(texts[name]) for role, name in TEMPLATE_NAMES.items() if name in texts}
    keys |= {f"{role}_token_id": number for role, number in ids.items() if isinstance(number, int) and 0 <= number < vocab}
    keys |= _further_ends(checkpoint, keys, vocab)
    plain, complete = (tokenizer.encode(SAMPLE, add_special_tokens=adds).ids for adds in (False, True))
    before = next((at for at in range(len(complete)) if complete[at : at + len(plain)] == plain), 0)
    keys |= {"add_bos_token": before > 0, "add_eos_token": len(complete) > before + len(plain)}
    metadata = {_PREFIX + key: value for key, value in keys.items()}
    stored = as_read({"general.architecture": architecture_for(checkpoint)[0], **metadata})
    back = tokenizer_json(GgufFile(checkpoint.path, stored, {}))
    if tokenizer_of(back, checkpoint.path).encode(SAMPLE).ids != complete:
        raise _unwritable(checkpoint, "the tokenizer in the GGUF file would split text differently")
    return metadata


def _further_ends(checkpoint: Checkpoint, keys: Mapping[str, Value], vocab: int) -> dict[str, Value]:
    """Return the keys for end tokens that readers don't recognise by their text."""
    file = GgufFile(checkpoint.path, as_read({_PREFIX + key: value for key, value in keys.items()}), {})
    known = eos_token_ids(file)
    further = [number for number in checkpoint.eos_token_ids if number not in known and 0 <= number < vocab]
    if len(further) > len(_END_KEYS):
        raise _unwritable(checkpoint, f"it has keys for {len(_END_KEYS)} of the end tokens {further}")
    return dict(zip(_END_KEYS, reversed(further)))


def _byte_level(checkpoint: Checkpoint, content: dict, steps: list[dict], vocab: int) -> dict[str, Value]:
    nfc, ignore_merges = (content["normalizer"] or {}).get("type") == "NFC", content["model"]["ignore_merges"]
    rows = ((name, row) for name, row in PRE_TOKENIZERS.items() if (row.nfc, row.ignore_merges) == (nfc, ignore_merges))
    # Other differences, such as the options of ByteLevel, are found when SAMPLE is tokenized.
    kinds_of = lambda steps: [(step["type"], step.get("pattern")) for step in steps]
    name = next((name for name, row in rows if kinds_of(row.steps) == kinds_of(steps)), None)
    if name is None:
        raise _unwritable(checkpoint, "castiron does not know the GGUF name of its pre-tokenizer")
    tokens, kinds = _tokens(content, vocab)
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": kinds, "merges": merges}


def _sentencepiece(content: dict, steps: list[dict], vocab: int) -> dict[str, Value]:
    """Return the metadata of a SentencePiece tokenizer; the token of merge i has the score -i."""
    tokens, kinds = _tokens(content, vocab)
    ranks: dict[str, int] = {}
    for left, right in content["model"]["merges"]:
        ranks.setdefault(left + right, len(ranks))
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    for number, token in enumerate(tokens):
        if token == content["model"]["unk_token"]:
            kinds[number] = _UNKNOWN
        elif _BYTE_TOKEN.fullmatch(token):
            kinds[number] = _BYTE
        elif kinds[number] == _USER_DEFINED:
            # Added tokens have plain spaces: the tokenizer matches them before it replaces the text's spaces.
            tokens[number] = token.replace(SPACE, " ")
    prefix = any(step["type"] == "Prepend" for step in _steps(content["normalizer"], "normalizers"))
    prefix = prefix or any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
    keys: dict[str, Value] = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores}
    return keys | {"add_space_prefix": prefix}


def _steps(step: dict | None, parts: str) -> Iterator[dict]:
    if step and step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    elif step:
        yield step


def _tokens(content: dict, vocab: int) -> tuple[list[str], list[int]]:
    """Return texts and llama.cpp's types of at least `vocab` tokens; unused ids have [PAD7]."""
    by_id = {number: (token, _NORMAL) for token, number in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        by_id[token["id"]] = token["content"], _CONTROL if token["special"] else _USER_DEFINED
    rows = [by_id.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(max(vocab, max(by_id, default=-1) + 1))]
    return [token for token, _ in rows], [kind for _, kind in rows]
