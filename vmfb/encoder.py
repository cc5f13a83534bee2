"""Running a bundle that encodes texts: the tokens of one become its vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.program import Call, Program, SessionError, alone
from castiron.vmfb.states import KINDS


class Encoder:
    """The encode functions of a bundle; one thread runs them at a time."""

    def __init__(self, source: Bundle | Path | str | Program, threads: int | None = None):
        """`source`: a bundle or its path, which `threads` threads run (default: the physical cores), or a program that runs
        already. SessionError for a bundle that generates."""
        self.program = program = source if isinstance(source, Program) else Program(source, threads)
        self.manifest = manifest = program.manifest
        if manifest.encoder is None:
            raise SessionError(f"{manifest.name} generates text and was not made to encode it: castiron run answers with it")
        self.facts, self.threads = manifest.encoder, program.threads
        states = [program.zeros(state.shape, state.dtype) for state in manifest.states]
        self._states = [
            KINDS[state.kind](buffer.array, state.window) for state, buffer in zip(manifest.states, states, strict=True)
        ]
        start, length = (program.zeros((), "i32") for _ in range(2))
        self._start, self._length = start.words, length.words
        self._calls = {}
        for width in manifest.widths("encode"):
            tokens = program.zeros((width,), "i32")
            self._calls[width] = Call(program, manifest.function("encode", width), (tokens, start, length, *states)), tokens

    @alone
    def encode(self, tokens: Sequence[int]) -> np.ndarray:
        """The vector of a text, f32 `[hidden]`. SessionError for no tokens, more than `max_tokens`, and an id outside the
        vocabulary."""
        ids, most, vocab = np.asarray(tokens), self.facts.max_tokens, self.manifest.vocab
        if ids.ndim != 1 or not 1 <= ids.size <= most:
            raise SessionError(f"a text of {ids.size} tokens has no vector here; it needs 1 to {most} of them")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab * (1 + self.facts.types):
            raise SessionError(f"tokens must be whole numbers below {vocab}, the size of the vocabulary")
        for state in self._states:
            state.go_back(0, 0)
        widest = max(self._calls)
        for start in range(0, ids.size, widest):
            part = ids[start : start + widest]
            call, buffer = self._calls[min(width for width in self._calls if width >= part.size)]
            buffer.array[: part.size], buffer.array[part.size :] = part, 0
            self._start[0], self._length[0] = start, part.size
            call.invoke()
        return call.vector()
