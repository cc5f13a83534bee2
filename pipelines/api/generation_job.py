"""`Job`, an API request in progress: it converts engine events to the answer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import chain

from castiron.pipelines.api.api_errors import api_error
from castiron.pipelines.api.async_engine import AsyncEngine
from castiron.pipelines.api.blocks_reply import BlocksReply
from castiron.pipelines.api.byte_limit import ByteShare
from castiron.pipelines.api.replies import Reply
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.text.text_output import Delta, TextOutput


@dataclass
class Job:
    """An API request in progress, with an engine request for each choice of its answer.

    share: memory reserved for log-probabilities and grammars. prompts: the index of the prompt of
    each engine request. events: engine events that have not been read. ended: engine requests that
    have finished.
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
        """The token counts and times so far, for the log."""
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
        """OpenAI's `usage` object so far; prompt tokens count once, even for several choices."""
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
        while len(self.ended) < len(self.requests):
            request, event = await self.events.get()
            if isinstance(event, Failed):
                raise api_error(event.error)
            if isinstance(event, Finished):
                self.ended.append(request)
            yield self.requests.index(request), event

    def close(self) -> None:
        """Cancel unfinished requests and release `share`; call it at the end of every job."""
        self.engine.cancel([request for request in self.requests if request not in self.ended])
        self.share.release()
