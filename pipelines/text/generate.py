"""Generate texts with an engine, from one or many prompts; score texts; open a draft model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.engine.draft import Draft
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.receipt import Receipt
from castiron.pipelines.engine.request import Failed, Request, Tokens
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.text_output import Delta, TextOutput
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import TOKENIZER
from castiron.vmfb.run.session import Session

# Plain text, token ids, or messages ({"role", "content"} each) for the chat template.
Prompt = str | Collection[int] | Sequence[Mapping[str, Any]]
# Collections that are neither token ids nor lists of prompts: texts that are not decoded, and single messages.
NO_PROMPTS = bytes | bytearray | Mapping


def encode_prompt(
    prompt: Any, tokenizer: Tokenizer | None, vocab: int, template_args: Mapping[str, Any] = {}
) -> Collection[int]:
    """Return the token ids of a prompt; raise PipelineError if it is not valid for this model."""
    if tokenizer and isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if tokenizer and is_messages(prompt):
        if tokenizer.chat_template is None:
            raise PipelineError("this model has no chat template; give text instead of messages")
        return tokenizer.encode_chat(prompt, **template_args)
    is_ids = isinstance(prompt, Collection) and not isinstance(prompt, NO_PROMPTS)
    if not is_ids or not all(isinstance(token, Integral) for token in prompt):
        kinds = "text, messages or " if tokenizer else ""
        raise PipelineError(f"invalid prompt: {type(prompt).__name__}; give {kinds}a list of token ids (integers)")
    check_token_ids(prompt, vocab)
    return prompt


def check_token_ids(ids: Iterable[int], vocab: int, where: str = "") -> None:
    """Raise PipelineError if an id is outside a vocabulary of `vocab` tokens."""
    if outside := [token for token in ids if not 0 <= token < vocab]:
        raise PipelineError(f"{where}token {outside[0]} is outside the vocabulary; give ids from 0 to {vocab - 1}")


def encode_question(text: str, tokenizer: Tokenizer, system: str | None, raw: bool) -> list[int]:
    """Return the token ids of a user's text, rendered by the chat template, unless `raw`."""
    if raw or tokenizer.chat_template is None:
        if system:
            raise PipelineError("--system needs a chat template; remove --raw, or use a model with a template")
        return tokenizer.encode(text)
    before = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*before, {"role": "user", "content": text}])


def is_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def is_prompt(value: Any) -> bool:
    """Return whether `value` is one prompt, and not a list of prompts."""
    if isinstance(value, str | NO_PROMPTS) or not isinstance(value, Iterable):
        return True
    ids = isinstance(value, Collection) and bool(len(value)) and all(isinstance(token, Integral) for token in value)
    return ids or is_messages(value)


@dataclass(frozen=True)
class Result:
    """The generated text, None without a tokenizer, and token ids of a prompt; or its error.

    receipt: with the option `receipt`, what `castiron audit` needs.
    """

    index: int
    tokens: list[int]
    text: str | None
    finish_reason: str
    error: PipelineError | None = None
    receipt: Receipt | None = None

    def __str__(self) -> str:
        return self.text if self.text is not None else " ".join(map(str, self.tokens))


@dataclass(frozen=True)
class Scored:
    """The tokens of a text and their log-probabilities, f64 [tokens], NaN for the first.

    top: the most probable (id, log-probability) at each token after the first.
    """

    tokens: list[int]
    logprobs: np.ndarray
    top: list[tuple[tuple[int, float], ...]]

    @property
    def total(self) -> float:
        """The sum of the log-probabilities of all tokens after the first."""
        return float(self.logprobs[1:].sum())


