"""The bodies of requests, as OpenAI's API reference has them, and what castiron takes besides.

A field is honoured, or refused by its name unless it asks for nothing; what only names the request or the customer is
taken and changes nothing.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from castiron.pipelines.serve.errors import ApiError

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0)]
# OpenAI has 64 letters, Anthropic 128.
FunctionIdentifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# A list of a million things that are wrong has one error, which is the one that is told.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Of a function: nothing but the model calls it.
DirectCallers = Annotated[list[Literal["direct"]], Field(fail_fast=True)]
# A JSON schema, by vLLM's also as its text, and texts of which an answer has to be one.
Schema = dict[str, Any] | bool | str
Words = Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)]
# A request may ask for several answers; each is a sequence that queues.
MAX_CHOICES = 128
# Texts of a request for embeddings, as OpenAI has it.
MAX_INPUTS = 2048
# Messages of a chat: of more there is no room in any context, and each costs before it is one.
MAX_MESSAGES = 2**14
# Entries of logit_bias, as OpenAI has it.
MAX_BIASES = 1024
# vLLM's is any integer; what JSON's other readers take for one.
MAX_PRIORITY = 2**53
Model = TypeVar("Model", bound="Body")


class Harmless:
    """Marks a field that a bundle cannot honour; of its values these, besides null, ask for nothing. `code` tells programs."""

    def __init__(self, *values: Any, code: str = "unsupported_parameter"):
        self.values, self.code = values, code

    def has(self, value: Any) -> bool:
        # In Python 0 is False.
        return any(value == nothing and type(value) is type(nothing) for nothing in self.values)

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.values]}


class Body(BaseModel):
    """The body of a request: JSON of exactly these fields, where null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # What fields of this kind alone may be, as WANTED has it.
    wanted_here: ClassVar[dict[str, str]] = {}


class StreamOptions(Body):
    """continuous_usage_stats is vLLM's: every chunk tells the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """What `strict` says it is: every answer holds to its schema."""

    name: str | None = None
    description: str | None = None
    wanted: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text of an answer has to be; a `schema` beside the type is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    wanted: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(Body):
    """vLLM's way to say what the text of an answer has to be: one of these, a schema also as its text."""

    wanted: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Words | None = None
    grammar: str | None = None


class Asking(Body):
    """What every request for an answer has, in whichever API; top_k, min_p, repeat_penalty (also repetition_penalty),
    repetition_stop, ignore_eos, grammar and regex are castiron's; priority is vLLM's."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    # Like 0, vLLM's -1 cuts nothing.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    repetition_stop: bool | None = None
    grammar: str | None = None
    regex: str | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class Generating(Asking):
    """What both kinds of completion share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # What an answer has to be, as vLLM has it now and had it before, and as llama.cpp does.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    # When an answer ends, as vLLM has it.
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    # What clients of vLLM and llama.cpp send though it is the default.
    skip_special_tokens: Annotated[Any, Harmless(True)] = None
    spaces_between_special_tokens: Annotated[Any, Harmless(True)] = None
    include_stop_str_in_output: Annotated[Any, Harmless(False)] = None
    use_beam_search: Annotated[Any, Harmless(False)] = None
    length_penalty: Annotated[Any, Harmless(1, 1.0)] = None
    typical_p: Annotated[Any, Harmless(1, 1.0)] = None
    mirostat: Annotated[Any, Harmless(0)] = None
    cache_prompt: Annotated[Any, Harmless(True)] = None
    return_token_ids: Annotated[Any, Harmless(False)] = None


class ContentPart(Body):
    """A part of a message; a bundle reads text alone. Beginnings that prompts share are computed once, whatever
    `cache_control` says."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


class RefusalPart(Body):
    """What an assistant said instead of an answer, in an earlier turn; its words are text too."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class Message(BaseModel):
    """A message; what a template may want to know besides role and content goes along."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart | RefusalPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict:
        """As chat templates want it: content is one string, and the developer's role has its older name."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        extra = dict(self.model_extra or {})
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = [_with_object(call) for call in calls]
        return {**extra, "role": "system" if self.role == "developer" else self.role, "content": text}


