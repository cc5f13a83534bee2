"""Read text, JSON and safetensors files of an HF directory; they may be damaged or malicious."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from castiron.emitter.shorten import shorten, shorten_text
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Tensor, is_ignorable, map_file
from castiron.pipelines.files import MAX_BYTES, has_too_many_values, read_regular

CODEC_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Types of the parts of quantised weights, which other modules convert. Until then, they are a tensor's codec.
PART_TYPES = ("U8", "I8", "I32", "I64", "F8_E4M3")
# Max nesting of values in JSON files of fewer than _LARGE characters.
_LARGE, _MAX_DEPTH = 1_000_000, 50
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_HEADER_LENGTH_BYTES = 8
# Limits of a safetensors header: JSON values (a tensor has seven), and dimensions of a tensor (NumPy's limit is 64).
_MAX_VALUES, _MAX_DIMENSIONS = 1_000_000, 16


def text_of(path: Path) -> str | None:
    """Return the text of a UTF-8 file; None if it doesn't exist."""
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the file and its permissions") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text; download the file again") from None


def json_value(path: Path) -> Any:
    """Return the value of a JSON file; None if it doesn't exist."""
    text = text_of(path)
    if text is None:
        return None
    if has_too_many_values(text):
        raise CheckpointError(f"{path} has more JSON values than castiron reads; download the file again")
    try:
        content = json.loads(text)  # a number of over 4,300 digits is a ValueError
        # json.dumps cannot write a string with half of a surrogate pair.
        if _HALF_OF_A_PAIR.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON; download the file again") from None
    # Deep nesting would overflow the stack of code that walks a config recursively; no code walks large files.
    if len(text) < _LARGE and _is_deep(content):
        raise CheckpointError(f"{path} nests values deeper than {_MAX_DEPTH}; download the file again")
    if content is None:
        raise CheckpointError(f"{path} contains only null; download the file again")
    return content


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        nested = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for children in nested for child in children]
    return bool(level)


def json_object(path: Path) -> dict | None:
    """Return the object in a JSON file; None if the file doesn't exist."""
    content = json_value(path)
    if content is not None and not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; download the file again")
    return content


def read_safetensors(path: Path, allow_parts: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; their data are views of the mapped file.

    allow_parts: allow scalars, integers and FP8, of which quantised weights consist.
    """
    from safetensors import SafetensorError, safe_open

    view = map_file(path)
    size = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
    # safe_open rejects a longer header.
    head = bytes(view[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + size]) if size <= MAX_BYTES else b""
    if has_too_many_values(head, _MAX_VALUES):
        raise CheckpointError(f"{path}: its header has more than {_MAX_VALUES} values; download the file again")
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening checks the header, that shapes fit their bytes, and that bytes neither overlap nor end early
    except (SafetensorError, OSError) as error:
        why = shorten_text(str(error))
        raise CheckpointError(f"{path} is not a valid safetensors file ({why}); download the file again") from None
    header = json.loads(head)
    data = np.frombuffer(view, np.uint8)[_HEADER_LENGTH_BYTES + size :]
    names = [name for name in header if name != "__metadata__" and not is_ignorable(name)]
    return {name: _tensor(path, name, header[name], data, allow_parts) for name in names}


def _tensor(path: Path, name: str, entry: dict, data: np.ndarray, allow_parts: bool) -> Tensor:
    shape, dtype, (start, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
    if len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: {shorten_text(name)} has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    codec = dtype if dtype in PART_TYPES and allow_parts else CODEC_OF_DTYPE.get(dtype)
    if allow_parts:
        shape = shape or (1,)
    if codec is None:
        raise unsupported_type(path, name, dtype)
    if not shape or 0 in shape:
        raise CheckpointError(f"{path}: {shorten_text(name)} has no elements: its shape is {shorten(list(shape))}")
    rows = data[start:end].reshape(*shape[:-1], -1)
    return Tensor(name, shape, codec, name, lambda: rows)


def unsupported_type(path: Path, name: str, dtype: str) -> CheckpointError:
    known = ", ".join(CODEC_OF_DTYPE)
    return CheckpointError(f"{path}: {shorten_text(name)} has the type {shorten_text(dtype)}; supported are {known}")