def generate_many(engine: Engine, prompts: Iterable[Prompt], make_request: Callable[[Prompt], Request]) -> Generator[Result]:
    """Yield the result of each prompt as soon as it is complete.

    make_request: a PipelineError that it raises becomes the prompt's result. The next prompt is
    taken when the engine has a free KV cache. Closing the iterator cancels unfinished prompts.
    """
    waiting, stream = enumerate(prompts), engine.stream()
    running: dict[Request, tuple[int, list[str]]] = {}
    try:
        while True:
            while len(running) < engine.slots and (taken := next(waiting, None)):
                index, prompt = taken
                try:
                    request = make_request(prompt)
                except PipelineError as error:
                    yield Result(index, [], None, "error", error)
                    continue
                running[request] = index, []
                stream.submit(request)
            if not running:
                return
            for request, event in stream.read():
                index, pieces = running[request]
                if isinstance(event, Delta):
                    pieces.append(event.text)
                if isinstance(event, Delta | Tokens):
                    continue
                del running[request]
                error = event.error if isinstance(event, Failed) else None
                text = "".join(pieces) if isinstance(request.output, TextOutput) else None
                yield Result(
                    index, request.tokens, text, request.finish_reason or "error", error, request.receipt(engine.manifest)
                )
    finally:
        stream.close()


def score_many(engine: Engine, prompts: Iterable[Prompt], make_request: Callable[[Prompt], Request]) -> list[Scored]:
    """Return the scores of each prompt's tokens; raise the error of an invalid prompt."""
    requests: list[Request] = []

    def remember(prompt: Prompt) -> Request:
        requests.append(make_request(prompt))
        return requests[-1]

    with closing(generate_many(engine, prompts, remember)) as results:
        for result in results:
            if result.error:
                raise result.error
    found = []
    for request in requests:
        logprobs = np.array([np.nan, *(score.logprob for score in request.scores)])
        top = [score.top[: request.prompt_logprobs] for score in request.scores]
        found.append(Scored(request.prompt.tolist(), logprobs, top))
    return found


def open_draft(bundle: Bundle | Path | str, target: Bundle, threads: int | None = None) -> Draft:
    """Open a draft model for `target`; raise PipelineError if it cannot be one."""
    bundle = open_bundle(bundle)
    check_draft(bundle, target)
    return Draft(Session(bundle, threads), target.manifest.vocab)


def check_draft(draft: Bundle, target: Bundle) -> None:
    """Raise PipelineError if `draft` cannot be a draft model for `target`."""
    if draft.manifest.encoder:
        raise PipelineError(f"{draft.path} is an embedding model and cannot be a draft; take one that generates text")
    check_verifies(target)
    check_vocabularies(*(Vocabulary.of(bundle) for bundle in (draft, target)))


def check_verifies(target: Bundle) -> None:
    """Raise PipelineError if a bundle cannot check the tokens that a draft model proposes."""
    if not target.manifest.widths("verify"):
        raise PipelineError(f"{target.path} has no verify functions for a draft; compile it with --verify-widths 2,4,8")


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a bundle or checkpoint; sha256: of its tokenizer.json, None without one."""

    path: Path
    size: int
    sha256: str | None
    tokenizer: Callable[[], Tokenizer]

    @classmethod
    def of(cls, bundle: Bundle) -> Vocabulary:
        """Return the vocabulary of a bundle."""
        file = bundle.manifest.files.get(TOKENIZER)
        return cls(bundle.path, bundle.manifest.vocab, file and file.sha256, lambda: load_tokenizer(bundle))


def check_vocabularies(draft: Vocabulary, target: Vocabulary) -> None:
    """Raise PipelineError if a draft model and its target have different vocabularies."""
    # Equal tokenizer files have equal vocabularies; different files may differ in other parts only.
    if draft.size == target.size and draft.sha256 == target.sha256:
        return
    if not (draft.sha256 and target.sha256):
        bare = target if draft.sha256 else draft
        raise PipelineError(
            f"{bare.path} has no tokenizer, so the vocabularies of {draft.path} and {target.path} cannot be compared; "
            "compile it from a checkpoint with a tokenizer"
        )
    tokens = [each.tokenizer().vocabulary for each in (draft, target)]
    # Unused ids at the end have empty bytes.
    pairs = enumerate(zip_longest(*tokens, fillvalue=b""))
    differs = next((index for index, (first, second) in pairs if first != second), None)
    if differs is not None:
        raise PipelineError(
            f"draft and model have different vocabularies from token {differs} on: {draft.path} and {target.path}; "
            "choose a draft from the same model family"
        )
