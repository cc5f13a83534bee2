"""`GenerationApi`: it runs a `Generation` on the engine."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from castiron.pipelines.api.api_errors import ApiError, invalid, unsupported
from castiron.pipelines.api.async_engine import AsyncEngine, Job
from castiron.pipelines.api.byte_limit import CACHE_SALT, CLIENT, answer_limit, reserve_answer
from castiron.pipelines.api.callable_tools import CallableTools, callable_tools
from castiron.pipelines.api.generation import EFFORTS, AnswerFormat, Effort, Generation
from castiron.pipelines.api.model_api import Limits, ModelApi, default_sampling, run_in_thread
from castiron.pipelines.api.oldest_messages import without_oldest
from castiron.pipelines.api.replies import Reply
from castiron.pipelines.api.request_body import log_ignored
from castiron.pipelines.api.samplers import with_samplers
from castiron.pipelines.engine.constraint import TokenFilter
from castiron.pipelines.engine.request import free_positions as positions_after
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import check_variables
from castiron.pipelines.text.fill_in_the_middle import Fim, fim_of
from castiron.pipelines.text.grammar import Grammar, GrammarBusy, GrammarError
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.bundle.manifest import Manifest

# Variables of chat templates that turn reasoning on and off.
SWITCHES = frozenset({"enable_thinking", "thinking"})


class GenerationApi(ModelApi):
    """A model that generates text."""

    engine: AsyncEngine

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, names: list[str], manifest: Manifest, limits: Limits):
        """Serve a model; PipelineError if `manifest` has an invalid generation_config."""
        super().__init__(engine, tokenizer, names, manifest, limits)
        self.sampling = default_sampling(manifest, limits)
        self.token_bytes = tokenizer.token_bytes
        self.retained = answer_limit()

    async def start(self, generation: Generation, reply: Reply) -> Job:
        """Queue an engine request for every choice of every prompt, and return their job."""
        if generation.priority and not self.limits.priorities:
            raise unsupported("priority", "this server has no priorities; start it with --scheduling-policy priority")
        called = callable_tools(generation, self.tokenizer.tool_format)
        if called and generation.reasoning_budget is not None and called.tools.form.style == "harmony":
            raise invalid(
                generation.name("reasoning_budget"),
                "a budget of reasoning is not supported with tools for this model; leave one of them out",
            )
        prompts = [self._truncated(generation, each) for each in generation.prompts or [await self.prompt(generation, called)]]
        form = called.answer_format(generation.format) if called else generation.format
        grammar = await self.grammar(form, generation.compact_json)
        ends = () if generation.ignore_eos else (*self.tokenizer.eos, *generation.end_tokens)
        stop_tokens = (*ends, *generation.stop_tokens)
        token_filter = await self._token_filter(generation, stop_tokens, bool(grammar))
        self.check_ids(generation.stop_tokens, "stop_token_ids")
        self.check_ids([key for key in generation.logit_bias if isinstance(key, int)], "logit_bias")
        bias = await run_in_thread(self._token_biases, generation.logit_bias) if generation.logit_bias else {}
        max_tokens = self.limits.max_tokens if generation.max_tokens is None else generation.max_tokens
        if generation.min_tokens > max_tokens:
            raise invalid(
                "min_tokens",
                f"min_tokens is {generation.min_tokens}, but the answer has at most {max_tokens} tokens; use a smaller one",
            )
        count = len(prompts) * generation.choices
        if count > self.engine.capacity:
            raise invalid(
                generation.param if generation.choices == 1 else generation.name("choices"),
                f"{len(prompts)} prompts with n {generation.choices} need {count} answers, but one client can have "
                f"{self.engine.capacity} in progress; send several requests",
            )
        job = Job(self.engine, reply, self.retained.share(CLIENT.get()))
        reply.requests, reply.manifest = job.requests, self.manifest
        top, prompt_top = generation.top_logprobs, generation.prompt_logprobs
        try:
            for index, prompt in enumerate(prompts):
                free = self.free_positions(generation, prompt)
                for choice in range(generation.choices):
                    reserve_answer(job.share, min(max_tokens, free), top, len(prompt), prompt_top, grammar)
                    request = text_request(
                        prompt, self.context, self.tokenizer, max_tokens=max_tokens,
                        sampling=replace(self.sampling_of(generation, choice), logit_bias=bias),
                        stop_strings=generation.stop_strings, stop_tokens=stop_tokens, top_logprobs=top,
                        prompt_logprobs=prompt_top, grammar=grammar, tools=called and called.tools,
                        constraint=token_filter and token_filter.copy(), reasoning=generation.has_reasoning,
                        reasoning_budget=generation.reasoning_budget, repetition_stop=generation.repetition_stop,
                        priority=generation.priority, client=CLIENT.get(), cache_salt=CACHE_SALT.get(),
                        receipt=generation.has_receipt,
                    )  # fmt: skip
                    job.prompts.append(index)
                    job.requests.append(request)
            job.stream = self.engine.submit(job.requests)
        except BaseException:
            job.share.release()
            raise
        return job

    async def count(self, generation: Generation) -> int:
        """Return the number of tokens of a prompt of messages."""
        return len(await self.prompt(generation, callable_tools(generation, self.tokenizer.tool_format)))

    async def prompt(self, generation: Generation, called: CallableTools | None) -> list[int]:
        """Return the token ids of the messages and of the functions in `called`."""
        variables = await self._template_args(generation)
        if called:
            variables["tools"] = [function.plain for function in called.functions]
        continue_last, starts_answer = generation.continues_last_message, generation.add_generation_prompt
        if starts_answer is not None:
            if starts_answer and continue_last:
                raise invalid(
                    "add_generation_prompt",
                    "add_generation_prompt starts a new answer, but this request continues the last message; leave it out",
                )
            variables["add_generation_prompt"] = starts_answer
        encode = lambda messages: self.render(messages, variables, continue_last=continue_last, param=generation.param)
        if generation.drops_oldest:
            return await without_oldest(generation.messages, encode, self.context, generation.max_tokens)
        return await encode(generation.messages)

    @cached_property
    def _fim(self) -> Fim:
        return fim_of(self.tokenizer)

    async def fim(self, param: str) -> Fim:
        """Return the builder of fill-in-the-middle prompts, or raise ApiError 400 for `param`."""
        try:
            return await run_in_thread(lambda: self._fim)
        except PipelineError as error:
            raise unsupported(param, f"fill-in-the-middle is not supported: {error}") from None

    def _truncated(self, generation: Generation, prompt: Sequence[int]) -> Sequence[int]:
        count = generation.max_prompt_tokens
        if count == -1:
            count = max(0, self.context + 1 - generation.free_tokens)
        if count is None or len(prompt) <= count:
            return prompt
        return prompt[:count] if generation.keeps_start else prompt[len(prompt) - count :]

    async def grammar(self, form: AnswerFormat | None, compact: bool = False) -> Grammar | None:
        """Compile the grammar of answers in the format `form`; None for free text.

        Raises ApiError 400 for an invalid schema or grammar, 503 if compiling takes too long now.
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

    async def _template_args(self, generation: Generation) -> dict[str, Any]:
        """Return the variables for the chat template; ApiError 400 if it does not read one."""
        given = dict(generation.template_args)
        try:
            check_variables(self.tokenizer.chat_template, given)
        except PipelineError as error:
            raise unsupported("chat_template_kwargs", f"unknown variable: {error}") from None
        if generation.thinking is not None:
            given = dict.fromkeys(SWITCHES & self.variables, generation.thinking) | given
        if "verbosity" in self.variables and generation.verbosity:
            given = {"verbosity": generation.verbosity} | given
        elif generation.verbosity not in (None, "medium"):
            self._no_effect(generation.name("verbosity"), "this model's chat template has no verbosity")
        effort = generation.reasoning_effort
        if effort is None:
            return given
        if "reasoning_effort" in self.variables:
            distance = lambda other: abs(EFFORTS.index(other) - EFFORTS.index(effort))
            return {"reasoning_effort": min(await run_in_thread(lambda: self._efforts), key=distance, default=effort)} | given
        if switches := SWITCHES & self.variables:
            return dict.fromkeys(switches, effort != "none") | given
        # Medium is OpenAI's default, and none is what a model without reasoning does.
        if effort not in ("none", "medium"):
            self._no_effect(generation.name("reasoning_effort"), "this model's chat template has no reasoning effort")
        return given

    def _no_effect(self, name: str, reason: str) -> None:
        if self.limits.strict_requests:
            raise unsupported(name, f"{reason}; leave it out")
        log_ignored([name])

    @cached_property
    def _efforts(self) -> list[Effort]:
        if self.tokenizer.tool_format.style == "harmony":
            # gpt-oss was trained with these efforts; its template accepts any text.
            return ["low", "medium", "high"]
        accepted: list[Effort] = []
        for effort in EFFORTS:
            with contextlib.suppress(PipelineError):
                self.tokenizer.render_chat([{"role": "user", "content": "x"}], reasoning_effort=effort)
                accepted.append(effort)
        return accepted

    async def _token_filter(
        self, generation: Generation, stop_tokens: Sequence[int], has_grammar: bool
    ) -> TokenFilter | None:  # fmt: skip
        self.check_ids(generation.allowed_token_ids, "allowed_token_ids")
        fields = ("min_tokens", "allowed_token_ids", "bad_words")
        if not (given := [name for name in fields if getattr(generation, name)]):
            return None
        if has_grammar:
            raise invalid(given[0], f"{given[0]} is not supported with a grammar, which decides all tokens; leave it out")
        words = await run_in_thread(self._token_sequences, generation.bad_words) if generation.bad_words else []
        return TokenFilter(generation.min_tokens, stop_tokens, generation.allowed_token_ids or None, words)

    def _token_biases(self, biases: Mapping[int | str, float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for key, bias in biases.items():
            ids = [key] if isinstance(key, int) else self.tokenizer.encode(key, add_special_tokens=False)
            found |= dict.fromkeys(ids, bias)
        return found

    def _token_sequences(self, words: Sequence[str]) -> list[list[int]]:
        # Each word has two sequences: without and with a space before it.
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return [ids for text in texts if (ids := self.tokenizer.encode(text, add_special_tokens=False))]

    def free_positions(self, generation: Generation, prompt: Sequence[int]) -> int:
        """Return how many tokens may follow `prompt`; ApiError 400 if it is empty or too long."""
        param, limit = generation.param, generation.max_tokens if generation.must_fit else None
        if not prompt:
            raise invalid(param, "the prompt has no tokens; give at least one")
        free = positions_after(self.context, len(prompt))
        if free < 1 or limit is not None and limit > free:
            have = "have" if param == "messages" else "has"
            requested = "" if limit is None else f" and the request asks for {limit} more"
            advice = f"ask for at most {free}" if free >= 1 else f"shorten the {param}"
            raise self.too_long(param, f"the {param} {have} {len(prompt)} tokens{requested}; {advice}")
        return free

    def sampling_of(self, generation: Generation, choice: int = 0) -> Sampling:
        """Return the sampling options of a choice, except logit_bias."""
        seed = None if generation.seed is None else (generation.seed + choice) % 2**64
        sampling = self.sampling.with_options(**{"frequency_penalty": 0.0, "presence_penalty": 0.0, **generation.sampling})
        sampling = replace(sampling, seed=seed)
        return sampling if generation.samplers is None else with_samplers(sampling, generation.samplers)


def generating(model: ModelApi) -> GenerationApi:
    """Return `model` if it generates text; otherwise raise ApiError 400."""
    if isinstance(model, GenerationApi):
        return model
    message = f"{model.names[0]} is an embedding model and cannot generate text; use {model.endpoint}"
    raise ApiError(400, message, "model", "model_not_supported")
