"""Plain rows: prompts and messages as `castiron run` answers them, texts as `castiron embed` encodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from castiron.pipelines.batch.requests import Outcome, Work
from castiron.pipelines.batch.row import PROMPTS, TEXTS, Row
from castiron.pipelines.embedding import Embedder
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.grammar import Grammar
from castiron.pipelines.generation.positions import at_most, room
from castiron.pipelines.generation.request import are_messages
from castiron.pipelines.generation.sampling import Sampler, Sampling
from castiron.pipelines.generation.sequence import Delta, Event, Failed
from castiron.pipelines.generation.sequence import Sequence as Generated
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.tokenizing import COUNTED
from castiron.vmfb.manifest import Manifest


@dataclass(frozen=True)
class Wanted:
    """How prompts are to go on: `most` tokens, or `usual` ones where there is room; None is to the end of the context.

    `raw` leaves the chat template out, `system` is a message before the prompt.
    """

    most: int | None = None
    usual: int | None = None
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    repetition_stop: bool = False
    raw: bool = False
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    json_schema: Any = None


class Prompts:
    """Plain rows: `messages`, or a `prompt` of text or token ids, answered in columns beside the row's own."""

    def __init__(self, manifest: Manifest, text: Text, wanted: Wanted):
        """PipelineError for options that no prompt can be run with."""
        self.manifest, self.text, self.wanted = manifest, text, wanted
        if wanted.system and (wanted.raw or text.chat_template is None):
            raise PipelineError("--system needs a chat template: drop --raw, or take a model that has a template")
        self.grammar: Grammar | None = None
        if wanted.json_schema is not None:
            self.grammar = text.grammar(json_schema=wanted.json_schema)
        self._sequence([0], False, 0)

    def draws(self, row: Row) -> bool:
        return self.wanted.sampling.temperature > 0

    def work(self, row: Row, key: str, seed: int) -> Work:
        ids, chat = self._encode(row.fields)
        sequence = self._sequence(ids, chat, seed)
        said, thoughts, failures = list[str](), list[str](), list[PipelineError]()

        def tell(_: Generated, event: Event) -> None:
            if isinstance(event, Delta):
                said.append(event.text)
                thoughts.append(event.thought)
            elif isinstance(event, Failed):
                failures.append(event.error)

        def outcome() -> Outcome:
            counts = {"prompt": len(ids), "generated": len(sequence.tokens), "cached": sequence.cached}
            if failures:
                return replace(self.failed(row, key, failures[0]), **counts)
            added = {"generated": "".join(said), "finish_reason": sequence.finish_reason}
            if self.text.marks:
                added["thoughts"] = "".join(thoughts) or None
            tokens = {"prompt_tokens": len(ids), "generated_tokens": len(sequence.tokens)}
            return Outcome({**added, **tokens, "error": None}, **counts)

        return Work(row, key, outcome, [sequence], tell)

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        empty = ("generated", "finish_reason", *(["thoughts"] if self.text.marks else []), "prompt_tokens", "generated_tokens")
        return Outcome({**dict.fromkeys(empty), "error": str(error)}, failed=True)

    def _encode(self, fields: Mapping[str, Any]) -> tuple[Sequence[int], bool]:
        """The ids of a row's prompt, and whether the template wrote it."""
        name = one_of(fields, PROMPTS)
        prompt, text = fields[name], self.text
        if name == "messages":
            if text.chat_template is None:
                raise PipelineError("this model has no chat template; give a prompt in place of messages")
            messages = messages_of(prompt)
            self._check_length(sum(len(message["content"]) for message in messages))
            return text.encode_chat(messages, **self.wanted.template_args), True
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not 0 <= min(prompt) <= max(prompt) < self.manifest.vocab:
                raise PipelineError(f"prompt has a token outside the vocabulary of {self.manifest.vocab} tokens")
            return prompt, False
        if not isinstance(prompt, str):
            raise PipelineError("prompt must be text, or a list of token ids")
        self._check_length(len(prompt))
        if self.wanted.raw or text.chat_template is None:
            return text.encode(prompt), False
        system = [{"role": "system", "content": self.wanted.system}] if self.wanted.system else []
        return text.encode_chat([*system, {"role": "user", "content": prompt}], **self.wanted.template_args), True

    def _check_length(self, characters: int) -> None:
        """PipelineError, before it is made tokens of, for a text that has more than the context whatever it says."""
        context = self.manifest.context
        if characters > COUNTED and characters > (most := context * self.text.longest_token):
            raise PipelineError(
                f"the prompt has {characters} characters, and in the bundle's context of {context} tokens {most} fit at most: "
                "shorten the prompt"
            )

    def _sequence(self, ids: Sequence[int], chat: bool, seed: int) -> Generated:
        wanted, context = self.wanted, self.manifest.context
        sampling = replace(wanted.sampling, seed=seed) if wanted.sampling.temperature > 0 else wanted.sampling
        return Generated(
            ids, context, max_tokens=wanted.most or at_most(wanted.usual, room(context, 0, len(ids))), text=self.text,
            sampler=Sampler(sampling), stop_tokens=() if wanted.ignore_eos else self.manifest.tokens.eos,
            stop_strings=wanted.stop, repetition_stop=wanted.repetition_stop, thoughts=chat, grammar=self.grammar,
        )  # fmt: skip


