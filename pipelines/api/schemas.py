"""Request bodies of OpenAI's API, with the fields that castiron, vLLM and llama.cpp add.

Unknown fields and fields that only label the request or the customer are ignored. An unsupported
field is an error if its value would change the answer.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model

from castiron.pipelines.api.chat_records import (
    AllowedTools,
    FreeformTool,
    Function,
    FunctionName,
    Message,
    NamedFreeform,
    NamedTool,
    Tool,
)
from castiron.pipelines.api.request_body import Body, ByType, Unsupported
from castiron.pipelines.engine.sampling import SCHEDULE


def is_negative(value: Any) -> bool:
    return type(value) in (int, float) and value < 0


def is_one_or_more(value: Any) -> bool:
    return type(value) in (int, float) and value >= 1


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

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _stops(value: Any) -> Any:
    """Convert the field `stop` to a list without empty strings, which stop nothing, as in llama.cpp."""
    strings = [value] if isinstance(value, str) else value
    return [each for each in strings if each != ""] if isinstance(strings, list) else value


Stops = Annotated[list[StopString], Field(max_length=16), BeforeValidator(_stops, json_schema_input_type=str | list[str])]
TokenId = Annotated[int, Field(ge=0)]
# fail_fast: validation of a list stops at the first wrong value, because a million errors would take seconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# left_to_right: the ids are not validated again as text.
Prompt = Annotated[str | TokenIds, Field(union_mode="left_to_right")]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Who may call a function: the model itself, but no code that it runs.
DirectCallers = Annotated[list[Literal["direct"]], Field(fail_fast=True)]
# Values of vLLM's fields: a JSON schema as an object or as text, and a list of possible answers.
Schema = dict[str, Any] | bool | str
Choices = Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)]
# Max choices of a request; each takes a slot or waits for one.
MAX_CHOICES = 128
# OpenAI's limits for the texts of an embeddings request and the entries of logit_bias.
MAX_INPUTS, MAX_BIASES = 2048, 1024
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
# A tool choice that is an object.
ChosenTool = Annotated[NamedTool | NamedFreeform | AllowedTools, ByType()]
# OpenAI's efforts, and vLLM's max.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
# Biases by token id, or by a text, which stands for its tokens.
Biases = Annotated[dict[TokenId | StopString, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
# Max absolute priority: vLLM allows any integer, but JSON parsers are exact only in this range.
MAX_PRIORITY = 2**53


def _biases(value: Any) -> Any:
    """Convert the field `logit_bias` to {token id or text: bias}.

    value: {token id or text: bias}, as in OpenAI's API, or a list of [token id or text, bias], as
        in llama.cpp's. An invalid value is returned unchanged, because Pydantic rejects it later.
    The bias false, with which llama.cpp forbids a token, becomes -100.
    """
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
    """Options of a stream.

    include_usage: whether the last chunk has token counts.
    continuous_usage_stats: whether every chunk has the token counts so far, as in vLLM.
    """

    include_usage: bool | None = None
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


class StructuredOutputs(Body):
    """The format of the answer, in vLLM's API; a request sets one of the fields."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class GenerationFields(Body):
    """The fields of all requests for generated text, in OpenAI's and Anthropic's formats.

    Some of the fields are not in these APIs: min_p, repeat_penalty (or repetition_penalty),
    repetition_stop, ignore_eos, grammar, regex, temperature_schedule, receipt, vLLM's priority and,
    for OpenAI's API, top_k.
    """

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    # OpenAI's max is 2; vLLM, llama.cpp and Ollama have none.
    temperature: float | None = Field(None, ge=0)
    temperature_schedule: str | None = Field(None, pattern=f"^{SCHEDULE}$")
    # 0 leaves one token.
    top_p: float | None = Field(None, ge=0, le=1)
    # 0, and vLLM's -1, mean no limit.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    repetition_stop: bool | None = None
    grammar: str | None = None
    regex: str | None = None
    # Castiron's field: whether the answer has a receipt for `castiron audit`.
    receipt: bool | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


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
        """The max tokens of the answer that the request sets.

        A negative number means no limit. None means that the request sets nothing.
        """
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def choices(self) -> int:
        return self.n or self.n_cmpl or 1

    @property
    def reasoning_budget(self) -> int | None:
        """The max tokens of reasoning that the request sets; None for no limit."""
        given = (self.thinking_token_budget, self.thinking_budget_tokens, self.reasoning_budget_tokens)
        return min((each for each in given if each is not None and each >= 0), default=None)


class ChatThinking(Body):
    """Anthropic's field `thinking`, which DeepSeek's and LiteLLM's clients send in chats."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)


class ChatRequest(CompletionFields, UnsupportedChatFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Annotated[Tool | FreeformTool, ByType()]], Field(max_length=128, fail_fast=True)] | None = None
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
    functions: Annotated[list[Function], Field(max_length=128)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None

    @property
    def limit(self) -> int | None:
        return super().limit if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reasoning_budget(self) -> int | None:
        thinking = self.thinking and self.thinking.budget_tokens
        return min((each for each in (super().reasoning_budget, thinking) if each is not None), default=None)


class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions.

    A prompt is a text or a list of token ids; `prompt` is one prompt or a list of prompts.
    """

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    echo: bool | None = None
    # OpenAI's max is 5.
    logprobs: int | None = Field(None, ge=0, le=20)
    # 0 counts as left out.
    best_of: int | None = Field(None, ge=0)
    suffix: str | None = None
    # vLLM's field: whether a text gets special tokens such as BOS.
    add_special_tokens: bool | None = None


class EmbeddingsRequest(Body):
    """The body of POST /v1/embeddings, with two fields that are not in OpenAI's API.

    prompt_name: name of one of the model's prompts; this prompt is put before each text.
    truncate: whether texts that are too long are truncated, instead of being an error.
    """

    input: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    truncate: bool | None = None
    user: str | None = None


class Document(BaseModel):
    """A document to rank. It may have other fields too, which a returned document keeps."""

    model_config = ConfigDict(extra="allow", strict=True)
    text: str


class RerankRequest(Body):
    """The body of POST /v1/rerank, as in Cohere's, Jina's and vLLM's APIs.

    Texts that are too long are truncated.
    """

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None
    # Accepted only as 1, because a long document is cut to one chunk.
    max_chunks_per_doc: Annotated[Any, Unsupported(1)] = None


class ScoreRequest(Body):
    """The body of POST /v1/score: two lists of texts to compare.

    text_1: one text, which is compared with each text in text_2; or a list as long as text_2, for
        comparing the texts at the same index.
    """

    expected: ClassVar[dict[str, str]] = dict.fromkeys(("text_1", "text_2"), "a string or a list of 1 to 2048 strings")

    text_1: Texts
    text_2: Texts
    model: str | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text (`content` in llama.cpp, `prompt` in vLLM) or messages."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
