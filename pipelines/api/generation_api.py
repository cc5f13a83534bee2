"""Convert chat and completion requests to engine requests."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from castiron.pipelines.api.answer_format import AnswerFormat, CallableTools, callable_tools, requested_format
from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.api.async_engine import AsyncEngine, Job
from castiron.pipelines.api.byte_limit import CACHE_SALT, CLIENT, answer_limit, reserve_answer
from castiron.pipelines.api.chat_records import FreeformTool
from castiron.pipelines.api.model_api import Limits, ModelApi, default_sampling, run_in_thread
from castiron.pipelines.api.oldest_messages import without_oldest
from castiron.pipelines.api.replies import ChatReply, ChoicesReply, CompletionReply, Echo, Reply
from castiron.pipelines.api.request_body import log_ignored
from castiron.pipelines.api.samplers import with_samplers
from castiron.pipelines.api.schemas import ChatRequest, CompletionFields, CompletionRequest, Effort, StreamOptions
from castiron.pipelines.engine.chooser import TokenFilter
from castiron.pipelines.engine.request import free_positions
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import check_variables
from castiron.pipelines.text.fill_in_the_middle import Fim, fim_of
from castiron.pipelines.text.grammar import Grammar, GrammarBusy, GrammarError
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.bundle.manifest import Manifest

# OpenAI's default for max_tokens of /v1/completions.
COMPLETION_TOKENS = 16
EFFORTS: tuple[str, ...] = get_args(Effort)
# Variables of chat templates that turn reasoning on and off.
SWITCHES = frozenset({"enable_thinking", "thinking"})


class GenerationApi(ModelApi):
    """The endpoints of a model that generates text."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, names: list[str], manifest: Manifest, limits: Limits):
        """Serve a model.

        `names`: names that requests may use for the model; answers contain the first one. Raises
        PipelineError if `manifest` has an invalid generation_config.
        """
        super().__init__(engine, tokenizer, names, manifest, limits)
        self.engine: AsyncEngine = engine
        self.sampling = default_sampling(manifest, limits)
        self.token_bytes = tokenizer.token_bytes
        self.retained = answer_limit()

    async def chat(
        self, body: ChatRequest, reply: Callable[[], Reply] | None = None, *, continue_last: bool = False,
        drops_oldest: bool = False,
    ) -> Job:  # fmt: skip
        """Start a chat completion and return its job.

        Args:
            reply: returns the object that builds the answer; None for OpenAI's chat completion.
            continue_last: whether the answer continues the last message.
            drops_oldest: whether to leave out the oldest messages if the conversation is too long,
                instead of raising ApiError.
        """
        called = callable_tools(body, self.tokenizer.tool_format)
        prompt = await self._prompt(body, called, continue_last or bool(body.continue_final_message), drops_oldest)
        if called and body.reasoning_budget is not None and called.tools.form.style == "harmony":
            raise invalid(
                "thinking_token_budget",
                "a budget of reasoning is not supported with tools for this model; leave one of them out",
            )
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true; set it, or leave top_logprobs out")
        top = (body.top_logprobs or 0) if body.logprobs else None
        custom = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, FreeformTool))
        built = reply() if reply else ChatReply(
            self.names[0], self.token_bytes, top is not None, is_legacy=bool(body.functions), custom=custom,
            shows_reasoning=body.include_reasoning is not False,
        )  # fmt: skip
        form = requested_format(body)
        grammar = await self.grammar(called.answer_format(form) if called else form, bool(body.compact_json))
        # A max_tokens that does not fit in the context is lowered.
        return await self.start_job(
            body, [prompt], "messages", built, top, max_tokens=_given_limit(body), reasoning=True, grammar=grammar,
            tools=called and called.tools,
        )  # fmt: skip

    async def count(self, body: ChatRequest, *, continue_last: bool = False, drops_oldest: bool = False) -> int:
        called = callable_tools(body, self.tokenizer.tool_format)
        return len(await self._prompt(body, called, continue_last, drops_oldest))

    async def _prompt(
        self, body: ChatRequest, called: CallableTools | None, continue_last: bool, drops_oldest: bool
    ) -> list[int]:
        variables = await self.template_args(body)
        if called:
            variables["tools"] = [tool.plain() for tool in called.shown]
        if body.add_generation_prompt is not None:
            if body.add_generation_prompt and continue_last:
                raise invalid(
                    "add_generation_prompt",
                    "add_generation_prompt starts a new answer, but this request continues the last message; leave it out",
                )
            variables["add_generation_prompt"] = body.add_generation_prompt
        encode = lambda messages: self.render(messages, variables, continue_last=continue_last)
        if drops_oldest:
            return await without_oldest(body.messages, encode, self.context, _given_limit(body))
        return self._truncated(body, await encode(body.messages))

    async def complete(self, body: CompletionRequest) -> Job:
        """Start a text completion, with one or more choices for each prompt, and return its job."""
        given: Any = body.prompt
        parts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        fim = await self.fim("suffix") if body.suffix else None
        limit = COMPLETION_TOKENS if body.limit is None else body.limit
        prompts = [await self._prompt_ids(part, body, fim) for part in parts]
        if body.best_of and body.best_of != body.choices:
            raise unsupported("best_of", "a value other than n is not supported; leave it out")
        if fim and body.echo:
            raise invalid("echo", "echo is not supported with suffix; leave one of them out")
        is_scored = body.echo and (body.logprobs is not None or limit == 0)

        def echo(part: str | list[int]) -> Echo:
            text = part if isinstance(part, str) else self.tokenizer.decode(part)
            return Echo(text, self.tokenizer.offsets(part) if is_scored else ())

        echoes = await run_in_thread(lambda: list(map(echo, parts))) if body.echo else [Echo()] * len(parts)
        each_choice = [echo for echo in echoes for _ in range(body.choices)]
        reply = CompletionReply(self.names[0], self.token_bytes, body.logprobs, each_choice)
        grammar = await self.grammar(requested_format(body), bool(body.compact_json))
        return await self.start_job(
            body, prompts, "prompt", reply, body.logprobs, max_tokens=None if limit < 0 else limit, grammar=grammar,
            stop_tokens=fim.ends if fim else (), prompt_logprobs=(body.logprobs or 0) if is_scored else None,
        )  # fmt: skip

    @cached_property
    def _fim(self) -> Fim:
        return fim_of(self.tokenizer)

    async def fim(self, param: str) -> Fim:
        """Return the builder of this model's fill-in-the-middle (FIM) prompts.

        Raises ApiError 400 if the model does not support FIM. `param`: the field that requires FIM,
        for the error.
        """
        try:
            return await run_in_thread(lambda: self._fim)
        except PipelineError as error:
            raise unsupported(param, f"fill-in-the-middle is not supported: {error}") from None

    async def _prompt_ids(self, prompt: str | list[int], body: CompletionRequest, fim: Fim | None) -> list[int]:
        """Return the token ids of a prompt.

        `prompt`: text or token ids. `fim`: builder of fill-in-the-middle prompts; if given, the
        result contains both `prompt` and the request's suffix.
        """
        ids: Any = prompt
        if isinstance(prompt, str):
            suffix = body.suffix or ""
            self.check_length(len(prompt) + len(suffix), "prompt")
            has_special = body.add_special_tokens is not False
            ids = await (
                run_in_thread(fim.prompt, prompt, suffix) if fim else run_in_thread(self.tokenizer.encode, prompt, has_special)
            )
        elif fim:
            raise invalid("suffix", "suffix needs a prompt of text, not of token ids; send text, or leave suffix out")
        if body.truncate_prompt_tokens is not None and (fim or body.echo):
            raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is not supported with suffix or echo; leave it out")
        ids = self._truncated(body, ids)
        self._free_positions(ids, _given_limit(body), "prompt")
        self.check_ids(ids, "prompt")
        return ids

    def _truncated(self, body: CompletionFields, prompt: list[int]) -> list[int]:
        count = body.truncate_prompt_tokens
        if count == 0:
            raise invalid(
                "truncate_prompt_tokens", "truncate_prompt_tokens is 0, which leaves no prompt; give at least 1, or -1"
            )
        if count == -1:
            count = max(0, self.context + 1 - max(1, body.limit or 1))
        if count is None or len(prompt) <= count:
            return prompt
        return prompt[:count] if body.truncation_side == "right" else prompt[len(prompt) - count :]

    async def grammar(self, form: AnswerFormat | None, compact: bool = False) -> Grammar | None:
        """Compile the grammar of answers in the format `form`; return None for free text.

        `compact`: whether JSON must be written without spaces between its elements. Raises ApiError
        400 for an invalid schema or grammar, and 503 if compiling it takes too long now.
        """
        if not form:
            return None
        grammars = await run_in_thread(lambda: self.tokenizer.grammars)
        try:
            return await grammars.compile_async(CLIENT.get(), **{form.kind: form.value}, compact_json=compact)
        except GrammarBusy as error:
            raise ApiError(503, f"{form.param}: {error}", form.param, "grammar_compiler_busy") from None
        except GrammarError as error:
            raise unsupported(form.param, f"the format of the answer is not supported: {error}") from None

    async def template_args(self, body: ChatRequest) -> dict[str, Any]:
        """Return the variables that the request passes to the chat template.

        Raises ApiError 400 for a variable that the template does not read.
        """
        given, name = dict(body.chat_template_kwargs or {}), "chat_template_kwargs"
        try:
            check_variables(self.tokenizer.chat_template, given)
        except PipelineError as error:
            raise unsupported(name, f"unknown variable: {error}") from None
        if (thinking := body.thinking and body.thinking.type) and thinking != "adaptive":
            given = dict.fromkeys(SWITCHES & self.variables, thinking == "enabled") | given
        if "verbosity" in self.variables and body.verbosity:
            given = {"verbosity": body.verbosity} | given
        elif body.verbosity not in (None, "medium"):
            self._no_effect("verbosity", "this model's chat template has no verbosity")
        effort, name = body.reasoning_effort, "reasoning_effort"
        if effort is None:
            return given
        if name in self.variables:
            distance = lambda other: abs(EFFORTS.index(other) - EFFORTS.index(effort))
            return {name: min(await run_in_thread(lambda: self._efforts), key=distance, default=effort)} | given
        if switches := SWITCHES & self.variables:
            return dict.fromkeys(switches, effort != "none") | given
        # Medium is OpenAI's default, and none is what a model without reasoning does.
        if effort not in ("none", "medium"):
            self._no_effect(name, "this model's chat template has no reasoning effort")
        return given

    def _no_effect(self, name: str, reason: str) -> None:
        if self.limits.strict_requests:
            raise unsupported(name, f"{reason}; leave it out")
        log_ignored([name])

    @cached_property
    def _efforts(self) -> list[str]:
        if self.tokenizer.tool_format.style == "harmony":
            # gpt-oss was trained with these efforts; its template accepts any text.
            return ["low", "medium", "high"]
        found = []
        for effort in EFFORTS:
            with contextlib.suppress(PipelineError):
                self.tokenizer.render_chat([{"role": "user", "content": "x"}], reasoning_effort=effort)
                found.append(effort)
        return found

    async def start_job(
        self, body: CompletionFields, prompts: list[list[int]], param: str, reply: Reply, top: int | None, *,
        max_tokens: int | None, grammar: Grammar | None = None, prompt_logprobs: int | None = None,
        stop_tokens: Sequence[int] = (), **options: Any,
    ) -> Job:  # fmt: skip
        """Queue an engine request for every choice and return the job.

        Args:
            prompts: token ids of each prompt; each is answered with body.choices choices.
            param: name of the request's field that has the prompts, for error messages.
            reply: builder of the answer's JSON.
            top: number of top_logprobs of each generated token; None if the request does not ask
                for log-probabilities.
            max_tokens: max tokens of a choice; None for the server's limit.
            grammar: grammar that restricts each choice; None for free text.
            prompt_logprobs: the same as `top` for the tokens of the prompts.
            stop_tokens: token ids that end a choice, in addition to the model's own; not used if
                the request has ignore_eos.
            options: more keyword arguments of `text_request`, which creates each engine request;
                they override options that `body` sets.
        """
        max_tokens = self.limits.max_tokens if max_tokens is None else max_tokens
        if isinstance(reply, ChoicesReply):
            stream_options = body.stream_options or StreamOptions()
            reply.include_usage = bool(stream_options.include_usage)
            reply.continuous_usage = bool(stream_options.continuous_usage_stats)
        if body.priority and not self.limits.priorities:
            raise unsupported("priority", "this server has no priorities; start it with --scheduling-policy priority")
        if isinstance(reply, CompletionReply | ChatReply):
            reply.prompt_top, reply.has_token_ids = body.prompt_logprobs, bool(body.return_token_ids)
            if body.prompt_logprobs is not None:
                if body.stream:
                    raise invalid("prompt_logprobs", "prompt_logprobs is not supported in a stream; leave one of them out")
                prompt_logprobs = max(body.prompt_logprobs, prompt_logprobs or 0)
        capacity, count = self.engine.slots + self.engine.queue, len(prompts) * body.choices
        if count > capacity:
            name = param if body.choices == 1 else "n" if body.n else "n_cmpl"
            raise invalid(
                name,
                f"{len(prompts)} prompts with n {body.choices} need {count} answers, but one client can have {capacity} in "
                "progress; send several requests",
            )
        min_tokens = body.min_tokens or 0
        for name in ("min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(body, name) and grammar:
                raise invalid(name, f"{name} is not supported with a grammar, which decides all tokens; leave it out")
        self.check_ids(more := body.stop_token_ids or [], "stop_token_ids")
        self.check_ids(body.allowed_token_ids or [], "allowed_token_ids")
        self.check_ids([key for key in body.logit_bias or () if isinstance(key, int)], "logit_bias")
        bias = await run_in_thread(self._token_biases, body.logit_bias) if body.logit_bias else {}
        client = CLIENT.get()
        ends = () if body.ignore_eos else (*self.tokenizer.eos, *stop_tokens)
        options = {
            "stop_strings": body.stop or (), "stop_tokens": (*ends, *more),
            "top_logprobs": top, "prompt_logprobs": prompt_logprobs, "grammar": grammar,
            "reasoning_budget": body.reasoning_budget,
            "repetition_stop": bool(body.repetition_stop), "client": client, "cache_salt": CACHE_SALT.get(),
            "priority": body.priority or 0, "receipt": bool(body.receipt),
        } | options  # fmt: skip
        rules: TokenFilter | None = None
        if min_tokens or body.allowed_token_ids or body.bad_words:
            words = await run_in_thread(self._token_sequences, body.bad_words) if body.bad_words else []
            rules = TokenFilter(min_tokens, (*ends, *more), body.allowed_token_ids, words)
        job = Job(self.engine, reply, self.retained.share(client))
        reply.requests, reply.manifest = job.requests, self.manifest
        try:
            for index, prompt in enumerate(prompts):
                free = self._free_positions(prompt, None, param)
                if min_tokens > max_tokens:
                    raise invalid(
                        "min_tokens",
                        f"min_tokens is {min_tokens}, but the answer has at most {max_tokens} tokens; use a smaller one",
                    )
                for choice in range(body.choices):
                    reserve_answer(job.share, min(max_tokens, free), top, len(prompt), prompt_logprobs, grammar)
                    sampling = replace(self.sampling_of(body, choice), logit_bias=bias)
                    request = text_request(
                        prompt, self.context, self.tokenizer, max_tokens=max_tokens, sampling=sampling,
                        constraint=rules and rules.copy(), **options,
                    )  # fmt: skip
                    job.prompts.append(index)
                    job.requests.append(request)
            job.stream = self.engine.submit(job.requests)
        except BaseException:
            job.share.release()
            raise
        return job

    def _token_biases(self, biases: Mapping[int | str, float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for key, bias in biases.items():
            ids = [key] if isinstance(key, int) else self.tokenizer.encode(key, add_special_tokens=False)
            found |= dict.fromkeys(ids, bias)
        return found

    def _token_sequences(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of words that the answer must not contain.

        Each word has two sequences: without and with a space before the word.
        """
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return [ids for text in texts if (ids := self.tokenizer.encode(text, add_special_tokens=False))]

    def _free_positions(self, prompt: list[int], limit: int | None, param: str) -> int:
        """Return how many more tokens fit in the context after `prompt`.

        `limit`: number of tokens that the request asks for, None for no limit. `param`: name of the
        request's field that has the prompt. Raises ApiError 400 if `prompt` is empty, if no token
        fits, or if fewer than `limit` fit.
        """
        if not prompt:
            raise invalid(param, "the prompt has no tokens; give at least one")
        free = free_positions(self.context, len(prompt))
        if free < 1 or limit is not None and limit > free:
            have = "have" if param == "messages" else "has"
            requested = "" if limit is None else f" and the request asks for {limit} more"
            advice = f"ask for at most {free}" if free >= 1 else f"shorten the {param}"
            raise self.too_long(param, f"the {param} {have} {len(prompt)} tokens{requested}; {advice}")
        return free

    def sampling_of(self, body: CompletionFields, choice: int = 0) -> Sampling:
        """Return the sampling options of one choice, except logit_bias.

        `choice`: index of the choice. If the request has a seed, it is added to that seed.
        """
        names = ("temperature", "temperature_schedule", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        # HF's and vLLM's name; their penalty counts all tokens.
        vllm = {"repeat_penalty": body.repetition_penalty, "repeat_last_n": -1} if body.repetition_penalty is not None else {}
        given = vllm | {name: value for name in names if (value := getattr(body, name)) is not None}
        if body.top_k is not None:
            given["top_k"] = max(body.top_k, 0)
        found = self.sampling.with_options(
            **given,
            # Each choice has its own seed, so that choices differ and each is reproducible.
            # As in vLLM and llama.cpp, -1 means a random seed.
            seed=None if body.seed in (None, -1) else (body.seed + choice) % 2**64,
            frequency_penalty=body.frequency_penalty or 0.0, presence_penalty=body.presence_penalty or 0.0,
        )  # fmt: skip
        return found if body.samplers is None else with_samplers(found, body.samplers)


def _given_limit(body: CompletionFields) -> int | None:
    return None if body.limit is None or body.limit < 0 else body.limit
