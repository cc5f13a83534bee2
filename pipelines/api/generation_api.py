"""Convert chat and completion requests to engine requests, and engine events to answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

from castiron.pipelines.api.api_errors import ApiError, api_error, invalid, unsupported
from castiron.pipelines.api.async_engine import AsyncEngine
from castiron.pipelines.api.byte_limit import CLIENT, ByteShare, answer_limit, reserve_answer
from castiron.pipelines.api.model_api import Limits, ModelApi, default_sampling, run_in_thread
from castiron.pipelines.api.replies import BlocksReply, ChatReply, ChoicesReply, CompletionReply, Echo, Reply
from castiron.pipelines.api.response_format import ANY_OBJECT, requested_format
from castiron.pipelines.api.schemas import ChatRequest, CompletionFields, CompletionRequest, NamedTool, StreamOptions
from castiron.pipelines.engine.context import free_positions
from castiron.pipelines.engine.request import Event, Failed, Finished, Request
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import check_variables
from castiron.pipelines.text.fim import Fim, fim_of
from castiron.pipelines.text.grammar import Grammar, GrammarError
from castiron.pipelines.text.text_output import Delta, TextOutput, text_request
from castiron.pipelines.text.token_bytes import TokenBytes
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.pipelines.text.tool_calls import Tools
from castiron.vmfb.manifest import Manifest

# The schema of a function without parameters.
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
# OpenAI's default for max_tokens of /v1/completions.
COMPLETION_TOKENS = 16


@dataclass
class Job:
    """An API request in progress, with an engine request for each choice of its answer.

    share: memory reserved for log-probabilities and grammars. prompts: for each engine request, the
    index of its prompt. events: engine events that have not been read. ended: engine requests that
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
        """OpenAI's `usage` object so far; a prompt counts once, also with several choices."""
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
        """Yield each event with the index of its engine request; raise ApiError if one fails."""
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


