"""Open a GGUF file as a Checkpoint, with HF's tensor names and HF's order of rows.

llama.cpp's converter reorders the rows of some tensors; reading them restores HF's order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, with_scale
from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.checkpoints.chat_templates import join_templates
from castiron.pipelines.checkpoints.checkpoint import (
    HEAD,
    Checkpoint,
    CheckpointError,
    Tensor,
    inconsistent,
    without,
    without_shared,
)
from castiron.pipelines.checkpoints.column_order import ORDER, column_orders
from castiron.pipelines.checkpoints.gguf.architectures import Architecture
from castiron.pipelines.checkpoints.gguf.config_rules import RULES_OF_ROPE_TENSOR
from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile, read_gguf
from castiron.pipelines.checkpoints.gguf.hf_config import (
    RANK_ROWS,
    RANK_TEMPLATE,
    architecture_of,
    encoding_of,
    hf_config,
    rank_template,
    sampling_config,
)
from castiron.pipelines.checkpoints.gguf.tokenizer_json import lacks_pre_tokenizer, tokenizer_json
from castiron.pipelines.checkpoints.gguf.vocabulary import eos_token_ids, fim_token_ids, special_tokens
from castiron.pipelines.terminal import print_message

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
# Filters of convolutions, [features, n] in GGUF and [features, 1, n] in HF.
_FILTERS = ("shortconv.conv", "ssm_conv1d")
_NAMED = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<leaf>.+)\.(?P<suffix>weight|bias)")


def open_gguf(path: Path, ignore_keys: Sequence[str] = ()) -> Checkpoint:
    """Open a GGUF file, without the metadata keys `ignore_keys`."""
    file = read_gguf(path)
    file = replace(file, metadata=without(file.metadata, ignore_keys, path), tensors=scaled(path, file.tensors))
    kind = file.metadata.get("general.type")
    if kind is not None and (not isinstance(kind, str) or kind != "model"):
        raise CheckpointError(f"{path} is a GGUF file of type {shorten(kind)}; give the GGUF file of a model")
    config = hf_config(file)
    eos = eos_token_ids(file)
    tensors, orders = column_orders(without_shared(hf_tensors(file, architecture_of(file), config), config))
    encoding, left_out = encoding_of(file), {}
    if encoding and tensors.pop(HEAD, None):
        left_out = {"lm_head": 1}
    if encoding and encoding.relevance:
        del tensors[RANK_ROWS]
        tensors |= encoding.tensors
    if lacks_pre_tokenizer(file):
        print_message(
            f"{path} does not name its pre-tokenizer: tokenizer.ggml.pre is missing; text is split as by llama.cpp's default, "
            "which may give other tokens than the model was trained with; convert the model again"
        )
    template = join_templates(*(file.metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use")))
    if encoding and encoding.relevance:
        template = rank_template(file.metadata[RANK_TEMPLATE])
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": list(eos), "pad_token_id": config["pad_token_id"]}
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_json(file),
        chat_template=template,
        special_tokens=special_tokens(file),
        bos_token_id=config["bos_token_id"],
        eos_token_ids=eos,
        fim_token_ids=fim_token_ids(file),
        generation_config={key: value for key, value in ids.items() if value not in (None, [])} | sampling_config(file),
        left_out=left_out,
        encoding=encoding,
        column_orders=orders,
    )


def scaled(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with NVFP4 weights multiplied by `*.scale`, a number or one per expert."""
    combined = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.codec == "nvfp4" and name.endswith(".weight"):
            combined.pop(name.removesuffix("weight") + "input_scale", None)
            if scale := combined.pop(name.removesuffix("weight") + "scale", None):
                combined[name] = _times(path, tensor, scale)
    return combined


def _times(path: Path, tensor: Tensor, scale: Tensor) -> Tensor:
    shape = (1 if len(tensor.shape) == 2 else tensor.shape[0], *(1,) * (len(tensor.shape) - 1))
    if prod(scale.shape) not in (1, shape[0]):
        numbers = f"{prod(scale.shape)} numbers, not 1 or {shape[0]}"
        raise inconsistent(path, f"{shorten_text(scale.source)} has {numbers}")
    read = lambda: with_scale(tensor.data, scale.dequantise().reshape(-1, *shape[1:]))
    return replace(tensor, codec="nvfp4_scaled", read=read)


def hf_tensors(file: GgufFile, row: Architecture, config: dict) -> dict[str, Tensor]:
    """Return the tensors with HF's names and order; one without an HF name is rejected later."""
    tensors: dict[str, Tensor] = {}
    for stored in file.tensors.values():
        # Skip blocks after the last layer, which are for multi-token prediction: castiron does not run it.
        block = _BLOCK.fullmatch(stored.name)
        further = block is not None and "delta_layers" in row.rules and int(block[1]) >= config["num_hidden_layers"]
        if RULES_OF_ROPE_TENSOR.get(stored.name, set()) & set(row.rules) or further:
            continue
        for tensor in _named(file, row, config, stored):
            if tensor.name in tensors:
                names = " and ".join(map(shorten_text, (tensors[tensor.name].source, stored.name)))
                raise inconsistent(file.path, f"{names} both contain {shorten_text(tensor.name)}")
            tensors[tensor.name] = tensor
    return tensors


