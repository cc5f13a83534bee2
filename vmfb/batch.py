"""Several conversations at once: one decode step reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.program import Buffer, Call, Program, SessionError, alone
from castiron.vmfb.session import Row, Session


class Batch:
    """As many sessions as the bundle's largest batch function has rows, each over its own slot of the states.

    A state of the batch is that of one sequence after another along dimension 0, so that a slot is a session's states as
    they are, and any B neighbours are the states of `decode_batch_B`. That function leaves a row alone whose position is
    negative. `sizes` are the numbers of rows that there are functions of.
    """

    def __init__(self, bundle: Bundle | Path | str, threads: int | None = None):
        """`threads` defaults to the physical cores. A bundle without batch functions has one slot."""
        self.program = program = Program(bundle, threads)
        states, self.sizes = program.manifest.states, program.manifest.widths("batch")
        self.size = max(self.sizes, default=1)
        buffers = [program.zeros((self.size * s.shape[0], *s.shape[1:]), s.dtype) for s in states]

        def slots(first: int, last: int) -> list[Buffer]:
            """The states of some sequences, side by side in memory."""
            return [b.part(first * s.shape[0], last * s.shape[0]) for s, b in zip(states, buffers, strict=True)]

        self.slots = [Session(program, states=slots(i, i + 1)) for i in range(self.size)]
        self._states = slots
        # By rows and first slot, as they are needed.
        self._calls: dict[tuple[int, int], tuple[Call, memoryview, memoryview]] = {}

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Appends one token to each of the given slots; slot -> most probable next token (the lowest id of equals), -1 where
        a slot's logits are no numbers.

        SessionError, before any work, for a slot that does not exist, an id outside the vocabulary or a full context.
        """
        for slot, token in tokens.items():
            if not 0 <= slot < self.size:
                raise SessionError(f"there is no slot {slot}: the batch has {self.size}")
            session = self.slots[slot]
            if session.position >= session.context or not 0 <= token < session.vocab:
                session._checked((token,))
        # One token alone is cheaper by itself.
        if len(tokens) < 2:
            return {slot: self.slots[slot].step(token) for slot, token in tokens.items()}
        return self._step_together(*window(self.sizes, tokens), tokens)

    @alone
    def _step_together(self, size: int, first: int, tokens: Mapping[int, int]) -> dict[int, int]:
        call, words, positions = self._call(size, first)
        self._keep(call, tokens)
        for row in range(size):
            slot = first + row
            words[row] = tokens.get(slot, 0)
            positions[row] = self.slots[slot].position if slot in tokens else -1
        call.invoke()
        found = call.argmaxes(size)
        for slot in tokens:
            session = self.slots[slot]
            session._position += 1
            session._last = Row(call, slot - first)
        return {slot: found[slot - first] for slot in tokens}

    def _call(self, size: int, first: int) -> tuple[Call, memoryview, memoryview]:
        """Of so many slots from the first on, with its tokens and positions."""
        if (size, first) not in self._calls:
            tokens, positions = (self.program.zeros((size,), "i32") for _ in range(2))
            entry = self.program.manifest.function("batch", size)
            call = Call(self.program, entry, (tokens, positions, *self._states(first, first + size)))
            self._calls[size, first] = call, tokens.words, positions.words
        return self._calls[size, first]

    def _keep(self, call: Call, stepped: Mapping[int, int]) -> None:
        """Saves the logits of the slots that are not stepped, which the next call would overwrite."""
        for slot, session in enumerate(self.slots):
            if slot not in stepped and isinstance(session._last, Row) and session._last.call is call:
                session._last = session._last.logits()


def fitting(sizes: Collection[int], count: int) -> int:
    """The fewest rows of a function of `sizes` that have room for so many sequences, at most the largest of them."""
    return min(size for size in sizes if size >= count)


def window(sizes: Collection[int], slots: Collection[int]) -> tuple[int, int]:
    """The rows and the first slot of the smallest function of `sizes` that takes in all of `slots`."""
    low, size = min(slots), fitting(sizes, max(slots) - min(slots) + 1)
    # Rather where others are taken in too: each place is a call with results of its own.
    whole = low // size * size
    return size, min(whole if max(slots) < whole + size else low, max(sizes) - size)
