"""State files: some tokens, and the session states (such as KV caches) after these tokens.

A file starts with three lines: the format, the sha256 of everything after this line, and JSON with
"bundle" (see `identity`) and "tokens", the number of tokens. The tokens follow as i32, then the
data of each state in the manifest's order (see `Session.rows`). Each of these arrays is padded to a
multiple of `ALIGNMENT` bytes. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.vmfb.atomic_write import replace_file
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.manifest import WEIGHTS, Manifest

FORMAT = b"castiron state 1\n"
ALIGNMENT = 64
_DIGEST = 64
# Bounds the memory that a damaged header can request.
_MAX_TOKENS = 1 << 24
# Offset of the tokens in bytes; the line of JSON is padded with spaces.
_HEAD = 256
_HASHED = len(FORMAT) + _DIGEST + 1


class StateError(Exception):
    """Raised for a state file that is damaged, or belongs to another bundle."""


@dataclass(frozen=True, eq=False)
class StateFile:
    """The header and the tokens, i32 `[n]`, of a state file; `bundle`: see `identity`."""

    path: Path
    bundle: str
    tokens: np.ndarray


def identity(manifest: Manifest, salt: str = "", is_long: bool = False) -> str:
    """Return the hash of a bundle's modules and weights, and of a salt, as 32 hex digits.

    Prompts with different salts, and sequences with another `is_long`, have different states.
    """
    hashes = [manifest.files[name].sha256 for name in (*manifest.modules, WEIGHTS)]
    # A salt follows, so the mark is first.
    return hashlib.sha256("".join(["long " * is_long, *hashes, salt]).encode()).hexdigest()[:32]


def write_state(path: Path, bundle: str, tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
    """Write a state file that only its owner may read; return its size in bytes."""
    head = json.dumps({"bundle": bundle, "tokens": len(tokens)}).encode()
    parts: list[bytes | memoryview] = [head.ljust(_HEAD - _HASHED - 1) + b"\n"]
    for array in (np.asarray(tokens, "<i4"), *rows):
        data = np.ascontiguousarray(array)
        parts += [data.reshape(-1).view(np.uint8).data, bytes(-data.nbytes % ALIGNMENT)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    with replace_file(path, private=True) as file:
        file.writelines((FORMAT, digest.hexdigest().encode(), b"\n", *parts))
        return file.tell()


def file_bytes(tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
    return _HEAD + sum(array.nbytes + -array.nbytes % ALIGNMENT for array in (tokens, *rows))


def read_head(path: Path) -> StateFile:
    """Read the header and tokens of a state file; the file's sha256 is not checked."""
    file = Part.of(path)
    head = file.read(0, _HEAD)
    try:
        if not head.startswith(FORMAT) or len(head) < _HEAD:
            raise ValueError
        header = json.loads(head[_HASHED:])
        bundle, count = str(header["bundle"]), int(header["tokens"])
        if not 0 < count <= min(_MAX_TOKENS, file.size // 4):
            raise ValueError
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        raise StateError(f"not a saved state of a session: {path}; delete it") from None
    return StateFile(path, bundle, np.frombuffer(file.read(_HEAD, 4 * count), "<i4"))


def read_rows(state: StateFile, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the data of each state, memory-mapped; StateError if the file is damaged.

    like: arrays with the shapes and types of the result.
    """
    data = Part.of(state.path).map()
    digest = bytes(data[len(FORMAT) : len(FORMAT) + _DIGEST])
    if len(data) != file_bytes(state.tokens, like) or hashlib.sha256(data[_HASHED:]).hexdigest().encode() != digest:
        raise StateError(f"damaged state file (wrong size or sha256): {state.path}; delete it")
    return [
        np.frombuffer(data, array.dtype, array.size, file_bytes(state.tokens, like[:n])).reshape(array.shape)
        for n, array in enumerate(like)
    ]
