"""Reading and writing GGUF files, little-endian versions 2 and 3 (ggml/docs/gguf.md).

`gguf.GGUFReader` is not used, because it slices past the end of a short file, trusts every count
and offset, and takes 13 s for a vocabulary of 262,144 that takes 0.5 s here. The checks include
those of ggml's `gguf_init_from_file`. `gguf.GGUFWriter` can't copy another file's metadata with its
types.
"""

import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.emitter.shorten import shorten
from castiron.pipelines.checkpoints.checkpoint import CheckpointError

CODEC_OF_GGML_TYPE = {
    0: "f32", 1: "f16", 30: "bf16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4",
}  # fmt: skip
GGML_TYPE = {codec: number for number, codec in CODEC_OF_GGML_TYPE.items()}

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SMALLEST_ENTRY = 8 + 4 + 1  # key length, type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, rank, one dimension, type, offset
ALIGNMENT = 32  # unless the file states another
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
# Limits for all strings of a file, because a sparse file can state any number; a tokenizer of 260,000 tokens has 800,000
# strings in 10 MB.
_MAX_STRINGS, _MAX_STRING_BYTES = 2_000_000, 200_000_000
# Entries of metadata, and tensors; models have a few thousand.
_MAX_ENTRIES = 200_000

# Metadata to write.
Value = int | float | bool | str | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file: name, shape in NumPy's order, codec, offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    codec: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A mapped GGUF file.

    metadata: by key a str, int, float, bool, list[str], or NumPy array of numbers. data: the file's
    bytes, u8. entries: start and end of each metadata entry in `data`.
    """

    path: Path
    version: int
    metadata: dict
    tensors: dict[str, GgufTensor]
    data: np.ndarray
    entries: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """Return the tensor's bytes, u8 [*shape[:-1], row_bytes], a view of the mapped file."""
        return self.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)


