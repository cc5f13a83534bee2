"""A checkpoint as a GGUF file with other weights, which llama.cpp reads as well."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter.quantise import convert
from castiron.pipelines.casting.calibrate import Importance
from castiron.pipelines.casting.compile import Options, Progress, build_model, importance_of, open_source, stored
from castiron.pipelines.casting.soundness import check_finite
from castiron.pipelines.casting.weights import codecs_of
from castiron.pipelines.checkpoints import gguf_writer, hf_as_gguf, open_checkpoint
from castiron.pipelines.checkpoints.adapter import open_adapter
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError
from castiron.pipelines.checkpoints.gguf_file import GgufFile, GgufTensor, read_gguf
from castiron.pipelines.checkpoints.gguf_writer import Stored, Value
from castiron.pipelines.checkpoints.tokenizer_as_gguf import tokenizer_metadata, tokens_by_id
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.places import model_name
from castiron.pipelines.space import need_room
from castiron.vmfb.aside import replacing
from castiron.vmfb.disk import reason

# llama.cpp's llama_ftype, by which it names a file.
_FILE_TYPE = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q4_k_m": 15, "q5_k": 16,
    "q5_k_m": 17, "q6_k": 18, "bf16": 32,
}  # fmt: skip
_QUANTISATION_VERSION = 2
_OWN = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Report:
    """The file, its bytes, how many tensors it has by codec, and the seconds that it took."""

    file: Path
    bytes: int
    codecs: dict[str, int]
    seconds: float


def quantise(model: str | Path, out: Path, options: Options, progress: Progress) -> Report:
    """Writes the GGUF file `out`, whole or not at all; of the options weights, adapter, calibrate and ignore_keys count.

    Of a GGUF file the metadata stays as it is; of an HF directory it is made, where the model's family and its tokenizer are
    known to GGUF. Raises CheckpointError, EmitError or PipelineError, each one sentence.
    """
    start = time.perf_counter()
    checkpoint = open_source(model, options, progress)
    if out.exists() and out.samefile(checkpoint.path):
        raise PipelineError(f"{out} is the checkpoint itself: give another name with -o")
    if checkpoint.encoding and checkpoint.format == "hf":
        raise PipelineError(
            f"{checkpoint.path} encodes texts, and no file written here has place for its layers after pooling: castiron "
            f"compile --weights {options.weights} makes a small bundle of it"
        )
    # What is missing in a checkpoint, or not understood, is found before anything is written.
    build_model(checkpoint, Options(context=1, batch=(), speculate=(), weights=options.weights), ())
    of = _of_gguf if checkpoint.format == "gguf" else _of_hf
    # Filled in before the first tensor is read: what cannot be written, or has no room, is seen before a text is run for it.
    importance: dict[str, np.ndarray] = {}
    entries, tensors = of(checkpoint, options, importance)
    need_room(out, sum(gguf_writer.padded(tensor.nbytes) for tensor in tensors), str(out))
    check_finite(checkpoint)
    importance |= importance_of(checkpoint, options, progress)
    entries += [gguf_writer.entry(key, value) for key, value in zip(_OWN, (_FILE_TYPE[options.weights], _QUANTISATION_VERSION))]
    try:
        with replacing(out) as file:
            gguf_writer.write_gguf(file, entries, tensors, lambda done: progress("quantise", done))
    except OSError as error:
        raise PipelineError(f"{out} cannot be written: {reason(error)}") from None
    codecs = dict(sorted(Counter(tensor.codec for tensor in tensors).items()))
    return Report(out, out.stat().st_size, codecs, round(time.perf_counter() - start, 3))


def _of_gguf(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[bytes], list[Stored]]:
    """The file's own entries, and its tensors in its own order of rows; of what an adapter changed those that it makes."""
    file, codecs = read_gguf(checkpoint.path), codecs_of(checkpoint, options.weights)
    own = open_checkpoint(checkpoint.path, ignore_keys=options.ignore_keys)
    # A tensor of the file may be several of HF's, which are of one codec: the experts of a layer.
    names: dict[str, list[str]] = {}
    for name, tensor in own.tensors.items():
        names.setdefault(tensor.source, []).append(name)
    wanted = {source: codecs[several[0]] for source, several in names.items()}
    wanted |= {tensor.name: tensor.codec for tensor in file.tensors.values() if len(tensor.shape) < 2}
    entries = {key: file.data[slice(*place)].tobytes() for key, place in file.entries.items() if key not in _OWN}
    changed: dict[str, Stored] = {}
    if options.adapter:
        touched = {own.tensors[name].source for name in open_adapter(Path(options.adapter)).names & own.tensors.keys()}
        config = hf_as_gguf.plain(checkpoint.config)
        made = hf_as_gguf.tensors_of(
            checkpoint, config, codecs, lambda name, codec: stored(checkpoint, name, codec, importance)
        )
        changed = {tensor.name: tensor for tensor in made if tensor.name in touched}
        entries |= _said_by_adapter(checkpoint, own)
    return list(entries.values()), [
        changed.get(tensor.name)
        or _converted(file, tensor, wanted.get(tensor.name, tensor.codec), names.get(tensor.name, []), importance)
        for tensor in file.tensors.values()
    ]


def _said_by_adapter(merged: Checkpoint, own: Checkpoint) -> dict[str, bytes]:
    """Entries for the chat template and the tokenizer that the training left, where the file has others."""
    said: dict[str, Value] = {}
    if merged.chat_template and merged.chat_template != own.chat_template:
        said["tokenizer.chat_template"] = merged.chat_template
    if merged.tokenizer and tokens_by_id(merged.tokenizer).items() - tokens_by_id(own.tokenizer or {}).items():
        said |= tokenizer_metadata(merged, _vocab(own))
    return {key: gguf_writer.entry(key, value) for key, value in said.items()}


def _converted(file: GgufFile, tensor: GgufTensor, codec: str, names: list[str], importance: Importance) -> Stored:
    """names: HF's, of the matrix or of those that are stacked in it, whose columns count by their own importance each."""

    def read() -> np.ndarray:
        rows = file.rows(tensor)
        try:
            if codec == tensor.codec:
                return rows
            if len(names) == 1:
                return convert(tensor.codec, rows, codec, importance.get(names[0]))
            return np.stack([convert(tensor.codec, part, codec, importance.get(name)) for part, name in zip(rows, names)])
        except ValueError as error:
            raise CheckpointError(f"{file.path}: {tensor.name}: {error}") from None

    return Stored(tensor.name, tensor.shape, codec, read)


def _vocab(checkpoint: Checkpoint) -> int:
    """Rows of the embeddings."""
    _, row = hf_as_gguf.architecture_for(checkpoint)
    return checkpoint.tensors[f"{row.top['token_embd']}.weight"].shape[0]


def _of_hf(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[bytes], list[Stored]]:
    config = hf_as_gguf.plain(checkpoint.config)
    codecs = codecs_of(checkpoint, options.weights)
    tensors = hf_as_gguf.tensors_of(checkpoint, config, codecs, lambda name, codec: stored(checkpoint, name, codec, importance))
    (name, _), vocab = hf_as_gguf.architecture_for(checkpoint), _vocab(checkpoint)
    metadata = {"general.architecture": name, "general.name": model_name(checkpoint.path), f"{name}.vocab_size": vocab}
    metadata |= hf_as_gguf.metadata_of(checkpoint, config) | tokenizer_metadata(checkpoint, vocab)
    hf_as_gguf.check_read_back(checkpoint, metadata, tensors)
    return [gguf_writer.entry(key, value) for key, value in metadata.items()], tensors