class GenerationApi(ModelApi):
    """The endpoints of a model that generates text."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, names: list[str], manifest: Manifest, limits: Limits):
        """Serve a model; raise PipelineError for an invalid generation_config in its manifest."""
        super().__init__(engine, tokenizer, names, manifest, limits)
        self.engine: AsyncEngine = engine
        self.sampling = default_sampling(manifest, limits)
        self.token_bytes = TokenBytes(tokenizer.backend)
        self.retained = answer_limit(limits.retained_bytes)
        # One process compiles all grammars. A lock per client lets each client queue only one grammar there, so that no client
        # waits for all grammars of another.
        self._compiling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def chat(
        self, body: ChatRequest, reply: Callable[[], Reply] | None = None, *, clamp: bool = False, continue_last: bool = False
    ) -> Job:
        """Start a chat completion and return its job.

        Args:
            reply: returns the object that builds the answer; None for OpenAI's chat completion.
            clamp: whether a max_tokens that does not fit in the context is lowered, not rejected.
            continue_last: whether the answer continues the last message.
        """
        tools, forced = self._tools(body)
        prompt = await self._prompt(body, tools, continue_last or bool(body.continue_final_message))
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true; set it, or leave top_logprobs out")
        top = (body.top_logprobs or 0) if body.logprobs else None
        built = reply() if reply else ChatReply(self.names[0], self.token_bytes, top is not None)
        form = requested_format(body)
        grammar, schema = ({form.kind: form.value}, form.schema) if form else ({}, None)
        if forced and form and schema is None:
            raise invalid("tool_choice", f"tool_choice requires a call, but {form.param} a text answer; give one of them")
        # The grammar of an answer in harmony format (gpt-oss) begins with the final channel, after any tool calls.
        if tools and (forced or schema is not None and tools.form.style != "harmony"):
            # If the answer must consist of tool calls, it has no text, so response_format does not apply.
            grammar = {"tools": tools.grammar(forced or tools.schemas, answer=None if forced else schema)}
        elif tools and not form and (schemas := _schemas_of_optional_calls(body, tools)):
            grammar = {"tools": tools.grammar(schemas, free=True)}
        compiled = await self.grammar(grammar, form.param if form else "tools", bool(body.compact_json))
        return self.start_job(
            body, [prompt], "messages", built, top, limit=None if clamp else limit, default=limit, reasoning=True,
            grammar=compiled, tools=tools,
        )  # fmt: skip

    async def count(self, body: ChatRequest, *, continue_last: bool = False) -> int:
        """Return the number of tokens in the prompt of a chat completion."""
        return len(await self._prompt(body, self._tools(body)[0], continue_last))

    async def _prompt(self, body: ChatRequest, tools: Tools | None, continue_last: bool) -> list[int]:
        variables = self._template_args(body)
        if tools:
            variables["tools"] = [tool.plain() for tool in body.tools or ()]
        if body.add_generation_prompt is not None:
            if body.add_generation_prompt and continue_last:
                message = "add_generation_prompt starts a new answer, but this request continues the last message; leave it out"
                raise invalid("add_generation_prompt", message)
            variables["add_generation_prompt"] = body.add_generation_prompt
        return await self.render(body.messages, variables, continue_last=continue_last)

    async def complete(self, body: CompletionRequest) -> Job:
        """Start a text completion, with one or more choices for each prompt, and return its job."""
        given: Any = body.prompt
        parts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        fim = await self.fim("suffix") if body.suffix else None
        prompts = [await self._prompt_ids(part, body.max_tokens, fim, body.suffix or "") for part in parts]
        if body.best_of not in (None, body.n or 1):
            raise unsupported("best_of", "only the value of n is supported; leave it out")
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens", "max_tokens is 0, which needs echo to be true; set it, or give at least 1")
        if fim and body.echo:
            raise invalid("echo", "echo is not supported with suffix; leave one of them out")
        is_scored = body.echo and (body.logprobs is not None or body.max_tokens == 0)

        def echo(part: str | list[int]) -> Echo:
            text = part if isinstance(part, str) else self.tokenizer.decode(part)
            return Echo(text, self.tokenizer.offsets(part) if is_scored else ())

        echoes = await run_in_thread(lambda: list(map(echo, parts))) if body.echo else [Echo()] * len(parts)
        each_choice = [echo for echo in echoes for _ in range(body.n or 1)]
        reply = CompletionReply(self.names[0], self.token_bytes, body.logprobs, each_choice)
        form = requested_format(body)
        grammar = await self.grammar({form.kind: form.value}, form.param, bool(body.compact_json)) if form else None
        job = self.start_job(
            body, prompts, "prompt", reply, body.logprobs, limit=body.max_tokens, default=COMPLETION_TOKENS,
            grammar=grammar, prompt_logprobs=(body.logprobs or 0) if is_scored else None, stop_tokens=fim.ends if fim else (),
        )  # fmt: skip
        reply.requests = job.requests
        return job

    @cached_property
    def _fim(self) -> Fim:
        return fim_of(self.tokenizer)

    async def fim(self, param: str) -> Fim:
        """Return the builder of the model's fill-in-the-middle (FIM) prompts.

        Raises ApiError 400 for the field `param` if the model has no such prompts.
        """
        try:
            return await run_in_thread(lambda: self._fim)
        except PipelineError as error:
            raise unsupported(param, str(error)) from None

    async def _prompt_ids(self, prompt: str | list[int], limit: int | None, fim: Fim | None, suffix: str) -> list[int]:
        """Return the token ids of a prompt, or of the FIM prompt for the text before `suffix`.

        Raises ApiError 400 if `limit` more tokens do not fit in the context.
        """
        ids: Any = prompt
        if isinstance(prompt, str):
            self.check_length(len(prompt) + len(suffix), "prompt")
            ids = await (run_in_thread(fim.prompt, prompt, suffix) if fim else run_in_thread(self.tokenizer.encode, prompt))
        elif fim:
            raise invalid("suffix", "suffix needs a prompt of text, not of token ids; send text, or leave suffix out")
        self._free_positions(ids, limit, "prompt")
        self.check_ids(ids, "prompt")
        return ids

    def _tools(self, body: ChatRequest) -> tuple[Tools | None, dict[str, Any]]:
        """Return (tools that the answer may call, {name: JSON schema} of required functions).

        The answer must call one of the required functions; without any, it need not make a call.
        """
        form, choice = self.tokenizer.tool_format, body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise invalid("tool_choice", "tool_choice needs tools; give tools, or leave tool_choice out")
            return None, {}
        if choice == "none":
            return None, {}
        schemas = {tool.function.name: tool.function.parameters or NO_PARAMETERS for tool in body.tools}
        forced: dict[str, Any] = schemas if choice == "required" else {}
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in schemas:
                raise invalid("tool_choice", f"tool_choice names {name!r}, but tools has no such function")
            forced = {name: schemas[name]}
        return Tools(form, schemas, single=body.parallel_tool_calls is False or isinstance(choice, NamedTool)), forced

    async def grammar(self, source: Mapping[str, Any], param: str, compact: bool = False) -> Grammar | None:
        """Compile the grammar of an answer; return None for free text.

        Args:
            source: keyword argument of `Tokenizer.grammar` and its value; empty for free text.
            param: field of the request that holds the grammar.
            compact: whether JSON in the answer has no spaces.

        Raises:
            ApiError: 400 for an invalid grammar.
        """
        if not source:
            return None
        grammars = await run_in_thread(lambda: self.tokenizer.grammars)
        async with self._compiling.setdefault(CLIENT.get(), asyncio.Lock()):
            try:
                return await grammars.compile_async(**source, compact_json=compact)
            except GrammarError as error:
                raise ApiError(400, str(error), "tools" if "tools" in source else param, "unsupported_parameter") from None

    def _template_args(self, body: ChatRequest) -> dict[str, Any]:
        """Return the variables that the request passes to the chat template.

        Raises ApiError 400 for a variable that the template does not read.
        """
        given, name = dict(body.chat_template_kwargs or {}), "chat_template_kwargs"
        try:
            check_variables(self.tokenizer.chat_template, given)
        except PipelineError as error:
            raise unsupported(name, str(error)) from None
        effort, name = body.reasoning_effort, "reasoning_effort"
        if effort is None:
            return given
        if name in self.variables:
            return {name: effort} | given
        # Accept medium, which is OpenAI's default, and none, which is what a model without reasoning does.
        if effort not in ("none", "medium"):
            raise unsupported(name, "this model's chat template has no reasoning effort; leave it out")
        return {"enable_thinking": False} | given if effort == "none" and "enable_thinking" in self.variables else given

    def start_job(
        self, body: CompletionFields, prompts: list[list[int]], param: str, reply: Reply, top: int | None, *,
        limit: int | None, default: int | None = None, grammar: Grammar | None = None, prompt_logprobs: int | None = None,
        stop_tokens: Sequence[int] = (), **options: Any,
    ) -> Job:  # fmt: skip
        """Queue an engine request for every choice and return the job.

        Args:
            param: field that holds the prompts, for error messages.
            top: top_logprobs of generated tokens, None without log-probabilities.
            limit: max tokens of an answer; ApiError if they do not fit in the context.
            default: max tokens if `limit` is None; None for as many as fit in the context.
            prompt_logprobs: top_logprobs of prompt tokens, None without log-probabilities.
            stop_tokens: end tokens besides the model's, unless the request has ignore_eos.
            options: other options of `text_request`, which replace those of `body`.
        """
        if isinstance(reply, ChoicesReply):
            stream_options = body.stream_options or StreamOptions()
            reply.include_usage = bool(stream_options.include_usage)
            reply.continuous_usage = bool(stream_options.continuous_usage_stats)
        if body.priority and not self.limits.priorities:
            raise unsupported("priority", "this server has no priorities; start it with --scheduling-policy priority")
        min_tokens = body.min_tokens or 0
        if min_tokens and grammar:
            raise invalid("min_tokens", "min_tokens is not supported with a grammar, which ends the answer; leave it out")
        self.check_ids(more := body.stop_token_ids or [], "stop_token_ids")
        client, bias = CLIENT.get(), dict[int, float]()
        for name, value in (body.logit_bias or {}).items():
            if not (name.isascii() and name.isdigit() and int(name[:20]) < self.vocab):
                raise invalid("logit_bias", f"logit_bias has {name[:40]!r}; use token ids below {self.vocab}")
            bias[int(name)] = value
        ends = () if body.ignore_eos else (*self.tokenizer.eos, *stop_tokens)
        options = {
            "stop_strings": body.stop or (), "stop_tokens": (*ends, *more),
            "top_logprobs": top, "prompt_logprobs": prompt_logprobs, "min_tokens": min_tokens, "grammar": grammar,
            "repetition_stop": bool(body.repetition_stop), "client": client, "priority": body.priority or 0,
        } | options  # fmt: skip
        job = Job(self.engine, reply, self.retained.share(client))
        try:
            for index, prompt in enumerate(prompts):
                free = self._free_positions(prompt, limit, param)
                max_tokens = default if limit is None else limit
                if max_tokens is not None and min_tokens > max_tokens:
                    message = f"min_tokens is {min_tokens}, but the answer has at most {max_tokens} tokens; use a smaller one"
                    raise invalid("min_tokens", message)
                for choice in range(body.n or 1):
                    longest = free if max_tokens is None else min(max_tokens, free)
                    reserve_answer(job.share, longest, top, len(prompt), prompt_logprobs, grammar)
                    sampling = replace(self.sampling_of(body, choice), logit_bias=bias)
                    request = text_request(
                        prompt, self.context, self.tokenizer, max_tokens=max_tokens, sampling=sampling, **options
                    )
                    job.prompts.append(index)
                    job.requests.append(request)
            self.engine.submit(job.requests, lambda request, event: job.events.put_nowait((request, event)))
        except BaseException:
            job.share.release()
            raise
        return job

    def _free_positions(self, prompt: list[int], limit: int | None, param: str) -> int:
        """Return how many tokens can follow `prompt` in the context.

        Raises ApiError 400 for the field `param` if this is less than `limit`, or less than 1.
        """
        if not prompt:
            raise invalid(param, "the prompt has no tokens; give at least one")
        free = free_positions(self.context, len(prompt))
        if free < 1 or limit is not None and limit > free:
            have = "have" if param == "messages" else "has"
            requested = "" if limit is None else f" and the request asks for {limit} more"
            advice = f"ask for at most {free}" if free >= 1 else f"shorten the {param}"
            raise self.too_long(param, f"the {param} {have} {len(prompt)} tokens{requested}: {advice}")
        return free

    def sampling_of(self, body: CompletionFields, choice: int = 0) -> Sampling:
        """Return the sampling options of choice number `choice`, without logit_bias."""
        names = ("temperature", "temperature_schedule", "top_p", "min_p", "repeat_penalty")
        options = [("repeat_penalty", body.repetition_penalty), *((name, getattr(body, name)) for name in names)]
        given = {name: value for name, value in options if value is not None}
        if body.top_k is not None:
            given["top_k"] = max(body.top_k, 0)
        return replace(
            self.sampling, **given,
            # Each choice has its own seed, so that choices differ and each is reproducible.
            seed=None if body.seed is None else (body.seed + choice) % 2**64,
            frequency_penalty=body.frequency_penalty or 0.0, presence_penalty=body.presence_penalty or 0.0,
        )  # fmt: skip


def _schemas_of_optional_calls(body: ChatRequest, tools: Tools) -> dict[str, Any]:
    """Return the JSON schemas that optional tool calls must match, by function name.

    The result is empty if no function is strict, or if the model's tool format has no token that
    starts a call. In a JSON tool format, a function that is not strict accepts any object.
    """
    strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
    form = tools.form
    if not strict or not form.triggers:
        return {}
    loose = form.style == "json"
    return {name: ANY_OBJECT if loose and name not in strict else schema for name, schema in tools.schemas.items()}
