"""Continuous batching: which sequence's prompt is read next, and one decode step for all that are past theirs."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import shared, stand
from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.sequence import Event, Failed, Finished, Sequence
from castiron.vmfb.bundle import Bundle, open_bundle

if TYPE_CHECKING:
    from castiron.pipelines.generation.draft import Draft
    from castiron.pipelines.generation.speculate import Speculator

# Tokens of a prompt that are read between two decode steps: what others wait for, against what a narrow chunk wastes.
INTERLEAVED = 32
# A prompt that others went before this often goes first.
PATIENCE = 4

Events = list[tuple[Sequence, Event]]


class ModelFailed(PipelineError):
    """Running the model, or choosing from what it found, went wrong; `__cause__` says how."""

    def __init__(self, cause: BaseException):
        super().__init__("the model failed on this request; other requests are not affected")
        self.__cause__ = cause


class Observer:
    """What a scheduler reports of its work, on its thread; nothing is done with it here."""

    def began(self, sequence: Sequence) -> None:
        """It has a slot now, where `sequence.cached` of its prompt's tokens were found."""

    def stepped(self) -> None:
        """One decode step has run, for all sequences that were past their prompts."""

    def token(self, sequence: Sequence, since: float | None) -> None:
        """Its latest token has come: `since` seconds after the one before, None for the first."""

    def ended(self, sequence: Sequence, reason: str) -> None:
        """It has left its slot: `reason` is that of its `Finished`, or "cancelled"."""

    def failed(self, sequence: Sequence) -> None:
        """It has ended without a result."""