class Embeddings:
    """Plain rows of a text or of token ids, whose vectors stand in a column beside the row's own."""

    def __init__(self, embedder: Embedder, prompt: str = "", dimensions: int | None = None):
        """`prompt`: the words before each text. PipelineError for more dimensions than there are."""
        embedder.check_dimensions(dimensions)
        self.embedder, self.prompt, self.dimensions = embedder, prompt, dimensions

    def draws(self, row: Row) -> bool:
        return False

    def work(self, row: Row, key: str, seed: int) -> Work:
        self.embedder.check_vectors()
        given = row.fields[one_of(row.fields, TEXTS)]
        if not isinstance(given, str) and not (isinstance(given, list) and all(type(token) is int for token in given)):
            raise PipelineError("what is to be encoded must be text, or a list of token ids")
        vocab = self.embedder.bundle.manifest.vocab
        if isinstance(given, list) and given and not 0 <= min(given) <= max(given) < vocab:
            raise PipelineError(f"the row has a token outside the vocabulary of {vocab} tokens")
        tokens = self.embedder.tokens(given, self.prompt)

        def outcome() -> Outcome:
            vector = self.embedder.vector(tokens, self.dimensions)
            # As few digits as say which f32 each is.
            added = {"embedding": [float(str(x)) for x in vector], "prompt_tokens": len(tokens.ids), "cut": tokens.cut}
            return Outcome({**added, "error": None}, prompt=len(tokens.ids))

        return Work(row, key, outcome)

    def failed(self, row: Row, key: str, error: Exception) -> Outcome:
        return Outcome({**dict.fromkeys(("embedding", "prompt_tokens", "cut")), "error": str(error)}, failed=True)


def messages_of(given: Any) -> list[dict[str, Any]]:
    """A row's messages with a text each, as chat templates want them; PipelineError for what is none."""
    if not are_messages(given):
        raise PipelineError("messages must be a list of objects with role and content, one at least")
    return [{**message, "content": _content(message, index)} for index, message in enumerate(given)]


def _content(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not isinstance(message.get("role"), str) or len(texts) < len(parts) or not all(isinstance(t, str) for t in texts):
        raise PipelineError(f"messages.{index} needs a role and a content, which are text; a content may be parts of type text")
    return "".join(texts)


def one_of(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """The one of these columns that a row has; PipelineError for none and for several."""
    found = [name for name in names if fields.get(name) is not None]
    if len(found) != 1:
        what = " and ".join(found) if found else "no " + " and no ".join(names)
        raise PipelineError(f"the row has {what}; give it one of {', '.join(names)}")
    return found[0]
