"""Random checkpoints of known shapes, as GGUF files in the cache: made once, for castiron and llama.cpp alike."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.pipelines.checkpoints import gguf_writer
from castiron.pipelines.checkpoints.gguf_rope import llama3_factors
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.known_shapes import SHAPES, Shape
from castiron.pipelines.measuring.random_rows import random_tile
from castiron.pipelines.progress import say
from castiron.pipelines.sizes import megabytes
from castiron.vmfb.cache import cache_folder, cache_place, replacing

KIND = "shapes"
DEFAULT_CODEC = "q4_k"
# What is left on the disk whatever is written.
_SPARE_BYTES = 1 << 28

Progress = Callable[[str, float], None]


def random_checkpoint(name: str, codec: str, progress: Progress) -> Path:
    """The GGUF file of a key of SHAPES with matrices in `codec`, which is made unless the cache has it.

    q4_k mixes codecs as llama.cpp's Q4_K_M does, any other is that of every matrix. PipelineError for a name or a codec that
    is not known, and where the disk has no room for the file and the bundle that will be made of it.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise PipelineError(f"--shape {name} is not known: without --kernel it takes {', '.join(SHAPES)}")
    if codec not in CODECS:
        raise PipelineError(f"--codec {codec} is not known: it takes {', '.join(CODECS)}")
    head, sizes = _head(shape, codec)
    file = f"{name}.{codec}.gguf"
    kept = cache_place(KIND) / file
    if _is_that(kept, head, sum(sizes)):
        return kept
    target = cache_folder(KIND) / file
    _remove_abandoned(target)
    _check_room(f"{name} in {codec}", len(head) + sum(sizes), target)
    try:
        with replacing(target) as out:
            out.write(head)
            _write_tensors(out, shape, codec, sizes, lambda done: progress(f"making {file}", done))
    except OSError as error:
        raise PipelineError(f"{target} cannot be written: {error.strerror or error}") from None
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


def _remove_abandoned(target: Path) -> None:
    """What processes that were killed have left of `target`, by the number in the name that `replacing` gives."""
    for path in target.parent.glob(f".{target.name}.*"):
        process = path.name.removeprefix(f".{target.name}.").partition(".")[0]
        if process.isdigit() and not _is_alive(int(process)):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


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


def _values(shape: Shape, name: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Of a norm ones, else the factors of Llama 3's rotary frequencies."""
    if not name.startswith("rope"):
        return np.ones(sizes)
    return llama3_factors(shape.head_dim, shape.rope_theta, shape.rope_factor, 1.0, 4.0, 8192)


def _write_tensors(out: BinaryIO, shape: Shape, codec: str, sizes: list[int], told: Callable[[float], None]) -> None:
    """Matrices are a tile of random blocks again and again, norms are ones; `told` gets the share that is written."""
    tiles = {own: random_tile(own) for own in {own for *_, own in shape.tensors(codec)}}
    written, total = 0, sum(sizes)
    for (name, sizes_of, own), size in zip(shape.tensors(codec), sizes, strict=True):
        if len(sizes_of) == 1:
            data = _values(shape, name, sizes_of).astype("<f4").tobytes()
            out.write(data + bytes(size - len(data)))
            written += size
            continue
        for start in range(0, size, len(tiles[own])):
            out.write(tiles[own][: size - start])
            told((written + start) / total)
        written += size
    told(1.0)
