"""Continuous batching: which sequence's prompt is read next, and one decode step for all that are past theirs."""

from __future__ import annotations

import time
from bisect import insort, insort_left
from collections import Counter
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.constraint import CannotFollow
from castiron.pipelines.generation.pausing import Paused
from castiron.pipelines.generation.positions import shared, stand
from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.scores import score_chunk, width_of
from castiron.pipelines.generation.sequence import Event, Failed, Finished, Sequence, yielding
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.program import NoNumbers, SessionError

if TYPE_CHECKING:
    from castiron.pipelines.generation.draft import Draft
    from castiron.pipelines.generation.speculate import Speculator
    from castiron.vmfb.manifest import Manifest

# Tokens of a prompt that are read between two decode steps: what others wait for, against what a narrow chunk wastes.
INTERLEAVED = 32
# A token whose logits are looked at takes at most as long as so many others of a prompt.
SCORING = 2
# A prompt that others went before this often goes first; of several such the oldest.
PATIENCE = 4

Events = list[tuple[Sequence, Event]]


class ModelFailed(PipelineError):
    """Running the model, or choosing from what it found, went wrong; `__cause__` says how."""

    def __init__(self, cause: BaseException):
        why = f": {cause}" if isinstance(cause, SessionError) else "; other requests are not affected"
        super().__init__(f"the model failed on this request{why}")
        self.__cause__ = cause


