"""The bodies of requests, as OpenAI's API reference has them, and what castiron takes besides.

A field is honoured, or refused by its name unless it asks for nothing; what only names the request or the customer is
taken and changes nothing.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from castiron.pipelines.serve.errors import ApiError

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0)]
# A request may ask for several answers; each is a sequence that queues.
MAX_CHOICES = 128
# Texts of a request for embeddings, as OpenAI has it.
MAX_INPUTS = 2048
Model = TypeVar("Model", bound="Body")


class Harmless:
    """Marks a field that a bundle cannot honour; of its values these, besides null, ask for nothing."""

    def __init__(self, *values: Any):
        self.values = values

    def has(self, value: Any) -> bool:
        # In Python 0 is False.
        return any(value == nothing and type(value) is type(nothing) for nothing in self.values)


class Body(BaseModel):
    """The body of a request: JSON of exactly these fields, where null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """What `strict` says it is: every answer holds to its schema."""

    name: str | None = None
    description: str | None = None
    wanted: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text of an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generating(Body):
    """What both kinds of completion share; top_k, min_p, repeat_penalty (also repetition_penalty), repetition_stop,
    ignore_eos, grammar and regex are castiron's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    seed: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    repetition_stop: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None


class ContentPart(Body):
    """A part of a message; a bundle reads text alone."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message; what a template may want to know besides role and content goes along."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None

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

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
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

    messages: list[Message] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # The answer goes on with the words of the last message, as vLLM has it.
    continue_final_message: bool | None = None
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

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1)
    suffix: Annotated[str | None, Harmless("")] = None


class EmbeddingsRequest(Body):
    """POST /v1/embeddings; prompt_name and truncate are castiron's: the model's prompt that comes before each text, and
    whether one that is too long is cut."""

    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    truncate: bool | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """POST /tokenize: text (`content`, or `prompt` as others call it) or messages."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


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
    "content": "a string or a list of parts of type text",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}


def read(kind: type[Model], data: bytes) -> Model:
    """The body of a request; ApiError 400, naming the field, for one that is not of this kind."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _bad(error.errors(include_url=False, include_context=False)) from None
    given = {name: value for name in type(body).model_fields if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        for asked in type(body).model_fields[name].metadata:
            if isinstance(asked, Harmless) and not asked.has(value):
                raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
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


def _bad(errors: list[dict]) -> ApiError:
    """OpenAI's words for the first thing that is wrong."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body of this request is not valid JSON: {error['msg'].split(': ', 1)[-1]}")
    path = [str(part) for part in error["loc"]]
    for depth, part in enumerate(path):
        if part in WANTED and error["type"] != "missing":
            param = ".".join(path[: depth + 1])
            return ApiError(400, f"{param} must be {WANTED[part]}", param, "invalid_value")
    param = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"you must provide {param}", param, "missing_required_parameter")
    message = error["msg"][0].lower() + error["msg"][1:]
    return ApiError(400, f"{param or 'the body'}: {message}", param, "invalid_value")
