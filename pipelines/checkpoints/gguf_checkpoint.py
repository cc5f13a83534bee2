"""A GGUF file as a Checkpoint: HF's names, HF's order of rows, HF's norms; no weight is copied to do so."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.shown import shown, shown_text
from castiron.pipelines.checkpoints.audit import HEAD, without_shared
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor, without
from castiron.pipelines.checkpoints.gguf_config import architecture_of, encoding_of, hf_config
from castiron.pipelines.checkpoints.gguf_file import GgufFile, GgufTensor, read_gguf
from castiron.pipelines.checkpoints.gguf_rope import RULES_OF_ROPE_TENSOR
from castiron.pipelines.checkpoints.gguf_tokenizer import eos_token_ids, tokenizer_json
from castiron.pipelines.checkpoints.gguf_words import Architecture

_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,9})\.(.+)\.(weight|bias)")
_IN_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_TOP_TENSOR = re.compile(r"(.+)\.(weight|bias)")


def open_gguf(path: Path, ignore_keys: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint in the GGUF file at `path`, its metadata less `ignore_keys`; CheckpointError (one sentence) if it cannot
    be used."""
    file = read_gguf(path)
    file = replace(file, metadata=without(file.metadata, ignore_keys, path))
    _refuse_parts(file)
    config = hf_config(file)
    eos = eos_token_ids(file)
    tensors, encoding, left_out = without_shared(_tensors(file, architecture_of(file), config), config), encoding_of(file), {}
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
        generation_config={key: value for key, value in ids.items() if value not in (None, [])},
        left_out=left_out,
        encoding=encoding,
    )


def _refuse_parts(file: GgufFile) -> None:
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts: join them with llama-gguf-split --merge")
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise CheckpointError(f"{file.path} is a GGUF file of type {shown(kind)}: give a model's file")


def _tensors(file: GgufFile, row: Architecture, config: dict) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stored in file.tensors.values():
        block = _IN_BLOCK.fullmatch(stored.name)
        # Blocks after the model's own predict further tokens.
        further = block is not None and "delta_layers" in row.rules and int(block[1]) >= config["num_hidden_layers"]
        if RULES_OF_ROPE_TENSOR.get(stored.name, set()) & set(row.rules) or further:
            continue
        for tensor in _named(file, row, config, stored):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{file.path}: {shown_text(tensors[tensor.name].source)} and {shown_text(stored.name)} are the same tensor"
                )
            tensors[tensor.name] = tensor
    return tensors


def _named(file: GgufFile, row: Architecture, config: dict, stored: GgufTensor) -> Iterator[Tensor]:
    """The HF tensors in one of the file; a name that the architecture does not know is kept, to be reported."""
    block, place = _BLOCK_TENSOR.fullmatch(stored.name), _IN_BLOCK.fullmatch(stored.name)
    if place and place[2] in row.vectors:
        yield _vector(file, stored, row.block.format(int(place[1])) + row.vectors[place[2]], tiled(row, config, place[2]))
        return
    if block is None:
        top = _TOP_TENSOR.fullmatch(stored.name)
        known = top and row.top.get(top[1])
        name = f"{known}.{top[2]}" if known else stored.name
        yield _tensor(file, stored, name, row.norms_plus_one and top and top[1].endswith("norm"))
        return
    layer, leaf, suffix = block.groups()
    prefix = row.block.format(int(layer))
    if leaf in row.per_index:
        found = row.per_index[leaf]
        names = (found,) if isinstance(found, str) else found
        for index in range(stored.shape[0]):
            for share, name in enumerate(names):
                yield _part(file, stored, f"{prefix}{name.format(index)}.{suffix}", index, share, len(names))
    elif leaf in row.permuted:
        yield _unpermuted(file, stored, f"{prefix}{row.tensors[leaf]}.{suffix}", config[row.permuted[leaf]])
    elif parts := next((parts for parts in row.joined if leaf in parts), None):
        if leaf == parts[0]:
            both = [file.tensors.get(f"blk.{layer}.{part}.{suffix}") for part in parts]
            yield from _joined(file, [s for s in both if s is not None], f"{prefix}{row.joined[parts]}.{suffix}")
    elif leaf in row.filters and suffix == "weight":
        features, positions = stored.shape
        order = tiled(row, config, leaf)
        read = lambda: file.rows(stored)[slice(None) if order is None else order].reshape(features, 1, -1)
        yield Tensor(f"{prefix}{row.tensors[leaf]}.weight", (features, 1, positions), stored.codec, stored.name, read)
    else:
        ending = "" if leaf in row.bare else f".{suffix}"
        name = f"{prefix}{row.tensors[leaf]}{ending}" if leaf in row.tensors else stored.name
        if (order := tiled(row, config, leaf)) is not None:
            yield _grouped(file, stored, name, order, row.tiled[leaf] == "columns")
            return
        yield _tensor(file, stored, name, row.norms_plus_one and leaf.endswith("norm"))