def _named(file: GgufFile, row: Architecture, config: dict, tensor: Tensor) -> Iterator[Tensor]:
    block, named = _BLOCK.fullmatch(tensor.name), _NAMED.fullmatch(tensor.name)
    prefix = row.block.format(int(block[1])) if block else ""
    if block and block[2] in row.vectors:
        yield _vector(replace(tensor, name=prefix + row.vectors[block[2]]), value_head_order(row, config, block[2]))
        return
    if named is None:
        yield tensor
        return
    layer, leaf, suffix = named.groups()
    hf_leaf = row.top.get(leaf) if layer is None else row.tensors.get(leaf)
    if hf_leaf:
        tensor = replace(tensor, name=prefix + hf_leaf + ("" if leaf in row.bare else f".{suffix}"))
    order = value_head_order(row, config, leaf)
    if layer and leaf in row.per_index:
        _check_rank(file, tensor, 2, 3)
        yield from _stacked(tensor, row.per_index[leaf], prefix, suffix)
    elif layer and leaf in row.permuted:
        yield _unpermuted(file.path, tensor, config[row.permuted[leaf]])
    elif layer and (leaves := next((leaves for leaves in row.joined if leaf in leaves), None)):
        if leaf == leaves[0]:
            parts = [part for name in leaves if (part := file.tensors.get(f"blk.{layer}.{name}.{suffix}"))]
            yield _joined(file, parts, f"{prefix}{row.joined[leaves]}.{suffix}")
    elif layer and (leaves := next((leaves for leaves in row.absorbed if leaf in leaves), None)):
        keys, values = (file.tensors.get(f"blk.{layer}.{name}.{suffix}") for name in leaves)
        if keys is None or values is None:
            absent = f"blk.{layer}.{leaves[0] if keys is None else leaves[1]}.{suffix}"
            raise inconsistent(file.path, f"it has {shorten_text(tensor.name)} without {absent}")
        if leaf == leaves[0]:
            yield _joined_key_values(file, keys, values, f"{prefix}{row.absorbed[leaves]}.{suffix}")
    elif layer and leaf in row.grouped:
        parts = key_head_parts(config, row.grouped[leaf])
        if tensor.shape[0] != (rows := sum(map(len, parts.values()))):
            raise inconsistent(file.path, f"{shorten_text(tensor.source)} has {tensor.shape[0]} rows, not {rows}")
        for name, part in parts.items():
            read = lambda part=part: tensor.data[part]
            yield replace(tensor, name=f"{prefix}{name}.{suffix}", shape=(len(part), *tensor.shape[1:]), read=read)
    elif layer and leaf in _FILTERS and suffix == "weight":
        _check_rank(file, tensor, 2)
        yield _filter(tensor, order)
    elif order is not None and row.tiled[leaf] == "columns":
        yield from _reordered_columns(tensor, order, config["linear_value_head_dim"])
    elif order is not None:
        yield replace(tensor, read=lambda: tensor.data[order])
    else:
        yield _minus_one(tensor) if hf_leaf and row.norms_plus_one and leaf.endswith("norm") else tensor


def _check_rank(file: GgufFile, tensor: Tensor, *ranks: int) -> None:
    if len(tensor.shape) not in ranks:
        dimensions = f"{len(tensor.shape)} dimensions, not {' or '.join(map(str, ranks))}"
        raise inconsistent(file.path, f"{shorten_text(tensor.source)} has {dimensions}")


def _minus_one(tensor: Tensor) -> Tensor:
    @np.errstate(invalid="ignore")  # a NaN is reported when the model is checked
    def read() -> np.ndarray:
        return (tensor.dequantise() - np.float32(1)).view(np.uint8)

    return replace(tensor, codec="f32", read=read)


def _vector(tensor: Tensor, order: np.ndarray | None) -> Tensor:
    """Return a tensor as an f32 vector in HF's order; GGUF stores -exp(A_log) for Mamba's A_log."""

    def read() -> np.ndarray:
        values = tensor.dequantise().reshape(-1)
        values = values if order is None else values[order]
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(-values) if tensor.name.endswith("A_log") else values).astype(np.float32).view(np.uint8)

    return replace(tensor, shape=(prod(tensor.shape),), codec="f32", read=read)


def _filter(tensor: Tensor, order: np.ndarray | None) -> Tensor:
    features, positions = tensor.shape
    read = lambda: tensor.data[slice(None) if order is None else order].reshape(features, 1, -1)
    return replace(tensor, shape=(features, 1, positions), read=read)