class _Cursor:
    """A reader that moves forward through the mapped file, never past its end."""

    def __init__(self, path: Path, view: mmap.mmap):
        self.path, self.view, self.at = path, view, 0
        self.strings = self.string_bytes = 0

    def invalid(self, what: str) -> CheckpointError:
        """Return the error for a file that breaks the format; `what` describes the fault."""
        return CheckpointError(f"{self.path} is not a valid GGUF file: {what}")

    @property
    def left(self) -> int:
        """Return the number of bytes from the current offset to the end of the file."""
        return len(self.view) - self.at

    def take(self, size: int, what: str) -> int:
        """Skip the next `size` bytes and return their offset; `what` names them in errors."""
        if size > self.left:
            raise self.invalid(f"it ends inside {what} ({len(self.view)} bytes); fetch it again")
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: struct.Struct, what: str) -> int | float:
        """Read one number; `what`: the name of the number in errors."""
        return form.unpack_from(self.view, self.take(form.size, what))[0]

    def string(self, what: str) -> str:
        """Read a string: its length as u64, then UTF-8."""
        size = self.number(_U64, what)
        start = self.take(size, what)
        self.strings, self.string_bytes = self.strings + 1, self.string_bytes + size
        if self.strings > _MAX_STRINGS or self.string_bytes > _MAX_STRING_BYTES:
            raise self.invalid(f"its strings exceed {_MAX_STRING_BYTES // 10**6} MB at {what}")
        try:
            return self.view[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.invalid(f"{what} is not UTF-8") from None

    def count(self, smallest: int, what: str, limit: int = 2**64) -> int:
        """Read a number of items; CheckpointError if it exceeds `limit`, or what the file can hold
        if an item takes at least `smallest` bytes."""
        count = self.number(_U64, what)
        if count * smallest > self.left:
            raise self.invalid(f"it announces {count} {what}, more than its {len(self.view)} bytes can hold")
        if count > limit:
            raise self.invalid(f"it announces {count} {what}; the limit is {limit}")
        return count

    def value(self, kind: int, what: str):
        """Read a metadata value of GGUF's type `kind`; `what` names the value in errors."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.invalid(f"{what} has the unknown value type {kind}")
        value = self.number(_SCALARS[kind], what)
        if kind == _BOOL:
            if value > 1:
                raise self.invalid(f"{what} is a boolean with the value {value}")
            return bool(value)
        return value

    def _array(self, what: str):
        kind = self.number(_U32, what)
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count(8, f"strings in {what}"))]
        if kind not in _SCALARS:
            raise self.invalid(f"{what} is an array of the unsupported value type {kind}")
        form = _SCALARS[kind]
        count = self.count(form.size, f"numbers in {what}")
        start = self.take(count * form.size, what)
        numbers = np.frombuffer(self.view, np.dtype(form.format), count, start)
        if kind == _BOOL:
            if numbers.size and numbers.max() > 1:
                raise self.invalid(f"{what} is an array of booleans with the value {numbers.max()}")
            return numbers.astype(bool)
        return numbers


def read_gguf(path: Path) -> GgufFile:
    """Map the GGUF file at `path` and parse its header; CheckpointError if it is invalid."""
    try:
        # Opening a pipe waits for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is not a regular file; give a GGUF file")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path} is empty; give a GGUF file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    cursor = _Cursor(path, view)
    version = _version(cursor)
    tensor_count = cursor.count(_SMALLEST_TENSOR, "tensors", _MAX_ENTRIES)
    metadata, alignment, ranges = _metadata(cursor, cursor.count(_SMALLEST_ENTRY, "metadata entries", _MAX_ENTRIES))
    tensors = _tensors(cursor, tensor_count, alignment)
    return GgufFile(path, version, metadata, tensors, np.frombuffer(view, np.uint8), ranges)


def _version(cursor: _Cursor) -> int:
    if cursor.view[:4] != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file; give a GGUF file or an HF directory")
    cursor.take(4, "its header")
    version = cursor.number(_U32, "its header")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{cursor.path} is a big-endian GGUF file; convert it again as little-endian")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.path} is GGUF version {version}, not 2 or 3; convert it again")
    return version


def _metadata(cursor: _Cursor, count: int) -> tuple[dict, int, dict[str, tuple[int, int]]]:
    """Return the entries, the alignment, and the start and end offset of each entry in the file."""
    metadata, alignment, ranges = {}, ALIGNMENT, {}
    for _ in range(count):
        start = cursor.at
        key = cursor.string("a metadata key")
        if not key:
            raise cursor.invalid("a metadata key is empty")
        if key in metadata:
            raise cursor.invalid(f"the metadata key {shorten(key)} appears twice")
        kind = cursor.number(_U32, f"the type of {shorten(key)}")
        metadata[key] = cursor.value(kind, shorten(key))
        ranges[key] = start, cursor.at
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or alignment == 0 or alignment & (alignment - 1):
                raise cursor.invalid(f"general.alignment is {shorten(alignment)}; it must be a 32-bit power of two")
    return metadata, alignment, ranges


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors; CheckpointError if their data is unaligned, overlaps, or exceeds the file."""
    found: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in found:
            raise cursor.invalid(f"the tensor {shorten(name)} appears twice")
        shape, codec = _shape(cursor, name), _codec(cursor, name)
        try:
            nbytes = tensor_bytes(shape, codec)
        except ValueError:
            block = CODECS[codec].block
            raise cursor.invalid(
                f"a row of {shorten(name)} has {shape[-1]} elements, not a multiple of {codec}'s block of {block}"
            ) from None
        found[name] = GgufTensor(name, shape, codec, cursor.number(_U64, f"the offset of {shorten(name)}"), nbytes)
    start, end, before = -(-cursor.at // alignment) * alignment, 0, ""
    tensors = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in found.items()}
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        name, offset = shorten(tensor.name), tensor.offset - start
        if offset % alignment:
            raise cursor.invalid(f"the data of {name} starts at {offset}, not a multiple of {alignment}")
        if tensor.offset + tensor.nbytes > len(cursor.view):
            raise cursor.invalid(f"the data of {name} ends past the file's {len(cursor.view)} bytes; fetch it again")
        if tensor.offset < end:
            raise cursor.invalid(f"the data of {shorten(before)} and of {name} overlap")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tensors


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    rank = cursor.number(_U32, f"the rank of {shorten(name)}")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise cursor.invalid(f"{shorten(name)} has {rank} dimensions, GGUF allows 1 to {_MAX_DIMENSIONS}")
    # GGUF writes the fastest dimension first
    shape = tuple(cursor.number(_U64, f"the shape of {shorten(name)}") for _ in range(rank))[::-1]
    if 0 in shape:
        raise cursor.invalid(f"{shorten(name)} has the empty shape {shape}")
    return shape


def _codec(cursor: _Cursor, name: str) -> str:
    ggml_type = cursor.number(_U32, f"the type of {shorten(name)}")
    if ggml_type in CODEC_OF_GGML_TYPE:
        return CODEC_OF_GGML_TYPE[ggml_type]
    from gguf.constants import GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    if ggml_type not in names:
        raise cursor.invalid(f"{shorten(name)} has the unknown ggml type {ggml_type}")
    known = ", ".join(codec.upper() for codec in CODEC_OF_GGML_TYPE.values())
    raise CheckpointError(f"{cursor.path}: {shorten(name)} has the unsupported type {names[ggml_type]}; supported are {known}")


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write, with its shape in NumPy's order; `read` computes its bytes."""

    name: str
    shape: tuple[int, ...]
    codec: str
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.codec)


