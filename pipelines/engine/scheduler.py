"""Continuous batching: a turn reads one chunk of a prompt and decodes one token of the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from castiron.pipelines.engine.admission import Admission
from castiron.pipelines.engine.chooser import ConstraintError
from castiron.pipelines.engine.context import move_to
from castiron.pipelines.engine.prefix_cache import Paused, PrefixCache
from castiron.pipelines.engine.request import Event, Failed, Request
from castiron.pipelines.engine.sampling import log_probabilities, logit_rows, score_width
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.program import NanLogitsError, SessionError

if TYPE_CHECKING:
    from castiron.pipelines.engine.draft import Draft
    from castiron.pipelines.engine.prefix_store import PrefixStore
    from castiron.pipelines.engine.speculation import Speculator


class Observer:
    """A receiver of the scheduler's events, on the scheduler's thread; this class ignores them."""

    def started(self, request: Request) -> None:
        """The request has a slot, and `cached` tokens of its prompt were found."""

    def stepped(self) -> None:
        """One decode step has run for all requests past their prompts."""

    def preempted(self, request: Request) -> None: ...

    def token(self, request: Request, since: float | None) -> None:
        """The request has a token, `since` seconds after the one before; None for the first."""

    def ended(self, request: Request, reason: str) -> None:
        """The request has ended; `reason`: `Finished.reason`, or "cancelled"."""

    def failed(self, request: Request) -> None: ...


# Tokens of a prompt that are read between two decode steps: more delay other requests, fewer make
# narrow, slow chunks.
INTERLEAVED = 32
# A prompt token whose logits are read costs at most this many times as much as one without.
SCORING = 2

Events = list[tuple[Request, Event]]


class ModelFailed(PipelineError):
    """An error while the model ran or a token was chosen; `__cause__` is the exception."""

    def __init__(self, cause: BaseException):
        reason = f": {cause}" if isinstance(cause, SessionError) else "; other requests are not affected"
        super().__init__(f"the model failed on this request{reason}")
        self.__cause__ = cause


class Scheduler:
    """Runs requests over the slots of a batch. One thread at a time calls `turn`, and nothing else
    may use the batch.

    A turn reads one chunk of one prompt and decodes one token of every other request, so that a
    long prompt delays the others by a chunk. A prefix that is copied from another slot or read from
    disk gets a turn of its own. Tokens that a constraint forces are read like a chunk of a prompt.

    `Admission` chooses what is read next. A request that fails ends by itself; a decode step that
    fails ends those that were in it. A preempted request gives up its slot and continues later,
    with its states in memory. A request that runs alone decodes several tokens a turn if proposals
    are right.

    Args:
        batch: a `castiron.vmfb.batch.Batch`, or a `SingleSlot`.
        store: where states of prefixes are stored.
        draft: a model that proposes tokens.
        ngrams: propose tokens from the text itself.
        fill_slots: read all prompts that have slots before the next step, in the widest chunks.
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
        self.requests = requests = Admission(self.slots, self.cache)
        self.waiting, self.prefilling, self.decoding = requests.waiting, requests.prefilling, requests.decoding
        self.speculator: Speculator | None = None

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    def submit(self, request: Request) -> None:
        """Queue a request; without stop tokens of its own it gets the model's."""
        if request.stop_tokens is None:
            request.stop_tokens = frozenset(self.manifest.tokens.eos)
        self.requests.add(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request, which then has no more events; must not be called during a turn."""
        self._leave(request, "cancelled")

    def turn(self) -> Events:
        """Read one chunk, run one decode step, and return the events."""
        events: Events = []
        if self.waiting and not self.requests.num_free:
            self._preempt()
        forced = {slot: r for slot, r in self.decoding.items() if r.constraint and len(self._unread(slot, r)) > 1}
        if self.waiting or self.prefilling or forced:
            while (
                self._read(forced, events) and self.fill_slots and (self.prefilling or self.waiting and self.requests.num_free)
            ):
                forced = {}
        if self.decoding:
            self._decode(events)
        return events

    def fail_all(self, error: BaseException) -> Events:
        """End every request with an error and clear every slot."""
        events: Events = []
        self._fail([*self.requests.running.values(), *self.waiting], error, events)
        for session in self.batch.slots:
            move_to(session, 0)
        return events

    def interrupt(self, error: BaseException) -> Events:
        """End every request after an interrupt at any point of a turn; states known to be valid
        stay in the cache."""
        events: Events = []
        for slot, session in enumerate(self.batch.slots):
            request = self.requests.running.get(slot)
            tokens = [*request.prompt.tolist(), *request.tokens][:-1] if request else []
            tokens = tokens[: session.position]
            try:
                move_to(session, len(tokens), tokens)
                self.cache.tokens[slot, : len(tokens)] = tokens
            except SessionError:
                move_to(session, 0)
        for request in [*self.requests.running.values(), *self.waiting]:
            self.requests.remove(request)
            events.append((request, Failed(ModelFailed(error))))
        self.speculator = None
        return events

    def _unread(self, slot: int, request: Request):
        return request.unread(self.batch.slots[slot].position)

    def _read(self, forced: dict[int, Request], events: Events) -> bool:
        """Read the next chunk of a prompt or of `forced` tokens; False if nothing is left."""
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
            width = self._interleaved_width if self.decoding.keys() - {slot} else self._prefill_width
            chunk, argmax = self._read_chunk(session, request, left, width, slot in forced)
            self.cache.appended(slot, chunk)
            if slot not in forced:
                if self.cache.store:
                    self.cache.store.offer(session, request.prompt)
                if request.on_prefill:
                    request.on_prefill(session.position, len(request.prompt))
        except Exception as error:
            self._fail([request], error, events)
            return True
        if len(chunk) == len(left):
            if slot not in forced:
                # The next prompt may continue from here, and an answer may be taken back.
                session.keep()
                self.decoding[slot] = self.prefilling.pop(slot)
            self._advance(slot, request, argmax, events)
        return True

    def _read_chunk(self, session, request: Request, left, width: int, forced: bool):
        """Read at most `width` of the unread tokens `left`.

        Returns the tokens that were read, and the most probable next token.
        """
        if request.prompt_logprobs is None or forced:
            return left[:width], session.prefill(left[:width])
        # Complete calls only, so that a prefix always has the same logits to the last bit.
        own = self.cache.score_width
        count = min(len(left), max(1, width // SCORING // own) * own)
        argmax, read = 0, left[:count]
        for index, logits in enumerate(logit_rows(session, read.tolist(), own), session.position + 1):
            if index < len(request.prompt):
                request.scores.append(log_probabilities(logits, int(request.prompt[index]), request.prompt_logprobs))
            else:
                argmax = int(logits.argmax())
        return read, argmax

    def _preempt(self) -> None:
        """Free a slot for a request of a higher priority."""
        if (slot := self.requests.preempted()) is None:
            return
        request = self.requests.running[slot]
        request.paused = Paused.of(self.batch.slots[slot], slot in self.prefilling)
        self.requests.remove(request)
        self.cache.touch(slot)
        self.speculator = None
        self.requests.add(request)
        self.observer.preempted(request)

    def _start(self, request: Request) -> int:
        """Give the request a slot and return the slot."""
        free = self.requests.free
        if paused := request.paused:
            slot = self.cache.resume(paused, [*request.prompt, *request.tokens], free)
            self.waiting.remove(request)
            (self.prefilling if paused.prefilling else self.decoding)[slot] = request
            request.paused = None
            return slot
        slot, request.cached = self.cache.take(request.prompt, free, request.prompt_logprobs)
        if request.prompt_logprobs is not None:
            request.scores = self.cache.scores[slot]
        self.waiting.remove(request)
        self.prefilling[slot] = request
        request.timing.started = time.monotonic()
        self.observer.started(request)
        return slot

    def _decode(self, events: Events) -> None:
        """Run a decode step with one token of every request whose prompt has been read.

        A request that then has no unread tokens chooses its next token.
        """
        unread = {slot: self._unread(slot, r) if r.constraint else r.tokens[-1:] for slot, r in self.decoding.items()}
        if len(self.decoding) == 1 and not (self.prefilling or self.waiting):
            ((slot, request),) = self.decoding.items()
            if len(unread[slot]) > 1:
                # The next turn reads them together.
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
        """Run one speculative decoding pass (last token and proposals) of the only request."""
        from castiron.pipelines.engine.speculation import Speculator

        session, start = self.batch.slots[slot], self.batch.slots[slot].position
        speculator, new = self.speculator, list[Event]()
        try:
            if speculator is None or speculator.request is not request:
                speculator = self.speculator = Speculator(session, request, self.draft)
                speculator.prompt_seconds = request.timing.first - request.timing.started
            speculator.feed(unread)
            while speculator.ready:
                before = request.timing.last
                new += speculator.advance()
                self.observer.token(request, request.timing.last - before)
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
        """Choose the request's next token, and the tokens that a constraint forces after it."""
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
        """End a request; its states stay in the cache."""
        slot = self.requests.remove(request)
        if slot is not None:
            self.cache.touch(slot)
        if slot is not None or request.paused:
            request.paused = None
            self.observer.ended(request, reason)

    def _fail(self, requests: list[Request], error: BaseException, events: Events) -> None:
        """End requests with an error and clear their slots."""
        # A constraint that no token satisfies is not a failure of the model.
        failure = error if isinstance(error, ConstraintError) else ModelFailed(error)
        for request in requests:
            if (slot := self.requests.remove(request)) is not None:
                move_to(self.batch.slots[slot], 0)
            self.observer.failed(request)
            events.append((request, Failed(failure)))
