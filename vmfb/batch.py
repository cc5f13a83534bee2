"""Several conversations at once: one decode step reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.program import Call, Program
from castiron.vmfb.session import Row, Session, SessionError


class Batch:
    """As many sessions as the bundle's largest batch function has rows, each over its own slot of the caches.

    The caches are `[size * layers, context, kv_heads, head_dim]`, a slot after another, so that a slot is a session's
    caches as they are, and the first B slots are the caches of `decode_batch_B`. Attention leaves out a row that is not
    stepped; where StableHLO computes it, the row writes where its session's next token will, and is forgotten.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None):
        """`threads` defaults to the physical cores. A bundle without batch functions has one slot."""
        if threads is not None and threads < 1:
            raise SessionError(f"threads is {threads}, and a batch needs at least 1")
        program = Program(bundle, threads)
        cache, sizes = program.manifest.cache, program.manifest.widths("batch")
        self.program, self.size = program, max(sizes, default=1)
        layers = cache.layers
        self._leaves_out = program.manifest.lowering == "kernels"
        caches = [program.zeros((self.size * layers, *cache.shape[1:]), cache.dtype) for _ in range(2)]
        self.slots: list[Session] = []
        for i in range(self.size):
            session = object.__new__(Session)
            session._start(program, tuple(c.part(i * layers, (i + 1) * layers) for c in caches))
            self.slots.append(session)
        self._calls = {}
        for size in sizes:
            tokens, positions = (program.zeros((size,), "i32") for _ in range(2))
            operands = (tokens, positions, *(c.part(0, size * layers) for c in caches))
            self._calls[size] = Call(program, f"decode_batch_{size}", operands), tokens.words, positions.words

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Appends one token to each of the given slots; slot -> most probable next token (the lowest id of equals).

        SessionError, before any work, for a slot that does not exist, an id outside the vocabulary or a full context.
        """
        for slot, token in tokens.items():
            if not 0 <= slot < self.size:
                raise SessionError(f"there is no slot {slot}: the batch has {self.size}")
            session = self.slots[slot]
            if session.position >= session.context or not 0 <= token < session.vocab:
                session._refuse((token,))
        # The smallest batch that reaches the highest slot; one token alone is cheaper by itself.
        size = min((s for s in self._calls if s > max(tokens, default=0)), default=None)
        if size is None or len(tokens) == 1:
            return {slot: self.slots[slot].step(token) for slot, token in tokens.items()}
        call, words, positions = self._calls[size]
        self._keep(call, tokens)
        for slot in range(size):
            session = self.slots[slot]
            words[slot] = tokens.get(slot, 0)
            if slot not in tokens and self._leaves_out:
                positions[slot] = -1
                continue
            # A full session that is not stepped gives up its last position: there is no next one to write to.
            if slot not in tokens and session.position == session.context:
                session.rewind(session.context - 1)
            positions[slot] = session.position
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
                session._last = session._last.keep()
