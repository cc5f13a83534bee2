"""Request bodies of OpenAI's API, with the fields that castiron, vLLM and llama.cpp add.

The server rejects a field that it does not support, unless the value has no effect. It ignores
fields that only label the request or the customer.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from castiron.pipelines.engine.sampling import SCHEDULE

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0)]
# Names of functions: OpenAI allows 64 characters, Anthropic 128.
FunctionIdentifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
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
# Prefix of the parts of an error's path that are types of records, not fields.
TAG = "type="
# Max choices of a request; each takes a slot or waits for one.
MAX_CHOICES = 128
# OpenAI's limits for the texts of an embeddings request and the entries of logit_bias.
MAX_INPUTS, MAX_BIASES = 2048, 1024
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
# Max absolute priority: vLLM allows any integer, but JSON parsers are exact only in this range.
MAX_PRIORITY = 2**53


class Unsupported:
    """An annotation of an unsupported field: it may only be null or one of `values`."""

    def __init__(self, *values: Any, code: str = "unsupported_parameter"):
        self.values, self.code = values, code

    def _check(self, value: Any) -> Any:
        # 0 and False differ here.
        if any(value == allowed and type(value) is type(allowed) for allowed in self.values):
            return value
        raise PydanticCustomError(self.code, "is not supported by this server; leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.values]}


class ByType:
    """An annotation of a union of records: the field `type` of a JSON object selects the record.

    `default`: the type of an object without that field.
    """

    def __init__(self, default: str | None = None):
        self.default = default

    def _tag(self, value: Any) -> str:
        return TAG + str((value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or self.default)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {
            TAG + name: handler.generate_schema(record)
            for record in get_args(source) or (source,)
            for name in get_args(record.model_fields["type"].annotation)
            if name
        }
        return core_schema.tagged_union_schema(choices, self._tag)


class Body(BaseModel):
    """Base class of objects in requests: unknown fields are errors; null means a missing field."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )
    # Descriptions of the values of fields, for error messages.
    expected: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Remove null fields, and all unknown fields except the first, which is then reported."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) and None not in value.values():
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: each for name, each in value.items() if each is not None}
        unknown = next((name for name in given if name not in known), None)
        return {name: each for name, each in given.items() if name in known or name == unknown}


class TextPart(Body):
    """A text; other fields, such as those for caching and citations, have no effect."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer; the model reads it as text."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def parts_of(value: Any) -> Any:
    """Return a text as a list of one text part, and other values unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Annotated[TextPart | RefusalPart, ByType()]], Field(fail_fast=True)]
# Content of a message: a text or a list of parts.
Content = Annotated[Parts, BeforeValidator(parts_of, json_schema_input_type=str | Parts)]


def text_of(content: Iterable[TextPart | RefusalPart] | None) -> str:
    """Return the texts of all parts, joined."""
    return "".join(part.text for part in content or ())


class StreamOptions(Body):
    """Options of a stream; continuous_usage_stats (vLLM) adds the usage so far to every chunk."""

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
    """The form of the answer; llama.cpp's clients send `schema` instead of `json_schema`."""

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

    Castiron adds fields that these APIs do not have: min_p, repeat_penalty (or repetition_penalty),
    repetition_stop, ignore_eos, grammar, regex, vLLM's priority and, for OpenAI's API, top_k.
    """

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    temperature_schedule: str | None = Field(None, pattern=f"^{SCHEDULE}$")
    top_p: float | None = Field(None, gt=0, le=1)
    # 0, and vLLM's -1, mean no limit.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    repetition_stop: bool | None = None
    grammar: str | None = None
    regex: str | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class CompletionFields(GenerationFields):
    """The fields of chat completions and text completions."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = None
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
    # Fields that clients of vLLM and llama.cpp send with their default values.
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(True)] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False)] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0)] = None
    typical_p: Annotated[Any, Unsupported(1, 1.0)] = None
    mirostat: Annotated[Any, Unsupported(0)] = None
    cache_prompt: Annotated[Any, Unsupported(True)] = None
    return_token_ids: Annotated[Any, Unsupported(False)] = None


class Message(BaseModel):
    """A message; other fields than role and content are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None

    def plain(self) -> dict:
        """Return the message for chat templates: content as a string, role developer as system."""
        extra = dict(self.model_extra or {})
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = [_with_object(call) for call in calls]
        return {**extra, "role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


def _with_object(call: Any) -> Any:
    """Return a tool call; its arguments are parsed if they are the text of a JSON object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("arguments"), str)):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """A tool choice that names the function which the answer must call."""

    type: Literal["function"]
    function: FunctionName


class Function(Body):
    """A function; `parameters` is the JSON schema of its arguments, None if it has none."""

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict:
        """Return the tool for chat templates."""
        function = {"name": self.function.name, "description": self.function.description or "",
                    "parameters": self.function.parameters or {"type": "object", "properties": {}}}  # fmt: skip
        return {"type": "function", "function": function}


class ChatRequest(CompletionFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's fields: whether the answer continues the last message, or starts a new one.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # vLLM's and llama.cpp's field: variables of the chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # Labels of the request or the customer.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported, unless the value changes nothing.
    store: Annotated[Any, Unsupported(False)] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    prompt_cache_retention: Annotated[Any, Unsupported("in-memory", "in_memory")] = None
    prompt_cache_options: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported("medium")] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    audio: Annotated[Any, Unsupported()] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None


class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions; `prompt` is one text, one list of token ids, or many."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    # OpenAI's max is 5.
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


class EmbeddingsRequest(Body):
    """The body of POST /v1/embeddings.

    Castiron adds prompt_name (a prompt of the model, put before each text) and truncate (whether
    long texts are cut).
    """

    input: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    truncate: bool | None = None
    user: str | None = None


class Document(BaseModel):
    """A document to rank; the answer returns it with all its fields."""

    model_config = ConfigDict(extra="allow", strict=True)
    text: str


class RerankRequest(Body):
    """The body of POST /v1/rerank, as in Cohere's, Jina's and vLLM's APIs; long texts are cut."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None
    # Accepted only as 1, because a long document is cut to one chunk.
    max_chunks_per_doc: Annotated[Any, Unsupported(1)] = None


class ScoreRequest(Body):
    """The body of POST /v1/score: texts to compare; text_1 has one text, or as many as text_2."""

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
