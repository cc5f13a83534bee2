"""Compute embeddings of texts as sentence-transformers does, and the relevance of documents."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.tokenizer import check_utf8, encode_text, load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.run.encoder import Encoder

# The models that can rerank, for error messages.
RERANKERS = "Qwen3-Reranker, a BERT or ModernBERT classifier or a decoder's classifier of one label, or an embedding model"
# Names of the prompts for queries and for documents; the first one that a model has is used.
QUERY, DOCUMENT = ("query",), ("document", "passage")
# A text, or token ids.
Given = str | Sequence[int]


@dataclass(frozen=True)
class Tokens:
    """The token ids of a text, special tokens included. cut: whether the text was truncated."""

    ids: list[int]
    cut: bool = False


class Embedder:
    """An embedding or reranking model with its tokenizer and prompts; threads may share it."""

    def __init__(self, bundle: Bundle | Path | str, threads: int | None = None):
        self.bundle = bundle = open_bundle(bundle)
        if bundle.manifest.encoder is None:
            raise PipelineError(
                f"{bundle.path} generates text and is not an embedding model; use castiron run, or give a model "
                "that sentence-transformers saved"
            )
        self.name, self.facts, self.hidden = bundle.manifest.name, bundle.manifest.encoder, bundle.manifest.hidden
        self.encoder = Encoder(bundle, threads)
        self.tokenizer = load_tokenizer(bundle) if bundle.tokenizer else None
        # Of a reranker with a prompt: the tokens of the prompt after the document.
        self._after = self._end_of_prompt() if self.tokenizer and self.facts.relevance else None
        if self.tokenizer and self._after is None:
            self.tokenizer.backend.enable_truncation(self.facts.max_tokens)
        self._running = threading.Lock()

    def prompt(self, name: str | None = None) -> str:
        """Return the model's prompt `name`, by default its default prompt, if any."""
        name = self.facts.default_prompt if name is None else name
        if name is not None and name not in self.facts.prompts:
            known = ", ".join(self.facts.prompts) or "none"
            raise PipelineError(f"{self.name} has no prompt {name!r}; its prompts are: {known}")
        return "" if name is None else self.facts.prompts[name]

    def tokens(self, text: Given, prompt: str = "") -> Tokens:
        """Return the tokens of `prompt` + `text`, cut to the limit; of ids, these if they fit."""
        if isinstance(text, str):
            # Remove white space at the ends, as sentence-transformers does.
            text = (prompt + text).strip()
            tokens = self._encode(text.lower() if self.facts.lower_case else text)[0]
        else:
            tokens = Tokens(list(text))
        if not 1 <= len(tokens.ids) <= self.facts.max_tokens:
            raise PipelineError(f"the text has {len(tokens.ids)} tokens; {self.name} embeds 1 to {self.facts.max_tokens}")
        return tokens

    def _encode(self, text: str, second: str | None = None) -> tuple[Tokens, list[int]]:
        if self.tokenizer is None:
            raise PipelineError(f"{self.name} has no tokenizer, because its checkpoint had none; give token ids")
        for part in (text, second or ""):
            check_utf8(part, "a text")
        found = encode_text(self.tokenizer.backend, text, second)
        return Tokens(found.ids, bool(found.overflowing)), found.type_ids

    def relevance_inputs(self, query: str, documents: Sequence[str]) -> list[Tokens]:
        """Return a reranker's pairs, or for an embedding model the query and then each document."""
        if self.facts.relevance:
            return [self._pair(query, document) for document in documents]
        before = [self.prompt(next((n for n in names if n in self.facts.prompts), None)) for names in (QUERY, DOCUMENT)]
        return [self.tokens(query, before[0]), *(self.tokens(document, before[1]) for document in documents)]

    def _messages(self, query: str, document: str) -> list[dict[str, str]]:
        # As in sentence-transformers, a reranker's prompt is its instruction.
        found = {"system": self.prompt(), "query": query, "document": document}
        return [{"role": role, "content": text} for role, text in found.items() if role != "system" or text]

    def _end_of_prompt(self) -> list[int] | None:
        """Return the tokens of the prompt after the document; None without a prompt."""
        assert self.tokenizer is not None
        texts = "its-query", "its-document"
        try:
            rendered = self.tokenizer.render_roles(self._messages(*texts))
        except PipelineError:
            return None
        if not all(rendered.count(text) == 1 for text in texts):
            return None
        return self.tokenizer.encode(rendered.partition(texts[1])[2], add_special_tokens=False)

    def _pair(self, query: str, document: str) -> Tokens:
        if self.tokenizer and self._after is not None:
            for text in (query, document):
                check_utf8(text, "a text")
            ids = self.tokenizer.encode_roles(self._messages(query, document))
            if len(ids) <= self.facts.max_tokens:
                return Tokens(ids)
            # The end of the prompt asks for the answer, so a long document is cut before it.
            space = max(0, self.facts.max_tokens - len(self._after))
            return Tokens([*ids[:space], *self._after][: self.facts.max_tokens], True)
        # The vocabulary size is added to the ids of the second text, if the model has token types.
        found, types = self._encode(query, document)
        shift = self.bundle.manifest.vocab if self.facts.types else 0
        return Tokens([token + shift * (kind > 0) for token, kind in zip(found.ids, types)], found.cut)

    def relevance(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Return the relevance of each document, f64 [documents]; vectors: of `relevance_inputs`.

        It is a reranker's score or, for an embedding model, the cosine with the query.
        """
        found = np.array(vectors, np.float64)
        if self.facts.relevance:
            numbers = found[:, 0]
            return 1 / (1 + np.exp(-numbers)) if self.facts.relevance == "sigmoid" else numbers
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found[1:] @ found[0]

    def rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """Return (index, relevance to the query) of each document, the most relevant one first."""
        tokens = self.relevance_inputs(query, documents)
        print_cut(tokens, self.facts.max_tokens)
        return ranked(self.relevance([self.vector(found) for found in tokens])) if documents else []

    def check_vectors(self) -> None:
        """Raise PipelineError for a reranking model, whose vectors are not embeddings."""
        if self.facts.relevance:
            raise PipelineError(f"{self.name} is a reranking model and cannot embed text; rerank texts with it")

    def check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and not 1 <= dimensions <= self.hidden:
            raise PipelineError(f"dimensions is {dimensions}; {self.name} supports 1 to {self.hidden}")

    def vector(self, tokens: Tokens, dimensions: int | None = None) -> np.ndarray:
        """Return the output of the model for a text, f32 [dimensions]."""
        self.check_dimensions(dimensions)
        with self._running:
            found = self.encoder.encode(tokens.ids)
        return cut_to(found, dimensions, self.facts.normalised)

    def embed(
        self, texts: Iterable[Given], prompt_name: str | None = None, prompt: str | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return the embeddings of texts, f32 [texts, dimensions]; print how many were truncated.

        prompt: instead of the model's prompt `prompt_name`. dimensions: the first of each vector.
        """
        self.check_vectors()
        before = self.prompt(prompt_name) if prompt is None else prompt
        tokens = [self.tokens(text, before) for text in texts]
        print_cut(tokens, self.facts.max_tokens)
        rows = [self.vector(found, dimensions) for found in tokens]
        return np.stack(rows) if rows else np.empty((0, dimensions or self.hidden), np.float32)


def ranked(scores: np.ndarray) -> list[tuple[int, float]]:
    """Return (index, score) pairs, the highest score first; equal scores stay in their order."""
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")]


def cut_to(vector: np.ndarray, dimensions: int | None, normalised: bool) -> np.ndarray:
    """Shorten an embedding to its first `dimensions` numbers; None for all.

    The model must be trained for this (Matryoshka, arXiv:2205.13147).
    """
    if dimensions is None or dimensions == vector.size:
        return vector
    found = vector[:dimensions]
    return found / np.maximum(np.linalg.norm(found), np.float32(1e-12)) if normalised else found.copy()


def print_cut(tokens: Sequence[Tokens], max_tokens: int) -> None:
    """Print how many of these texts were truncated to `max_tokens` tokens, if any."""
    if cut := sum(each.cut for each in tokens):
        print_message(
            f"{cut} of {len(tokens)} texts exceed{'s' * (cut == 1)} {max_tokens} tokens; only the first {max_tokens} are used"
        )
