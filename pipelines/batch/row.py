"""A row of a job, wherever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Row number `index` of the input, counted from 0.

    `fields` are its columns, empty where `error` says why it cannot be read. `kept` is what its result keeps of it: the
    fields, or of a table the row as Arrow writes it, in base64. `source`: what it was read from, for its hash.
    """

    index: int
    fields: Mapping[str, Any]
    kept: Mapping[str, Any] | str
    source: bytes
    error: str | None = None