class Observer:
    """What a scheduler reports of its work, on its thread; nothing is done with it here."""

    def began(self, sequence: Sequence) -> None:
        """It has a slot now, where `sequence.cached` of its prompt's tokens were found."""

    def stepped(self) -> None:
        """One decode step has run, for all sequences that were past their prompts."""

    def paused(self, sequence: Sequence) -> None:
        """It has given its slot to one that goes first."""

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
    the others by a chunk, not by its length; what the cache has of a prompt is taken in a turn of its own, if others
    would wait, and read from disk beside the turns. Tokens that a grammar forces are such a chunk, or as long as another
    one is read go through the step one by one.

    What is read next, and so who is given a free slot, is decided by: a lower `priority`; a client with fewer slots than
    its share, which is that of all clients that are here; having been passed over `PATIENCE` times, and then age; the
    fewest tokens left to read. One that shares its beginning with an older prompt being read waits until it finds it in
    the cache. A sequence that fails ends alone; a decode step that fails ends those that were in it. Where no slot is free, one
    of a higher `priority` number waits on with its states aside, at most as many of them as there are slots.

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
        self.cache = PrefixCache(self.batch.slots, store, width_of(self.manifest.widths("verify"), INTERLEAVED // SCORING))
        self.draft = draft
        self._speculator: Speculator | None = None
        # By priority, and in the order in which they came.
        self.waiting: list[Sequence] = []
        self.reading: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.widest = max(self.manifest.prefill_widths, default=1)
        self.interleaved = interleaved(self.manifest)
        # Whether all prompts for which there are slots are read before the next step: where nobody waits for a token, so that
        # no step is for fewer than it might be.
        self.fills = False

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.decoding)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence that was made for this context; it ends at the model's end token unless it has other stops."""
        if sequence.stop_tokens is None:
            sequence.stop_tokens = frozenset(self.manifest.tokens.eos)
        insort(self.waiting, sequence, key=lambda s: s.priority)

    def cancel(self, sequence: Sequence) -> None:
        """Lets go of a sequence, which has no more events; nothing if it has ended. Not during a turn."""
        self._leave(sequence, "cancelled")

    def turn(self) -> Events:
        """One chunk of what is to be read and one decode step, and what the sequences have to tell."""
        events: Events = []
        self._preempt()
        forced = {slot: s for slot, s in self.decoding.items() if s.constraint and len(self._unread(slot, s)) > 1}
        if self.waiting or self.reading or forced:
            while self._read(forced, events) and self.fills and (self.reading or self.waiting and self._free):
                forced = {}
        if self.decoding:
            self._decode(events)
        return events

    def give_up(self, error: BaseException) -> Events:
        """Ends every sequence and forgets every slot."""
        events: Events = []
        self._fail([*self._running.values(), *self.waiting], error, events)
        return events

    def _unread(self, slot: int, sequence: Sequence) -> list[int]:
        """Its tokens that the model has not taken in, of which several are forced."""
        return sequence.tokens[self.batch.slots[slot].position - len(sequence.prompt) :]

    @property
    def _running(self) -> dict[int, Sequence]:
        """Those that have a slot."""
        return {**self.reading, **self.decoding}

    @property
    def _free(self) -> int:
        return self.slots - len(self.reading) - len(self.decoding)

    def _read(self, forced: dict[int, Sequence], events: Events) -> bool:
        """The next chunk of the prompt, or of the `forced` tokens, whose turn it is; False where it is nobody's."""
        slot, sequence = self._next(forced)
        if sequence is None:
            return False
        try:
            if slot is None:
                resumed, slot = sequence.paused, self._begin(sequence)
                if resumed or self.decoding and sequence.cached:
                    # It was copied, or came from disk, which may take as long as a chunk.
                    return True
            session = self.batch.slots[slot]
            width = self.interleaved if self.decoding else self.widest
            left = self._unread(slot, sequence) if slot in forced else sequence.prompt[session.position :]
            chunk = left[:width]
            if sequence.prompt_logprobs is None or slot in forced:
                argmax = session.prefill(chunk)
            else:
                # In whole calls, so that what is scored again is found again to the last bit.
                own = self.cache.scoring
                chunk = chunk[: max(1, width // SCORING // own) * own]
                argmax = score_chunk(session, sequence, len(chunk), own)
            self.cache.fed(slot, chunk)
            if self.cache.store and slot not in forced and not sequence.owner:
                self.cache.store.offer(session, sequence.prompt)
        except Exception as error:
            self._fail([sequence], error, events)
            return True
        if len(chunk) == len(left):
            if slot not in forced:
                session.keep()
                self.decoding[slot] = self.reading.pop(slot)
            self._advance(slot, sequence, argmax, events)
        return True

    def _next(self, forced: dict[int, Sequence]) -> tuple[int | None, Sequence | None]:
        """Whose prompt or `forced` tokens are read on, with its slot; None for a sequence that has none yet."""
        found: list[tuple[int, int | None, Sequence]] = [
            (len(s.prompt) - self.batch.slots[slot].position, slot, s) for slot, s in self.reading.items()
        ]
        found += [(len(self._unread(slot, s)), slot, s) for slot, s in forced.items()]
        if self.waiting and self._free:
            found += self._candidates(self._free)
        if not found:
            return None, None

        def order(one: tuple[int, int | None, Sequence]) -> tuple[int, bool, int, float]:
            left, _, s = one
            patient = s.passed_over < PATIENCE
            return s.priority, patient, left if patient else 0, s.arrived

        _, slot, chosen = min(found, key=order)
        for _, _, sequence in found:
            sequence.passed_over = 0 if sequence is chosen else sequence.passed_over + 1
        return slot, chosen

    def _candidates(self, free: int) -> list[tuple[int, None, Sequence]]:
        """Those that a free slot may go to now, with the tokens that are to be read."""
        held = Counter(s.client for s in self._running.values())
        share = ceil(self.slots / len({*held, *(s.client for s in self.waiting)}))
        seen: Counter[str] = Counter()
        found: dict[tuple[int, int], list[tuple[int, None, Sequence]]] = {}
        for sequence in self.waiting:
            seen[sequence.client] += 1
            if seen[sequence.client] > free:
                continue
            beyond = max(0, held[sequence.client] - share + 1)
            if left := self._left(sequence):
                found.setdefault((sequence.priority, beyond), []).append((left, None, sequence))
        return found[min(found)] if found else []

    def _left(self, sequence: Sequence) -> int:
        """How many tokens of a sequence that waits are to be read; 0 if it waits for what is being read or fetched."""
        if sequence.paused:
            return max(1, len(sequence.prompt) - sequence.paused.position)
        asked = sequence.prompt, sequence.owner, sequence.prompt_logprobs
        known = self.cache.longest(*asked)
        if self.decoding and self.cache.fetching(*asked):
            return 0
        older = (s for s in self.reading.values() if s.owner == sequence.owner and s.arrived <= sequence.arrived)
        return 0 if any(self._gives_more(other, sequence, known) for other in older) else len(sequence.prompt) - known

    def _gives_more(self, other: Sequence, sequence: Sequence, known: int) -> bool:
        """Whether more of the sequence's prompt than is known will be in the cache once that of the `other` is read."""
        wanted, given = sequence.prompt_logprobs, other.prompt_logprobs
        if wanted is None:
            return shared(sequence.prompt, other.prompt) > known
        return given is not None and given >= wanted and self.cache.whole(shared(sequence.prompt, other.prompt)) > known

    def _preempt(self) -> None:
        """Frees a slot for a sequence that goes before one that runs."""
        if not self.waiting or self._free:
            return
        running = self._running
        if (slot := yielding(running, self.waiting[0].priority)) is None:
            return
        # Who would have the slot if it were free; some wait for what is being read or fetched.
        ready = self._candidates(1)
        aside = sum(s.paused is not None for s in self.waiting)
        if ready and ready[0][2].priority < running[slot].priority and aside < self.slots:
            sequence = running[slot]
            sequence.paused = Paused.of(self.batch.slots[slot], slot in self.reading)
            self._remove(sequence)
            self.cache.touch(slot)
            self._speculator = None
            # Before those of its priority that have not begun.
            insort_left(self.waiting, sequence, key=lambda s: s.priority)
            self.observer.paused(sequence)

    def _begin(self, sequence: Sequence) -> int:
        """Gives the sequence a slot; returns it."""
        running = self._running
        free = [slot for slot in range(self.slots) if slot not in running]
        if paused := sequence.paused:
            slot = self.cache.give(paused, [*sequence.prompt, *sequence.tokens], free, sequence.owner)
            self.waiting.remove(sequence)
            (self.reading if paused.reading else self.decoding)[slot] = sequence
            sequence.paused = None
            return slot
        slot, sequence.cached = self.cache.take(sequence.prompt, free, sequence.owner, sequence.prompt_logprobs)
        if sequence.prompt_logprobs is not None:
            sequence.scores = self.cache.scores[slot]
        self.waiting.remove(sequence)
        self.reading[slot] = sequence
        sequence.began = time.monotonic()
        self.observer.began(sequence)
        return slot

    def _decode(self, events: Events) -> None:
        """The next token of every sequence that is past its prompt goes in; where it was the last one there is, the
        sequence has its next one."""
        unread = {slot: self._unread(slot, s) if s.constraint else s.tokens[-1:] for slot, s in self.decoding.items()}
        if self.draft and not (self.reading or self.waiting):
            ((slot, sequence), *others) = self.decoding.items()
            if not others and sequence.top_logprobs is None and len(unread[slot]) == 1:
                self._speculate(slot, sequence, unread[slot], events)
                return
        try:
            found = self.batch.step({slot: tokens[0] for slot, tokens in unread.items()})
        except Exception as error:
            self._fail(list(self.decoding.values()), error, events)
            return
        self.observer.stepped()
        for slot, sequence in list(self.decoding.items()):
            if found[slot] < 0:
                self._fail([sequence], NoNumbers(), events)
                continue
            self.cache.fed(slot, unread[slot][:1])
            if len(unread[slot]) == 1:
                self._advance(slot, sequence, found[slot], events)

    def _speculate(self, slot: int, sequence: Sequence, unread: list[int], events: Events) -> None:
        """The tokens that one pass over the last one of a sequence that is alone and proposals brings."""
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
            if sequence.limit:
                self.observer.token(sequence, sequence.last - before if before else None)
            events += [(sequence, event) for event in told]
            forced = sequence.forced
        if told and isinstance(told[-1], Finished):
            self._leave(sequence, told[-1].reason)

    def _leave(self, sequence: Sequence, reason: str) -> None:
        """What the caches hold stays for the prompts to come."""
        slot = self._remove(sequence)
        if slot is not None:
            self.cache.touch(slot)
        if slot is not None or sequence.paused:
            sequence.paused = None
            self.observer.ended(sequence, reason)

    def _fail(self, sequences: list[Sequence], error: BaseException, events: Events) -> None:
        """Ends sequences and forgets what their slots hold; a grammar that no token can follow is no failure of the model."""
        failure = error if isinstance(error, CannotFollow) else ModelFailed(error)
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


def interleaved(manifest: Manifest) -> int:
    """Tokens of a prompt that are read between two decode steps."""
    return max((width for width in manifest.prefill_widths if width <= INTERLEAVED), default=1)
