"""Several conversations at once: one decode step reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.cover import Cover, Span, costs
from castiron.vmfb.program import Buffer, Call, NoNumbers, Program, SessionError, alone
from castiron.vmfb.session import Row, Session


class Batch:
    """As many sessions as the bundle's largest batch function has rows, each over its own slot of the states.

    A state of the batch is that of one sequence after another along dimension 0, so that a slot is a session's states as
    they are, and any B slots side by side are the states of `decode_batch_B`. That function leaves a row alone whose
    position is negative, but takes as long as for all: slots far apart are stepped by several calls where that is sooner.
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
        self._cover = Cover(self.size, costs(program.manifest))
        self._calls: dict[Span, tuple[Call, memoryview, memoryview]] = {}
        for first, width in self._cover.spans:
            if width > 1:
                tokens, positions = (program.zeros((width,), "i32") for _ in range(2))
                operands = tokens, positions, *slots(first, first + width)
                call = Call(program, program.manifest.function("batch", width), operands)
                self._calls[first, width] = call, tokens.words, positions.words

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
        found: dict[int, int] = {}
        for first, width in self._cover.of(tuple(sorted(tokens))):
            if width == 1:
                try:
                    found[first] = self.slots[first].step(tokens[first])
                except NoNumbers:
                    found[first] = -1
            else:
                found |= self._step_together((first, width), tokens)
        return found

    @alone
    def _step_together(self, span: Span, tokens: Mapping[int, int]) -> dict[int, int]:
        """The tokens of those slots that are within the span."""
        (call, words, positions), (first, width) = self._calls[span], span
        taken = [slot for slot in range(first, first + width) if slot in tokens]
        self._keep(call, taken)
        for row in range(width):
            words[row] = tokens.get(first + row, 0)
            positions[row] = self.slots[first + row].position if first + row in tokens else -1
        call.invoke()
        found = call.argmaxes(width)
        for slot in taken:
            session = self.slots[slot]
            session._position += 1
            session._last = Row(call, slot - first)
        return {slot: found[slot - first] for slot in taken}

    def _keep(self, call: Call, stepped: Collection[int]) -> None:
        """Saves the logits of the slots that are not stepped, which the next call would overwrite."""
        for slot, session in enumerate(self.slots):
            if slot not in stepped and isinstance(session._last, Row) and session._last.call is call:
                session._last = session._last.logits()
