"""`Generation`: a request for text, which the parser of every API returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from castiron.pipelines.api.api_errors import invalid
from castiron.pipelines.text.text_output import StopStrings

# A message for the chat template: role, content (a text), and any other fields that the template reads.
Message = dict[str, Any]
# OpenAI's efforts of reasoning, and vLLM's max.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
# The JSON schema that every object matches.
ANY_OBJECT = {"type": "object"}


def plain_message(role: str, content: str, calls: Sequence[Mapping[str, Any]] = (), **fields: Any) -> Message:
    """Return a message without `fields` that are None; a call has the keys id and function."""
    message = {**{name: value for name, value in fields.items() if value is not None}, "role": role, "content": content}
    return {**message, "tool_calls": [*calls]} if calls else message


@dataclass(frozen=True)
class CallableFunction:
    """A function that an answer may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_strict: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        """The function as JSON for chat templates."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class AnswerFormat:
    """The format that the field `param` sets: json_schema, regex, grammar or tools (calls)."""

    param: str
    kind: str
    value: Any

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema, or None if the answer is not JSON."""
        return self.value if self.kind == "json_schema" else None


def only_format(formats: Sequence[AnswerFormat]) -> AnswerFormat | None:
    """Return the only format, or None for free text; ApiError 400 if there are several."""
    if len(formats) > 1:
        first, second = formats[0].param, formats[1].param
        raise invalid(second, f"{first} and {second} each set the form of the answer; give one")
    return formats[0] if formats else None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request for text, independent of the API that it came by.

    param: the client's name of the field with the prompt, for errors.
    names: the client's names of other fields, {field of this record: name}, where they differ.
    prompts: token ids of each prompt, instead of `messages`.
    """

    param: str
    names: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    prompts: Sequence[Sequence[int]] | None = None

    # How the messages are rendered; None leaves a choice to the template.
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continues_last_message: bool = False
    # Whether a conversation that is too long loses its oldest messages.
    drops_oldest: bool = False
    # Max tokens of the prompt, -1 for as many as leave `free_tokens` in the context; whether a longer one keeps its start.
    max_prompt_tokens: int | None = None
    free_tokens: int = 1
    keeps_start: bool = False

    functions: Sequence[CallableFunction] = ()
    tool_choice: Literal["none", "auto", "required"] = "auto"
    # Name of the function that the answer must call.
    called: str | None = None
    has_single_call: bool = False
    format: AnswerFormat | None = None
    compact_json: bool = False

    # Fields of `Sampling`. The seed of choice i is seed + i; None is a random seed.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    # llama.cpp's names of the samplers; None for all.
    samplers: Sequence[str] | None = None
    # Biases of token ids, or of the tokens of a text.
    logit_bias: Mapping[int | str, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()

    # Number of answers to each prompt.
    choices: int = 1
    # None for the server's limit. A limit that does not fit in the context is lowered, or is an error.
    max_tokens: int | None = None
    must_fit: bool = False
    min_tokens: int = 0
    # None for no limit.
    reasoning_budget: int | None = None
    stop_strings: Sequence[str] | StopStrings = ()
    stop_tokens: Sequence[int] = ()
    # Tokens that end an answer like the model's own end tokens, which ignore_eos turns off.
    end_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_stop: bool = False
    priority: int = 0
    # Whether the answer has a receipt for `castiron audit`.
    has_receipt: bool = False

    # Whether reasoning is separated from the answer.
    has_reasoning: bool = False
    # Number of top log-probabilities of each token of the answers and of the prompts; None for none.
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def name(self, field_name: str) -> str:
        """Return the client's name of a field of this record."""
        return self.names.get(field_name, field_name)
