"""Requests for completions into sequences, and what the sequences tell into answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from castiron.pipelines.generation.choosing import Choosing
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.sequence import Event, Failed, Finished, Piece, Sequence
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.serve.engine import Engine
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.replies import ChatReply, CompletionReply, Reply, usage
from castiron.pipelines.serve.schemas import ChatRequest, CompletionRequest, Generating, Message, TokenizeRequest

# OpenAI's defaults.
TEMPERATURE, COMPLETION_TOKENS = 1.0, 16


@dataclass(frozen=True)
class Limits:
    """seconds: of one request, from its arrival to its end. body_bytes: of what it sends. temperature: of requests that
    name none."""

    seconds: float = 600.0
    body_bytes: int = 4_000_000
    temperature: float = TEMPERATURE


@dataclass
class Job:
    """A request under way: its sequences, where they put what they tell, and how it is answered.

    `prompts[i]` says which of the request's prompts sequence i goes on from.
    """

    sequences: list[Sequence]
    prompts: list[int]
    events: asyncio.Queue[tuple[int, Event]]
    reply: Reply
    ends: dict[int, Finished]

    @property
    def summary(self) -> str:
        """For the log: what it cost so far."""
        ends = list(self.ends.values())
        if not ends:
            return "no sequence finished"
        tokens, seconds = sum(e.generated for e in ends), max(e.decode_seconds for e in ends)
        speed = f" at {(tokens - len(ends)) / seconds:.1f} tok/s" if seconds > 0 and tokens > len(ends) else ""
        first = min(e.first_token_seconds for e in ends)
        return (
            f"{ends[0].prompt} prompt tokens ({ends[0].cached} cached), first token after {first * 1e3:.0f} ms, "
            f"{tokens} tokens{speed}"
        )


class Api:
    """What the endpoints do, apart from HTTP."""

    def __init__(self, engine: Engine, text: Text, names: list[str], context: int, vocab: int, limits: Limits):
        """`names[0]` is the model's name; the others are taken for it too."""
        self.engine, self.text, self.names, self.limits = engine, text, tuple(names), limits
        self.context, self.vocab = context, vocab
        self.token_bytes = TokenBytes(text)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's; none at all is this model."""
        if name is not None and name not in self.names:
            message = f"the model {name!r} does not exist; this server has {self.names[0]!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def chat(self, body: ChatRequest) -> Job:
        """Starts a chat completion."""
        prompt = await self.render(body.messages)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        top = (body.top_logprobs or 0) if body.logprobs else None
        reply = ChatReply(self.names[0], self.token_bytes, top is not None)
        return self._start(body, [prompt], "messages", limit, top, reply)

    async def complete(self, body: CompletionRequest) -> Job:
        """Starts a completion of every prompt of the request."""
        given = body.prompt
        several = isinstance(given, list) and not all(isinstance(part, int) for part in given)
        prompts = [await self._ids(part) for part in (given if several else [given])]
        if body.best_of not in (None, body.n or 1):
            raise ApiError(400, "best_of other than n is not supported by this server", "best_of", "unsupported_parameter")
        if body.echo and body.logprobs is not None:
            message = "echo together with logprobs is not supported by this server"
            raise ApiError(400, message, "echo", "unsupported_parameter")
        # A prompt of ids is echoed as the text that they are.
        parts = given if several else [given]
        texts = [p if isinstance(p, str) else self.text.decode(p) for p in parts] if body.echo else [""] * len(parts)
        echoes = [text for text in texts for _ in range(body.n or 1)]
        reply = CompletionReply(self.names[0], self.token_bytes, body.logprobs is not None, echoes)
        limit = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
        # The default yields to the context; only what was asked for is refused.
        room = min(self.context - len(prompt) + 1 for prompt in prompts)
        limit = limit if body.max_tokens is not None else max(1, min(limit, room))
        return self._start(body, prompts, "prompt", limit, body.logprobs, reply)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        given = [body.content, body.prompt, body.messages]
        if sum(part is not None for part in given) != 1:
            raise ApiError(400, "give one of content, prompt and messages", "content", "invalid_value")
        if body.messages is not None:
            return await self.render(body.messages)
        text = body.content if body.content is not None else body.prompt
        if body.add_special or body.add_special_tokens:
            return await _on_the_side(self.text.encode, text)
        found = await _on_the_side(self.text.tokenizer.encode, text, None, False, False)
        return found.ids

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of the ids, special tokens included."""
        self._check_ids(tokens, "tokens")
        return await _on_the_side(self.text.tokenizer.decode, tokens, False)

    async def render(self, messages: list[Message]) -> list[int]:
        """The ids of messages in the chat template."""
        if self.text.chat_template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        return await _on_the_side(self.text.encode_chat, [message.plain() for message in messages])

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await _on_the_side(self.text.encode, prompt)
        self._check_ids(prompt, "prompt")
        return prompt

    def _check_ids(self, tokens: list[int], param: str) -> None:
        if tokens and max(tokens) >= self.vocab:
            message = f"token {max(tokens)} is outside the vocabulary of {self.vocab} tokens"
            raise ApiError(400, message, param, "invalid_value")

    def _start(
        self, body: Generating, prompts: list[list[int]], param: str, limit: int | None, top: int | None, reply: Reply
    ) -> Job:
        rooms = [self._room(prompt, limit, param) for prompt in prompts]
        bias = self._bias(body.logit_bias or {})
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        job = Job([], [], events, reply, {})
        for place, prompt in enumerate(prompts):
            for choice in range(body.n or 1):
                job.prompts.append(place)
                job.sequences.append(
                    Sequence(
                        self.text,
                        prompt,
                        _teller(events, len(job.sequences)),
                        max_tokens=rooms[place],
                        choosing=Choosing(
                            self._sampling(body, choice),
                            body.frequency_penalty or 0.0,
                            body.presence_penalty or 0.0,
                            bias,
                            top,
                        ),
                        stop_strings=stops,
                        stop_tokens=() if body.ignore_eos else self.text.eos,
                    )  # fmt: skip
                )
        self.engine.submit(job.sequences)
        return job

    def _room(self, prompt: list[int], limit: int | None, param: str) -> int:
        """How many tokens may follow `prompt`; ApiError 400, with the numbers, if it or what is asked for is too long."""
        if not prompt:
            raise ApiError(400, "the prompt has no tokens; give at least one", param, "invalid_value")
        # The last token that is generated needs no position.
        room = self.context - len(prompt) + 1
        asked = "" if limit is None else f" and {limit} more are asked for"
        if room < 1 or limit is not None and limit > room:
            advice = f"ask for at most {room}" if room >= 1 else f"shorten the {param}"
            message = (
                f"this model's maximum context length is {self.context} tokens; the {param} "
                f"{'have' if param == 'messages' else 'has'} {len(prompt)} tokens{asked}: {advice}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        return room if limit is None else limit

    def _sampling(self, body: Generating, choice: int) -> Sampling:
        temperature = self.limits.temperature if body.temperature is None else body.temperature
        repeat = body.repeat_penalty if body.repeat_penalty is not None else body.repetition_penalty
        # Choices of one request differ, and each is repeatable.
        seed = None if body.seed is None else (body.seed + choice) % 2**64
        top_p = 1.0 if body.top_p is None else body.top_p
        repeat = 1.0 if repeat is None else repeat
        return Sampling(temperature, body.top_k or 0, top_p, body.min_p or 0.0, repeat, seed)

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias = {}
        for name, value in given.items():
            if not (name.isascii() and name.isdigit() and int(name[:20]) < self.vocab):
                message = f"logit_bias names {name[:40]!r}, which is no token id below {self.vocab}"
                raise ApiError(400, message, "logit_bias", "invalid_value")
            bias[int(name)] = value
        return bias

    async def whole(self, job: Job) -> dict:
        """The complete answer; ApiError if a sequence failed."""
        texts, said = ["" for _ in job.sequences], [[] for _ in job.sequences]
        async for index, event in self._events(job):
            if isinstance(event, Piece):
                texts[index] += event.text
                said[index] += event.said
        choices = [
            job.reply.choice(index, texts[index], said[index], job.ends[index].reason) for index in range(len(job.sequences))
        ]
        return job.reply.whole(choices, self._usage(job))

    async def chunks(self, job: Job, include_usage: bool) -> AsyncIterator[dict]:
        """The answer as it comes."""
        reply, opened = job.reply, set()
        async for index, event in self._events(job):
            if index not in opened:
                opened.add(index)
                if opening := reply.opening(index):
                    yield reply.chunk([opening])
            if isinstance(event, Piece):
                yield reply.chunk([reply.delta(index, event.text, event.said)])
            else:
                yield reply.chunk([reply.delta(index, "", (), event.reason)])
        if include_usage:
            yield reply.chunk([], self._usage(job))

    def _usage(self, job: Job) -> dict:
        return usage([(job.prompts[index], end) for index, end in sorted(job.ends.items())])

    async def _events(self, job: Job) -> AsyncIterator[tuple[int, Piece | Finished]]:
        """What the sequences tell until all have finished; ApiError if one fails."""
        while len(job.ends) < len(job.sequences):
            index, event = await job.events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                job.ends[index] = event
            yield index, event

    def close(self, job: Job) -> None:
        """Stops what has not finished; for the end of a request, however it ended."""
        self.engine.cancel([sequence for index, sequence in enumerate(job.sequences) if index not in job.ends])


def _teller(events: asyncio.Queue, index: int) -> Callable[[Event], None]:
    return lambda event: events.put_nowait((index, event))


async def _on_the_side(function: Callable, *arguments):
    """Runs what may take long for a long text without holding up the other requests."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