def write_gguf(
    out: BinaryIO, entries: Sequence[bytes], tensors: Sequence[NewTensor], progress: Callable[[float], None]
) -> None:
    """Write a GGUF file: metadata entries from `metadata_entry`, and tensors; `progress` gets the
    share that is written."""
    out.write(header(entries, [(tensor.name, tensor.shape, tensor.codec) for tensor in tensors]))
    written, total = 0, sum(padded(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8)
        if data.size != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {data.size} bytes, not {tensor.nbytes}")
        out.write(data)
        out.write(bytes(padded(data.size) - data.size))
        written += padded(data.size)
        progress(written / total)


def header(entries: Sequence[bytes], tensors: Sequence[tuple[str, tuple[int, ...], str]]) -> bytes:
    """Return the bytes of a GGUF file that precede the tensors' data.

    tensors: name, shape and codec of each tensor; the data of each is padded.
    """
    rows, offset = [], 0
    for name, shape, codec in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        rows.append(_string(name) + dims + struct.pack("<IQ", GGML_TYPE[codec], offset))
        offset += padded(tensor_bytes(shape, codec))
    found = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(entries)) + b"".join([*entries, *rows])
    return found + bytes(-len(found) % ALIGNMENT)


def tensor_bytes(shape: tuple[int, ...], codec: str) -> int:
    """Return a tensor's size in bytes; ValueError if a row is not a multiple of the codec's block."""
    return math.prod(shape[:-1]) * row_bytes(codec, shape[-1])


def padded(nbytes: int) -> int:
    """Return the size in the file, with padding, of a tensor of `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def metadata_entry(key: str, value: Value) -> bytes:
    """Return the bytes of a metadata entry; whole numbers are u32 (in arrays i32), others f32."""
    match value:
        case bool():
            typed = struct.pack("<I?", _BOOL, value)
        case int():
            typed = struct.pack("<II", _UINT32, value)
        case float():
            typed = struct.pack("<If", _FLOAT32, value)
        case str():
            typed = struct.pack("<I", _STRING) + _string(value)
        case _:
            kind, items = _items(list(value))
            typed = struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    return _string(key) + typed


def as_read(metadata: Mapping[str, Value]) -> dict:
    """Return metadata in the form that `read_gguf` returns: lists of numbers are NumPy arrays."""
    numbers = lambda value: isinstance(value, list) and not isinstance(value[0], str)
    return {key: np.array(value) if numbers(value) else value for key, value in metadata.items()}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _items(values: list) -> tuple[int, bytes]:
    """Return GGUF's type number for an array's values, and their bytes."""
    if values and isinstance(values[0], str):
        return _STRING, b"".join(map(_string, values))
    for type_, kind, form in ((bool, _BOOL, "?"), (int, _INT32, "i")):
        if all(isinstance(value, type_) for value in values):
            return kind, struct.pack(f"<{len(values)}{form}", *values)
    return _FLOAT32, struct.pack(f"<{len(values)}f", *values)
