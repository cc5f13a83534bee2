"""Records that are not in OpenAI's format: prompts to answer, and texts to embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from castiron.pipelines.batch.records import PROMPTS, TEXTS, Outcome, Record, Work
from castiron.pipelines.engine.request import Event, Failed, Request
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.embedder import Embedder
from castiron.pipelines.text.generate import encode_question, is_messages
from castiron.pipelines.text.text_output import Delta, text_request
from castiron.pipelines.text.tokenizer import Tokenizer
from castiron.vmfb.bundle.manifest import Manifest


@dataclass
class Prompts:
    """Converts records with a column `messages` or `prompt` to engine requests.

    A prompt is a text or a list of token ids. The attributes apply to all records of the job.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    repetition_stop: bool = False
    raw: bool = False
    system: str | None = None
    json_schema: Any = None

    def __post_init__(self) -> None:
        self.grammar = None if self.json_schema is None else self.tokenizer.grammar(json_schema=self.json_schema)
        self.columns = ["generated", "finish_reason", *["reasoning_content"] * bool(self.tokenizer.marks)]
        # These raise an error for invalid options before the first record.
        encode_question("x", self.tokenizer, self.system, self.raw)
        self._request([0], False, 0)

    def samples(self, record: Record) -> bool:
        return self.sampling.is_random

    def work(self, record: Record, seed: int) -> Work:
        ids, chat = self._encode(record.fields)
        request = self._request(ids, chat, seed)
        deltas, failures = list[Delta](), list[PipelineError]()

        def listen(_: Request, event: Event) -> None:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Failed):
                failures.append(event.error)

        def outcome() -> Outcome:
            counts = {"prompt": len(ids), "generated": len(request.tokens), "cached": request.cached}
            if failures:
                return replace(self.failed(record, failures[0]), **counts)
            reasoning = "".join(delta.reasoning for delta in deltas) or None
            values = ["".join(delta.text for delta in deltas), request.finish_reason, reasoning]
            tokens = {"prompt_tokens": len(ids), "generated_tokens": len(request.tokens)}
            return Outcome({**dict(zip(self.columns, values)), **tokens, "error": None}, **counts)

        return Work(record, outcome, [request], listen)

    def failed(self, record: Record, error: Exception) -> Outcome:
        empty = dict.fromkeys((*self.columns, "prompt_tokens", "generated_tokens"))
        return Outcome({**empty, "error": str(error)}, failed=True)

    def _encode(self, fields: Mapping[str, Any]) -> tuple[Sequence[int], bool]:
        """Return (token ids of a record's prompt, whether the chat template was used)."""
        name = column_of(fields, PROMPTS)
        prompt, tokenizer = fields[name], self.tokenizer
        if name == "messages":
            if tokenizer.chat_template is None:
                raise PipelineError("this model has no chat template; give a prompt instead of messages")
            return tokenizer.encode_chat(messages_of(prompt)), True
        if (ids := ids_of(prompt, self.manifest.vocab)) is not None:
            return ids, False
        if not isinstance(prompt, str):
            raise PipelineError("prompt is neither text nor a list of token ids; give a string, or a list such as [1, 2, 3]")
        return encode_question(prompt, tokenizer, self.system, self.raw), not self.raw and tokenizer.chat_template is not None

    def _request(self, ids: Sequence[int], chat: bool, seed: int) -> Request:
        sampling = replace(self.sampling, seed=seed) if self.sampling.is_random else self.sampling
        return text_request(
            ids, self.manifest.context, self.tokenizer, max_tokens=self.max_tokens, sampling=sampling, stop_strings=self.stop,
            stop_tokens=() if self.ignore_eos else self.manifest.tokens.eos, repetition_stop=self.repetition_stop,
            reasoning=chat, grammar=self.grammar,
        )  # fmt: skip


class Embeddings:
    """Computes the embedding of each record, from a column with a text or a list of token ids."""

    def __init__(self, embedder: Embedder, prompt: str = "", dimensions: int | None = None):
        embedder.check_dimensions(dimensions)
        self.embedder, self.prompt, self.dimensions = embedder, prompt, dimensions

    def samples(self, record: Record) -> bool:
        return False

    def work(self, record: Record, seed: int) -> Work:
        self.embedder.check_vectors()
        given = record.fields[name := column_of(record.fields, TEXTS)]
        ids = ids_of(given, self.embedder.bundle.manifest.vocab)
        if ids is None and not isinstance(given, str) and given != []:
            raise PipelineError(f"{name} is neither text nor a list of token ids; give a string, or a list such as [1, 2, 3]")
        tokens = self.embedder.tokens(given, self.prompt)

        def outcome() -> Outcome:
            vector = self.embedder.vector(tokens, self.dimensions)
            # `str` of an f32 gives the shortest decimal that rounds to it; float() alone gives f64 digits.
            added = {"embedding": [float(str(x)) for x in vector], "prompt_tokens": len(tokens.ids), "truncated": tokens.cut}
            return Outcome({**added, "error": None}, prompt=len(tokens.ids))

        return Work(record, outcome)

    def failed(self, record: Record, error: Exception) -> Outcome:
        return Outcome({**dict.fromkeys(("embedding", "prompt_tokens", "truncated")), "error": str(error)}, failed=True)


def ids_of(value: Any, vocab: int) -> list[int] | None:
    """Return `value` if it is a non-empty list of token ids, and None if it is anything else.

    Raises PipelineError if one of the integers is outside the vocabulary.
    """
    if not (isinstance(value, list) and value and all(type(token) is int for token in value)):
        return None
    if outside := [token for token in value if not 0 <= token < vocab]:
        raise PipelineError(f"token {str(outside[0])[:40]} is outside the vocabulary; use ids from 0 to {vocab - 1}")
    return value


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return chat messages whose content is text; PipelineError if they are invalid."""
    if not is_messages(value):
        raise PipelineError(
            "messages is empty or not a list of objects with role and content; give at least one, such "
            'as {"role": "user", "content": "Hello"}'
        )
    return [{**message, "content": _content(message, index)} for index, message in enumerate(value)]


def _content(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not isinstance(message.get("role"), str):
        raise PipelineError(f'messages.{index}: role is missing or not a string; give a role, such as "user"')
    if len(texts) < len(parts) or not all(isinstance(t, str) for t in texts):
        raise PipelineError(
            f"messages.{index}: content is missing or has a part that is not text; give a string, or a "
            "list of parts of type text"
        )
    return "".join(texts)


def column_of(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the only one of `names` that has a value in a record, else raise PipelineError."""
    found = [name for name in names if fields.get(name) is not None]
    if len(found) != 1:
        columns = " and ".join(found) if found else "no " + " and no ".join(names)
        raise PipelineError(f"the record has {columns}; give it exactly one of the columns {', '.join(names)}")
    return found[0]
