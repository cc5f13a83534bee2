"""A text in chunks, as llama.cpp's perplexity tool takes it, and a bundle's logits after each token of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import numpy as np

from castiron.pipelines.checking.distances import Compared, compare_rows, joined, negative_log_likelihoods, statistics
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.scores import rows, width_of
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.manifest import Accuracy
from castiron.vmfb.session import Session

# Chapters I to IV of Lewis Carroll, Alice's Adventures in Wonderland (1865), which is in the public domain, by the 29th
# edition of Project Gutenberg's text; a paragraph is a line.
DEFAULT_TEXT = "evaluate_text.txt"
# Tokens of a bundle without tokenizer, drawn with a fixed seed.
DRAWN = 8192
# The short form: chunks, and tokens of each, of which the second half counts.
SHORT_CHUNKS, SHORT_CONTEXT = 2, 256

Told = Callable[[int, int], None]


class Rows(Protocol):
    """What has logits: `rows(tokens, first)` gives those after each of `tokens[first:]`, f32 `[vocab]`, one by one; they hold
    until the next is taken."""

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True)
class Chunk:
    """`tokens` are run, and the logits after each of `tokens[first:]` are asked for `wanted`, the token that follows it."""

    tokens: list[int]
    wanted: list[int]
    first: int


class BundleRows:
    """The rows of a session: prompt functions up to `first`, then verify functions, which give many rows a call, or steps
    where the bundle has none. With `steps` every token is a step."""

    def __init__(self, session: Session, steps: bool = False):
        self.session, self.steps = session, steps

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        session = self.session
        session.rewind(0)
        if not self.steps:
            if first:
                session.prefill(tokens[:first])
            yield from rows(session, tokens[first:], width_of(session.manifest.widths("verify"), len(tokens)))
            return
        for place, token in enumerate(tokens):
            session.step(token)
            if place >= first:
                yield session.logits()


def text_of(path: str | None = None) -> str:
    """The text of a file, by default castiron's own; without its last line feed, as llama.cpp reads one."""
    try:
        text = (Path(path) if path else files("castiron.pipelines.checking") / DEFAULT_TEXT).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PipelineError(f"{path} is not a text in UTF-8") from None
    return text.removesuffix("\n")


def tokens_of(bundle: Bundle, path: str | None = None) -> list[int]:
    """The ids of the text, or drawn ones for a bundle without tokenizer."""
    if bundle.tokenizer is not None:
        return load_text(bundle).encode(text_of(path))
    if path is not None:
        raise PipelineError(f"{bundle.path} has no tokenizer, so --text cannot be read: leave it out for drawn token ids")
    return [int(token) for token in np.random.default_rng(0).integers(bundle.manifest.vocab, size=DRAWN)]


def text_name(bundle: Bundle, path: str | None = None) -> str:
    """What `tokens_of` takes its tokens from, for a report."""
    return path or (DEFAULT_TEXT if bundle.tokenizer else "drawn tokens")


def chunks_of(tokens: Sequence[int], context: int, most: int | None = None, bos: int | None = None) -> list[Chunk]:
    """Chunks of `context` tokens one after another, at most so many; what is left over is not used.

    As `perplexity` in llama.cpp's tools/perplexity/perplexity.cpp: of each chunk the first half conditions alone, and tokens
    context // 2 + 1 and on count. A text that begins with `bos` has it in place of the first token of every chunk.
    PipelineError for fewer tokens than two chunks have.
    """
    if context < 4:
        raise PipelineError(f"--context is {context}; a chunk needs at least 4 tokens")
    if most is not None and most < 1:
        raise PipelineError(f"--chunks is {most}; it must be at least 1")
    if len(tokens) < 2 * context:
        raise PipelineError(
            f"the text has {len(tokens)} tokens, and chunks of {context} need at least {2 * context}: "
            "give a longer --text or a smaller --context"
        )
    found, first = [], context // 2
    for start in range(0, len(tokens) - context + 1, context)[:most]:
        chunk = list(tokens[start : start + context])
        if bos is not None and tokens[0] == bos:
            chunk[0] = bos
        found.append(Chunk(chunk[:-1], chunk[first + 1 :], first))
    return found


def likelihoods(model: Rows, chunks: Sequence[Chunk], told: Told = lambda done, total: None) -> np.ndarray:
    """The negative log-likelihood of every token that counts, f64; `told` gets (chunks done, chunks in all)."""
    found = []
    for done, chunk in enumerate(chunks):
        told(done, len(chunks))
        found.append(negative_log_likelihoods(model.rows(chunk.tokens, chunk.first), chunk.wanted))
    told(len(chunks), len(chunks))
    return np.concatenate(found)


def compare(model: Rows, base: Rows, chunks: Sequence[Chunk], told: Told = lambda done, total: None) -> Compared:
    """Model and base on every token that counts; `told` gets (chunks done, chunks in all)."""
    found = []
    for done, chunk in enumerate(chunks):
        told(done, len(chunks))
        rows, base_rows = (side.rows(chunk.tokens, chunk.first) for side in (model, base))
        found.append(compare_rows(rows, base_rows, chunk.wanted))
    told(len(chunks), len(chunks))
    return joined(found)


def own_accuracy(bundle: Bundle, told: Told = lambda done, total: None) -> Accuracy | None:
    """How far a bundle's prompt and verify functions are from its steps, which are exact, on a few hundred tokens. None where
    the context, or what the tokenizer makes of the text, is too short."""
    context = min(SHORT_CONTEXT, bundle.manifest.context)
    try:
        chunks = chunks_of(tokens_of(bundle), context, SHORT_CHUNKS, bundle.manifest.tokens.bos)
    except PipelineError:
        return None
    session = Session(bundle)
    compared = compare(BundleRows(session), BundleRows(Session(session.program), steps=True), chunks, told)
    found = statistics(compared)
    kld, same = found["kld"], found["same_top_p"]
    return Accuracy(
        "decode_step", text_name(bundle), context, int(compared.kld.size),
        kld["mean"], kld["error"], kld["99.0%"], kld["maximum"], same["mean"], same["error"],
    )  # fmt: skip
