"""`AsyncEngine`, an engine with a queue limit, and `Job`, an API request that the engine runs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import chain

from castiron.pipelines.api.api_errors import QueueFull, Stopping, api_error
from castiron.pipelines.api.byte_limit import ByteShare
from castiron.pipelines.api.replies import BlocksReply, Reply
from castiron.pipelines.engine.engine import Engine, EventStream
from castiron.pipelines.engine.request import Failed, Finished, Request
from castiron.pipelines.text.text_output import Delta, TextOutput

# The limit for queued requests of all clients, as a multiple of the limit for one client.
QUEUES = 4


class AsyncEngine:
    """An `Engine` with a thread of its own, which limits how many requests wait.

    `queue`: max number of requests of one client that wait because the engine is busy. For all
    clients together, the max is `QUEUES * queue`.
    """

    def __init__(self, engine: Engine, queue: int):
        self.engine, self.queue, self.slots = engine, queue, engine.slots
        self.start, self.stop = engine.start, engine.close
        self._is_draining = False

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and accepts requests."""
        return self.engine.is_running and not self._is_draining

    @property
    def unfinished(self) -> int:
        """The number of requests that run or wait."""
        return len(self.engine.unfinished)

    @property
    def capacity(self) -> int:
        """Max requests of one client that run or wait."""
        return self.slots + max(self.queue, 0)

    def submit(self, requests: list[Request]) -> EventStream:
        """Queue `requests`, all of one client; return the stream of their events.

        Raises QueueFull if not all requests fit in the queue, and Stopping after `drain`. In both
        cases no request is queued.
        """
        if self._is_draining:
            raise Stopping
        live = self.engine.unfinished
        of_client = sum(other.client == request.client for request in requests[:1] for other in live)
        for count, limit in ((of_client, self.queue), (len(live), QUEUES * self.queue)):
            if count + len(requests) > self.slots + limit:
                waiting = max(0, count - self.slots)
                raise QueueFull(
                    f"the queue of {limit} requests is full: {count - waiting} run and {waiting} wait, so "
                    f"{len(requests)} more do not fit; try again later"
                )
        return self.engine.submit(*requests)

    def drain(self) -> None:
        """Reject new requests from now on, and let accepted requests finish."""
        self._is_draining = True

    def abort(self) -> None:
        """End every unfinished request with the error `Stopping`; call this after `drain`."""
        self.engine.fail(Stopping())


@dataclass
class Job:
    """An API request in progress, with one engine request for each choice of the answer.

    reply: builder of the answer's JSON.
    share: memory that this API request has reserved for log-probabilities and grammars.
    requests: the engine requests.
    prompts: for each engine request, the index of its prompt in the API request.
    stream: the events of the engine requests; None before they are submitted.
    ended: engine requests that have finished.
    """

    engine: AsyncEngine
    reply: Reply
    share: ByteShare
    requests: list[Request] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    stream: EventStream | None = None
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
        assert self.stream
        async for request, event in self.stream:
            if isinstance(event, Failed):
                raise api_error(event.error)
            if isinstance(event, Finished):
                self.ended.append(request)
            yield self.requests.index(request), event

    def close(self) -> None:
        """Cancel unfinished requests and release the memory; call it at the end of every job."""
        if self.stream:
            self.stream.close()
        self.share.release()
