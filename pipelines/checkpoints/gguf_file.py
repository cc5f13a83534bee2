"""The GGUF container, versions 2 and 3, little-endian: metadata and the tensor table, checked before use.

`gguf.GGUFReader` is not used to read: it slices past the end of a short file without noticing, trusts every count
and offset, and takes 13 s for a vocabulary of 262,144 that takes 0.5 s here. Layout: the GGUF specification
(ggml/docs/gguf.md); the checks are those of ggml's own `gguf_init_from_file` and more.
"""

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.emitter.shown import shown
from castiron.pipelines.checkpoints.checkpoint import CheckpointError

CODEC_OF_GGML_TYPE = {
    0: "f32", 1: "f16", 30: "bf16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4",
}  # fmt: skip

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SMALLEST_ENTRY = 8 + 4 + 1  # key length, type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, rank, one dimension, type, offset
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
# Of all strings together; the tokenizer of 260,000 tokens has 800,000 of 10 MB. A file with holes has as many as it says.
_MOST_STRINGS, _MOST_STRING_BYTES = 2_000_000, 200_000_000
# Of metadata, and of tensors: files have a few thousand.
_MOST_ENTRIES = 200_000


@dataclass(frozen=True)
class GgufTensor:
    """A row of the tensor table: shape in NumPy's order, the offset of its bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    codec: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """metadata: str, int, float, bool, list[str], or a NumPy array of numbers. data: the whole file, u8, mapped. entries: where
    in it each entry of the metadata starts and ends."""

    path: Path
    version: int
    metadata: dict
    tensors: dict[str, GgufTensor]
    data: np.ndarray
    entries: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, u8 [*shape[:-1], row_bytes], a view of the mapped file."""
        return self.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)


class _Cursor:
    """Reads forward through the mapped file; every read is bounded by the file's end."""

    def __init__(self, path: Path, view: mmap.mmap):
        self.path, self.view, self.at = path, view, 0
        self.strings = self.string_bytes = 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a sound GGUF file: {what}")

    @property
    def left(self) -> int:
        return len(self.view) - self.at

    def take(self, size: int, what: str) -> int:
        """Where the next `size` bytes start."""
        if size > self.left:
            raise self.fail(f"it ends inside {what} ({len(self.view)} bytes); fetch it again")
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: struct.Struct, what: str) -> int | float:
        return form.unpack_from(self.view, self.take(form.size, what))[0]

    def string(self, what: str) -> str:
        size = self.number(_U64, what)
        start = self.take(size, what)
        self.strings, self.string_bytes = self.strings + 1, self.string_bytes + size
        if self.strings > _MOST_STRINGS or self.string_bytes > _MOST_STRING_BYTES:
            raise self.fail(f"it holds more text than any, with {what}")
        try:
            return self.view[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def count(self, smallest: int, what: str, most: int = 2**64) -> int:
        count = self.number(_U64, what)
        if count * smallest > self.left:
            raise self.fail(f"it announces {count} {what}, more than its {len(self.view)} bytes can hold")
        if count > most:
            raise self.fail(f"it announces {count} {what}, and no model's has more than {most}")
        return count

    def value(self, kind: int, what: str):
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        value = self.number(_SCALARS[kind], what)
        if kind == _BOOL:
            if value > 1:
                raise self.fail(f"{what} is a boolean with the value {value}")
            return bool(value)
        return value

    def _array(self, what: str):
        kind = self.number(_U32, what)
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count(8, f"strings in {what}"))]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of the unsupported value type {kind}")
        form = _SCALARS[kind]
        count = self.count(form.size, f"numbers in {what}")
        start = self.take(count * form.size, what)
        numbers = np.frombuffer(self.view, np.dtype(form.format), count, start)
        if kind == _BOOL:
            if numbers.size and numbers.max() > 1:
                raise self.fail(f"{what} is an array of booleans with the value {numbers.max()}")
            return numbers.astype(bool)
        return numbers


def read_gguf(path: Path) -> GgufFile:
    """The container at `path`, mapped and checked. CheckpointError if anything in it does not hold."""
    try:
        # Opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no ordinary file: give a GGUF file")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path} is empty: give a GGUF file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    cursor = _Cursor(path, view)
    version = _version(cursor)
    tensor_count = cursor.count(_SMALLEST_TENSOR, "tensors", _MOST_ENTRIES)
    metadata, alignment, ranges = _metadata(cursor, cursor.count(_SMALLEST_ENTRY, "metadata entries", _MOST_ENTRIES))
    entries = _tensor_table(cursor, tensor_count)
    tensors = _placed(cursor, entries, alignment)
    return GgufFile(path, version, metadata, tensors, np.frombuffer(view, np.uint8), ranges)