def _joined(file: GgufFile, parts: list[Tensor], name: str) -> Tensor:
    for part in parts:
        _check_rank(file, part, 2)
    codecs = {part.codec for part in parts}

    def read() -> np.ndarray:
        return np.concatenate([part.data if len(codecs) == 1 else part.dequantise().view(np.uint8) for part in parts])

    codec = parts[0].codec if len(codecs) == 1 else "f32"
    return Tensor(name, (sum(part.shape[0] for part in parts), parts[0].shape[1]), codec, parts[0].name, read)


def _joined_key_values(file: GgufFile, keys: Tensor, values: Tensor, name: str) -> Tensor:
    """Join the keys [heads, latent, k] and values [heads, v, latent] of MLA to HF's kv_b_proj.

    Quantised ones become f32, because a block of `keys` spans several rows of the result.
    """
    if (len(keys.shape), len(values.shape)) != (3, 3) or keys.shape[:2] != values.shape[::2]:
        k, v = (f"{shorten_text(tensor.source)} {list(tensor.shape)}" for tensor in (keys, values))
        raise inconsistent(file.path, f"the shapes of {k} and {v} do not fit each other")
    (heads, latent, key), value = keys.shape, values.shape[1]
    codec = keys.codec if keys.codec == values.codec and not CODECS[keys.codec].quantised else "f32"

    def read() -> np.ndarray:
        both = [t.data if codec == t.codec else t.dequantise().view(np.uint8) for t in (keys, values)]
        k, v = (part.reshape(*part.shape[:2], -1, CODECS[codec].block_bytes) for part in both)
        return np.concatenate([k.swapaxes(1, 2), v], 1).reshape(heads * (key + value), -1)

    return Tensor(name, (heads * (key + value), latent), codec, values.name, read)


def value_head_order(row: Architecture, config: dict, leaf: str) -> np.ndarray | None:
    """Return the index in a GGUF tensor of each HF row or column; None if they are equal."""
    kind = row.tiled.get(leaf.partition(".")[0])
    keys, values = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads", 1)
    if kind is None or keys in (1, values):
        return None
    size = 1 if kind == "heads" else config["linear_value_head_dim"]
    order = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).reshape(-1)
    before = 2 * keys * config["linear_key_head_dim"] if kind == "last rows" else 0
    return np.concatenate([np.arange(before), before + order])


def key_head_parts(config: dict, parts: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the rows of each HF tensor in a GGUF tensor; `parts` as in `Architecture.grouped`."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    sizes = {"h": values // keys, "k": config["linear_key_head_dim"], "v": values // keys * config["linear_value_head_dim"]}
    ends = np.cumsum([sizes[letter] for letters in parts.values() for letter in letters])
    pieces = iter(np.split(np.arange(keys * ends[-1]).reshape(keys, -1), ends[:-1], axis=1))
    return {name: np.concatenate([next(pieces).reshape(-1) for _ in letters]) for name, letters in parts.items()}


def _reordered_columns(tensor: Tensor, order: np.ndarray, head_dim: int) -> Iterator[Tensor]:
    """Yield a matrix with reordered columns or, if a block spans heads, with its column order."""
    block = CODECS[tensor.codec].block
    if head_dim % block:
        values = np.argsort(order).astype("<f4")
        name = tensor.name.removesuffix("weight") + ORDER
        yield tensor
        yield Tensor(name, values.shape, "f32", name, lambda: values.view(np.uint8))
        return

    def read() -> np.ndarray:
        rows = tensor.data
        return rows.reshape(len(rows), order.size // block, -1)[:, order[::block] // block].reshape(len(rows), -1)

    yield replace(tensor, read=read)


def _stacked(tensor: Tensor, hf_names: str | tuple[str, ...], prefix: str, suffix: str) -> Iterator[Tensor]:
    """Split a tensor with the matrices of all experts into HF's tensors."""
    names = (hf_names,) if isinstance(hf_names, str) else hf_names
    shape = tensor.shape[1:]
    if len(names) > 1:
        shape = (shape[0] // len(names), *shape[1:])
    for index in range(tensor.shape[0]):
        for number, name in enumerate(names):
            rows = slice(number * shape[0], (number + 1) * shape[0])
            read = lambda index=index, rows=rows: tensor.data[index][rows if len(names) > 1 else slice(None)]
            yield replace(tensor, name=f"{prefix}{name.format(index)}.{suffix}", shape=shape, read=read)


def _unpermuted(path: Path, tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of rows from [heads, 2, d / 2] to [heads, d / 2, 2]."""
    out = tensor.shape[0]
    if out % (2 * heads):
        raise inconsistent(path, f"{shorten_text(tensor.source)} has {out} rows, not a multiple of {2 * heads}")
    if len(tensor.shape) == 1 and CODECS[tensor.codec].quantised:
        raise CheckpointError(f"{path}: the bias {shorten_text(tensor.source)} is quantised; supported are floats")

    def read() -> np.ndarray:
        # The elements of a bias are its rows.
        rows = tensor.data.reshape(out, -1)
        ordered = rows.reshape(heads, out // heads // 2, 2, -1).swapaxes(1, 2)
        return ordered.reshape(tensor.data.shape)

    return replace(tensor, read=read)
