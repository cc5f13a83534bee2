"""Request bodies of OpenAI's completions, with fields of castiron, vLLM and llama.cpp.

Unknown fields and fields that only label the request or the customer are ignored. An unsupported
field is an error if its value would change the answer.
"""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from castiron.pipelines.api.api_errors import invalid
from castiron.pipelines.api.generation import ANY_OBJECT, AnswerFormat, Effort, Message
from castiron.pipelines.api.request_body import Body, ByType, Unsupported, is_one_or_more
from castiron.pipelines.api.request_fields import (
    LIMITED,
    CalledFunction,
    Content,
    Function,
    FunctionIdentifier,
    GenerationFields,
    Prompt,
    Stops,
    StopString,
    TokenId,
    TokenIds,
    formats_of,
    text_of,
)


def is_negative(value: Any) -> bool:
    return type(value) in (int, float) and value < 0


# Unsupported fields of vLLM and llama.cpp: (accepted values, which change nothing; names).
UNSUPPORTED: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "repetition_detection guided_whitespace_pattern"),
    ((False,), "include_stop_str_in_output return_prompt_text return_tokens_as_token_ids use_beam_search watermarking"),
    ((False,), "post_sampling_probs return_tokens"),
    ((True,), "skip_special_tokens spaces_between_special_tokens"),
    ((0,), "dry_multiplier min_keep mirostat"),
    ((0, is_negative), "dynatemp_range n_probs top_n_sigma xtc_probability"),
    ((is_negative,), "adaptive_target"),
    ((is_one_or_more,), "typical_p typ_p"),
    ((1,), "length_penalty"),
    (([],), "logits_processors logprob_token_ids lora"),
    (({},), "vllm_xargs"),
)
# The same for fields of chat completions, also OpenAI's.
UNSUPPORTED_IN_CHAT: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "audio moderation web_search_options chat_template"),
    ((False,), "add_special_tokens echo"),
    ((True,), "parse_tool_calls"),
    (([],), "documents"),
    (([], ["text"]), "modalities"),
    (("auto", "deepseek"), "reasoning_format"),
)


def _record(name: str, table: Iterable[tuple[tuple[Any, ...], str]]) -> Any:
    fields: Any = {field: (Annotated[Any, Unsupported(*values)], None) for values, names in table for field in names.split()}
    return create_model(name, __base__=Body, **fields)


UnsupportedFields = _record("UnsupportedFields", UNSUPPORTED)
UnsupportedChatFields = _record("UnsupportedChatFields", UNSUPPORTED_IN_CHAT)

# The JSON schema of the arguments of a custom tool.
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}


class Call(Body):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["function", None] = None
    id: str | None = None
    function: CalledFunction


class CalledFreeform(Body):
    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    name: str
    input: str | None = None


class FreeformCall(Body):
    """A call to a custom tool in an earlier answer."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["custom"]
    id: str | None = None
    custom: CalledFreeform

    @property
    def function(self) -> CalledFunction:
        return CalledFunction(name=self.custom.name, arguments={"input": self.custom.input})


class ChatMessage(BaseModel):
    """A chat message; fields other than role and content are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: Annotated[list[Annotated[Call | FreeformCall, ByType("function")]], Field(fail_fast=True)] | None = None
    # OpenAI's old name of a single call, which has no id.
    function_call: CalledFunction | None = None

    @property
    def plain(self) -> Message:
        """The message with its content as text, and all calls in `tool_calls`."""
        old = [Call(function=self.function_call)] if self.function_call else []
        calls = [{"id": call.id, "function": call.function.model_dump()} for call in (*(self.tool_calls or ()), *old)]
        message = {**(self.model_extra or {}), "role": self.role, "content": text_of(self.content)}
        return {**message, "tool_calls": calls} if calls else message


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """A tool choice that names the function which the answer must call."""

    type: Literal["function"]
    function: FunctionName


class NamedFreeform(Body):
    """A tool choice that names the custom tool which the answer must call."""

    type: Literal["custom"]
    function: FunctionName = Field(alias="custom")


class AllowedToolList(Body):
    """The functions that an answer may call, and whether it must call one (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedTool | NamedFreeform, ByType()]], Field(fail_fast=True)]


class AllowedTools(Body):
    """A tool choice that lists the functions which the answer may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class Tool(Body):
    type: Literal["function"]
    function: Function