def _version(cursor: _Cursor) -> int:
    if cursor.view[:4] != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file: it does not start with the letters GGUF")
    cursor.take(4, "its header")
    version = cursor.number(_U32, "its header")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{cursor.path} is a big-endian GGUF file: convert it again as little-endian")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path} is GGUF version {version}: only 2 and 3 are supported; convert it again")
    return version


def _metadata(cursor: _Cursor, count: int) -> tuple[dict, int, dict[str, tuple[int, int]]]:
    """The entries, the alignment that they state, and from where to where each lies."""
    metadata, alignment, ranges = {}, _DEFAULT_ALIGNMENT, {}
    for _ in range(count):
        start = cursor.at
        key = cursor.string("a metadata key")
        if not key:
            raise cursor.fail("a metadata key is empty")
        if key in metadata:
            raise cursor.fail(f"the metadata key {shown(key)} appears twice")
        kind = cursor.number(_U32, f"the type of {shown(key)}")
        metadata[key] = cursor.value(kind, shown(key))
        ranges[key] = start, cursor.at
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or alignment == 0 or alignment & (alignment - 1):
                raise cursor.fail(f"general.alignment is {shown(alignment)}; it must be a 32-bit power of two")
    return metadata, alignment, ranges


def _tensor_table(cursor: _Cursor, count: int) -> list[tuple]:
    """[(name, shape, codec, offset from the start of the data, nbytes)]"""
    entries, seen = [], set()
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in seen:
            raise cursor.fail(f"the tensor {shown(name)} appears twice")
        seen.add(name)
        shape = _shape(cursor, name)
        codec = _codec(cursor, name)
        try:
            nbytes = math.prod(shape[:-1]) * row_bytes(codec, shape[-1])
        except ValueError:
            block = CODECS[codec].block
            raise cursor.fail(
                f"a row of {shown(name)} has {shape[-1]} elements, not a multiple of {codec}'s block of {block}"
            ) from None
        entries.append((name, shape, codec, cursor.number(_U64, f"the offset of {shown(name)}"), nbytes))
    return entries


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    rank = cursor.number(_U32, f"the rank of {shown(name)}")
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise cursor.fail(f"{shown(name)} has {rank} dimensions, GGUF allows 1 to {_MOST_DIMENSIONS}")
    # GGUF writes the fastest dimension first
    shape = tuple(cursor.number(_U64, f"the shape of {shown(name)}") for _ in range(rank))[::-1]
    if 0 in shape:
        raise cursor.fail(f"{shown(name)} has the empty shape {shape}")
    return shape


def _codec(cursor: _Cursor, name: str) -> str:
    ggml_type = cursor.number(_U32, f"the type of {shown(name)}")
    if ggml_type in CODEC_OF_GGML_TYPE:
        return CODEC_OF_GGML_TYPE[ggml_type]
    from gguf.constants import GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    if ggml_type not in names:
        raise cursor.fail(f"{shown(name)} has the unknown ggml type {ggml_type}")
    known = ", ".join(codec.upper() for codec in CODEC_OF_GGML_TYPE.values())
    raise CheckpointError(
        f"{cursor.path}: {shown(name)} is stored as {names[ggml_type]}, which is not supported; supported are {known}"
    )


def _placed(cursor: _Cursor, entries: list[tuple], alignment: int) -> dict[str, GgufTensor]:
    """The table with offsets from the start of the file: aligned, inside the file, none over another."""
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, codec, offset, nbytes in entries:
        if offset % alignment:
            raise cursor.fail(f"the data of {shown(name)} starts at {offset}, not a multiple of {alignment}")
        if data_start + offset + nbytes > len(cursor.view):
            raise cursor.fail(f"the data of {shown(name)} ends past the file's {len(cursor.view)} bytes; fetch it again")
        tensors[name] = GgufTensor(name, shape, codec, data_start + offset, nbytes)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for one, next_one in zip(in_order, in_order[1:]):
        if one.offset + one.nbytes > next_one.offset:
            raise cursor.fail(f"the data of {shown(one.name)} and of {shown(next_one.name)} overlap")
    return tensors
