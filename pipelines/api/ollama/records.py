"""Request bodies of Ollama's API; as in Ollama, unknown fields have no effect."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from castiron.pipelines.api.generation import ANY_OBJECT, AnswerFormat, Message, plain_message
from castiron.pipelines.api.request_body import Body, Unsupported, is_allowed, is_one_or_more
from castiron.pipelines.api.request_fields import (
    LIMITED,
    MAX_INPUTS,
    SAMPLED,
    CalledFunction,
    Function,
    Stops,
    TokenId,
)

# Tag that Ollama adds to a model's name without a tag.
TAG = ":latest"

ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(TAG))]
Images = Annotated[Any, Unsupported([])]


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _within(low: float, high: float = float("inf")) -> BeforeValidator:
    """Replace a number outside the limits by the nearest one, as llama.cpp does for Ollama."""
    return BeforeValidator(lambda value: min(max(value, low), high) if _number(value) else value)


def _only(*values: Any) -> BeforeValidator:
    """Accept only `values`, which do not change the answer; the message names the first."""

    message = f"this server supports only the value {values[0]}; leave it out"

    def check(value: Any) -> Any:
        if is_allowed(value, values):
            return value
        raise PydanticCustomError("only_value", "{message}", {"message": message})

    return BeforeValidator(check)


class OllamaOptions(Body):
    """The field `options`."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    temperature: Annotated[float | None, _within(0)] = None
    top_k: Annotated[int | None, _within(0)] = None
    top_p: Annotated[float | None, _within(0, 1)] = None
    min_p: Annotated[float | None, _within(0, 1)] = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(None, ge=-1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stops | None = None
    # A negative seed means a random one.
    seed: int | None = None
    # A number below 1 means no limit.
    num_predict: Annotated[int | None, BeforeValidator(lambda value: -1 if _number(value) and value < 1 else value)] = None
    mirostat: Annotated[Any, _only(0)] = None
    typical_p: Annotated[Any, _only(1, is_one_or_more)] = None
    tfs_z: Annotated[Any, _only(1)] = None


class OllamaBody(Body):
    """The fields that all requests have."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    expected: ClassVar[dict[str, str]] = {
        "format": "json or a JSON schema", "think": "true, false, low, medium, high or max",
    }  # fmt: skip

    model: ModelName | None = None
    # It has no effect: `castiron serve --keep-alive` decides when a model is closed.
    keep_alive: Any = None


class OllamaGeneration(OllamaBody):
    """The fields of /api/chat and /api/generate."""

    options: OllamaOptions | None = None
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Whether to leave out the oldest messages of a conversation that is too long for the context.
    truncate: bool | None = True
    # Castiron's field: whether the answer has a receipt for `castiron audit`.
    receipt: bool | None = None

    @property
    def generation_options(self) -> dict[str, Any]:
        """The arguments of `Generation` that these fields set."""
        options = self.options or OllamaOptions()
        schema = ANY_OBJECT if self.format == "json" else self.format
        sampled = (*SAMPLED, "top_k")
        return {
            "sampling": {name: value for name in sampled if (value := getattr(options, name, None)) is not None},
            "seed": None if options.seed is None or options.seed < 0 else options.seed,
            "stop_strings": options.stop or (),
            "max_tokens": None if options.num_predict is None or options.num_predict < 0 else options.num_predict,
            "format": AnswerFormat("format", "json_schema", schema) if schema else None,
            "thinking": self.think if isinstance(self.think, bool) else None,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "has_receipt": bool(self.receipt),
        }  # fmt: skip


class OllamaCall(Body):
    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @property
    def plain(self) -> Message:
        calls = [call.model_dump() for call in self.tool_calls or ()]
        result = {"tool_call_id": self.tool_call_id, "name": self.tool_name} if self.role == "tool" else {}
        return plain_message(self.role, self.content or "", calls, reasoning_content=self.thinking, **result)


class OllamaTool(Body):
    type: Literal["function"] | None = None
    function: Function


class OllamaChatRequest(OllamaGeneration):
    """The body of POST /api/chat; a request without messages only loads the model."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = []
    tools: Annotated[list[OllamaTool], LIMITED] | None = None


class OllamaGenerateRequest(OllamaGeneration):
    """The body of POST /api/generate; a request without a prompt only loads the model.

    context: token ids from the answer to an earlier request, to put before the prompt.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool | None = None
    context: Annotated[list[TokenId], Field(fail_fast=True)] = []
    template: Annotated[Any, Unsupported("")] = None
    images: Images = None


class OllamaEmbedRequest(OllamaBody):
    """The body of POST /api/embed; by default, long texts are truncated."""

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)] = ""
    truncate: bool | None = True
    dimensions: int | None = Field(None, ge=1)


class OllamaEmbeddingsRequest(OllamaBody):
    """The body of POST /api/embeddings, the older form of /api/embed."""

    prompt: str = ""


class OllamaShowRequest(OllamaBody):
    """The body of POST /api/show; older clients send `name` instead of `model`."""

    name: ModelName | None = None
