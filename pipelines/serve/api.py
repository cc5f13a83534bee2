"""Requests for completions into sequences, and what the sequences tell into answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.chat_template import check_variables, reads_tools
from castiron.pipelines.generation.engine import Engine
from castiron.pipelines.generation.grammar import Grammar, GrammarError
from castiron.pipelines.generation.positions import at_most, room
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.sequence import Delta, Event, Failed, Finished, Sequence
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.token_bytes import TokenBytes
from castiron.pipelines.generation.tool_calls import Tools
from castiron.pipelines.serve import kept
from castiron.pipelines.serve.blocks import Blocks
from castiron.pipelines.serve.clients import ASKER, Share
from castiron.pipelines.serve.errors import ApiError, api_error
from castiron.pipelines.serve.forms import OBJECT, Form, asked_form
from castiron.pipelines.serve.models import usual_sampling
from castiron.pipelines.serve.replies import ChatReply, Choices, CompletionReply, Echo, Reply, so_far, usage
from castiron.pipelines.serve.schemas import ChatRequest, CompletionRequest, Generating, NamedTool, StreamOptions
from castiron.pipelines.serve.text_api import Limits, TextApi, on_the_side
from castiron.vmfb.manifest import Manifest

# The parameters of a function that names none.
NOTHING = {"properties": {}, "additionalProperties": False}
# OpenAI's default.
COMPLETION_TOKENS = 16


@dataclass
class Job:
    """A request under way: its sequences, one for each choice of the answer, and how it is answered.

    `prompts[i]` says which of the request's prompts sequence i goes on from; `ended` are the sequences that have finished;
    `share` is what they keep beside their states.
    """

    sequences: list[Sequence]
    prompts: list[int]
    reply: Reply
    events: asyncio.Queue[tuple[Sequence, Event]]
    ended: list[Sequence]
    share: Share

    @property
    def summary(self) -> str:
        """For the log: what it cost so far."""
        if not self.ended:
            return "no sequence finished"
        tokens, seconds = sum(len(s.tokens) for s in self.ended), max(s.last - s.first for s in self.ended)
        speed = f" at {(tokens - len(self.ended)) / seconds:.1f} tok/s" if seconds > 0 and tokens > len(self.ended) else ""
        one, first = self.ended[0], min(s.first - s.arrived for s in self.ended)
        return (
            f"{len(one.prompt)} prompt tokens ({one.cached} cached), first token after {first * 1e3:.0f} ms, "
            f"{tokens} tokens{speed}"
        )


class Api(TextApi):
    """The endpoints of a model that generates."""

    def __init__(self, engine: Engine, text: Text, names: list[str], manifest: Manifest, limits: Limits):
        """As of a TextApi. PipelineError for a generation_config that cannot be used."""
        super().__init__(engine, text, names, manifest, limits)
        self.engine: Engine = engine
        self.sampling = usual_sampling(manifest, limits)
        self.token_bytes = TokenBytes(text.tokenizer)
        self.kept = kept.shares(limits.kept_bytes)

    async def chat(
        self, body: ChatRequest, reply: Callable[[], Reply] | None = None, *, bound: bool = False, go_on: bool = False
    ) -> Job:
        """Starts a chat completion; for another API than OpenAI's completions `reply` makes what answers it. `bound`: the limit
        of its tokens gives way to the context. `go_on`: the answer goes on with the last message."""
        tools, forced = self._tools(body)
        prompt = await self._prompt(body, tools, go_on or bool(body.continue_final_message))
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        top = (body.top_logprobs or 0) if body.logprobs else None
        answer = reply() if reply else ChatReply(self.names[0], self.token_bytes, top is not None)
        form = asked_form(body)
        grammar, schema = await self._grammar(form), form.schema if form else None
        if forced and grammar and schema is None:
            message = "tool_choice asks for calls, and another field for a text of another form; give one of them"
            raise ApiError(400, message, "tool_choice", "invalid_value")
        # Harmony's grammar begins with its final channel, behind any calls.
        if tools and (forced or schema is not None and tools.form.kind != "harmony"):
            # Of calls alone there is no text that a response_format speaks of.
            grammar = await self._call_grammar(forced or tools.schemas, not tools.single, None if forced else schema)
        elif tools and not grammar and (held := _held(body, tools)):
            grammar = await self._call_grammar(held, not tools.single, None, True)
        if bound and limit is not None:
            limit = at_most(limit, self._check_room(prompt, None, "messages"))
        return self._start(body, [prompt], "messages", limit, top, answer, thoughts=True, grammar=grammar, tools=tools)

    async def count(self, body: ChatRequest, *, go_on: bool = False) -> int:
        """The tokens of a chat's prompt."""
        return len(await self._prompt(body, self._tools(body)[0], go_on))

    async def _prompt(self, body: ChatRequest, tools: Tools | None, go_on: bool) -> list[int]:
        given: dict[str, Any] = {"tools": [tool.plain() for tool in body.tools or ()]} if tools else {}
        if body.add_generation_prompt is not None:
            if body.add_generation_prompt and go_on:
                message = "add_generation_prompt begins an answer, and this one goes on with the last message; leave it out"
                raise ApiError(400, message, "add_generation_prompt", "invalid_value")
            given["add_generation_prompt"] = body.add_generation_prompt
        return await self.render(body.messages, self._template_args(body) | given, go_on=go_on)

    async def complete(self, body: CompletionRequest) -> Job:
        """Starts a completion of every prompt of the request."""
        given = body.prompt
        several = isinstance(given, list) and not all(isinstance(part, int) for part in given)
        parts = given if several else [given]
        prompts = [await self.ids(part) for part in parts]
        if body.best_of not in (None, body.n or 1):
            raise ApiError(400, "best_of other than n is not supported by this server", "best_of", "unsupported_parameter")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens 0 leaves nothing to answer without echo", "max_tokens", "invalid_value")
        scored = body.echo and (body.logprobs is not None or body.max_tokens == 0)
        for prompt in prompts:
            self._check_room(prompt, body.max_tokens, "prompt")

        def echo(part: str | list[int]) -> Echo:
            # A prompt of ids is echoed as the text that they are.
            text = part if isinstance(part, str) else self.text.decode(part)
            return Echo(text, self.text.offsets(part) if scored else ())

        found = await on_the_side(lambda: list(map(echo, parts))) if body.echo else [Echo()] * len(parts)
        echoes = [each for each in found for _ in range(body.n or 1)]
        reply = CompletionReply(self.names[0], self.token_bytes, body.logprobs, echoes)
        job = self._start(
            body, prompts, "prompt", body.max_tokens, body.logprobs, reply, COMPLETION_TOKENS,
            grammar=await self._grammar(asked_form(body)), prompt_logprobs=(body.logprobs or 0) if scored else None,
        )  # fmt: skip
        reply.sequences = job.sequences
        return job

    def _tools(self, body: ChatRequest) -> tuple[Tools | None, dict[str, Any]]:
        """What reads the calls out of an answer, None for one that has none, and the functions of which one must be called;
        ApiError for what the model cannot do."""
        form, choice = self.text.tool_form, body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice needs tools", "tool_choice", "invalid_value")
            return None, {}
        if not reads_tools(self.text.chat_template):
            raise ApiError(
                400, "tools: this model's chat template knows of none; leave them out", "tools", "unsupported_parameter"
            )
        if form is None:
            message = "tools: the form in which this model calls them is not known; give them in a message of your own"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        if choice == "none":
            return None, {}
        schemas = {tool.function.name: tool.function.parameters or NOTHING for tool in body.tools}
        forced: dict[str, Any] = schemas if choice == "required" else {}
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in schemas:
                raise ApiError(400, f"tool_choice names {name!r}, which is none of the tools", "tool_choice", "invalid_value")
            forced = {name: schemas[name]}
        return Tools(form, schemas, single=body.parallel_tool_calls is False or isinstance(choice, NamedTool)), forced

    async def _call_grammar(self, schemas: Mapping[str, Any], parallel: bool, answer: Any, free: bool = False) -> Grammar:
        """What an answer has to be that is calls, or with a schema of the `answer` either, or where it is `free` words with
        calls; ApiError for parameters that cannot be held to."""
        try:
            return await on_the_side(self.text.call_grammar, schemas, parallel, answer, free)
        except PipelineError as error:
            raise ApiError(400, f"tools: {error}", "tools", "unsupported_parameter") from None

    async def _grammar(self, form: Form | None) -> Grammar | None:
        """What holds an answer to the form that is asked for; ApiError for one that cannot be honoured."""
        if form is None:
            return None
        try:
            return await on_the_side(lambda: self.text.grammar(**{form.kind: form.value}))
        except GrammarError as error:
            raise ApiError(400, str(error), form.param, "unsupported_parameter") from None

    def _template_args(self, body: ChatRequest) -> dict[str, Any]:
        """Variables of the chat template, from chat_template_kwargs and reasoning_effort; ApiError for one that it does not
        read."""
        given, name = dict(body.chat_template_kwargs or {}), "chat_template_kwargs"
        try:
            check_variables(self.text.chat_template, given)
        except PipelineError as error:
            raise ApiError(400, f"{name}: {error}", name, "unsupported_parameter") from None
        effort, name = body.reasoning_effort, "reasoning_effort"
        if effort is None:
            return given
        known = self.variables
        if name in known:
            return {name: effort} | given
        # What OpenAI's API takes where nothing is said asks for nothing.
        if effort not in ("none", "medium"):
            message = f"{name}: this model's chat template knows no degrees of effort; leave it out"
            raise ApiError(400, message, name, "unsupported_parameter")
        # A model that cannot think makes no effort as it is.
        return ({"enable_thinking": False} if effort == "none" and "enable_thinking" in known else {}) | given

    def _start(
        self, body: Generating, prompts: list[list[int]], param: str, limit: int | None, top: int | None, reply: Reply,
        usual: int | None = None, thoughts: bool = False, grammar: Grammar | None = None, tools: Tools | None = None,
        prompt_logprobs: int | None = None,
    ) -> Job:  # fmt: skip
        """Queues a sequence for every choice: of `limit` tokens, or where the request names none of `usual` or of as
        many as there is room for."""
        if isinstance(reply, Choices):
            asked_usage = body.stream_options or StreamOptions()
            reply.include_usage = bool(asked_usage.include_usage)
            reply.continuous_usage = bool(asked_usage.continuous_usage_stats)
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if body.priority and not self.limits.priorities:
            message = "priority needs a server that runs with --scheduling-policy priority"
            raise ApiError(400, message, "priority", "unsupported_parameter")
        asker, bias = ASKER.get(), self._bias(body.logit_bias or {})
        ends, least = self._ends(body), body.min_tokens or 0
        if least and grammar:
            message = "min_tokens does not go with an answer of a form, which says itself where it ends; leave it out"
            raise ApiError(400, message, "min_tokens", "invalid_value")
        job = Job([], [], reply, asyncio.Queue(), [], self.kept.of(asker.client))
        try:
            for index, prompt in enumerate(prompts):
                free = self._check_room(prompt, limit, param)
                most = at_most(usual, free) if limit is None else limit
                if most is not None and least > most:
                    message = f"min_tokens is {least}, and the answer has {most} tokens at most: ask for fewer"
                    raise ApiError(400, message, "min_tokens", "invalid_value")
                for choice in range(body.n or 1):
                    kept.take(job.share, free if most is None else most, top, len(prompt), prompt_logprobs, grammar)
                    sequence = Sequence(
                        prompt, self.context, max_tokens=most, text=self.text,
                        sampler=Sampler(self.sampling_of(body, choice, bias)), stop_strings=stops, top_logprobs=top,
                        stop_tokens=ends, repetition_stop=bool(body.repetition_stop), thoughts=thoughts, grammar=grammar,
                        tools=tools, prompt_logprobs=prompt_logprobs, min_tokens=least,
                    )  # fmt: skip
                    sequence.client, sequence.owner, sequence.priority = asker.client, asker.owner, body.priority or 0
                    job.prompts.append(index)
                    job.sequences.append(sequence)
            self.engine.submit(job.sequences, lambda sequence, event: job.events.put_nowait((sequence, event)))
        except BaseException:
            job.share.give_back()
            raise
        return job

    def _ends(self, body: Generating) -> tuple[int, ...]:
        """The tokens that end an answer."""
        more = body.stop_token_ids or []
        if more and max(more) >= self.vocab:
            message = f"stop_token_ids names {max(more)}, which is no token id below {self.vocab}"
            raise ApiError(400, message, "stop_token_ids", "invalid_value")
        return (*(() if body.ignore_eos else self.text.eos), *more)

    def _check_room(self, prompt: list[int], limit: int | None, param: str) -> int:
        """How many tokens may follow `prompt`; ApiError 400, with the numbers, if it or what is asked for is too long."""
        if not prompt:
            raise ApiError(400, "the prompt has no tokens; give at least one", param, "invalid_value")
        free = room(self.context, 0, len(prompt))
        asked = "" if limit is None else f" and {limit} more are asked for"
        if free < 1 or limit is not None and limit > free:
            advice = f"ask for at most {free}" if free >= 1 else f"shorten the {param}"
            message = (
                f"this model's maximum context length is {self.context} tokens; the {param} "
                f"{'have' if param == 'messages' else 'has'} {len(prompt)} tokens{asked}: {advice}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")
        return free

    def sampling_of(self, body: Generating, choice: int = 0, bias: dict[int, float] | None = None) -> Sampling:
        """How the tokens of one choice are drawn; `bias`: what `logit_bias` is, where that is known."""
        own, repeat = self.sampling, body.repeat_penalty if body.repeat_penalty is not None else body.repetition_penalty
        top_k = None if body.top_k is None else max(body.top_k, 0)
        given = {"temperature": body.temperature, "top_k": top_k, "top_p": body.top_p, "min_p": body.min_p,
                 "repeat_penalty": repeat}  # fmt: skip
        return replace(
            own, **{name: value for name, value in given.items() if value is not None},
            # Choices of one request differ, and each is repeatable.
            seed=None if body.seed is None else (body.seed + choice) % 2**64,
            frequency_penalty=body.frequency_penalty or 0.0, presence_penalty=body.presence_penalty or 0.0,
            logit_bias=bias or {},
        )  # fmt: skip

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
        if isinstance(job.reply, Blocks):
            async for _ in self.chunks(job):
                pass
            return job.reply.answer
        said: list[list[Delta]] = [[] for _ in job.sequences]
        ends = [Finished("")] * len(job.sequences)
        async for index, event in self._events(job):
            if isinstance(event, Delta):
                said[index].append(event)
            else:
                ends[index] = event
        choices = [job.reply.choice(index, Delta.joined(parts), end) for index, (parts, end) in enumerate(zip(said, ends))]
        return job.reply.whole(choices, self._usage(job))

    async def chunks(self, job: Job) -> AsyncIterator[dict]:
        """The answer as it comes."""
        reply, opened, told = job.reply, set(), 0
        async for index, event in self._events(job):
            begun = [] if index in opened else reply.begin(index, self._usage(job))
            opened.add(index)
            more, end = (event, None) if isinstance(event, Delta) else (Delta(""), event)
            told += len(more.tokens)
            for chunk in chain(begun, reply.go_on(index, more, end)):
                yield chunk | {"usage": so_far(self._usage(job), told)} if reply.continuous_usage else chunk
        for chunk in reply.finish(self._usage(job)):
            yield chunk

    def _usage(self, job: Job) -> dict:
        return usage(list(zip(job.prompts, job.sequences)))

    async def _events(self, job: Job) -> AsyncIterator[tuple[int, Delta | Finished]]:
        """What the sequences tell until all have finished; ApiError if one fails."""
        while len(job.ended) < len(job.sequences):
            sequence, event = await job.events.get()
            if isinstance(event, Failed):
                raise api_error(event.error)
            if isinstance(event, Finished):
                job.ended.append(sequence)
            yield job.sequences.index(sequence), event

    def close(self, job: Job) -> None:
        """Stops what has not finished; for the end of a request, however it ended."""
        self.engine.cancel([sequence for sequence in job.sequences if sequence not in job.ended])
        job.share.give_back()


def _held(body: ChatRequest, tools: Tools) -> dict[str, Any]:
    """What the parameters of functions are held to that the model calls of its own accord: nothing where none is strict or no
    mark tells a call from text, and of those that are not strict no more than an object where the form has one."""
    strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
    form = tools.form
    if not strict or not form.begin or form.kind == "harmony":
        return {}
    loose = form.kind in ("json", "list", "named")
    return {name: OBJECT if loose and name not in strict else schema for name, schema in tools.schemas.items()}