def _tensor(file: GgufFile, stored: GgufTensor, name: str, plus_one: bool) -> Tensor:
    if plus_one and name != stored.name:

        @np.errstate(invalid="ignore")  # what is no number stays none, and is told where all are
        def minus_one() -> np.ndarray:
            return (dequantise(stored.codec, file.rows(stored)) - np.float32(1)).view(np.uint8)

        return Tensor(name, stored.shape, "f32", stored.name, minus_one)
    return Tensor(name, stored.shape, stored.codec, stored.name, lambda: file.rows(stored))


def _vector(file: GgufFile, stored: GgufTensor, name: str, order: np.ndarray | None) -> Tensor:
    """The numbers of a tensor of whatever shape; A_log where the file has -exp(A_log)."""

    def read() -> np.ndarray:
        values = dequantise(stored.codec, file.rows(stored)).reshape(-1)
        values = values if order is None else values[order]
        with np.errstate(invalid="ignore", divide="ignore"):
            return (np.log(-values) if name.endswith("A_log") else values).astype(np.float32).view(np.uint8)

    return Tensor(name, (prod(stored.shape),), "f32", stored.name, read)


def _joined(file: GgufFile, parts: list[GgufTensor], name: str) -> Iterator[Tensor]:
    """The rows of several tensors in one; of several codecs in f32."""
    codecs = {part.codec for part in parts}
    codec = codecs.pop() if len(codecs) == 1 else "f32"

    def read() -> np.ndarray:
        rows = [file.rows(part) for part in parts]
        if len({part.codec for part in parts}) > 1:
            rows = [dequantise(part.codec, own).view(np.uint8) for part, own in zip(parts, rows)]
        return np.concatenate(rows)

    yield Tensor(name, (sum(part.shape[0] for part in parts), parts[0].shape[1]), codec, parts[0].name, read)


def tiled(row: Architecture, config: dict, leaf: str) -> np.ndarray | None:
    """Where in the file each row, or column, of HF's tensor is; None where both are in one order."""
    kind = row.tiled.get(leaf.partition(".")[0])
    keys, values = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads", 1)
    if kind is None or keys == values:
        return None
    each = 1 if kind == "heads" else config["linear_value_head_dim"]
    order = np.arange(values * each).reshape(values // keys, keys, each).swapaxes(0, 1).reshape(-1)
    before = 2 * keys * config["linear_key_head_dim"] if kind == "last rows" else 0
    return np.concatenate([np.arange(before), before + order])


def _grouped(file: GgufFile, stored: GgufTensor, name: str, order: np.ndarray, columns: bool) -> Tensor:
    """A tensor with its rows, or its columns, in this order; columns of which blocks hold several heads' become f32."""
    block = CODECS[stored.codec].block
    starts = order.reshape(-1, block)[:, :1] if order.size % block == 0 else order[:0]
    whole = (
        columns
        and starts.size * block == order.size
        and np.array_equal(order.reshape(-1, block), starts + np.arange(block))
        and not (starts % block).any()
    )

    def read() -> np.ndarray:
        rows = file.rows(stored)
        if not columns:
            return rows[order]
        if whole:
            return rows.reshape(len(rows), order.size // block, -1)[:, starts[:, 0] // block].reshape(len(rows), -1)
        return np.ascontiguousarray(dequantise(stored.codec, rows)[:, order]).view(np.uint8)

    return Tensor(name, stored.shape, stored.codec if whole or not columns else "f32", stored.name, read)


def _part(file: GgufFile, stored: GgufTensor, name: str, index: int, share: int, shares: int) -> Tensor:
    """One of those stacked, or of its rows the `share`-th of so many."""
    if shares == 1:
        return Tensor(name, stored.shape[1:], stored.codec, stored.name, lambda: file.rows(stored)[index])
    rows = stored.shape[1] // shares
    read = lambda: file.rows(stored)[index][share * rows : (share + 1) * rows]
    return Tensor(name, (rows, *stored.shape[2:]), stored.codec, stored.name, read)


def _unpermuted(file: GgufFile, stored: GgufTensor, name: str, heads: int) -> Tensor:
    """Rows back from (head, pair, half) to HF's (head, half, pair): the inverse of the converter's `permute`."""
    out = stored.shape[0]
    if out % (2 * heads):
        raise CheckpointError(
            f"{file.path}: {shown_text(stored.name)} has {out} rows, which cannot be divided among {heads} heads"
        )

    def read() -> np.ndarray:
        rows = file.rows(stored)
        if len(stored.shape) == 1:  # a bias: its elements are the rows
            rows = rows.reshape(out, -1)
        ordered = rows.reshape(heads, out // heads // 2, 2, -1).swapaxes(1, 2)
        return ordered.reshape(file.rows(stored).shape)

    if len(stored.shape) == 1 and CODECS[stored.codec].quantised:
        raise CheckpointError(f"{file.path}: {shown_text(stored.name)} is a quantised bias, whose elements cannot be reordered")
    return Tensor(name, stored.shape, stored.codec, stored.name, read)
