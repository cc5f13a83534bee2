"""Batched decoding: one call reads the weights once for several sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import Manifest
from castiron.vmfb.device.open_program import open_program
from castiron.vmfb.device.program import Buffer, Call, NanLogitsError, SessionError, exclusive
from castiron.vmfb.run.session import Row, Session

# FLOP that a CPU core computes in the time that it takes to read one byte: 100 GFLOP/s at 10 GB/s.
FLOPS_PER_BYTE = 10

# A call: (first slot, number of slots). A call of one slot is a `decode_step`.
Span = tuple[int, int]


class Cover:
    """The cheapest decode calls that append one token to each of the given slots.

    A call of width w decodes w adjacent slots, the first of which is a multiple of w; some of them
    may get no token. Ties go to the fewest calls, then to the smallest total width.
    """

    def __init__(self, size: int, costs: Mapping[int, float]):
        """Plan for `size` slots; `costs`: time of a call by width, in any unit."""
        self.spans = {(first, w): costs[w] for w in costs for first in range(0, size - w + 1, w)}
        self.widths = sorted(costs)
        self.of = lru_cache(4096)(self._of)

    def _of(self, slots: tuple[int, ...]) -> tuple[Span, ...]:
        # best[n]: (cost, number of calls, total width, spans) of the best plan for the last n slots.
        best: list[tuple[float, int, int, tuple[Span, ...]]] = [(0.0, 0, 0, ())]
        for slot in reversed(slots):
            found = []
            for width in self.widths:
                span = slot // width * width, width
                if span in self.spans:
                    cost, calls, widths, spans = best[sum(other >= span[0] + width for other in slots)]
                    found.append((cost + self.spans[span], calls + 1, widths + width, (span, *spans)))
            best.append(min(found))
        return best[-1][3]


def costs_of(manifest: Manifest) -> dict[int, float]:
    """Return the estimated time of one decode call by width, in the time of one FLOP.

    It is the sum over the call's kernels at position 0 of their compute time or memory time,
    whichever is longer; 0 for all widths if the manifest does not have these numbers.
    """
    functions = [manifest.function("decode"), *(manifest.function("batch", width) for width in manifest.widths("batch"))]
    work = manifest.compile.get("work", {})
    if not all(work.get(function.name) for function in functions):
        return dict.fromkeys((function.width for function in functions), 0.0)
    cost = lambda kernel: kernel["calls"] * max(kernel["flops"][0], FLOPS_PER_BYTE * kernel["bytes"][0])
    return {function.width: sum(map(cost, work[function.name].values())) for function in functions}


class Batch:
    """Slots of sequences that are decoded together, so that a call reads the weights only once.

    slots: a `Session` each. The bundle's functions `decode_batch_B` decode B adjacent slots; there
    are as many slots as the largest B. A call takes as long if some of its slots get no token, so
    several narrow calls may be faster than a wide one. The slots' states are parts of one buffer
    per state, joined along dimension 0.
    """

    def __init__(self, source: Bundle | Path | str | Session, threads: int | None = None, single: bool = False):
        """Load a bundle, or use an open session as the only slot; `single`: have only one slot."""
        self._calls: dict[Span, tuple[Call, memoryview, memoryview]] = {}
        if single or not isinstance(source, Bundle | Path | str):
            self.slots, self.size = [Session(source, threads) if isinstance(source, Bundle | Path | str) else source], 1
            return
        bundle = open_bundle(source)
        states, self.size = bundle.manifest.states, max(bundle.manifest.widths("batch"), default=1)
        self.program = program = open_program(bundle, threads, self.size)
        buffers = [program.state((self.size * s.shape[0], *s.shape[1:]), s.dtype) for s in states]

        def slots(first: int, last: int) -> list[Buffer]:
            return [b.part(first * s.shape[0], last * s.shape[0]) for s, b in zip(states, buffers, strict=True)]

        self.slots = [Session(program, states=slots(i, i + 1)) for i in range(self.size)]
        self._cover = Cover(self.size, costs_of(program.manifest))
        for first, width in self._cover.spans:
            if width > 1:
                tokens, positions = (program.zeros((width,), "i32") for _ in range(2))
                operands = tokens, positions, *slots(first, first + width)
                call = program.call(program.manifest.function("batch", width), operands)
                self._calls[first, width] = call, tokens.words, positions.words

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Append one token to each given slot; return the argmax after it by slot, -1 for NaN.

        SessionError, before any work, for an invalid slot or token, or a full context.
        """
        for slot in tokens:
            if not 0 <= slot < self.size:
                raise SessionError(f"slot {slot} does not exist; the batch has slots 0 to {self.size - 1}")
        if len(tokens) == 1:
            return {slot: self._step_single(slot, token) for slot, token in tokens.items()}
        for slot, token in tokens.items():
            session = self.slots[slot]
            if session.position >= session.context or not 0 <= token < session.vocab:
                session._checked((token,))
        found: dict[int, int] = {}
        for first, width in self._cover.of(tuple(sorted(tokens))):
            if width == 1:
                found[first] = self._step_single(first, tokens[first])
            else:
                found |= self._step_together((first, width), tokens)
        return found

    def _step_single(self, slot: int, token: int) -> int:
        try:
            return self.slots[slot].step(token)
        except NanLogitsError:
            return -1

    @exclusive
    def _step_together(self, span: Span, tokens: Mapping[int, int]) -> dict[int, int]:
        (call, words, positions), (first, width) = self._calls[span], span
        taken = [slot for slot in range(first, first + width) if slot in tokens]
        for slot in taken:
            self.slots[slot].prepare(self.slots[slot].position + 1)
        self._save_logits(call, taken)
        for row in range(width):
            words[row] = tokens.get(first + row, 0)
            positions[row] = self.slots[first + row].position if first + row in tokens else -1
        call.invoke()
        found = call.argmaxes(width)
        for slot in taken:
            session = self.slots[slot]
            session.tokens[session.position] = tokens[slot]
            session.position += 1
            session._last = Row(call, slot - first)
        return {slot: found[slot - first] for slot in taken}

    def _save_logits(self, call: Call, stepped: Collection[int]) -> None:
        """Copy logits of slots not in `stepped`, which the next run of `call` would overwrite."""
        for slot, session in enumerate(self.slots):
            if slot not in stepped and isinstance(session._last, Row) and session._last.call is call:
                session._last = session._last.logits()