class Freeform(Body):
    """A custom tool, whose input is a text; a grammar for it is not supported."""

    name: FunctionIdentifier
    description: str | None = None
    format: Annotated[Any, Unsupported({"type": "text"})] = None


class FreeformTool(Body):
    """OpenAI's custom tool, which the model calls like a function with the argument `input`."""

    type: Literal["custom"]
    custom: Freeform

    @property
    def function(self) -> Function:
        return Function(name=self.custom.name, description=self.custom.description, parameters=INPUT, strict=True)


# Values of vLLM's fields: a JSON schema as an object or as text, and a list of possible answers.
Schema = dict[str, Any] | bool | str
Choices = Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)]
# Max choices of a request; each takes a slot or waits for one.
MAX_CHOICES = 128
# OpenAI's limit for the entries of logit_bias.
MAX_BIASES = 1024
# A tool choice that is an object.
ChosenTool = Annotated[NamedTool | NamedFreeform | AllowedTools, ByType()]
Verbosity = Literal["low", "medium", "high"]
# Biases by token id, or by a text, which stands for its tokens.
Biases = Annotated[dict[TokenId | StopString, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]


def _biases(value: Any) -> Any:
    """Convert pairs to an object, and false, with which llama.cpp forbids a token, to -100."""
    if isinstance(value, list):
        is_pair = lambda each: isinstance(each, list) and len(each) == 2 and type(each[0]) in (int, str)
        if len(value) > MAX_BIASES or not all(map(is_pair, value)):
            return value
        pairs = value
    elif isinstance(value, dict):
        pairs = [(int(key[:20]) if key.isascii() and key.isdigit() else key, bias) for key, bias in value.items()]
    else:
        return value
    return {key: -100 if bias is False else bias for key, bias in pairs}


class StreamOptions(Body):
    include_usage: bool | None = None
    # vLLM's field: whether every chunk has the token counts so far.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class JsonSchema(Body):
    """A JSON schema that the answer must match, whether or not `strict` is set."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer; llama.cpp's clients send `schema` instead of `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @property
    def formats(self) -> list[AnswerFormat]:
        if (self.json_schema is None) == (self.type == "json_schema") and self.schema_ is None:
            param = "response_format.json_schema"
            if self.type == "json_schema":
                raise invalid(param, f"{param} is missing; give it, because the type is json_schema")
            raise invalid(param, f"{param} needs the type json_schema, but the type is {self.type}; change one of them")
        if self.schema_ is not None:
            param = "response_format.schema"
            if self.json_schema is not None:
                raise invalid(param, f"{param} and response_format.json_schema each give a schema; leave one out")
            if self.type == "text":
                raise invalid(param, f"{param} needs the type json_schema, but the type is text; change one of them")
        if self.type == "text":
            return []
        schema = self.json_schema.schema_ if self.json_schema else ANY_OBJECT if self.schema_ is None else self.schema_
        return [AnswerFormat("response_format", "json_schema", schema)]


class StructuredOutputs(Body):
    """The format of the answer, in vLLM's API; a request sets one of the fields."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def formats(self, prefix: str) -> list[AnswerFormat]:
        """Return the formats that are set; prefix: start of the names of the fields."""
        schema = self.json_
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                schema = None
            if not isinstance(schema, dict | bool):
                raise invalid(f"{prefix}json", f"{prefix}json must be a JSON schema, as an object or as text")
        choice = None if self.choice is None else "|".join(map(re.escape, self.choice))
        return [
            *([] if schema is None else [AnswerFormat(f"{prefix}json", "json_schema", schema)]),
            *([AnswerFormat(f"{prefix}json_object", "json_schema", ANY_OBJECT)] if self.json_object else []),
            *([] if choice is None else [AnswerFormat(f"{prefix}choice", "regex", choice)]),
            *formats_of(prefix, regex=self.regex, grammar=self.grammar),
        ]


class CompletionFields(GenerationFields, UnsupportedFields):
    """The fields that requests for chat completions and for text completions have in common."""

    stream_options: StreamOptions | None = None
    # Max tokens of the answer, also by llama.cpp's name; a negative number means no limit.
    max_tokens: int | None = Field(None, ge=-1)
    n_predict: int | None = Field(None, ge=-2)
    # Number of choices, also by llama.cpp's name.
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    n_cmpl: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[Biases, BeforeValidator(_biases, json_schema_input_type=Biases | list[Any])] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # vLLM's fields for the form of the answer, new and old.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    # Castiron's field: whether JSON has no spaces. llama.cpp's field: a JSON schema.
    compact_json: bool | None = None
    json_schema: dict[str, Any] | bool | None = None
    # vLLM's fields for the end of an answer.
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    # vLLM's fields for the tokens that an answer may have.
    allowed_token_ids: TokenIds | None = None
    # llama.cpp's and Ollama's field: how many last tokens repeat_penalty counts; -1 means all.
    repeat_last_n: int | None = Field(None, ge=-1)
    # llama.cpp's field: the order of the samplers, by name or as one letter each.
    samplers: Annotated[list[str], Field(max_length=64, fail_fast=True)] | str | None = None
    bad_words: Annotated[list[StopString], Field(max_length=1024, fail_fast=True)] | None = None
    # vLLM's fields for the prompt: how many of its tokens are used (-1 for as many as fit in the
    # context), where others are removed, and for how many tokens at each position the answer has
    # log-probabilities.
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    # vLLM's field: whether the answer has the ids of its tokens and of the prompt's.
    return_token_ids: bool | None = None
    # Max tokens of reasoning, by vLLM's and by llama.cpp's names; -1 means no limit.
    thinking_token_budget: int | None = Field(None, ge=-1)
    thinking_budget_tokens: int | None = Field(None, ge=-1)
    reasoning_budget_tokens: int | None = Field(None, ge=-1)
    # It has no effect, because shared prefixes are always cached and never change an answer.
    cache_prompt: bool | None = None

    @property
    def limit(self) -> int | None:
        """The max tokens of the answer; negative for no limit, None if the request sets nothing."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def max_answer(self) -> int | None:
        return None if self.limit is None or self.limit < 0 else self.limit

    @property
    def choices(self) -> int:
        return self.n or self.n_cmpl or 1

    @property
    def reasoning_budget(self) -> int | None:
        budgets = (self.thinking_token_budget, self.thinking_budget_tokens, self.reasoning_budget_tokens)
        return min((budget for budget in budgets if budget is not None and budget >= 0), default=None)

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {
            "names": {"reasoning_budget": "thinking_token_budget", "choices": "n" if self.n else "n_cmpl"},
            "choices": self.choices, "max_tokens": self.max_answer, "min_tokens": self.min_tokens or 0,
            "stop_strings": self.stop or (), "stop_tokens": self.stop_token_ids or (), "logit_bias": self.logit_bias or {},
            "samplers": self.samplers, "allowed_token_ids": self.allowed_token_ids or (), "bad_words": self.bad_words or (),
            "reasoning_budget": self.reasoning_budget, "compact_json": bool(self.compact_json),
        }  # fmt: skip

    @property
    def formats(self) -> list[AnswerFormat]:
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        return [
            *(self.response_format.formats if self.response_format else ()),
            *(self.structured_outputs.formats("structured_outputs.") if self.structured_outputs else ()),
            *guided.formats("guided_"), *formats_of("", json_schema=self.json_schema), *super().formats,
        ]  # fmt: skip


class ChatThinking(Body):
    """Anthropic's field `thinking`, which DeepSeek's and LiteLLM's clients send in chats."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)


class ChatRequest(CompletionFields, UnsupportedChatFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Annotated[Tool | FreeformTool, ByType()]], LIMITED] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's fields: whether the answer continues the last message, or starts a new one.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # vLLM's and llama.cpp's field: variables of the chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    thinking: ChatThinking | None = None
    # vLLM's field: whether the answer has the reasoning.
    include_reasoning: bool | None = None
    # Labels of the request or the customer.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # It has no effect: chat completions are not stored.
    store: bool | None = None
    # OpenAI's old names of tools and tool_choice.
    functions: Annotated[list[Function], LIMITED] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None

    @property
    def limit(self) -> int | None:
        return super().limit if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reasoning_budget(self) -> int | None:
        thinking = self.thinking and self.thinking.budget_tokens
        return min((each for each in (super().reasoning_budget, thinking) if each is not None), default=None)


class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions, with one prompt or several."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    echo: bool | None = None
    # OpenAI's max is 5.
    logprobs: int | None = Field(None, ge=0, le=20)
    # 0 counts as left out.
    best_of: int | None = Field(None, ge=0)
    suffix: str | None = None
    # vLLM's field: whether a text gets special tokens such as BOS.
    add_special_tokens: bool | None = None


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text (`content` in llama.cpp, `prompt` in vLLM) or messages."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
