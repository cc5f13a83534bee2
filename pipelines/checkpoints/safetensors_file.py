"""A safetensors file as mapped bytes. The library checks the file; the bytes are ours, since NumPy has no bf16."""

import json
import mmap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter.shown import shown, shown_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.ordinary_files import MOST_BYTES, has_too_many_values

CODEC_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_HEADER_LENGTH_BYTES = 8
# Of a header: a tensor has seven.
_MOST_MARKS, _MOST_DIMENSIONS = 1_000_000, 16


@dataclass(frozen=True)
class StoredTensor:
    """dtype as safetensors names it; data u8 [*shape[:-1], bytes of a row], a view of the mapped file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file by name; CheckpointError if the file is not sound."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
        # Of a longer one the library says so.
        head = view[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + size] if size <= MOST_BYTES else b""
        if has_too_many_values(head, _MOST_MARKS):
            raise CheckpointError(f"{path} holds more tensors than any file of a model does: fetch it again")
        with safe_open(path, framework="numpy"):
            pass  # opening checks the header, that shapes fit their bytes, and that bytes neither overlap nor end early
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file ({shown_text(str(error))}): fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty: fetch it again") from None
    data_start = _HEADER_LENGTH_BYTES + size
    header = json.loads(view[_HEADER_LENGTH_BYTES:data_start], object_pairs_hook=lambda pairs: _unique(path, pairs))
    data = np.frombuffer(view, np.uint8)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if len(entry["shape"]) > _MOST_DIMENSIONS:
            raise CheckpointError(f"{path}: {shown_text(name)} has {len(entry['shape'])} dimensions: fetch it again")
        tensors[name] = StoredTensor(name, tuple(entry["shape"]), entry["dtype"], data[data_start + start : data_start + end])
    return tensors


def _unique(path: Path, pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"{path} is not a sound safetensors file: {shown(twice)} appears twice in its header")
    return found
