"""Continuous batching: requests start and end independently in the slots of a batch."""

from __future__ import annotations

import time

from castiron.pipelines.engine import speculation
from castiron.pipelines.engine.admission import Admission
from castiron.pipelines.engine.constraint import ConstraintError
from castiron.pipelines.engine.draft import Draft
from castiron.pipelines.engine.memory import total_bytes
from castiron.pipelines.engine.prefix_cache import Paused, PrefixCache
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.engine.request import Event, Failed, Request
from castiron.pipelines.engine.sampling import log_probabilities, logit_rows, score_width
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.device.program import NanLogitsError, SessionError
from castiron.vmfb.run.session import move_to


class Observer:
    """What the scheduler notifies of the progress of requests; the methods here do nothing."""

    def started(self, request: Request) -> None:
        """A request got its first slot; its `cached` is the length of the reused prefix."""

    def stepped(self) -> None:
        """A decode step has run, for all requests that generate tokens."""

    def preempted(self, request: Request) -> None:
        """A request has lost its slot."""

    def token(self, request: Request, since: float | None) -> None:
        """A token was generated, `since` seconds after the last one; None for the first."""

    def ended(self, request: Request, reason: str) -> None:
        """A request has ended; `reason`: that of `Finished`, or "cancelled"."""

    def failed(self, request: Request) -> None:
        """A request has ended with an error."""


# Tokens of a prompt that are read between two decode steps. More would delay other requests; fewer
# would make narrow, slow chunks.
INTERLEAVED = 32
# Max cost of a prompt token whose logits are read, relative to one whose logits are not read.
SCORING = 2
# Copies of the KV caches of preempted requests take at most 1/PAUSED_PART of the machine's memory.
PAUSED_PART = 8

Events = list[tuple[Request, Event]]


class ModelFailed(PipelineError):
    """An error in the model or in the choice of a token; `__cause__` is the original exception."""

    def __init__(self, cause: BaseException):
        reason = f": {cause}" if isinstance(cause, SessionError) else "; other requests are not affected"
        super().__init__(f"the model failed on this request{reason}")
        self.__cause__ = cause


