"""Running a bundle: one conversation's caches and position, and the calls that move it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.chunks import chunks
from castiron.vmfb.program import Buffer, Call, Program


class SessionError(Exception):
    """A request that a session refuses before doing any of it; one sentence."""


class Session:
    """The caches k and v of one conversation, filled up to `position`, over a program that forks share.

    Sessions of one program may not run at the same time in several threads. A large context costs memory only as it
    is filled: the caches are pages that the system supplies when first written.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None):
        """`threads` defaults to the physical cores; SessionError for less than one."""
        if threads is not None and threads < 1:
            raise SessionError(f"threads is {threads}, and a session needs at least 1")
        self._start(Program(bundle, threads))

    def _start(self, program: Program, caches: tuple[Buffer, Buffer] | None = None) -> None:
        self.program = program
        self.manifest = program.manifest
        self.context, self.vocab, self.threads = self.manifest.context, self.manifest.vocab, program.threads
        self._position = 0
        cache = self.manifest.cache
        self._k, self._v = caches or tuple(program.zeros(cache.shape, cache.dtype) for _ in range(2))
        self._pos, self._length = program.zeros((), "i32"), program.zeros((), "i32")
        token = program.zeros((), "i32")
        self._decode = Call(program, "decode_step", (token, self._pos, self._k, self._v))
        # Written to as plain memory: a numpy scalar assignment costs twice as much.
        self._token_word, self._pos_word, self._length_word = token.words, self._pos.words, self._length.words
        self._prefill: dict[int, tuple[Call, Buffer]] = {}
        for width in self.manifest.prefill_widths:
            tokens = program.zeros((width,), "i32")
            operands = (tokens, self._pos, self._length, self._k, self._v)
            self._prefill[width] = (Call(program, f"prefill_{width}", operands), tokens)
        self._verify: dict[int, tuple[Call, Buffer]] = {}
        for width in self.manifest.widths("verify"):
            tokens = program.zeros((width,), "i32")
            operands = (tokens, self._pos, self._k, self._v)
            self._verify[width] = (Call(program, f"verify_{width}", operands), tokens)
        # The kernels skip rows past the length; StableHLO alone computes them.
        self._padding = 0.0 if self.manifest.lowering == "kernels" else 1.0
        self._last: Call | Row | _Kept | None = None

    @property
    def position(self) -> int:
        """How many tokens the caches hold; the next one goes here."""
        return self._position

    def step(self, token: int) -> int:
        """Appends one token and returns the most probable next one (the lowest id of equals)."""
        position = self._position
        if position >= self.context or not 0 <= token < self.vocab:
            self._refuse((token,))
        self._token_word[0] = token
        self._pos_word[0] = position
        call = self._decode
        call.invoke()
        self._position = position + 1
        self._last = call
        return call.argmax()

    def count_runtime(self) -> Callable[[], float]:
        """What returns the seconds that steps from now on spend inside the runtime: the rest of a step is Python's."""
        call = self._decode
        call.count_seconds()
        return lambda: call.seconds

    def prefill(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> int:
        """Appends `tokens` from `position` on, in chunks, and returns the most probable token after them.

        `progress` gets (tokens done, tokens in all) after every chunk. SessionError, before any work, for no tokens,
        an id outside the vocabulary or an end past the context.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or self._position + ids.size > self.context \
                or ids.min() < 0 or ids.max() >= self.vocab:  # fmt: skip
            self._refuse(tokens)
        done, total = 0, int(ids.size)
        best = 0
        for width, count in chunks(total, self._position, self.context, self.manifest.prefill_widths, self._padding):
            best = self._chunk(width, ids[done : done + count])
            done += count
            if progress:
                progress(done, total)
        return best

    def _chunk(self, width: int, ids: np.ndarray) -> int:
        if width == 1:
            return self.step(int(ids[0]))
        call, tokens = self._prefill[width]
        tokens.array[: ids.size] = ids
        tokens.array[ids.size :] = 0
        self._pos_word[0], self._length_word[0] = self._position, ids.size
        call.invoke()
        self._position += int(ids.size)
        self._last = call
        return call.argmax()

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Appends `tokens`, as many as a verify function takes, and returns the most probable token after each.

        `rewind` takes back those that were not wanted. SessionError for another number of tokens, an id outside the
        vocabulary or an end past the context.
        """
        if len(tokens) not in self._verify:
            widths = ", ".join(map(str, self._verify)) or "none: compile the bundle with --speculate"
            raise SessionError(f"{len(tokens)} tokens cannot be verified at once; the bundle's widths are {widths}")
        if self._position + len(tokens) > self.context or min(tokens) < 0 or max(tokens) >= self.vocab:
            self._refuse(tokens)
        call, buffer = self._verify[len(tokens)]
        buffer.array[:] = tokens
        self._pos_word[0] = self._position
        call.invoke()
        self._position += len(tokens)
        self._last = Row(call, len(tokens) - 1)
        return call.argmaxes(len(tokens))

    def margins(self) -> list[float]:
        """Of each token of the last `verify`: how far its most probable successor is ahead of the second, as a share of
        the largest logit. SessionError if another call, or none, came last."""
        if not isinstance(self._last, Row):
            raise SessionError("there are no margins: verify first")
        call = self._last.call
        return [_margin(call.logits(row)) for row in range(self._last.row + 1)]

    def copy_from(self, other: Session, positions: int) -> None:
        """Takes over the first `positions` positions of a session of the same program and stands after them."""
        if other.program is not self.program or not 0 <= positions <= other.position:
            raise SessionError(f"{positions} positions cannot be copied from a session at {other.position}")
        for mine, theirs in ((self._k, other._k), (self._v, other._v)):
            mine.array[:, :positions] = theirs.array[:, :positions]
        self._position, self._last = positions, None

    def logits(self) -> np.ndarray:
        """The logits after the last token, f32 `[vocab]`, a copy; SessionError before a token or after a rewind."""
        if self._last is None:
            raise SessionError("there are no logits yet: prefill or step first")
        return self._last.logits()

    def rewind(self, position: int) -> None:
        """Forgets every token from `position` on; SessionError for a position that was never reached."""
        if not 0 <= position <= self._position:
            raise SessionError(f"a session at position {self._position} cannot be rewound to {position}")
        if position != self._position:
            self._position, self._last = position, None

    def fork(self) -> Session:
        """A session of its own that goes on from here, with a copy of the caches up to `position`."""
        other = object.__new__(type(self))
        other._start(self.program)
        other.copy_from(self, self._position)
        other._last = self._last and _Kept(self._last.logits())
        return other

    def _refuse(self, tokens: Sequence[int]) -> NoReturn:
        """Says what is wrong with `tokens`."""
        ids = np.asarray(tokens)
        if not ids.size:
            raise SessionError("there are no tokens to take")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise SessionError(f"tokens are {ids.dtype}{list(ids.shape)}, not a list of whole numbers")
        if outside := [int(t) for t in ids if not 0 <= t < self.vocab]:
            raise SessionError(f"token {outside[0]} is outside the vocabulary of {self.vocab}")
        raise SessionError(
            f"{ids.size} token{'s' * (ids.size > 1)} from position {self._position} would end past the context of "
            f"{self.context}: shorten the prompt or compile with a larger --context"
        )


class Row:
    """Logits at one row of a call's results, until the next call."""

    def __init__(self, call: Call, row: int):
        self.call, self.row = call, row

    def logits(self) -> np.ndarray:
        return self.call.logits(self.row)

    def keep(self) -> _Kept:
        """The same, past the next call."""
        return _Kept(self.logits())


class _Kept:
    """Logits that outlive the call that made them."""

    def __init__(self, logits: np.ndarray):
        self._logits = logits

    def logits(self) -> np.ndarray:
        return self._logits.copy()


def _margin(logits: np.ndarray) -> float:
    """Between the two largest of `logits` f32 `[vocab]`, which are overwritten; quicker than a partition."""
    best = int(logits.argmax())
    largest = logits[best]
    scale = max(abs(largest), abs(logits.min()))
    logits[best] = -np.inf
    return float((largest - logits.max()) / scale) if scale else 0.0
