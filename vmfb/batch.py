"""Several conversations at once: one decode step reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.program import Buffer, Call, Program, SessionError, alone
from castiron.vmfb.session import Row, Session


class Batch:
    """As many sessions as the bundle's largest batch function has rows, each over its own slot of the states.

    A state of the batch is that of one sequence after another along dimension 0, so that a slot is a session's states as
    they are, and the first B slots are the states of `decode_batch_B`. That function leaves a row alone whose position is
    negative.
    """

    def __init__(self, bundle: Bundle | Path | str, threads: int | None = None):
        """`threads` defaults to the physical cores. A bundle without batch functions has one slot."""
        self.program = program = Program(bundle, threads)
        states, sizes = program.manifest.states, program.manifest.widths("batch")
        self.size = max(sizes, default=1)
        buffers = [program.zeros((self.size * s.shape[0], *s.shape[1:]), s.dtype) for s in states]

        def slots(first: int, last: int) -> list[Buffer]:
            """The states of some sequences, side by side in memory."""
            return [b.part(first * s.shape[0], last * s.shape[0]) for s, b in zip(states, buffers, strict=True)]

        self.slots = [Session(program, states=slots(i, i + 1)) for i in range(self.size)]
        self._calls: dict[int, tuple[Call, memoryview, memoryview]] = {}
        for size in sizes:
            tokens, positions = (program.zeros((size,), "i32") for _ in range(2))
            call = Call(program, program.manifest.function("batch", size), (tokens, positions, *slots(0, size)))
            self._calls[size] = call, tokens.words, positions.words

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
        # The smallest batch that reaches the highest slot; one token alone is cheaper by itself.
        size = min((s for s in self._calls if s > max(tokens, default=0)), default=None)
        if size is None or len(tokens) == 1:
            return {slot: self.slots[slot].step(token) for slot, token in tokens.items()}
        return self._step_together(size, tokens)

    @alone
    def _step_together(self, size: int, tokens: Mapping[int, int]) -> dict[int, int]:
        call, words, positions = self._calls[size]
        self._keep(call, tokens)
        for slot in range(size):
            words[slot] = tokens.get(slot, 0)
            positions[slot] = self.slots[slot].position if slot in tokens else -1
        call.invoke()
        found = call.argmaxes(size)
        for slot in tokens:
            session = self.slots[slot]
            session._position += 1
            session._last = Row(call, slot)
        return {slot: found[slot] for slot in tokens}

    def _keep(self, call: Call, stepped: Mapping[int, int]) -> None:
        """Saves the logits of the slots that are not stepped, which the next call would overwrite."""
        for slot, session in enumerate(self.slots):
            if slot not in stepped and isinstance(session._last, Row) and session._last.call is call:
                session._last = session._last.logits()
