"""Embedding models: convert the tokens of a text to a vector with a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.device.open_program import open_program
from castiron.vmfb.device.program import Buffer, Call, Program, SessionError, exclusive
from castiron.vmfb.run.states import KINDS


class Encoder:
    """A compiled embedding model, which one thread at a time may use."""

    def __init__(self, source: Bundle | Path | str | Program, threads: int | None = None):
        """Load an embedding model; SessionError for a model that generates text.

        threads: None for one per physical core.
        """
        self.program = program = source if isinstance(source, Program) else open_program(source, threads)
        self.manifest = manifest = program.manifest
        if manifest.encoder is None:
            raise SessionError(f"{manifest.name} generates text and is not an embedding model; use `castiron run`")
        self.facts, self.threads = manifest.encoder, program.threads
        states = [program.state(state.shape, state.dtype) for state in manifest.states]
        self._states = [
            KINDS[state.kind](buffer.array, state.window) for state, buffer in zip(manifest.states, states, strict=True)
        ]
        start, length = (program.zeros((), "i32") for _ in range(2))
        self._start, self._length = start.words, length.words
        self._calls: dict[bool, dict[int, tuple[Call, Buffer]]] = {False: {}, True: {}}
        for function in manifest.functions:
            tokens = program.zeros((function.width,), "i32")
            call = program.call(function, (tokens, start, length, *states))
            self._calls[function.is_long][function.width] = call, tokens

    @exclusive
    def encode(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the embedding of token ids, f32 `[hidden]`; SessionError if they are invalid."""
        ids, max_tokens, vocab = np.asarray(tokens), self.facts.max_tokens, self.manifest.vocab
        if ids.ndim != 1 or not 1 <= ids.size <= max_tokens:
            raise SessionError(f"text has {ids.size} tokens; the model accepts 1 to {max_tokens}")
        if ids.dtype.kind not in "iu":
            raise SessionError(f"token ids are {ids.dtype}; give integers")
        if ids.min() < 0 or ids.max() >= vocab * (1 + self.facts.types):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise SessionError(f"token {wrong} is outside the vocabulary of {vocab}; use the model's tokenizer")
        for state in self._states:
            state.go_back(0, 0)
        calls = self._calls[self.manifest.is_long(ids.size)]
        widest = max(calls)
        for start in range(0, ids.size, widest):
            part = ids[start : start + widest]
            call, buffer = calls[min(width for width in calls if width >= part.size)]
            buffer.array[: part.size], buffer.array[part.size :] = part, 0
            self._start[0], self._length[0] = start, part.size
            call.invoke()
        return call.floats(0)
