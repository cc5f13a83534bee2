"""Plain rows: prompts and messages to answer, and texts to embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from castiron.pipelines.batch.rows import PROMPTS, TEXTS, Outcome, Row, Work
from castiron.pipelines.engine.context import default_limit, free_positions
from castiron.pipelines.engine.request import Event, Failed, Request
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.embedder import Embedder
from castiron.pipelines.text.generation import is_messages
from castiron.pipelines.text.text_output import Delta, text_request
from castiron.pipelines.text.tokenizer import COUNTED, Tokenizer
from castiron.vmfb.manifest import Manifest


@dataclass(frozen=True)
class PromptOptions:
    """The options of a job for its prompts.

    max_tokens: max length of an answer; None for `default_tokens`, or for as many as fit.
    default_tokens: None for the rest of the context. raw: whether prompts are used without the chat
    template. system: system message before each prompt.
    """

    max_tokens: int | None = None
    default_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    repetition_stop: bool = False
    raw: bool = False
    system: str | None = None
    json_schema: Any = None


class Prompts:
    """Plain rows with `messages` or a `prompt` of text or token ids, to be answered."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, options: PromptOptions):
        """Answer rows with these options; raise PipelineError if they are invalid."""
        self.manifest, self.tokenizer, self.options = manifest, tokenizer, options
        if options.system and (options.raw or tokenizer.chat_template is None):
            raise PipelineError("--system needs a chat template; remove --raw, or use a model with a template")
        self.grammar = None if options.json_schema is None else tokenizer.grammar(json_schema=options.json_schema)
        self.columns = ["generated", "finish_reason", *["reasoning_content"] * bool(tokenizer.marks)]
        # Raises an error for invalid options before the first row.
        self._request([0], False, 0)

    def draws(self, row: Row) -> bool:
        return self.options.sampling.temperature > 0

    def work(self, row: Row, key: str, seed: int) -> Work:
        ids, chat = self._encode(row.fields)
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
                return replace(self.failed(row, key, failures[0]), **counts)
            reasoning = "".join(delta.reasoning for delta in deltas) or None
            values = ["".join(delta.text for delta in deltas), request.finish_reason, reasoning]
            tokens = {"prompt_tokens": len(ids), "generated_tokens": len(request.tokens)}
            return Outcome({**dict(zip(self.columns, values)), **tokens, "error": None}, **counts)

        return Work(row, key, outcome, [request], listen)

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        empty = dict.fromkeys((*self.columns, "prompt_tokens", "generated_tokens"))
        return Outcome({**empty, "error": str(error)}, failed=True)

    def _encode(self, fields: Mapping[str, Any]) -> tuple[Sequence[int], bool]:
        """Return the token ids of a row's prompt, and whether the chat template rendered it."""
        name = column_of(fields, PROMPTS)
        prompt, tokenizer = fields[name], self.tokenizer
        if name == "messages":
            if tokenizer.chat_template is None:
                raise PipelineError("this model has no chat template; give a prompt instead of messages")
            messages = messages_of(prompt)
            self._check_length(sum(len(message["content"]) for message in messages))
            return tokenizer.encode_chat(messages), True
        if is_ids(prompt):
            check_ids(prompt, self.manifest.vocab)
            return prompt, False
        if not isinstance(prompt, str):
            raise PipelineError("prompt must be text or a list of token ids")
        self._check_length(len(prompt))
        if self.options.raw or tokenizer.chat_template is None:
            return tokenizer.encode(prompt), False
        system = [{"role": "system", "content": self.options.system}] if self.options.system else []
        return tokenizer.encode_chat([*system, {"role": "user", "content": prompt}]), True

    def _check_length(self, characters: int) -> None:
        """Raise PipelineError for a text that cannot fit in the context, without tokenizing it."""
        context = self.manifest.context
        if characters > COUNTED and characters > (limit := context * self.tokenizer.longest_token):
            raise PipelineError(
                f"prompt has {characters} characters; {context} tokens of context have at most {limit}: shorten the prompt"
            )

    def _request(self, ids: Sequence[int], chat: bool, seed: int) -> Request:
        options, context = self.options, self.manifest.context
        sampling = replace(options.sampling, seed=seed) if options.sampling.temperature > 0 else options.sampling
        limit = options.max_tokens or default_limit(options.default_tokens, free_positions(context, len(ids)))
        return text_request(
            ids, context, self.tokenizer, max_tokens=limit, sampling=sampling, stop_strings=options.stop,
            stop_tokens=() if options.ignore_eos else self.manifest.tokens.eos, repetition_stop=options.repetition_stop,
            reasoning=chat, grammar=self.grammar,
        )  # fmt: skip


class Embeddings:
    """Plain rows with a text or token ids, to be embedded."""

    def __init__(self, embedder: Embedder, prompt: str = "", dimensions: int | None = None):
        """Embed each text after `prompt`; raise PipelineError for too many dimensions."""
        embedder.check_dimensions(dimensions)
        self.embedder, self.prompt, self.dimensions = embedder, prompt, dimensions

    def draws(self, row: Row) -> bool:
        return False

    def work(self, row: Row, key: str, seed: int) -> Work:
        self.embedder.check_vectors()
        given = row.fields[column_of(row.fields, TEXTS)]
        if is_ids(given):
            check_ids(given, self.embedder.bundle.manifest.vocab)
        elif not isinstance(given, str) and given != []:
            raise PipelineError("the input must be text or a list of token ids")
        tokens = self.embedder.tokens(given, self.prompt)

        def outcome() -> Outcome:
            vector = self.embedder.vector(tokens, self.dimensions)
            # The shortest decimals with the same f32 values.
            added = {"embedding": [float(str(x)) for x in vector], "prompt_tokens": len(tokens.ids), "truncated": tokens.cut}
            return Outcome({**added, "error": None}, prompt=len(tokens.ids))

        return Work(row, key, outcome)

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        return Outcome({**dict.fromkeys(("embedding", "prompt_tokens", "truncated")), "error": str(error)}, failed=True)


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise PipelineError for a token id outside the vocabulary."""
    if not 0 <= min(ids) <= max(ids) < vocab:
        raise PipelineError(f"the row has a token id outside the vocabulary; use ids from 0 to {vocab - 1}")


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return a row's messages with content as text; raise PipelineError if they are invalid."""
    if not is_messages(value):
        raise PipelineError("messages must be a non-empty list of objects with role and content")
    return [{**message, "content": _content(message, index)} for index, message in enumerate(value)]


def _content(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not isinstance(message.get("role"), str) or len(texts) < len(parts) or not all(isinstance(t, str) for t in texts):
        raise PipelineError(f"messages.{index}: role must be a string, content a string or a list of parts of type text")
    return "".join(texts)


def column_of(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the only one of these columns that a row has; raise PipelineError otherwise."""
    found = [name for name in names if fields.get(name) is not None]
    if len(found) != 1:
        columns = " and ".join(found) if found else "no " + " and no ".join(names)
        raise PipelineError(f"the row has {columns}; give it one of {', '.join(names)}")
    return found[0]