class Scheduler:
    """Sequences over the slots of a batch; one thread calls `turn` again and again, and no other may touch the batch.

        scheduler = Scheduler(bundle)
        scheduler.submit(Sequence(prompt, scheduler.context, max_tokens=64))
        while not scheduler.idle:
            for sequence, event in scheduler.turn():
                ...

    A turn reads one chunk of one prompt and decodes one token of every other sequence, so that a long prompt delays
    the others by a chunk, not by its length. Tokens that a grammar forces are read together, as a prompt is. Among
    prompts the one with the fewest tokens left goes first; one that shares its beginning with a prompt being read waits
    until it finds it in the cache. A sequence that fails ends alone; a decode step that fails
    ends those that were in it.

    With a `draft` a sequence that is alone decodes several tokens a turn, where proposals are right; not one whose
    log-probabilities are told.
    """

    def __init__(
        self,
        bundle,
        threads: int | None = None,
        observer: Observer | None = None,
        store: PrefixStore | None = None,
        draft: Draft | None = None,
    ):
        """Over as many slots as the bundle's batch functions have rows, one without them; `threads` defaults to the
        physical cores. `bundle` may also be its path, or a `castiron.vmfb.batch.Batch` that nothing else uses. `store`: where
        states of the beginnings of its prompts are kept. `draft`: a model that proposes tokens, as `open_draft` opens it."""
        self.bundle, self.batch = None, bundle
        if isinstance(bundle, Bundle | Path | str):
            from castiron.vmfb.batch import Batch

            self.bundle = open_bundle(bundle)
            self.batch = Batch(self.bundle, threads)
        self.slots, self.context = self.batch.size, self.batch.slots[0].context
        self.manifest = self.batch.slots[0].manifest
        self.observer = observer or Observer()
        self.cache = PrefixCache(self.batch.slots, store)
        self.draft = draft
        self._speculator: Speculator | None = None
        self.waiting: deque[Sequence] = deque()
        self.reading: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        widths = self.manifest.prefill_widths
        self.widest = max(widths, default=1)
        self.interleaved = max((w for w in widths if w <= INTERLEAVED), default=1)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.decoding)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence that was made for this context; it ends at the model's end token unless it has other stops."""
        if sequence.stop_tokens is None:
            sequence.stop_tokens = frozenset(self.manifest.tokens.eos)
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Lets go of a sequence, which has no more events; nothing if it has ended. Not during a turn."""
        self._leave(sequence, "cancelled")

    def turn(self) -> Events:
        """One chunk of a prompt and one decode step, and what the sequences have to tell."""
        events: Events = []
        if self.waiting or self.reading:
            self._read(events)
        if self.decoding:
            self._decode(events)
        return events

    def give_up(self, error: BaseException) -> Events:
        """Ends every sequence and forgets every slot."""
        events: Events = []
        self._fail([*self.reading.values(), *self.decoding.values(), *self.waiting], error, events)
        return events

    def _read(self, events: Events) -> None:
        """The next chunk of the prompt whose turn it is."""
        slot, sequence = self._next()
        if sequence is None:
            return
        try:
            if slot is None:
                slot = self._begin(sequence)
            session = self.batch.slots[slot]
            width = self.interleaved if self.decoding else self.widest
            chunk = sequence.prompt[session.position :][:width]
            argmax = session.prefill(chunk)
            self.cache.fed(slot, chunk)
            if self.cache.store:
                self.cache.store.offer(session, sequence.prompt)
        except Exception as error:
            self._fail([sequence], error, events)
            return
        if session.position == len(sequence.prompt):
            session.keep()
            self.decoding[slot] = self.reading.pop(slot)
            self._advance(slot, sequence, argmax, events)

    def _next(self) -> tuple[int | None, Sequence | None]:
        """Whose prompt is read on, with its slot; None for a sequence that has none yet."""
        free = self.batch.size - len(self.reading) - len(self.decoding)
        found: list[tuple[int, int | None, Sequence]] = [
            (len(s.prompt) - self.batch.slots[slot].position, slot, s) for slot, s in self.reading.items()
        ]
        for sequence in list(self.waiting)[:free]:
            known = self.cache.longest(sequence.prompt)
            if all(shared(sequence.prompt, other.prompt) <= known for other in self.reading.values()):
                found.append((len(sequence.prompt) - known, None, sequence))
        if not found:
            return None, None
        _, slot, chosen = min(found, key=lambda f: (f[2].passed_over < PATIENCE, f[0], f[2].arrived))
        for _, _, sequence in found:
            sequence.passed_over = 0 if sequence is chosen else sequence.passed_over + 1
        return slot, chosen

    def _begin(self, sequence: Sequence) -> int:
        """Gives the sequence a slot; returns it."""
        taken = {**self.reading, **self.decoding}
        free = [slot for slot in range(self.batch.size) if slot not in taken]
        slot, sequence.cached = self.cache.take(sequence.prompt, free)
        self.waiting.remove(sequence)
        self.reading[slot] = sequence
        sequence.began = time.monotonic()
        self.observer.began(sequence)
        return slot

    def _decode(self, events: Events) -> None:
        """One token for every sequence that has a token to go on from; several that are forced are read first."""
        sequences, tokens = {}, {}
        for slot, sequence in list(self.decoding.items()):
            unread = sequence.tokens[self.batch.slots[slot].position - len(sequence.prompt) :]
            if len(unread) > 1:
                self._read_forced(slot, sequence, unread, events)
            elif self._alone(sequence):
                self._speculate(slot, sequence, unread, events)
            else:
                sequences[slot], tokens[slot] = sequence, unread[0]
        if not tokens:
            return
        try:
            found = self.batch.step(tokens)
        except Exception as error:
            self._fail(list(sequences.values()), error, events)
            return
        self.observer.stepped()
        for slot, sequence in sequences.items():
            self.cache.fed(slot, [tokens[slot]])
            self._advance(slot, sequence, found[slot], events)

    def _alone(self, sequence: Sequence) -> bool:
        """Whether proposals are worth a pass of this sequence's own."""
        others = len(self.decoding) > 1 or self.reading or self.waiting
        return self.draft is not None and not others and sequence.top_logprobs is None

    def _speculate(self, slot: int, sequence: Sequence, unread: list[int], events: Events) -> None:
        """The tokens that one pass over the sequence's last one and proposals brings."""
        from castiron.pipelines.generation.speculate import Speculator

        session, begun, told = self.batch.slots[slot], self.batch.slots[slot].position, []
        speculator = self._speculator
        try:
            if speculator is None or speculator.text is not sequence:
                speculator = self._speculator = Speculator(session, sequence, draft=self.draft)
                speculator.prompt_seconds = sequence.first - sequence.began
            speculator.feed(unread)
            while speculator.ready:
                before = sequence.last
                told += speculator.advance()
                self.observer.token(sequence, sequence.last - before)
        except Exception as error:
            self._fail([sequence], error, events)
            return
        self.observer.stepped()
        start = begun - len(sequence.prompt)
        self.cache.fed(slot, sequence.tokens[start : start + session.position - begun])
        events += [(sequence, event) for event in told]
        if told and isinstance(told[-1], Finished):
            self._leave(sequence, told[-1].reason)
        elif sequence.forced:
            self._advance(slot, sequence, 0, events)

    def _read_forced(self, slot: int, sequence: Sequence, tokens: list[int], events: Events) -> None:
        """Tokens of a sequence that are certain; behind the last of them comes one of the model's."""
        chunk = tokens[: self.interleaved]
        try:
            argmax = self.batch.slots[slot].prefill(chunk)
            self.cache.fed(slot, chunk)
        except Exception as error:
            self._fail([sequence], error, events)
            return
        if len(chunk) == len(tokens):
            self._advance(slot, sequence, argmax, events)

    def _advance(self, slot: int, sequence: Sequence, argmax: int, events: Events) -> None:
        """The next token, and those that it forces."""
        forced = True
        while forced:
            before = sequence.last
            try:
                told = sequence.advance(argmax, self.batch.slots[slot].logits)
            except Exception as error:
                self._fail([sequence], error, events)
                return
            self.observer.token(sequence, sequence.last - before if before else None)
            events += [(sequence, event) for event in told]
            forced = sequence.forced
        if told and isinstance(told[-1], Finished):
            self._leave(sequence, told[-1].reason)

    def _leave(self, sequence: Sequence, reason: str) -> None:
        """What the caches hold stays for the prompts to come."""
        if (slot := self._remove(sequence)) is not None:
            self.cache.touch(slot)
            self.observer.ended(sequence, reason)

    def _fail(self, sequences: list[Sequence], error: BaseException, events: Events) -> None:
        """Ends sequences and forgets what their slots hold."""
        failure = ModelFailed(error)
        for sequence in sequences:
            if (slot := self._remove(sequence)) is not None:
                stand(self.batch.slots[slot], 0)
            self.observer.failed(sequence)
            events.append((sequence, Failed(failure)))

    def _remove(self, sequence: Sequence) -> int | None:
        """Takes a sequence out; the slot that it had, None if it waited or is not here."""
        for running in (self.reading, self.decoding):
            for slot, other in running.items():
                if other is sequence:
                    del running[slot]
                    return slot
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        return None