def _with_object(call: Any) -> Any:
    """A call with its arguments as an object, as chat templates want it, where they are JSON of one."""
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
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class Function(Body):
    """`parameters` is a JSON schema of an object; without it there are none."""

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict:
        """As chat templates want it."""
        function = {"name": self.function.name, "description": self.function.description or "",
                    "parameters": self.function.parameters or {"type": "object", "properties": {}}}  # fmt: skip
        return {"type": "function", "function": function}


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # The answer goes on with the words of the last message, or is one of its own, as vLLM has it.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Variables of the chat template, as vLLM and llama.cpp have them.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # What only names the request or the customer.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # What a bundle cannot do, unless it asks for nothing; see Harmless.
    store: Annotated[Any, Harmless(False)] = None
    service_tier: Annotated[Any, Harmless("auto", "default")] = None
    prompt_cache_retention: Annotated[Any, Harmless("in-memory", "in_memory")] = None
    prompt_cache_options: Annotated[Any, Harmless()] = None
    prediction: Annotated[Any, Harmless()] = None
    verbosity: Annotated[Any, Harmless("medium")] = None
    functions: Annotated[Any, Harmless([])] = None
    function_call: Annotated[Any, Harmless("none", "auto")] = None
    audio: Annotated[Any, Harmless()] = None
    modalities: Annotated[Any, Harmless(["text"])] = None
    moderation: Annotated[Any, Harmless()] = None
    web_search_options: Annotated[Any, Harmless()] = None


class CompletionRequest(Generating):
    """POST /v1/completions; a prompt is text or token ids, or a list of such."""

    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    # OpenAI has 5 at most.
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1)
    suffix: Annotated[str | None, Harmless("")] = None


class EmbeddingsRequest(Body):
    """POST /v1/embeddings; prompt_name and truncate are castiron's: the model's prompt that comes before each text, and
    whether one that is too long is cut."""

    input: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    truncate: bool | None = None
    user: str | None = None


class Document(BaseModel):
    """What else a document has goes along."""

    model_config = ConfigDict(extra="allow", strict=True)
    text: str


class RerankRequest(Body):
    """POST /v1/rerank, as Cohere, Jina and vLLM have it; a document that is too long is cut."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None
    # Of one document that is too long there is one part.
    max_chunks_per_doc: Annotated[Any, Harmless(1)] = None


class TokenizeRequest(Body):
    """POST /tokenize: text (`content`, or `prompt` as others call it) or messages."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


# Two names of one thing; who gives both must mean the same.
SAME = (
    ("repeat_penalty", "repetition_penalty"),
    ("max_completion_tokens", "max_tokens"),
    ("add_special", "add_special_tokens"),
)

# What a field that may be one of several things may be.
WANTED = {
    "stop": "a string of 1 to 256 characters or a list of at most 16 such strings",
    "prompt": "a string, a list of token ids, or a list of at most 128 of either, none of them without ids",
    "input": "a string, a list of token ids, or a list of at most 2048 of either, none of them without ids",
    "documents": "a list of 1 to 2048 strings or objects with a text",
    "content": "a string or a list of parts of type text",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}


def read(kind: type[Model], data: bytes) -> Model:
    """The body of a request; ApiError 400, naming the field, for one that is not of this kind."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise bad(error, kind.wanted_here) from None
    given = {name: value for name in type(body).model_fields if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        for asked in type(body).model_fields[name].metadata:
            if isinstance(asked, Harmless) and not asked.has(value):
                raise ApiError(400, f"{name} is not supported by this server", name, asked.code)
    for name, other in SAME:
        if name in given and given[name] != given.get(other, given[name]):
            raise ApiError(400, f"{name} and {other} say different things; give one of them", name, "invalid_value")
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
    return body


def bad(found: ValidationError, wanted: Mapping[str, str] = MappingProxyType({}), place: str = "") -> ApiError:
    """OpenAI's words for the first thing that is wrong, in a field of `place`; `wanted` goes before WANTED."""
    error, wanted = found.errors(include_url=False, include_context=False)[0], {**WANTED, **wanted}
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body of this request is not valid JSON: {error['msg'].split(': ', 1)[-1]}")
    path = [*filter(None, [place]), *map(str, error["loc"])]
    for depth, part in enumerate(path):
        if part in wanted and error["type"] != "missing":
            param = ".".join(path[: depth + 1])
            return ApiError(400, f"{param} must be {wanted[part]}", param, "invalid_value")
    param = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"you must provide {param}", param, "missing_required_parameter")
    message = error["msg"][0].lower() + error["msg"][1:]
    return ApiError(400, f"{param or 'the body'}: {message}", param, "invalid_value")
