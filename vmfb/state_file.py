"""What a session remembers, as a file: whose state it is, the tokens behind it, and what each state holds of them.

A line that names the format, the sha256 of all that follows, and a line of JSON ({"bundle", "tokens": how many}); then the
tokens, i32, and what the states hold in the manifest's order, each padded to `ALIGNMENT` bytes. Numbers have their least byte
first. A file is written aside and renamed, so that none is ever half there; it is read only where its sha256 holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from castiron.vmfb.archive import Part
from castiron.vmfb.aside import replacing
from castiron.vmfb.manifest import MODEL, WEIGHTS, Manifest

Buffer: TypeAlias = bytes | memoryview

FORMAT = b"castiron state 1\n"
ALIGNMENT = 64
_DIGEST = 64
# The sha256 with its line's end; the line of JSON, filled up with spaces, ends where the tokens begin.
_HEAD = 256
_HASHED = len(FORMAT) + _DIGEST + 1


class StateError(Exception):
    """A file of a state that cannot be used; one sentence."""


@dataclass(frozen=True, eq=False)
class StateFile:
    """The state at `path` of the bundle that `identity` calls `bundle`, after `tokens`, i32 [n]."""

    path: Path
    bundle: str
    tokens: np.ndarray


def identity(manifest: Manifest) -> str:
    """What the states of one bundle have in common, and those of no other: 32 hexadecimal digits of its program and weights."""
    return hashlib.sha256("".join(manifest.files[name].sha256 for name in (MODEL, WEIGHTS)).encode()).hexdigest()[:32]


def write_state(path: Path, bundle: str, tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
    """Writes what `Session.rows` gives after `tokens`; returns the file's size. OSError if it cannot be written."""
    head = json.dumps({"bundle": bundle, "tokens": len(tokens)}).encode()
    parts: list[Buffer] = [head.ljust(_HEAD - _HASHED - 1) + b"\n"]
    for array in (np.asarray(tokens, "<i4"), *rows):
        data = np.ascontiguousarray(array)
        parts += [data.reshape(-1).view(np.uint8).data, bytes(-data.nbytes % ALIGNMENT)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    with replacing(path) as file:
        file.write(FORMAT + digest.hexdigest().encode() + b"\n")
        for part in parts:
            file.write(part)
        return file.tell()


def file_bytes(tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
    """The size of the file of a state."""
    return _HEAD + sum(_padded(array.nbytes) for array in (tokens, *rows))


def read_head(path: Path) -> StateFile:
    """Whose state a file is and of which tokens; StateError for another file, OSError. Whether it is whole shows when it is
    read."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        try:
            if not head.startswith(FORMAT) or len(head) < _HEAD:
                raise ValueError
            facts = json.loads(head[_HASHED:])
            bundle, count = str(facts["bundle"]), int(facts["tokens"])
            if not 0 < count <= os.fstat(file.fileno()).st_size // 4:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise StateError(f"{path} is not a state that castiron wrote") from None
        return StateFile(path, bundle, np.frombuffer(file.read(4 * count), "<i4"))


def read_rows(state: StateFile, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the states held, where it lies in the file: arrays `like` those that were written. StateError for a file that is
    not what was written, byte for byte, OSError."""
    data = Part.of(state.path).map()
    starts = [file_bytes(state.tokens, like[:n]) for n in range(len(like))]
    digest = bytes(data[len(FORMAT) : len(FORMAT) + _DIGEST])
    if len(data) != file_bytes(state.tokens, like) or hashlib.sha256(data[_HASHED:]).hexdigest().encode() != digest:
        raise StateError(f"{state.path} is not the state that was written (sha256)")
    return [
        np.frombuffer(data, array.dtype, array.size, start).reshape(array.shape)
        for array, start in zip(like, starts, strict=True)
    ]


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT
