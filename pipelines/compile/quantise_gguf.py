"""Write a checkpoint as a GGUF file with weights in other codecs, for castiron and llama.cpp."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter.models import read_config
from castiron.emitter.quantise import convert
from castiron.pipelines.checkpoints import gguf_export
from castiron.pipelines.checkpoints.adapter import open_adapter
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, check_finite, tokenizer_of
from castiron.pipelines.checkpoints.gguf_config import sampling_metadata
from castiron.pipelines.checkpoints.gguf_file import (
    GgufFile,
    GgufTensor,
    NewTensor,
    Value,
    metadata_entry,
    padded,
    read_gguf,
    write_gguf,
)
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.calibration import Importance, calibrate
from castiron.pipelines.compile.options import Options, Progress
from castiron.pipelines.compile.weights import codecs_of, convert_tensor
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import require_free_space
from castiron.pipelines.locate import model_name
from castiron.vmfb.disk import reason
from castiron.vmfb.staging import replace_file

# --weights -> llama.cpp's llama_ftype, from which llama.cpp prints a file's type.
_FILE_TYPE = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q4_k_m": 15, "q5_k": 16,
    "q5_k_m": 17, "q6_k": 18, "bf16": 32,
}  # fmt: skip
_QUANTISATION_VERSION = 2
_OWN = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Report:
    """The result of `quantise`."""

    file: Path
    bytes: int
    codecs: dict[str, int]  # number of tensors of each codec
    seconds: float


def quantise(model: str | Path, out: Path, options: Options, progress: Progress) -> Report:
    """Write a model as the GGUF file `out`, completely or not at all.

    Only the options weights, adapter, calibrate and ignore_keys are used. The metadata of a GGUF
    file is copied; that of an HF directory is made from its config and tokenizer.
    """
    start = time.perf_counter()
    checkpoint = open_source(model, options, progress)
    if out.exists() and out.samefile(checkpoint.path):
        raise PipelineError(f"{out} is the checkpoint itself; give another name with -o")
    if checkpoint.encoding and checkpoint.format == "hf":
        compile_ = f"castiron compile --weights {options.weights}"
        raise PipelineError(f"{checkpoint.path} is an embedding model, which cannot be written as GGUF; use {compile_}")
    # An invalid checkpoint is rejected before anything is written.
    build_model(checkpoint, Options(context=1, prefill=(), batch=(), speculate=(), weights=options.weights))
    # Filled in after the checks below, and before the first tensor is read.
    importance: dict[str, np.ndarray] = {}
    entries, tensors = (_of_gguf if checkpoint.format == "gguf" else _of_hf)(checkpoint, options, importance)
    require_free_space(out, sum(padded(tensor.nbytes) for tensor in tensors), str(out))
    check_finite(checkpoint)
    importance |= calibrate(checkpoint, options, progress)
    entries += [metadata_entry(key, value) for key, value in zip(_OWN, (_FILE_TYPE[options.weights], _QUANTISATION_VERSION))]
    try:
        with replace_file(out) as file:
            write_gguf(file, entries, tensors, lambda done: progress("quantise", done))
    except OSError as error:
        raise PipelineError(f"{out} cannot be written: {reason(error)}") from None
    codecs = dict(sorted(Counter(tensor.codec for tensor in tensors).items()))
    return Report(out, out.stat().st_size, codecs, round(time.perf_counter() - start, 3))


def _of_gguf(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[bytes], list[NewTensor]]:
    """Return the entries and tensors to write for a GGUF file, with the adapter's changes."""
    file, codecs = read_gguf(checkpoint.path), codecs_of(checkpoint, options.weights)
    own = open_checkpoint(checkpoint.path, ignore_keys=options.ignore_keys)
    # A tensor of the file may stack several of HF's, such as a layer's experts, in one codec.
    names: dict[str, list[str]] = {}
    for name, tensor in own.tensors.items():
        names.setdefault(tensor.source, []).append(name)
    entries = {key: file.data[slice(*span)].tobytes() for key, span in file.entries.items() if key not in _OWN}
    changed: dict[str, NewTensor] = {}
    if options.adapter:
        adapter = open_adapter(Path(options.adapter))
        adapted = {own.tensors[name].source for name in (*adapter.pairs, *adapter.replaced) if name in own.tensors}
        made = _exported(checkpoint, gguf_export.flat_config(checkpoint.config), codecs, importance)
        changed = {tensor.name: tensor for tensor in made if tensor.name in adapted}
        entries |= _adapter_metadata(checkpoint, own)

    def new(tensor: GgufTensor) -> NewTensor:
        members = names.get(tensor.name, [])
        codec = codecs[members[0]] if members and len(tensor.shape) > 1 else tensor.codec
        return changed.get(tensor.name) or _converted(file, tensor, codec, members, importance)

    return list(entries.values()), [new(tensor) for tensor in file.tensors.values()]


def _adapter_metadata(merged: Checkpoint, own: Checkpoint) -> dict[str, bytes]:
    """Return entries of the adapter's chat template and tokenizer, if they differ from the file's.

    merged, own: the checkpoint with and without the adapter.
    """
    metadata: dict[str, Value] = {}
    if merged.chat_template and merged.chat_template != own.chat_template:
        metadata["tokenizer.chat_template"] = merged.chat_template
    if merged.tokenizer and _vocabulary(merged).items() - _vocabulary(own).items():
        metadata |= gguf_export.export_tokenizer(merged, read_config(own.config).vocab)
    return {key: metadata_entry(key, value) for key, value in metadata.items()}


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    return tokenizer_of(checkpoint.tokenizer, checkpoint.path).get_vocab() if checkpoint.tokenizer else {}


def _converted(file: GgufFile, tensor: GgufTensor, codec: str, names: list[str], importance: Importance) -> NewTensor:
    """Return a tensor of the file in another codec; names: HF's names of the matrices in it."""

    def read() -> np.ndarray:
        rows = file.rows(tensor)
        if codec == tensor.codec:
            return rows
        parts = [rows] if len(names) == 1 else rows
        try:
            return np.stack([convert(tensor.codec, part, codec, importance.get(name)) for part, name in zip(parts, names)])
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {tensor.name}: {error}") from None

    return NewTensor(tensor.name, tensor.shape, codec, read)


def _of_hf(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[bytes], list[NewTensor]]:
    config = gguf_export.flat_config(checkpoint.config)
    tensors = _exported(checkpoint, config, codecs_of(checkpoint, options.weights), importance)
    (name, _), vocab = gguf_export.architecture_for(checkpoint), read_config(checkpoint.config).vocab
    metadata = {"general.architecture": name, "general.name": model_name(checkpoint.path), f"{name}.vocab_size": vocab}
    metadata |= gguf_export.export_metadata(checkpoint, config) | gguf_export.export_tokenizer(checkpoint, vocab)
    metadata |= sampling_metadata(checkpoint.generation_config)
    gguf_export.check_read_back(checkpoint, metadata, tensors)
    return [metadata_entry(key, value) for key, value in metadata.items()], tensors


def _exported(checkpoint: Checkpoint, config: dict, codecs: dict[str, str], importance: Importance) -> list[NewTensor]:
    read = lambda name, codec: convert_tensor(checkpoint, name, codec, importance)
    return gguf_export.export_tensors(checkpoint, config, codecs, read)