class Scheduler:
    """Continuous batching: requests start and end independently in the slots of a batch.

    Each `turn` reads one chunk of one prompt and decodes one token of each other request, so a long
    prompt delays the others by one chunk at a time. A turn that copies a prefix or reads it from
    disk reads no chunk. Forced tokens are read in one call, like a chunk. If reading a prompt
    fails, only its request ends; if a decode step fails, all requests in it end. With `draft` or
    `ngrams`, a request is speculated for while no other runs. One thread at a time may call `turn`.

    fill_slots: a turn reads the prompts of all requests that can get a slot, before it decodes.
    """

    def __init__(
        self, batch, *, observer: Observer | None = None, store: PrefixStore | None = None, draft: Draft | None = None,
        ngrams: bool = False, fill_slots: bool = False,
    ):  # fmt: skip
        self.batch, self.slots = batch, batch.size
        self.context, self.manifest = batch.slots[0].context, batch.slots[0].manifest
        self.observer, self.draft, self.ngrams, self.fill_slots = observer or Observer(), draft, ngrams, fill_slots
        widths = self.manifest.widths("prefill")
        self._prefill_width = max(widths, default=1)
        narrow = max((width for width in widths if width <= INTERLEAVED), default=1)
        self._interleaved_width = self._prefill_width if fill_slots else narrow
        self.cache = PrefixCache(batch.slots, store, score_width(self.manifest.widths("verify"), INTERLEAVED // SCORING))
        self.paused_bytes = total_bytes() // PAUSED_PART
        self.requests = requests = Admission(self.slots, self.cache)
        self.waiting, self.prefilling, self.decoding = requests.waiting, requests.prefilling, requests.decoding
        self.speculator: speculation.Speculator | None = None

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        """Queue a request; if its `stop_tokens` is None, set it to the model's end tokens."""
        if request.stop_tokens is None:
            request.stop_tokens = frozenset(self.manifest.tokens.eos)
        self.requests.add(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request, so that it has no more events; not during a turn."""
        self._leave(request, "cancelled")

    def turn(self) -> Events:
        """Read a part of a prompt, run a decode step, and return the new events."""
        events: Events = []
        self._preempt()
        self._read_outgrown_again()
        forced = {slot: r for slot, r in self.decoding.items() if r.constraint and len(self._unread(slot, r)) > 1}
        while self._read(forced, events) and self.fill_slots and (self.prefilling or self.waiting and self.requests.free):
            forced = {}
        self._read_outgrown_again()
        if self.decoding:
            self._decode(events)
        return events

    def _read_outgrown_again(self) -> None:
        """Read texts again that are now longer than the model's original context (LongRoPE)."""
        for slot, request in list(self.decoding.items()):
            session, total = self.batch.slots[slot], len(request.prompt) + len(request.tokens)
            if not session.is_valid_for(total):
                session.rewind(0)
                self.cache.scores[slot] = []
                self.prefilling[slot] = self.decoding.pop(slot)

    def fail_all(self, error: BaseException) -> Events:
        """End every request with `error`, and return the events that report this.

        The error may have come at any point of a turn, so only states that are certain stay.
        """
        events: Events = []
        for slot, session in enumerate(self.batch.slots):
            request = self.requests.running.get(slot)
            tokens = [*request.prompt.tolist(), *request.tokens][:-1] if request else []
            tokens = tokens[: session.position]
            try:
                move_to(session, len(tokens), tokens)
                self.cache.tokens[slot, : len(tokens)] = tokens
            except Exception:
                move_to(session, 0)
        self._fail([*self.requests.running.values(), *self.waiting], error, events, clear=False)
        self.speculator = None
        return events

    def _unread(self, slot: int, request: Request):
        return request.unread(self.batch.slots[slot].position)

    def _read(self, forced: dict[int, Request], events: Events) -> bool:
        """Read the next part of a prompt, or forced tokens; return False if there was nothing."""
        if (chosen := self.requests.next(forced)) is None:
            return False
        slot, request = chosen
        try:
            if slot is None:
                resumed, slot = request.paused, self._start(request)
                if resumed or self.decoding and request.cached:
                    # Copying, or reading from disk, may take as long as a chunk.
                    return True
            session, left = self.batch.slots[slot], self._unread(slot, request)
            total = len(request.unread(0))
            store, is_interleaved = self.cache.store_of(request.cache_salt, total), bool(self.decoding.keys() - {slot})
            if is_interleaved and store and slot not in forced and session.position == session.chunked_tokens:
                # Read full chunks, because a state after narrower ones is not stored.
                is_interleaved = not store.will_store(session, request.prompt, session.position)
            width = self._interleaved_width if is_interleaved else self._prefill_width
            chunk, argmax = self._read_chunk(session, request, left, width, slot in forced)
            self.cache.appended(slot, chunk)
            if slot not in forced:
                if store:
                    store.offer(session, request.prompt)
                if request.on_prefill:
                    request.on_prefill(session.position, len(request.prompt))
        except Exception as error:
            self._fail([request], error, events)
            return True
        if len(chunk) == len(left):
            if slot not in forced:
                # Retain this position: the next prompt may continue from it without the answer.
                session.keep()
                self.decoding[slot] = self.prefilling.pop(slot)
            self._advance(slot, request, argmax, events)
        return True

    def _read_chunk(self, session, request: Request, left, width: int, forced: bool):
        if not request.needs_scores or forced:
            return left[:width], session.prefill(left[:width], total=len(request.unread(0)))
        # Make only complete calls, so that a prefix always has the same logits to the last bit.
        own = self.cache.score_width
        count = min(len(left), max(1, width // SCORING // own) * own)
        argmax, read = 0, left[:count]
        rows = logit_rows(session, read.tolist(), own, len(request.prompt))
        for index, logits in enumerate(rows, session.position + 1):
            if index < len(request.prompt):
                request.scores.append(log_probabilities(logits, int(request.prompt[index]), request.prompt_logprobs))
            else:
                argmax = int(logits.argmax())
        return read, argmax

    def _preempt(self) -> None:
        if (slot := self.requests.preempted()) is None:
            return
        request = self.requests.running[slot]
        left = self.paused_bytes - sum(r.paused.nbytes for r in self.waiting if r.paused)
        request.paused = Paused.of(self.batch.slots[slot], slot in self.prefilling, left)
        self.requests.remove(request)
        self.cache.touch(slot)
        self.speculator = None
        self.requests.add(request)
        self.observer.preempted(request)

    def _start(self, request: Request) -> int:
        free = self.requests.free
        if (paused := request.paused) and paused.rows:
            slot = self.cache.resume(paused, request.unread(0), free, request.cache_salt)
            self.waiting.remove(request)
            (self.prefilling if paused.prefilling else self.decoding)[slot] = request
            request.paused = None
            return slot
        needs_scores = request.needs_scores
        top = request.prompt_logprobs if needs_scores else None
        slot, cached = self.cache.take(request.unread(0), free, top, request.cache_salt)
        if needs_scores:
            request.scores = self.cache.scores[slot]
        self.waiting.remove(request)
        self.prefilling[slot] = request
        if paused:
            request.paused = None
            return slot
        request.cached = cached
        request.timing.started = time.monotonic()
        self.observer.started(request)
        return slot

    def _decode(self, events: Events) -> None:
        unread = {slot: self._unread(slot, r) if r.constraint else r.tokens[-1:] for slot, r in self.decoding.items()}
        if len(self.decoding) == 1 and not (self.prefilling or self.waiting):
            ((slot, request),) = self.decoding.items()
            if len(unread[slot]) > 1:
                # The next turn reads the forced tokens in one call.
                return
            if (self.draft or self.ngrams) and request.top_logprobs is None:
                self._speculate(slot, request, unread[slot], events)
                return
        try:
            found = self.batch.step({slot: tokens[0] for slot, tokens in unread.items()})
        except Exception as error:
            self._fail(list(self.decoding.values()), error, events)
            return
        self.observer.stepped()
        for slot, request in list(self.decoding.items()):
            if found[slot] < 0:
                self._fail([request], NanLogitsError(), events)
                continue
            self.cache.appended(slot, unread[slot][:1])
            if len(unread[slot]) == 1:
                self._advance(slot, request, found[slot], events)

    def _speculate(self, slot: int, request: Request, unread: list[int], events: Events) -> None:
        session, start = self.batch.slots[slot], self.batch.slots[slot].position
        speculator, new = self.speculator, list[Event]()
        try:
            if speculator is None or speculator.request is not request:
                speculator = self.speculator = speculation.Speculator(session, request, self.draft)
            before = request.timing.last
            for of_token in speculator.run(unread):
                new += of_token
                self.observer.token(request, request.timing.last - before)
                before = request.timing.last
        except Exception as error:
            self._fail([request], error, events)
            return
        self.observer.stepped()
        first = start - len(request.prompt)
        self.cache.appended(slot, request.tokens[first : first + session.position - start])
        events += [(request, event) for event in new]
        if request.finish_reason:
            self._leave(request, request.finish_reason)
        elif request.forced:
            self._advance(slot, request, 0, events)

    def _advance(self, slot: int, request: Request, argmax: int, events: Events) -> None:
        """Choose a request's next token, and append the tokens that are then forced."""
        forced = True
        while forced:
            before = request.timing.last
            try:
                new = request.advance(argmax, self.batch.slots[slot].logits)
            except Exception as error:
                self._fail([request], error, events)
                return
            if request.limit:
                self.observer.token(request, request.timing.last - before if before else None)
            events += [(request, event) for event in new]
            forced = request.forced
        if request.finish_reason:
            self._leave(request, request.finish_reason)

    def _leave(self, request: Request, reason: str) -> None:
        slot = self.requests.remove(request)
        if slot is not None:
            self.cache.touch(slot)
        if slot is not None or request.paused:
            request.paused = None
            self.observer.ended(request, reason)

    def _fail(self, requests: list[Request], error: BaseException, events: Events, clear: bool = True) -> None:
        """End requests with `error`, and `clear` their states from the prefix cache."""
        # A constraint that no token satisfies is not a failure of the model.
        failure = error if isinstance(error, ConstraintError) else ModelFailed(error)
        for request in requests:
            if (slot := self.requests.remove(request)) is not None and clear:
                move_to(self.batch.slots[slot], 0)
            self.observer.failed(request)
            events.append((request, Failed(failure)))
