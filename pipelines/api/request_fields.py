"""Fields and JSON objects that the requests of several APIs have."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from castiron.pipelines.api.generation import AnswerFormat
from castiron.pipelines.api.request_body import Body, ByType, Unsupported
from castiron.pipelines.engine.sampling import SCHEDULE

# fail_fast: validation of a list stops at the first wrong value, because a million errors would take seconds.
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# left_to_right: the ids are not validated again as text.
Prompt = Annotated[str | TokenIds, Field(union_mode="left_to_right")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# Names of functions: OpenAI allows 64 characters, Anthropic 128.
MAX_NAME = 128
FunctionIdentifier = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]
# Who may call a function: the model itself, but no code that it runs.
DirectCallers = Annotated[list[Literal["direct"]], Field(fail_fast=True)]
# Max functions of a request.
MAX_FUNCTIONS = 128
LIMITED = Field(max_length=MAX_FUNCTIONS, fail_fast=True)
# OpenAI's limit for the texts of an embeddings request.
MAX_INPUTS = 2048
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
# Max absolute priority: vLLM allows any integer, but JSON parsers are exact only in this range.
MAX_PRIORITY = 2**53
# Fields of requests that are fields of `Sampling`.
SAMPLED = (
    "temperature", "temperature_schedule", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip


def _stops(value: Any) -> Any:
    """Convert `stop` to a list without empty strings, which stop nothing, as in llama.cpp."""
    strings = [value] if isinstance(value, str) else value
    return [each for each in strings if each != ""] if isinstance(strings, list) else value


Stops = Annotated[list[StopString], Field(max_length=16), BeforeValidator(_stops, json_schema_input_type=str | list[str])]


class TextPart(Body):
    """A part with text; fields for other purposes, such as citations, have no effect."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer; the model reads it as text."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def parts_of(value: Any) -> Any:
    """Convert a string to a list with one part of type text; return other values unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Annotated[TextPart | RefusalPart, ByType()]], Field(fail_fast=True)]
# Content of a message: a text or a list of parts.
Content = Annotated[Parts, BeforeValidator(parts_of, json_schema_input_type=str | Parts)]


def text_of(content: Iterable[TextPart | RefusalPart] | None) -> str:
    return "".join(part.text for part in content or ())


class CalledFunction(Body):
    """A function's name and arguments: JSON text, or what a model wrote in its place."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    name: str
    arguments: Any = None


class Function(Body):
    """A function that the model may call; without parameters it has no arguments."""

    name: FunctionIdentifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GenerationFields(Body):
    """The fields of OpenAI's and Anthropic's requests for text, and fields of castiron."""

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

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `Sampling` that the request sets."""
        # HF's and vLLM's penalty counts all tokens.
        vllm = {"repeat_penalty": self.repetition_penalty, "repeat_last_n": -1} if self.repetition_penalty is not None else {}
        names = [name for name in SAMPLED if name in type(self).model_fields]
        given = vllm | {name: value for name in names if (value := getattr(self, name)) is not None}
        return given if self.top_k is None else {**given, "top_k": max(self.top_k, 0)}

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Generation` that these fields set."""
        return {
            # As in vLLM and llama.cpp, -1 means a random seed.
            "sampling": self.sampling, "seed": None if self.seed == -1 else self.seed, "ignore_eos": bool(self.ignore_eos),
            "repetition_stop": bool(self.repetition_stop), "priority": self.priority or 0, "has_receipt": bool(self.receipt),
        }  # fmt: skip

    @property
    def formats(self) -> list[AnswerFormat]:
        """The formats of the answer that the request sets; more than one are an error."""
        return formats_of("", grammar=self.grammar or None, regex=self.regex)


def formats_of(prefix: str, **values: Any) -> list[AnswerFormat]:
    """Return a format of each kind whose value is not None; its field is prefix + kind."""
    return [AnswerFormat(f"{prefix}{kind}", kind, value) for kind, value in values.items() if value is not None]


class EmbeddingsRequest(Body):
    """The body of POST /v1/embeddings; prompt_name and truncate are not in OpenAI's API."""

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
    """The body of POST /v1/rerank, as in Cohere's, Jina's and vLLM's APIs; texts are truncated."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None
    # Accepted only as 1, because a long document is cut to one chunk.
    max_chunks_per_doc: Annotated[Any, Unsupported(1)] = None


class ScoreRequest(Body):
    """The body of POST /v1/score: pairs of texts, or one text_1 for each text in text_2."""

    expected: ClassVar[dict[str, str]] = dict.fromkeys(("text_1", "text_2"), "a string or a list of 1 to 2048 strings")

    text_1: Texts
    text_2: Texts
    model: str | None = None
    user: str | None = None
