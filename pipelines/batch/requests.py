"""Rows into work for a scheduler: what all kinds of rows have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from castiron.pipelines.batch.row import Row
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.sequence import Event
from castiron.pipelines.generation.sequence import Sequence as Generated
from castiron.pipelines.serve.errors import ApiError
from castiron.vmfb.manifest import LOG, Manifest
from castiron.vmfb.manifest import TEXT as MODULE_TEXT

# Files of a bundle that no answer depends on.
IDLE_FILES = (LOG, MODULE_TEXT)


@dataclass(frozen=True)
class Outcome:
    """What became of a row: the columns `added` to what it `keeps`, and its tokens; `cached` are of its prompt."""

    added: Mapping[str, Any]
    failed: bool = False
    keeps: bool = True
    prompt: int = 0
    generated: int = 0
    cached: int = 0


@dataclass
class Work:
    """A row under way: the sequences that a scheduler runs for it, none if it needs none, and what it comes to.

    `tell` takes what the sequences tell, and `outcome` is asked once after the end of the last.
    """

    row: Row
    key: str
    outcome: Callable[[], Outcome]
    sequences: Sequence[Generated] = ()
    tell: Callable[[Generated, Event], None] = lambda sequence, event: None


class Kind(Protocol):
    """What makes rows of a kind into work."""

    def draws(self, row: Row) -> bool:
        """Whether its answer is drawn by a seed that the row does not name."""
        ...

    def work(self, row: Row, key: str, seed: int) -> Work:
        """PipelineError, or an ApiError with OpenAI's words, for a row that cannot be answered."""
        ...

    def failed(self, row: Row, key: str, error: Exception) -> Outcome: ...


class Requests:
    """Rows of OpenAI's format and plain ones, with their keys, into work."""

    def __init__(self, plain: Kind, openai: Callable[[], Kind], identity: bytes, seed: int):
        """`openai` is called when the first such row comes. `identity`: a hash of all that answers depend on besides the row.
        `seed`: where tokens are drawn, each row draws by a seed of its own that follows from this one."""
        self.plain, self.openai, self.identity, self.seed = plain, openai, identity, seed
        self._openai: Kind | None = None

    def key(self, row: Row) -> str:
        """A hash of a row and all that its answer depends on: 32 hex digits. Where the answer is drawn, or names the row's
        line, its number is part of it, so that equal rows draw different answers."""
        numbered = row.error is not None or self._kind(row).draws(row)
        return hashlib.sha256(self.identity + (b"%d " % row.index if numbered else b"") + row.source).hexdigest()[:32]

    def work(self, row: Row, key: str) -> Work:
        """What there is to do for a row; of one that cannot be answered the outcome says why."""
        kind = self._kind(row)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:8]) >> 1
        try:
            if row.error is not None:
                raise PipelineError(row.error)
            return kind.work(row, key, seed)
        except (PipelineError, ApiError) as error:
            failure = kind.failed(row, key, error)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Whatever a row has that nobody thought of, the others go on.
            failure = kind.failed(row, key, PipelineError(f"castiron failed on this row: {type(error).__name__}: {error}"))
        return Work(row, key, lambda: failure)

    def _kind(self, row: Row) -> Kind:
        if not row.is_request:
            return self.plain
        if self._openai is None:
            self._openai = self.openai()
        return self._openai


def identity(manifest: Manifest, options: Mapping[str, Any]) -> bytes:
    """A hash of all but the row that its answer depends on."""
    files = {name: file.sha256 for name, file in manifest.files.items() if name not in IDLE_FILES}
    facts = [files, manifest.name, manifest.context, manifest.numerics, manifest.generation, repr(manifest.tokens),
             repr(manifest.encoder), manifest.tool_form, dict(options)]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).digest()
