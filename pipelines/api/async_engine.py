"""`AsyncEngine`, an engine on its own thread, and `Job`, an API request that the engine runs."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import chain

from castiron.pipelines.api.api_errors import QueueFull, Stopping, api_error
from castiron.pipelines.api.blocks_reply import BlocksReply
from castiron.pipelines.api.byte_limit import ByteShare
from castiron.pipelines.api.replies import Reply
from castiron.pipelines.engine.chooser import ConstraintError
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.engine.scheduler import Events
from castiron.pipelines.text.text_output import Delta, TextOutput

Listener = Callable[[Request, Event], None]

# The limit for queued requests of all clients, as a multiple of the limit for one client.
QUEUES = 4


class AsyncEngine:
    """An `Engine` on its own thread, for use from asyncio.

    Each request has a listener, a function that is called on the event loop with each event of the
    request, such as new tokens.
    """

    def __init__(self, engine: Engine, queue: int):
        """Prepare the thread, which `start` starts.

        `queue`: max number of requests of one client that wait because the engine is busy. For all
        clients together, the max is `QUEUES * queue`.
        """
        self.engine, self.queue, self.slots = engine, queue, engine.slots
        self._stream = engine.stream()
        self._listeners: dict[Request, Listener] = {}
        self._wake = threading.Condition()
        self._draining = self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model")

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and accepts requests."""
        return self._thread.is_alive() and not self._draining

    @property
    def unfinished(self) -> int:
        """The number of requests that run or wait."""
        return len(self._listeners)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the thread if it does not run; listeners are called on the event loop `loop`.

        Before the first request, call it with the loop. Raises RuntimeError if there is no memory for
        a thread.
        """
        self._loop = loop
        if not self._thread.is_alive():
            self._thread.start()

    def submit(self, requests: list[Request], listener: Listener) -> None:
        """Queue `requests`, all of one client; call `listener(request, event)` for their events.

        Raises QueueFull if not all requests fit in the queue, and Stopping after `drain`. In both
        cases no request is queued.
        """
        with self._wake:
            if self._draining:
                raise Stopping
            own = sum(live.client == request.client for request in requests[:1] for live in self._listeners)
            for count, limit in ((own, self.queue), (len(self._listeners), QUEUES * self.queue)):
                if count + len(requests) > self.slots + limit:
                    waiting = max(0, count - self.slots)
                    raise QueueFull(
                        f"the queue of {limit} requests is full: {count - waiting} run and {waiting} wait, so "
                        f"{len(requests)} more do not fit; try again later"
                    )
            self._listeners.update(dict.fromkeys(requests, listener))
            for request in requests:
                self._stream.submit(request)
            self._wake.notify()

    def cancel(self, requests: list[Request]) -> None:
        """Cancel those `requests` that have not ended; their listeners are not called again."""
        with self._wake:
            for request in requests:
                self._listeners.pop(request, None)
                self._stream.cancel(request)
            self._wake.notify()

    def drain(self) -> None:
        """Reject new requests from now on, and let accepted requests finish."""
        with self._wake:
            self._draining = True

    def abort(self) -> None:
        """Cancel every unfinished request and report the error `Stopping` to its listener.

        Call this on the event loop, after `drain`.
        """
        live = dict(self._listeners)
        self.cancel(list(live))
        for request, listener in live.items():
            listener(request, Failed(Stopping()))

    def stop(self) -> None:
        """Cancel all requests and wait for the thread to end."""
        with self._wake:
            self._draining = self._ended = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._stream.idle and not self.engine.cancelled and not self._ended:
                    self._wake.wait()
                if self._ended:
                    return
            events = self._stream.read()
            for failure in {event.error for _, event in events if isinstance(event, Failed)}:
                if not isinstance(failure, ConstraintError):
                    traceback.print_exception(failure)
            # call_soon_threadsafe raises RuntimeError if the event loop is closed already.
            with contextlib.suppress(RuntimeError):
                if events and self._loop:
                    self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Events) -> None:
        for request, event in events:
            listener = self._listeners.get(request)
            if isinstance(event, Finished | Failed):
                self._listeners.pop(request, None)
            if listener:
                listener(request, event)


@dataclass
class Job:
    """An API request in progress, with one engine request for each choice of the answer.

    reply: builder of the answer's JSON.
    share: memory that this API request has reserved for log-probabilities and grammars.
    requests: the engine requests.
    prompts: for each engine request, the index of its prompt in the API request.
    events: (engine request, event) that `answer` or `chunks` has not read.
    ended: engine requests that have finished.
    """

    engine: AsyncEngine
    reply: Reply
    share: ByteShare
    requests: list[Request] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    events: asyncio.Queue[tuple[Request, Event]] = field(default_factory=asyncio.Queue)
    ended: list[Request] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """Token counts, latency and speed of the finished choices, as text for the log."""
        if not self.ended:
            return "no answer finished"
        tokens, seconds = sum(len(r.tokens) for r in self.ended), max(r.timing.last - r.timing.first for r in self.ended)
        speed = f" at {(tokens - len(self.ended)) / seconds:.1f} tok/s" if seconds > 0 and tokens > len(self.ended) else ""
        first, latency = self.ended[0], min(r.timing.first - r.timing.arrived for r in self.ended)
        return (
            f"{len(first.prompt)} prompt tokens ({first.cached} cached), first token after {latency * 1e3:.0f} ms, "
            f"{tokens} tokens{speed}"
        )

    @property
    def usage(self) -> dict:
        """OpenAI's `usage` object: token counts so far.

        The tokens of a prompt count once, even if several choices answer it.
        """
        # Use the first request of each prompt: later ones count the prompt as cached.
        prompts = dict(reversed(list(zip(self.prompts, self.requests)))).values()
        prompt, generated = sum(len(r.prompt) for r in prompts), sum(len(r.tokens) for r in self.requests)
        outputs = [request.output for request in self.requests]
        reasoning = sum(output.reasoning_tokens for output in outputs if isinstance(output, TextOutput))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(r.cached for r in prompts)},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def listen(self, request: Request, event: Event) -> None:
        """Add an engine event to `events`; `AsyncEngine` calls this method for each event."""
        self.events.put_nowait((request, event))

    async def answer(self) -> dict:
        """Return the complete answer as JSON; raise ApiError if a request failed."""
        if isinstance(self.reply, BlocksReply):
            async for _ in self.chunks():
                pass
            return self.reply.answer
        deltas: list[list[Delta]] = [[] for _ in self.requests]
        ends = [Finished("")] * len(self.requests)
        async for index, event in self._events():
            if isinstance(event, Delta):
                deltas[index].append(event)
            else:
                ends[index] = event
        choices = [self.reply.choice(index, Delta.joined(parts), end) for index, (parts, end) in enumerate(zip(deltas, ends))]
        return self.reply.complete(choices, self.usage)

    async def chunks(self) -> AsyncIterator[dict]:
        """Yield the JSON events of a streamed answer; raise ApiError if a request failed."""
        reply, opened, sent = self.reply, set(), 0
        async for index, event in self._events():
            opening = [] if index in opened else reply.begin(index, self.usage)
            opened.add(index)
            delta, end = (event, None) if isinstance(event, Delta) else (Delta(), event)
            sent += len(delta.tokens)
            for chunk in chain(opening, reply.extend(index, delta, end)):
                if reply.continuous_usage:
                    # Count sent tokens only: `usage` may include tokens that the model has generated since.
                    counts = self.usage
                    counts |= {"completion_tokens": sent, "total_tokens": counts["prompt_tokens"] + sent}
                    chunk = chunk | {"usage": counts}
                yield chunk
        for chunk in reply.finish(self.usage):
            yield chunk

    async def _events(self) -> AsyncIterator[tuple[int, Delta | Finished]]:
        while len(self.ended) < len(self.requests):
            request, event = await self.events.get()
            if isinstance(event, Failed):
                raise api_error(event.error)
            if isinstance(event, Finished):
                self.ended.append(request)
            yield self.requests.index(request), event

    def close(self) -> None:
        """Cancel unfinished requests and release the memory; call it at the end of every job."""
        self.engine.cancel([request for request in self.requests if request not in self.ended])
        self.share.release()
