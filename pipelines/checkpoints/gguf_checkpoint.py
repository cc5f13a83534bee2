"""Open a GGUF file as a Checkpoint, with HF's names of tensors and HF's order of rows.

Weights stay in the mapped file; reading a tensor undoes the changes of llama.cpp's converter.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.checkpoints.checkpoint import HEAD, Checkpoint, CheckpointError, Tensor, without, without_shared
from castiron.pipelines.checkpoints.gguf_config import architecture_of, encoding_of, hf_config, sampling_config
from castiron.pipelines.checkpoints.gguf_file import GgufFile, GgufTensor, read_gguf
from castiron.pipelines.checkpoints.gguf_metadata import Architecture
from castiron.pipelines.checkpoints.gguf_rules import RULES_OF_ROPE_TENSOR
from castiron.pipelines.checkpoints.gguf_tokenizer import eos_token_ids, tokenizer_json

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_NAMED = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<leaf>.+)\.(?P<suffix>weight|bias)")


def open_gguf(path: Path, ignore_keys: Sequence[str] = ()) -> Checkpoint:
    """Open a GGUF file without the metadata keys `ignore_keys`; CheckpointError if it is invalid."""
    file = read_gguf(path)
    file = replace(file, metadata=without(file.metadata, ignore_keys, path))
    _reject_parts(file)
    config = hf_config(file)
    eos = eos_token_ids(file)
    tensors = without_shared(hf_tensors(file, architecture_of(file), config), config)
    encoding, left_out = encoding_of(file), {}
    if encoding and tensors.pop(HEAD, None):
        left_out = {"lm_head": 1}
    chat_template = file.metadata.get("tokenizer.chat_template")
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": list(eos), "pad_token_id": config["pad_token_id"]}
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_json(file),
        chat_template=chat_template if isinstance(chat_template, str) else None,
        bos_token_id=config["bos_token_id"],
        eos_token_ids=eos,
        generation_config={key: value for key, value in ids.items() if value not in (None, [])} | sampling_config(file),
        left_out=left_out,
        encoding=encoding,
    )


def _reject_parts(file: GgufFile) -> None:
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts; join them with llama-gguf-split --merge")
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise CheckpointError(f"{file.path} is a GGUF file of type {shorten(kind)}; give a model's file")


def hf_tensors(file: GgufFile, row: Architecture, config: dict) -> dict[str, Tensor]:
    """Return the model's tensors by HF name; unknown tensors keep GGUF's names, so that a later
    check reports them."""
    tensors: dict[str, Tensor] = {}
    for stored in file.tensors.values():
        # Blocks after the last layer are for multi-token prediction.
        block = _BLOCK.fullmatch(stored.name)
        further = block is not None and "delta_layers" in row.rules and int(block[1]) >= config["num_hidden_layers"]
        if RULES_OF_ROPE_TENSOR.get(stored.name, set()) & set(row.rules) or further:
            continue
        for tensor in _named(file, row, config, stored):
            if tensor.name in tensors:
                names = " and ".join(map(shorten_text, (tensors[tensor.name].source, stored.name)))
                raise CheckpointError(f"{file.path}: {names} are the same tensor; fetch it again")
            tensors[tensor.name] = tensor
    return tensors


def _named(file: GgufFile, row: Architecture, config: dict, stored: GgufTensor) -> Iterator[Tensor]:
    """Yield the HF tensors that are made from one tensor of the file, such as one per expert."""
    block, named = _BLOCK.fullmatch(stored.name), _NAMED.fullmatch(stored.name)
    prefix = row.block.format(int(block[1])) if block else ""
    if block and block[2] in row.vectors:
        yield _vector(file, stored, prefix + row.vectors[block[2]], tiled(row, config, block[2]))
        return
    if named is None or named["layer"] is None:
        top = named and row.top.get(named["leaf"])
        name = f"{top}.{named['suffix']}" if named and top else stored.name
        yield _tensor(file, stored, name, row.norms_plus_one and bool(top) and named["leaf"].endswith("norm"))
        return
    layer, leaf, suffix = named.groups()
    if leaf in row.per_index:
        yield from _stacked(file, stored, row.per_index[leaf], prefix, suffix)
    elif leaf in row.permuted:
        yield _unpermuted(file, stored, f"{prefix}{row.tensors[leaf]}.{suffix}", config[row.permuted[leaf]])
    elif parts := next((parts for parts in row.joined if leaf in parts), None):
        if leaf == parts[0]:
            found = [file.tensors.get(f"blk.{layer}.{part}.{suffix}") for part in parts]
            yield _joined(file, [part for part in found if part is not None], f"{prefix}{row.joined[parts]}.{suffix}")
    elif leaf in row.filters and suffix == "weight":
        yield _filter(file, stored, f"{prefix}{row.tensors[leaf]}.weight", tiled(row, config, leaf))
    else:
        ending = "" if leaf in row.bare else f".{suffix}"
        name = f"{prefix}{row.tensors[leaf]}{ending}" if leaf in row.tensors else stored.name
        if (order := tiled(row, config, leaf)) is not None:
            yield _reordered(file, stored, name, order, row.tiled[leaf] == "columns")
        else:
            yield _tensor(file, stored, name, row.norms_plus_one and leaf.endswith("norm"))


def _check_rank(file: GgufFile, stored: GgufTensor, *ranks: int) -> None:
    if len(stored.shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise CheckpointError(
            f"{file.path}: {shorten_text(stored.name)} has {len(stored.shape)} dimensions, not {wanted}; fetch it again"
        )


def _tensor(file: GgufFile, stored: GgufTensor, name: str, plus_one: bool) -> Tensor:
    if plus_one and name != stored.name:

        @np.errstate(invalid="ignore")  # a NaN is reported when the model is checked
        def minus_one() -> np.ndarray:
            return (dequantise(stored.codec, file.rows(stored)) - np.float32(1)).view(np.uint8)

        return Tensor(name, stored.shape, "f32", stored.name, minus_one)
    return Tensor(name, stored.shape, stored.codec, stored.name, lambda: file.rows(stored))


def _vector(file: GgufFile, stored: GgufTensor, name: str, order: np.ndarray | None) -> Tensor:
    """Return a tensor as an f32 vector, its elements rearranged by `order`; A_log is computed from
    the stored -exp(A_log)."""

    def read() -> np.ndarray:
        values = dequantise(stored.codec, file.rows(stored)).reshape(-1)
        values = values if order is None else values[order]
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(-values) if name.endswith("A_log") else values).astype(np.float32).view(np.uint8)

    return Tensor(name, (prod(stored.shape),), "f32", stored.name, read)


def _filter(file: GgufFile, stored: GgufTensor, name: str, order: np.ndarray | None) -> Tensor:
    """Return a convolution's filter, [features, n] in the file, as HF's [features, 1, n]; `order`
    rearranges features."""
    _check_rank(file, stored, 2)
    features, positions = stored.shape
    read = lambda: file.rows(stored)[slice(None) if order is None else order].reshape(features, 1, -1)
    return Tensor(name, (features, 1, positions), stored.codec, stored.name, read)


def _joined(file: GgufFile, parts: list[GgufTensor], name: str) -> Tensor:
    """Return the rows of several matrices as one matrix, in f32 if their codecs differ."""
    for part in parts:
        _check_rank(file, part, 2)
    codecs = {part.codec for part in parts}

    def read() -> np.ndarray:
        rows = [file.rows(part) for part in parts]
        if len(codecs) > 1:
            rows = [dequantise(part.codec, own).view(np.uint8) for part, own in zip(parts, rows)]
        return np.concatenate(rows)

    codec = parts[0].codec if len(codecs) == 1 else "f32"
    return Tensor(name, (sum(part.shape[0] for part in parts), parts[0].shape[1]), codec, parts[0].name, read)


def tiled(row: Architecture, config: dict, leaf: str) -> np.ndarray | None:
    """Return the file's index of each row, or column, of HF's tensor; None if both have the same
    order.

    leaf: GGUF's name of the tensor inside its block.
    """
    kind = row.tiled.get(leaf.partition(".")[0])
    keys, values = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads", 1)
    if kind is None or keys == values:
        return None
    size = 1 if kind == "heads" else config["linear_value_head_dim"]
    order = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).reshape(-1)
    before = 2 * keys * config["linear_key_head_dim"] if kind == "last rows" else 0
    return np.concatenate([np.arange(before), before + order])


def _reordered(file: GgufFile, stored: GgufTensor, name: str, order: np.ndarray, columns: bool) -> Tensor:
    """Return a tensor with its rows, or if `columns` its columns, rearranged by `order`.

    Columns are dequantised to f32 if `order` splits a quantised block.
    """
    block = CODECS[stored.codec].block
    starts = order.reshape(-1, block)[:, :1] if order.size % block == 0 else order[:0]
    keeps_blocks = (
        columns
        and starts.size * block == order.size
        and np.array_equal(order.reshape(-1, block), starts + np.arange(block))
        and not (starts % block).any()
    )

    def read() -> np.ndarray:
        rows = file.rows(stored)
        if not columns:
            return rows[order]
        if keeps_blocks:
            return rows.reshape(len(rows), order.size // block, -1)[:, starts[:, 0] // block].reshape(len(rows), -1)
        return np.ascontiguousarray(dequantise(stored.codec, rows)[:, order]).view(np.uint8)

    return Tensor(name, stored.shape, stored.codec if keeps_blocks or not columns else "f32", stored.name, read)


def _stacked(file: GgufFile, stored: GgufTensor, found: str | tuple[str, ...], prefix: str, suffix: str) -> Iterator[Tensor]:
    """Yield the tensors that a tensor of the file stacks, such as one per expert.

    found: template of the HF name of one of them, with `{}` for its index. If `found` has several
    names, each of them gets an equal share of the rows.
    """
    names = (found,) if isinstance(found, str) else found
    _check_rank(file, stored, 2, 3)
    rows = stored.shape[1] // len(names)
    for index in range(stored.shape[0]):
        for number, name in enumerate(names):
            own = slice(number * rows, (number + 1) * rows) if len(names) > 1 else slice(None)
            read = lambda index=index, own=own: file.rows(stored)[index][own]
            shape = stored.shape[1:] if len(names) == 1 else (rows, *stored.shape[2:])
            yield Tensor(f"{prefix}{name.format(index)}.{suffix}", shape, stored.codec, stored.name, read)


def _unpermuted(file: GgufFile, stored: GgufTensor, name: str, heads: int) -> Tensor:
    """Return a tensor with its rows in HF's order (head, half, pair); the file has (head, pair,
    half).

    This is the inverse of `permute` in llama.cpp's converter.
    """
    out = stored.shape[0]
    if out % (2 * heads):
        raise CheckpointError(f"{file.path}: {shorten_text(stored.name)} has {out} rows, not a multiple of 2 x {heads} heads")
    if len(stored.shape) == 1 and CODECS[stored.codec].quantised:
        raise CheckpointError(f"{file.path}: {shorten_text(stored.name)} is a quantised bias, which cannot be reordered")

    def read() -> np.ndarray:
        rows = file.rows(stored)
        if len(stored.shape) == 1:  # a bias: its elements are the rows
            rows = rows.reshape(out, -1)
        ordered = rows.reshape(heads, out // heads // 2, 2, -1).swapaxes(1, 2)
        return ordered.reshape(file.rows(stored).shape)

    return Tensor(name, stored.shape, stored.codec, stored.name, read)
