"""Random checkpoints of known shapes in the cache, made once: GGUF files, for castiron and llama.cpp alike, and of models
that castiron reads from HF directories alone such directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.emitter.types import DTYPES, from_f32
from castiron.pipelines.casting.weights import WEIGHTS
from castiron.pipelines.checkpoints import gguf_writer
from castiron.pipelines.checkpoints.gguf_rope import llama3_factors
from castiron.pipelines.checkpoints.hf_directory import CONFIG
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.known_shapes import SHAPES, Configured, Shape
from castiron.pipelines.measuring.random_rows import random_tile
from castiron.pipelines.progress import say
from castiron.pipelines.sizes import megabytes
from castiron.vmfb.aside import replacing, sweep
from castiron.vmfb.cache import cache_folder, cache_place
from castiron.vmfb.disk import reason

KIND = "shapes"
DEFAULT_CODEC = "q4_k"
# What is left on the disk whatever is written.
_SPARE_BYTES = 1 << 28

Progress = Callable[[str, float], None]
# Name, shape and codec of a tensor.
Stored = tuple[str, tuple[int, ...], str]
Values = Callable[[str, tuple[int, ...]], np.ndarray]


def random_checkpoint(name: str, codec: str, progress: Progress) -> tuple[Path, str]:
    """The checkpoint of a key of SHAPES, which is made unless the cache has it, and what `--weights` is to be when it is cast:
    a GGUF file holds `codec` already, an HF directory bf16.

    q4_k mixes codecs as llama.cpp's Q4_K_M does, any other is that of every matrix. PipelineError for a name or a codec that
    is not known, and where the disk has no room for the checkpoint and the bundle that will be made of it.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise PipelineError(f"--shape {name} is not known: without --kernel it takes {', '.join(SHAPES)}")
    if codec not in CODECS:
        raise PipelineError(f"--codec {codec} is not known: it takes {', '.join(CODECS)}")
    if isinstance(shape, Configured):
        weights = "q4_k_m" if codec == "q4_k" else codec
        if weights not in WEIGHTS:
            known = ", ".join(c for c in CODECS if c in WEIGHTS)
            raise PipelineError(f"{name} is quantised when it is cast, which --codec {codec} cannot be: it takes {known}")
        return _directory(name, shape, progress), weights
    head, sizes = _head(shape, codec)
    file = f"{name}.{codec}.gguf"
    tensors = [(name, sizes_of, own) for name, sizes_of, own in shape.tensors(codec)]
    return _write(file, f"{name} in {codec}", head, sizes, tensors, _values(shape), progress), "native"


def _directory(name: str, shape: Configured, progress: Progress) -> Path:
    """config.json and model.safetensors, all in bf16."""
    start, header, sizes = 0, {}, []
    for own, sizes_of in shape.tensors().items():
        sizes.append(2 * prod(sizes_of))
        header[own] = {"dtype": "BF16", "shape": sizes_of, "data_offsets": [start, start + sizes[-1]]}
        start += sizes[-1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    head = len(text).to_bytes(8, "little") + text
    tensors = [(own, sizes_of, "bf16") for own, sizes_of in shape.tensors().items()]
    ones = lambda own, sizes_of: np.ones(sizes_of)
    place = _write(f"{name}/model.safetensors", name, head, sizes, tensors, ones, progress).parent
    (place / CONFIG).write_text(json.dumps(dict(shape.config), indent=2) + "\n")
    return place


def _write(
    file: str, what: str, head: bytes, sizes: list[int], tensors: list[Stored], values: Values, progress: Progress
) -> Path:
    """The file of this head and of tensors that take so many bytes each, made unless it is there; `values` are those of
    vectors."""
    kept = cache_place(KIND) / file
    if _is_that(kept, head, sum(sizes)):
        return kept
    target = cache_folder(KIND) / file
    target.parent.mkdir(exist_ok=True)
    # It may be as large as what is to be written.
    sweep(target.parent)
    _check_room(what, len(head) + sum(sizes), target)
    try:
        with replacing(target) as out:
            out.write(head)
            _write_tensors(out, tensors, sizes, values, lambda done: progress(f"making {file}", done))
    except OSError as error:
        raise PipelineError(f"{target} cannot be written: {reason(error)}") from None
    return target


def _is_that(path: Path, head: bytes, data_bytes: int) -> bool:
    """Whether the file at `path` is whole and begins as it would be written now."""
    try:
        with open(path, "rb") as file:
            return file.read(len(head)) == head and path.stat().st_size == len(head) + data_bytes
    except OSError:
        return False


def _check_room(what: str, size: int, target: Path) -> None:
    free, needed = shutil.disk_usage(target.parent).free, 2 * size
    told = f"{what}: a random checkpoint of {megabytes(size)} goes to {target.parent}, a bundle of about as much beside it"
    if free < needed + _SPARE_BYTES:
        raise PipelineError(
            f"{told}, and {megabytes(free)} are free: castiron cache clear makes room, CASTIRON_CACHE names another folder"
        )
    say(f"{told}; {megabytes(free)} are free")


def _head(shape: Shape, codec: str) -> tuple[bytes, list[int]]:
    """Everything before the data, and the bytes of each tensor with what fills them up."""
    tensors = []
    for name, sizes_of, own in shape.tensors(codec):
        try:
            tensors.append((name, sizes_of, own, row_bytes(own, sizes_of[-1]) * prod(sizes_of[:-1])))
        except ValueError as error:
            raise PipelineError(f"this shape cannot be had in {codec}: {error}") from None
    entries = [gguf_writer.entry(key, value) for key, value in shape.metadata().items()]
    return gguf_writer.head(entries, tensors), [gguf_writer.padded(nbytes) for *_, nbytes in tensors]


def _values(shape: Shape) -> Values:
    """Of a norm ones, else the factors of Llama 3's rotary frequencies."""

    def values(name: str, sizes: tuple[int, ...]) -> np.ndarray:
        if not name.startswith("rope"):
            return np.ones(sizes)
        return llama3_factors(shape.head_dim, shape.rope_theta, shape.rope_factor, 1.0, 4.0, 8192)

    return values


def _write_tensors(
    out: BinaryIO, tensors: list[Stored], sizes: list[int], values: Values, told: Callable[[float], None]
) -> None:
    """Matrices are a tile of random blocks again and again; `told` gets the share that is written."""
    tiles = {own: random_tile(own) for own in {own for *_, own in tensors}}
    written, total = 0, sum(sizes)
    for (name, sizes_of, own), size in zip(tensors, sizes, strict=True):
        if len(sizes_of) == 1:
            data = from_f32(values(name, sizes_of).astype(np.float32), DTYPES[own]).tobytes()
            out.write(data + bytes(size - len(data)))
            written += size
            continue
        for start in range(0, size, len(tiles[own])):
            out.write(tiles[own][: size - start])
            told((written + start) / total)
        written += size
    told(1.0)
