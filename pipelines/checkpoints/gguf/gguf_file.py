"""Read and write GGUF files, little-endian versions 2 and 3 (ggml/docs/gguf.md).

`gguf.GGUFReader` is not used, because it reads past the end of a short file, trusts every count and
offset, and takes 13 s for a vocabulary of 262,144 tokens (here 0.5 s). `gguf.GGUFWriter` is not
used, because it cannot copy another file's metadata with its types. The checks include those of
ggml's `gguf_init_from_file`.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from castiron.emitter.codecs import CODECS
from castiron.emitter.shorten import shorten
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor, inconsistent, map_file
from castiron.pipelines.locate import parts_of

CODEC_OF_GGML_TYPE = {
    0: "f32", 1: "f16", 30: "bf16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4", 40: "nvfp4", 41: "q1_0", 42: "q2_0",
    16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s", 22: "iq2_s", 29: "iq1_m",
}  # fmt: skip
GGML_TYPE = {codec: number for number, codec in CODEC_OF_GGML_TYPE.items()}

# From GGUF's number of a value type to the NumPy type.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SMALLEST_ENTRY = 8 + 4 + 1  # key length, type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, rank, one dimension, type, offset
ALIGNMENT = 32  # unless the file states another
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
# Max bytes of memory for all strings of a file, because a sparse file can contain any number of strings.
# A string takes about 100 bytes more than its text; a tokenizer of 260,000 tokens has 800,000 strings.
_MAX_STRING_BYTES, _STRING_OVERHEAD = 200_000_000, 100
# Max number of metadata entries, and of tensors; models have a few thousand.
_MAX_ENTRIES = 200_000

# The bytes of a metadata entry, and the types of metadata values that can be written.
Buffer = bytes | memoryview
Value = int | float | bool | str | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is mapped into memory.

    metadata: str, int, float, bool, list[str] or NumPy arrays. entries: their bytes, for copying.
    """

    path: Path
    metadata: dict
    tensors: dict[str, Tensor]
    entries: dict[str, memoryview] = field(default_factory=dict)


