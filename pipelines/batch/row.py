"""A row of a job, wherever it was read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Columns that a plain row has its prompt in, and its text.
PROMPTS, TEXTS = ("messages", "prompt"), ("text", "prompt", "input")
# Those that a row of OpenAI's format has.
REQUEST = {"custom_id", "url", "body"}


@dataclass(frozen=True)
class Row:
    """Row number `index` of the input, counted from 0.

    `fields` are its columns, empty where `error` says why it cannot be read. `kept` is what its result keeps of it: the
    fields, or of a table the row as Arrow writes it, in base64. `source`: what it was read from, for its hash. `before`: of one
    that cannot be read the columns of the last row before it that can.
    """

    index: int
    fields: Mapping[str, Any]
    kept: Mapping[str, Any] | str
    source: bytes
    error: str | None = None
    before: Collection[str] = ()

    @property
    def is_request(self) -> bool:
        """Whether it is of OpenAI's format; what that has may be missing where there is nothing that a plain row has."""
        names = self.fields if self.error is None else self.before
        own = len(REQUEST.intersection(names))
        return own == 3 or own == 2 and not {*PROMPTS, *TEXTS}.intersection(names)
