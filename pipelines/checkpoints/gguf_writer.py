"""Writing the GGUF container, version 3 (ggml/docs/gguf.md): what `gguf_file` reads, tensor after tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np

from castiron.emitter.codecs import row_bytes
from castiron.pipelines.checkpoints.gguf_file import CODEC_OF_GGML_TYPE

ALIGNMENT = 32
GGML_TYPE = {codec: number for number, codec in CODEC_OF_GGML_TYPE.items()}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

Value = int | float | bool | str | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


@dataclass(frozen=True)
class Stored:
    """A tensor to write: its shape in NumPy's order, and what makes its bytes, called once, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    codec: str
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * row_bytes(self.codec, self.shape[-1])


def entry(key: str, value: Value) -> bytes:
    """A metadata entry: whole numbers as u32 (in arrays i32), others as f32."""
    return _string(key) + _typed(value)


def as_read(metadata: Mapping[str, Value]) -> dict:
    """Metadata as `gguf_file.read_gguf` gives it: arrays of numbers as NumPy's."""
    numbers = lambda value: isinstance(value, list) and not isinstance(value[0], str)
    return {key: np.array(value) if numbers(value) else value for key, value in metadata.items()}


def head(entries: Sequence[bytes], tensors: Sequence[tuple[str, tuple[int, ...], str, int]]) -> bytes:
    """Everything before the data; tensors as (name, shape, codec, bytes), whose data follow each other, each padded."""
    rows, at = [], 0
    for name, shape, codec, nbytes in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        rows.append(_string(name) + dims + struct.pack("<IQ", GGML_TYPE[codec], at))
        at += padded(nbytes)
    whole = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(entries)) + b"".join(entries) + b"".join(rows)
    return whole + bytes(-len(whole) % ALIGNMENT)


def padded(nbytes: int) -> int:
    """What a tensor of so many bytes takes in the file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_gguf(out: BinaryIO, entries: Sequence[bytes], tensors: Sequence[Stored], progress: Callable[[float], None]) -> None:
    """Writes a whole file to `out`; `progress` gets the share of the data that is there."""
    out.write(head(entries, [(tensor.name, tensor.shape, tensor.codec, tensor.nbytes) for tensor in tensors]))
    written, total = 0, sum(padded(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8)
        if data.size != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {data.size} bytes where {tensor.nbytes} were announced")
        out.write(data)
        out.write(bytes(padded(data.size) - data.size))
        written += padded(data.size)
        progress(written / total)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Value) -> bytes:
    """The number of a value's type, and itself."""
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
    kind, items = _items(list(value))
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items


def _items(values: list) -> tuple[int, bytes]:
    if values and isinstance(values[0], str):
        return _STRING, b"".join(map(_string, values))
    for type_, kind, form in ((bool, _BOOL, "?"), (int, _I32, "i")):
        if all(isinstance(value, type_) for value in values):
            return kind, struct.pack(f"<{len(values)}{form}", *values)
    return _F32, struct.pack(f"<{len(values)}f", *values)
