"""Write a checkpoint as a GGUF file with quantised weights, for castiron and llama.cpp."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, Tensor, check_finite
from castiron.pipelines.checkpoints.gguf import export
from castiron.pipelines.checkpoints.gguf.gguf_file import Buffer, GgufFile, metadata_entry, padded, read_gguf, write_gguf
from castiron.pipelines.checkpoints.gguf.hf_config import sampling_metadata
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.calibration import Importance, calibrate
from castiron.pipelines.compile.compile_options import Options, Progress
from castiron.pipelines.compile.weight_codecs import codecs_of, convert_tensor
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import require_free_space
from castiron.pipelines.locate import model_name
from castiron.vmfb.atomic_write import replace_file
from castiron.vmfb.file_errors import reason

# By value of --weights: the number in llama.cpp's enum llama_ftype, which llama.cpp prints as the type of the file.
_FILE_TYPE = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q4_k_m": 15, "q5_k": 16,
    "q5_k_m": 17, "q6_k": 18, "bf16": 32,
}  # fmt: skip
_QUANTISATION_VERSION = 2
_OWN = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Report:
    """The file that `quantise` wrote; codecs: number of tensors of each codec."""

    file: Path
    bytes: int
    codecs: dict[str, int]
    seconds: float


def quantise(model: str | Path, out: Path, options: Options, progress: Progress) -> Report:
    """Write a model to the GGUF file `out` atomically, with weights converted to `options.weights`.

    The metadata of a GGUF file without adapter is copied, others are made from the config.
    """
    start = time.perf_counter()
    checkpoint = open_source(model, options, progress)
    if out.exists() and out.samefile(checkpoint.path):
        raise PipelineError(f"{out} is the checkpoint itself; give another name with -o")
    copies = checkpoint.format == "gguf" and not options.adapter
    if checkpoint.encoding and not copies:
        raise PipelineError(
            f"cannot write an embedding model as GGUF: {checkpoint.path}; run castiron compile --weights "
            f"{options.weights} instead, or give a GGUF file without --adapter"
        )
    # Reject an invalid checkpoint before anything is written.
    build_model(checkpoint, replace(options, context=1, prefill=(), batch=(), verify_widths=()))
    # Filled in after the checks below, and before the first tensor is read.
    importance: dict[str, np.ndarray] = {}
    entries, tensors = (_copied if copies else _exported)(checkpoint, options, importance)
    require_free_space(out, sum(padded(tensor.nbytes) for tensor in tensors), str(out))
    check_finite(checkpoint)
    importance |= calibrate(checkpoint, options, progress)
    entries += [metadata_entry(key, value) for key, value in zip(_OWN, (_FILE_TYPE[options.weights], _QUANTISATION_VERSION))]
    try:
        with replace_file(out) as file:
            write_gguf(file, entries, tensors, lambda done: progress("quantise", done))
    except OSError as error:
        raise PipelineError(f"cannot write {out}: {reason(error)}") from None
    codecs = dict(sorted(Counter(tensor.codec for tensor in tensors).items()))
    return Report(out, out.stat().st_size, codecs, round(time.perf_counter() - start, 3))


def _copied(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[Buffer], list[Tensor]]:
    file, codecs = read_gguf(checkpoint.path), codecs_of(checkpoint, options.weights, options.requantise)
    # A GGUF tensor may be a stack of several HF tensors, such as the experts of a layer, in one codec.
    names: dict[str, list[str]] = {}
    for name, tensor in checkpoint.tensors.items():
        names.setdefault(tensor.source, []).append(name)
    tensors = []
    for tensor in file.tensors.values():
        members = names.get(tensor.name, [])
        codec = codecs[members[0]] if members and len(tensor.shape) > 1 else tensor.codec
        tensors.append(_converted(file, tensor, codec, members, importance))
    return [entry for key, entry in file.entries.items() if key not in _OWN], tensors


def _converted(file: GgufFile, tensor: Tensor, codec: str, names: list[str], importance: Importance) -> Tensor:
    """Return a tensor in a codec; names: of the HF tensors in it, one or more in each of its matrices."""
    if codec == tensor.codec:
        return tensor

    def read() -> np.ndarray:
        parts = tensor.data.reshape(-1, *tensor.data.shape[-2:])
        of_parts = [importance.get(names[index * len(names) // len(parts)]) for index in range(len(parts))]
        matrices = [replace(tensor, read=lambda part=part: part) for part in parts]
        return np.stack([convert_tensor(matrix, codec, file.path, of_part) for matrix, of_part in zip(matrices, of_parts)])

    return replace(tensor, codec=codec, read=read)


def _exported(checkpoint: Checkpoint, options: Options, importance: Importance) -> tuple[list[Buffer], list[Tensor]]:
    config, codecs = export.flat_config(checkpoint.config), codecs_of(checkpoint, options.weights, options.requantise)

    def read(name: str, codec: str, columns: np.ndarray | None) -> np.ndarray:
        tensor, factors = checkpoint.tensors[name], importance.get(name)
        if columns is not None:
            rows = np.ascontiguousarray(tensor.dequantise()[:, columns]).view(np.uint8)
            tensor, factors = replace(tensor, codec="f32", read=lambda: rows), None if factors is None else factors[columns]
        return convert_tensor(tensor, codec, checkpoint.path, factors)

    tensors = export.export_tensors(checkpoint, config, codecs, read)
    (name, _), vocab = export.architecture_for(checkpoint), read_config(checkpoint.config).vocab
    metadata = {"general.architecture": name, "general.name": model_name(checkpoint.path), f"{name}.vocab_size": vocab}
    metadata |= export.export_metadata(checkpoint, config) | export.export_tokenizer(checkpoint, vocab)
    metadata |= sampling_metadata(checkpoint.generation_config)
    if checkpoint.chat_template:
        metadata["tokenizer.chat_template"] = checkpoint.chat_template
    export.check_read_back(checkpoint, metadata, tensors)
    return [metadata_entry(key, value) for key, value in metadata.items()], tensors
