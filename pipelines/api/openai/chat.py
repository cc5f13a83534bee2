"""OpenAI's /v1/chat/completions and /v1/completions, and vLLM's and llama.cpp's /tokenize."""

from __future__ import annotations

from typing import Any

from castiron.pipelines.api.api_errors import invalid, unsupported
from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.callable_tools import unknown_function
from castiron.pipelines.api.generation import CallableFunction, Generation, only_format
from castiron.pipelines.api.generation_api import GenerationApi, generating
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.openai.records import (
    AllowedTools,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    FunctionName,
    TokenizeRequest,
)
from castiron.pipelines.api.openai.replies import ChatReply, CompletionReply, Echo
from castiron.pipelines.api.request_fields import Function

# OpenAI's default for max_tokens of /v1/completions.
COMPLETION_TOKENS = 16
# Max characters of a /tokenize request; each takes 200 bytes of memory while it is encoded.
MAX_TOKENIZE_CHARACTERS = 1_000_000


async def start_chat(model: ModelApi, body: ChatRequest) -> Job:
    """Start a chat completion."""
    api = generating(model)
    return await api.start(parse_chat(body), ChatReply(api.names[0], api.token_bytes, body))


def parse_chat(body: ChatRequest) -> Generation:
    """Convert a chat request; ApiError 400 for fields that contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true; set it, or leave top_logprobs out")
    thinking = body.thinking.type if body.thinking and body.thinking.type != "adaptive" else None
    return Generation(
        param="messages", messages=[message.plain for message in body.messages], template_args=body.chat_template_kwargs or {},
        thinking=thinking and thinking == "enabled", reasoning_effort=body.reasoning_effort, verbosity=body.verbosity,
        add_generation_prompt=body.add_generation_prompt, continues_last_message=bool(body.continue_final_message),
        format=only_format(body.formats), has_reasoning=True,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=_prompt_logprobs(body),
        **_functions(body), **_truncation(body), **body.options,
    )  # fmt: skip


def _functions(body: ChatRequest) -> dict[str, Any]:
    tools: list[Function] = [tool.function for tool in body.tools or ()]
    choice, has_single_call = body.tool_choice, body.parallel_tool_calls is False
    called: str | None = None
    if body.functions:
        if tools:
            raise invalid("functions", "functions is the old name of tools; give one of them")
        tools, has_single_call, choice = body.functions, True, None
        if isinstance(body.function_call, FunctionName):
            called = body.function_call.name
        else:
            choice = body.function_call
    if isinstance(choice, AllowedTools):
        known = {tool.name: tool for tool in reversed(tools)}
        names = [named.function.name for named in choice.allowed_tools.tools]
        if unknown := [name for name in names if name not in known]:
            raise unknown_function(unknown[0])
        tools, choice = [known[name] for name in names], choice.allowed_tools.mode
    elif choice is not None and not isinstance(choice, str):
        called, choice = choice.function.name, None
    functions = [CallableFunction(tool.name, tool.description, tool.parameters, bool(tool.strict)) for tool in tools]
    return {
        "functions": functions, "tool_choice": choice or "auto", "called": called, "has_single_call": has_single_call
    }  # fmt: skip


def _truncation(body: CompletionFields) -> dict[str, Any]:
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is 0, which leaves no prompt; give at least 1, or -1")
    return {
        "max_prompt_tokens": body.truncate_prompt_tokens, "free_tokens": max(1, body.limit or 1),
        "keeps_start": body.truncation_side == "right",
    }  # fmt: skip


def _prompt_logprobs(body: CompletionFields, scored: int | None = None) -> int | None:
    if body.prompt_logprobs is None:
        return scored
    if body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not supported in a stream; leave one of them out")
    return max(body.prompt_logprobs, scored or 0)


async def start_completion(model: ModelApi, body: CompletionRequest) -> Job:
    """Start a text completion, with one or more choices for each prompt."""
    api = generating(model)
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    if body.truncate_prompt_tokens is not None and (body.suffix or body.echo):
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is not supported with suffix or echo; leave it out")
    if body.best_of and body.best_of != body.choices:
        raise unsupported("best_of", "a value other than n is not supported; leave it out")
    if body.suffix and body.echo:
        raise invalid("echo", "echo is not supported with suffix; leave one of them out")
    fim = await api.fim("suffix") if body.suffix else None
    ids = [await _encoded(api, body, prompt) for prompt in prompts]
    limit = COMPLETION_TOKENS if body.limit is None else body.max_answer
    is_scored = body.echo and (body.logprobs is not None or limit == 0)
    options = body.options | {"max_tokens": limit}
    generation = Generation(
        param="prompt", prompts=ids, must_fit=body.max_answer is not None, format=only_format(body.formats),
        end_tokens=fim.ends if fim else (), top_logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body, (body.logprobs or 0) if is_scored else None), **_truncation(body), **options,
    )  # fmt: skip

    def echo(prompt: str | list[int], tokens: list[int]) -> Echo:
        # A prompt that is too long would take seconds.
        api.free_positions(generation, tokens)
        text = prompt if isinstance(prompt, str) else api.tokenizer.decode(prompt)
        return Echo(text, api.tokenizer.offsets(prompt) if is_scored else ())

    echoes = await run_in_thread(lambda: list(map(echo, prompts, ids))) if body.echo else [Echo()] * len(prompts)
    reply = CompletionReply(api.names[0], api.token_bytes, body, [echo for echo in echoes for _ in range(body.choices)])
    return await api.start(generation, reply)


async def _encoded(api: GenerationApi, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt, together with the request's suffix."""
    if isinstance(prompt, str):
        api.check_length(len(prompt) + len(body.suffix or ""), "prompt")
        if body.suffix:
            return await run_in_thread((await api.fim("suffix")).prompt, prompt, body.suffix)
        return await run_in_thread(api.tokenizer.encode, prompt, body.add_special_tokens is not False)
    if body.suffix:
        raise invalid("suffix", "suffix needs a prompt of text, not of token ids; send text, or leave suffix out")
    api.check_ids(prompt, "prompt")
    return prompt


async def tokenize(api: ModelApi, body: TokenizeRequest) -> list[int]:
    """Return the token ids of a text or of messages."""
    fields = ("content", "prompt", "messages")
    given = {name: value for name in fields if (value := getattr(body, name)) is not None}
    if len(given) != 1:
        raise invalid("content", f"the request has {len(given)} of content, prompt and messages; give one")
    special = body.add_special if body.add_special is not None else body.add_special_tokens
    if body.messages is not None:
        if special is not None:
            raise invalid("add_special", "messages get special tokens from the chat template; leave add_special out")
        return await api.render([message.plain for message in body.messages])
    ((name, text),) = given.items()
    if len(text) > MAX_TOKENIZE_CHARACTERS:
        raise invalid(name, f"{name} has {len(text)} characters; the limit is {MAX_TOKENIZE_CHARACTERS}: send it in parts")
    # By default, llama.cpp adds no special tokens (field content) and vLLM adds them (field prompt).
    if name == "prompt" if special is None else special:
        return await run_in_thread(api.tokenizer.encode, text)
    return await run_in_thread(api.tokenizer.encode, text, False)