class _Cursor:
    """Reads consecutive values; errors name `what` would continue after the end of the file."""

    def __init__(self, path: Path, view: memoryview):
        self.path, self.view, self.at, self.string_bytes = path, view, 0, 0

    def invalid(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid GGUF file: {fault}; download the file again")

    def take(self, size: int, what: str) -> int:
        if size > len(self.view) - self.at:
            raise self.invalid(f"it ends inside {what} ({len(self.view)} bytes)")
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: struct.Struct, what: str) -> int | float:
        return form.unpack_from(self.view, self.take(form.size, what))[0]

    def string(self, what: str) -> str:
        size = self.number(_U64, what)
        start = self.take(size, what)
        self.string_bytes += size + _STRING_OVERHEAD
        if self.string_bytes > _MAX_STRING_BYTES:
            raise self.invalid(f"its strings exceed {_MAX_STRING_BYTES // 10**6} MB at {what}")
        try:
            return str(self.view[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.invalid(f"{what} is not UTF-8") from None

    def count(self, smallest: int, what: str, limit: int = 2**64) -> int:
        count = self.number(_U64, what)
        if count * smallest > len(self.view) - self.at:
            raise self.invalid(f"it states {count} {what}, more than its {len(self.view)} bytes can hold")
        if count > limit:
            raise self.invalid(f"it states {count} {what}; the limit is {limit}")
        return count

    def value(self, kind: int, what: str):
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.numbers(kind, what, 1)[0].item()
        kind = self.number(_U32, what)
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count(8, f"strings in {what}"))]
        return self.numbers(kind, what)

    def numbers(self, kind: int, what: str, count: int | None = None) -> np.ndarray:
        if kind not in _NUMBERS:
            raise self.invalid(f"{what} has the unsupported value type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        count = self.count(dtype.itemsize, f"numbers in {what}") if count is None else count
        numbers = np.frombuffer(self.view, dtype, count, self.take(count * dtype.itemsize, what))
        if kind != _BOOL:
            return numbers
        if numbers.max(initial=0) > 1:
            raise self.invalid(f"{what} has the boolean value {numbers.max()}; it must be 0 or 1")
        return numbers.astype(bool)


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and, if it is the first part of a split model, the other parts."""
    file = _read_part(path)
    split = {key: file.metadata.pop(key, None) for key in ("split.count", "split.no", "split.tensors.count")}
    count, number, stated = split.values()
    for key in split:
        file.entries.pop(key, None)
    if not isinstance(count, int) or isinstance(count, bool) or count <= 1:
        return file
    names = parts_of(path.name)
    if len(names) != count or number != 0:
        example = f"NAME-00001-of-{count:05d}.gguf" if count < 100_000 else "the first"
        raise CheckpointError(f"{path} is one of {count} parts; give {example}, with the other parts in the same directory")
    for number, name in enumerate(names[1:], 1):
        if not (path.parent / name).exists():
            raise CheckpointError(f"{path.parent / name}: no such file; download all {count} parts of the model")
        part = _read_part(path.parent / name)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise inconsistent(path, f"{part.path.name} is not part {number + 1} of {count}")
        if twice := sorted(file.tensors.keys() & part.tensors.keys()):
            raise inconsistent(path, f"tensor {shorten(twice[0])} is in two parts")
        file.tensors.update(part.tensors)
    if stated not in (None, len(file.tensors)):
        raise inconsistent(path, f"its parts have {len(file.tensors)} tensors, not {shorten(stated)}")
    return file


def _read_part(path: Path) -> GgufFile:
    cursor = _Cursor(path, view := map_file(path))
    if view[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file; give a GGUF file or an HF directory")
    cursor.take(4, "its header")
    version = cursor.number(_U32, "its header")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{path} is a big-endian GGUF file; convert it again as little-endian")
    if version not in (2, 3):
        raise CheckpointError(f"{path} is GGUF version {version}, not 2 or 3; convert the model again")
    tensor_count = cursor.count(_SMALLEST_TENSOR, "tensors", _MAX_ENTRIES)
    metadata, alignment, entries = _metadata(cursor, cursor.count(_SMALLEST_ENTRY, "metadata entries", _MAX_ENTRIES))
    return GgufFile(path, metadata, _tensors(cursor, tensor_count, alignment), entries)


def _metadata(cursor: _Cursor, count: int) -> tuple[dict, int, dict[str, memoryview]]:
    metadata, alignment, entries = {}, ALIGNMENT, {}
    for _ in range(count):
        start = cursor.at
        key = cursor.string("a metadata key")
        if not key:
            raise cursor.invalid("a metadata key is empty")
        if key in metadata:
            raise cursor.invalid(f"the metadata key {shorten(key)} appears twice")
        kind = cursor.number(_U32, f"the type of {shorten(key)}")
        metadata[key] = cursor.value(kind, shorten(key))
        entries[key] = cursor.view[start : cursor.at]
        if key == "general.alignment":
            alignment = metadata[key]
            if kind != _UINT32 or alignment == 0 or alignment & (alignment - 1):
                raise cursor.invalid(f"general.alignment is {shorten(alignment)}; it must be a 32-bit power of two")
    return metadata, alignment, entries


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    tensors: dict[str, tuple[Tensor, int]] = {}  # with the offset in the data section
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in tensors:
            raise cursor.invalid(f"the tensor {shorten(name)} appears twice")
        tensors[name] = _tensor(cursor, name)
    start, end, before = -(-cursor.at // alignment) * alignment, 0, ""
    for tensor, offset in sorted(tensors.values(), key=lambda item: item[1]):
        name = shorten(tensor.name)
        if offset % alignment:
            raise cursor.invalid(f"the data of {name} starts at {offset}, not a multiple of {alignment}")
        if start + offset + tensor.nbytes > len(cursor.view):
            raise cursor.invalid(f"the data of {name} ends past the file's {len(cursor.view)} bytes")
        if start + offset < end:
            raise cursor.invalid(f"the data of {before} and of {name} overlap")
        end, before = start + offset + tensor.nbytes, name
    data = np.frombuffer(cursor.view, np.uint8)[start:]
    rows = lambda tensor, offset: data[offset : offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)
    return {name: replace(tensor, read=partial(rows, tensor, offset)) for name, (tensor, offset) in tensors.items()}


def _tensor(cursor: _Cursor, name: str) -> tuple[Tensor, int]:
    what = shorten(name)
    rank = cursor.number(_U32, f"the rank of {what}")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise cursor.invalid(f"{what} has {rank} dimensions, not 1 to {_MAX_DIMENSIONS}")
    # GGUF writes the fastest dimension first
    shape = tuple(cursor.number(_U64, f"the shape of {what}") for _ in range(rank))[::-1]
    if 0 in shape:
        raise cursor.invalid(f"{what} has no elements: its shape is {shape}")
    ggml_type = cursor.number(_U32, f"the type of {what}")
    codec = CODEC_OF_GGML_TYPE.get(ggml_type)
    if codec is None:
        from gguf.constants import GGMLQuantizationType

        named = {kind.value: kind.name for kind in GGMLQuantizationType}.get(ggml_type, ggml_type)
        known = ", ".join(map(str.upper, GGML_TYPE))
        raise CheckpointError(f"{cursor.path}: {what} has the unsupported type {named}; supported are {known}")
    if shape[-1] % (block := CODECS[codec].block):
        raise cursor.invalid(f"a row of {what} has {shape[-1]} elements, not a multiple of {codec}'s block of {block}")
    unread = lambda: np.empty(0, np.uint8)
    return Tensor(name, shape, codec, name, unread), cursor.number(_U64, f"the offset of {what}")


def write_gguf(out: BinaryIO, entries: Sequence[Buffer], tensors: Sequence[Tensor], progress: Callable[[float], None]) -> None:
    """Write a GGUF file; entries: encoded by `metadata_entry`, or copied from another file."""
    out.write(header(entries, tensors))
    written, total = 0, sum(padded(tensor.nbytes) for tensor in tensors)
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8)
        if data.size != tensor.nbytes:
            raise ValueError(f"the data of tensor {tensor.name} is {data.size} bytes, not {tensor.nbytes}")
        out.write(data)
        out.write(bytes(padded(data.size) - data.size))
        written += padded(data.size)
        progress(written / total)


def header(entries: Sequence[Buffer], tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of a GGUF file that come before the tensor data."""
    rows, offset = [], 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        rows.append(_string(tensor.name) + dims + struct.pack("<IQ", GGML_TYPE[tensor.codec], offset))
        offset += padded(tensor.nbytes)
    unpadded = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(entries)) + b"".join([*entries, *rows])
    return unpadded + bytes(-len(unpadded) % ALIGNMENT)


def padded(nbytes: int) -> int:
    """Return the size of a tensor of `nbytes` bytes in a GGUF file, including padding."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def metadata_entry(key: str, value: Value) -> bytes:
    """Encode a metadata entry. Integers become u32, but i32 in lists; floats become f32."""
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
    """Return metadata with the types that they have after writing and reading."""
    numbers = lambda value: isinstance(value, list) and not isinstance(value[0], str)
    return {key: np.array(value) if numbers(value) else value for key, value in metadata.items()}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _items(values: list) -> tuple[int, bytes]:
    """Return GGUF's number of the elements' type, and their bytes."""
    if values and isinstance(values[0], str):
        return _STRING, b"".join(map(_string, values))
    for type_, kind, form in ((bool, _BOOL, "?"), (int, _INT32, "i")):
        if all(isinstance(value, type_) for value in values):
            return kind, struct.pack(f"<{len(values)}{form}", *values)
    return _FLOAT32, struct.pack(f"<{len(values)}f", *values)
