"""Continuous batching: which sequence's prompt is read next, and one decode step for all that are past theirs."""

import time
import traceback
from collections import deque

from castiron.pipelines.generation.prefix_cache import PrefixCache, shared
from castiron.pipelines.generation.sequence import Event, Failed, Finished, Sequence
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.metrics import Metrics

# Tokens of a prompt that are read between two decode steps: what others wait for, against what a narrow chunk wastes.
INTERLEAVED = 32
# A prompt that others went before this often goes first.
PATIENCE = 4

Told = list[tuple[Sequence, Event]]
MODEL_FAILED = ApiError(500, "the model failed on this request; other requests are not affected", code="model_failure")


class Scheduler:
    """Sequences over the slots of a `Batch`; one thread calls `turn` for ever, and no other may touch the batch.

    A turn reads one chunk of one prompt and decodes one token of every other sequence, so that a long prompt delays
    the others by a chunk, not by its length. Among prompts the one with the fewest tokens left goes first; one that
    shares its beginning with a prompt being read waits until it finds it in the cache. A sequence that fails ends
    alone; a decode step that fails ends those that were in it.
    """

    def __init__(self, batch, metrics: Metrics | None = None):
        self.batch = batch
        self.metrics = metrics or Metrics()
        self.cache = PrefixCache(batch.slots)
        self.waiting: deque[Sequence] = deque()
        self.reading: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        widths = batch.slots[0].manifest.prefill_widths
        self.widest = max(widths, default=1)
        self.interleaved = max((w for w in widths if w <= INTERLEAVED), default=1)
        self.metrics.requests_running.read = lambda: len(self.reading) + len(self.decoding)
        self.metrics.requests_waiting.read = lambda: len(self.waiting)
        self.metrics.slots.read = lambda: batch.size

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.decoding)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt and max_tokens fit in the context."""
        self.waiting.append(sequence)

    def turn(self) -> Told:
        """One chunk of a prompt and one decode step, and what the sequences have to tell."""
        told: Told = []
        self._let_go()
        if self.waiting or self.reading:
            self._read(told)
        if self.decoding:
            self._decode(told)
        return told

    def give_up(self) -> Told:
        """Ends every sequence and forgets every slot, because of the exception at hand."""
        told: Told = []
        self._fail({**self.reading, **self.decoding}, told)
        while self.waiting:
            self._fail({None: self.waiting[0]}, told)
        return told

    def _let_go(self) -> None:
        if any(sequence.cancelled for sequence in self.waiting):
            self.waiting = deque(s for s in self.waiting if not s.cancelled)
        for place in (self.reading, self.decoding):
            for slot in [slot for slot, sequence in place.items() if sequence.cancelled]:
                self._leave(slot, place.pop(slot), "cancelled")

    def _read(self, told: Told) -> None:
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
        except Exception:
            self._fail({slot: sequence}, told)
            return
        if session.position == len(sequence.prompt):
            del self.reading[slot]
            self.decoding[slot] = sequence
            self._advance(slot, sequence, argmax, told)

    def _next(self) -> tuple[int | None, Sequence | None]:
        """Whose prompt is read on, with its slot; None for a sequence that has none yet."""
        free = self.batch.size - len(self.reading) - len(self.decoding)
        found = [(len(s.prompt) - self.batch.slots[slot].position, slot, s) for slot, s in self.reading.items()]
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
        metrics = self.metrics
        metrics.prefix_cache_queries_total.add()
        metrics.prefix_cache_hits_total.add(sequence.cached > 0)
        metrics.prefix_cache_tokens_total.add(sequence.cached)
        metrics.prompt_tokens_total.add(len(sequence.prompt))
        metrics.queue_seconds.observe(sequence.began - sequence.arrived)
        return slot

    def _decode(self, told: Told) -> None:
        """One token for every sequence that has a token to go on from."""
        tokens = {slot: sequence.tokens[-1] for slot, sequence in self.decoding.items()}
        sequences = dict(self.decoding)
        try:
            found = self.batch.step(tokens)
        except Exception:
            self._fail(sequences, told)
            return
        self.metrics.decode_steps_total.add()
        for slot, sequence in sequences.items():
            self.cache.fed(slot, [tokens[slot]])
            before = sequence.last
            self._advance(slot, sequence, found[slot], told)
            self.metrics.time_per_token_seconds.observe(sequence.last - before)

    def _advance(self, slot: int, sequence: Sequence, argmax: int, told: Told) -> None:
        first = not sequence.tokens
        try:
            events = sequence.advance(argmax, self.batch.slots[slot].logits)
        except Exception:
            self._fail({slot: sequence}, told)
            return
        if first:
            self.metrics.time_to_first_token_seconds.observe(sequence.first - sequence.arrived)
        told += [(sequence, event) for event in events]
        if events and isinstance(events[-1], Finished):
            self._leave(slot, self.decoding.pop(slot), events[-1].reason)

    def _leave(self, slot: int, sequence: Sequence, reason: str) -> None:
        """What the caches hold stays for the prompts to come."""
        self.cache.touch(slot)
        metrics, count = self.metrics, len(sequence.tokens)
        metrics.sequences_total.add(1, reason)
        metrics.generated_tokens_total.add(count)
        metrics.request_seconds.observe(time.monotonic() - sequence.arrived)
        metrics.request_prompt_tokens.observe(len(sequence.prompt))
        metrics.request_generated_tokens.observe(count)

    def _fail(self, failed: dict[int | None, Sequence], told: Told) -> None:
        """Ends sequences, by slot, because of the exception at hand, and forgets what their slots hold."""
        traceback.print_exc()
        for slot, sequence in failed.items():
            if slot is None:
                self.waiting.remove(sequence)
            else:
                self.reading.pop(slot, None)
                self.decoding.pop(slot, None)
                self.batch.slots[slot].rewind(0)
            self.metrics.sequences_total.add(1, "failed")
            told.append((sequence, Failed(MODEL_FAILED)))
