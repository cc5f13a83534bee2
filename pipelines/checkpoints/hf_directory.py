"""A directory as `save_pretrained` writes it: config.json, safetensors, and what there is of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from castiron.emitter.shown import shown, shown_list, shown_text
from castiron.pipelines.checkpoints.audit import HEAD, IGNORABLE, refuse_impossible_sizes, without_shared
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor, without
from castiron.pipelines.checkpoints.classifier_files import read_classifier
from castiron.pipelines.checkpoints.hf_layouts import BYTES, laid_out
from castiron.pipelines.checkpoints.json_files import json_object, text_of
from castiron.pipelines.checkpoints.safetensors_file import CODEC_OF_DTYPE, StoredTensor, read_safetensors
from castiron.pipelines.checkpoints.sentence_files import base_names, read_encoding
from castiron.pipelines.checkpoints.text_part import text_config, text_tensors

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of a file, in bytes.
_LONGEST_NAME = 255


def open_hf_directory(path: Path, ignore_keys: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint in the directory `path`, its config less `ignore_keys`; CheckpointError (one sentence) if it cannot be
    used.

    Without tokenizer.json the checkpoint has no tokenizer. The chat template is that of chat_template.jinja, else
    of tokenizer_config.json (the one called default, where there are several).
    """
    whole = json_object(path / CONFIG)
    if whole is None:
        raise CheckpointError(f"{path} has no config.json: give a directory as HF's save_pretrained writes it")
    if not isinstance(whole.get("model_type"), str):
        raise CheckpointError(f"{path / CONFIG} names no model_type, so the model's family is unknown")
    stored = base_names(_tensors(path))
    config = without(text_config(whole, stored), ignore_keys, path / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path / CONFIG} names no model_type of its text, so the model's family is unknown")
    generation = json_object(path / "generation_config.json") or {}
    tensors, left_out = text_tensors(whole["model_type"], stored)
    encoding = read_encoding(path) or read_classifier(path, whole, stored)
    if encoding and tensors.pop(HEAD, None):
        left_out |= {"lm_head": 1}
    refuse_impossible_sizes(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    tensors = without_shared(laid_out(config["model_type"], tensors), config)
    for tensor in tensors.values():
        if tensor.codec == BYTES:
            raise _unknown_dtype(path, tensor.name, BYTES)
    if encoding:
        tensors |= encoding.tensors
    return Checkpoint(
        path=path,
        format="hf",
        config=config,
        tensors=tensors,
        tokenizer=json_object(path / "tokenizer.json"),
        chat_template=chat_template(path),
        bos_token_id=_first_id(path, "bos_token_id", generation, whole, config),
        eos_token_ids=_eos_ids(path, generation, whole, config),
        generation_config=generation,
        left_out=left_out,
        encoding=encoding,
    )


def shards_of(path: Path) -> dict[str, list[str] | None]:
    """Of the directory's safetensors: file name -> the tensors that the index says are in it, or None if nobody says."""
    if (path / SINGLE).exists():
        return {SINGLE: None}
    index = json_object(path / INDEX)
    if index is None:
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}: save the model as safetensors")
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(shard, str) for shard in files.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map of tensor names to files")
    shards: dict[str, list[str] | None] = {}
    for name, shard in files.items():
        if Path(shard).name != shard or "\0" in shard or len(shard.encode()) > _LONGEST_NAME:
            raise CheckpointError(f"{path / INDEX} says {shown_text(name)} is in {shown(shard)}, which is not a file beside it")
        shards.setdefault(shard, []).append(name)
    return shards


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard, expected in shards_of(path).items():
        if not (path / shard).is_file():
            raise CheckpointError(f"{path / shard} is missing, and {INDEX} names it: fetch it")
        stored = read_safetensors(path / shard)
        absent = sorted(set(expected or ()) - set(stored))
        if absent:
            raise CheckpointError(f"{path / shard} lacks {shown_list(absent)}, which {INDEX} says it has")
        for tensor in stored.values():
            if tensor.name in tensors:
                raise CheckpointError(f"{path / shard} holds {shown_text(tensor.name)}, and so does another shard")
            if not any(pattern.fullmatch(tensor.name) for pattern in IGNORABLE):
                tensors[tensor.name] = _tensor(path / shard, tensor)
    return tensors


def _tensor(shard: Path, stored: StoredTensor) -> Tensor:
    # What is in bytes may be a part of something: of what, `laid_out` knows.
    codec = BYTES if stored.dtype == BYTES else CODEC_OF_DTYPE.get(stored.dtype)
    if codec is None:
        raise _unknown_dtype(shard, stored.name, stored.dtype)
    if not stored.shape or 0 in stored.shape:
        raise CheckpointError(f"{shard}: {shown_text(stored.name)} has the shape {shown(list(stored.shape))}, which is empty")
    rows = stored.data.reshape(*stored.shape[:-1], -1)
    return Tensor(stored.name, stored.shape, codec, stored.name, lambda: rows)


def _unknown_dtype(where: Path, name: str, dtype: str) -> CheckpointError:
    known = ", ".join(CODEC_OF_DTYPE)
    return CheckpointError(
        f"{where}: {shown_text(name)} is stored as {shown_text(dtype)}, which is not supported; supported are {known}"
    )


def chat_template(path: Path) -> str | None:
    """The chat template that lies in a directory with a tokenizer, if one does."""
    beside = text_of(path / "chat_template.jinja")
    if beside is not None:
        return beside
    template = (json_object(path / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):
        defaults = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[-1].get("template") if defaults else None
    return template if isinstance(template, str) else None


def _first_id(path: Path, key: str, *sources: dict) -> int | None:
    """generation_config.json wins over config.json, as in HF's generate."""
    for source in sources:
        value = source.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise CheckpointError(f"{path}: {key} is {shown(value)}, not a token id")
            return value
    return None


def _eos_ids(path: Path, *sources: dict) -> tuple[int, ...]:
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            several = value if isinstance(value, list) else [value]
            if any(isinstance(token, bool) or not isinstance(token, int) for token in several):
                raise CheckpointError(f"{path}: eos_token_id is {shown(value)}, not token ids")
            return tuple(several)
    return ()
