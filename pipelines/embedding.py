"""Texts to vectors, as sentence-transformers has it: a prompt before the text, its tokens cut to what the model takes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.text import Text, load_text
from castiron.pipelines.generation.tokenizing import encoding_of, utf8
from castiron.pipelines.progress import say
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.encoder import Encoder
from castiron.vmfb.manifest import Encoder as Facts

# What is said of another model that is to rerank.
NO_RERANKER = "generates text: rerank with a BERT or ModernBERT classifier of one label, or a model that encodes texts"
# Names of prompts, of a question and of what is searched.
QUERY, DOCUMENT = ("query",), ("document", "passage")
# Text, or token ids as they are.
Given = str | Sequence[int]


@dataclass(frozen=True)
class Tokens:
    """The ids of a text, special tokens among them; cut: whether it has more than these."""

    ids: list[int]
    cut: bool = False


class Embedder:
    """A bundle that encodes texts, with its tokenizer and prompts. Threads may share it: one runs at a time."""

    def __init__(self, bundle: Bundle | Path | str, threads: int | None = None):
        """`threads` default to the physical cores. PipelineError for a bundle that generates."""
        self.bundle = bundle = open_bundle(bundle)
        self.name, self.facts = bundle.manifest.name, facts_of(bundle)
        self.encoder = Encoder(bundle, threads)
        self.text: Text | None = load_text(bundle) if bundle.tokenizer else None
        if self.text:
            self.text.tokenizer.enable_truncation(self.facts.max_tokens)
        self._alone = threading.Lock()

    def prompt(self, name: str | None = None) -> str:
        """The words before a text by the name of a prompt, the usual ones without; PipelineError for a name that there is
        not."""
        name = self.facts.default_prompt if name is None else name
        if name is not None and name not in self.facts.prompts:
            known = ", ".join(self.facts.prompts) or "none"
            raise PipelineError(f"{self.name} has no prompt {name!r}; its prompts are: {known}")
        return "" if name is None else self.facts.prompts[name]

    def tokens(self, text: Given, prompt: str = "") -> Tokens:
        """The tokens of a text after a prompt; PipelineError for one of which there are none, and for too many ids."""
        most = self.facts.max_tokens
        if isinstance(text, str):
            if self.text is None:
                raise PipelineError(f"{self.name} has no tokenizer, because its checkpoint had none: give token ids")
            # White space at the ends counts for nothing, as in sentence-transformers.
            words = (prompt + text).strip()
            found = encoding_of(self.text.tokenizer, utf8(words.lower() if self.facts.lower_case else words, "a text"))
            tokens = Tokens(found.ids, bool(found.overflowing))
        else:
            tokens = Tokens(list(text))
        if not 1 <= len(tokens.ids) <= most:
            raise PipelineError(f"a text of {len(tokens.ids)} tokens has no vector; it needs 1 to {most} of them")
        return tokens

    def pair(self, query: str, document: str) -> Tokens:
        """The tokens of two texts together, the longer of which is cut, for a model that judges them so; PipelineError for a
        text that is not valid."""
        if self.text is None:
            raise PipelineError(f"{self.name} has no tokenizer, because its checkpoint had none")
        found = encoding_of(self.text.tokenizer, utf8(query.strip(), "a text"), utf8(document.strip(), "a text"))
        shift = self.bundle.manifest.vocab if self.facts.types else 0
        ids = [token + shift * (kind > 0) for token, kind in zip(found.ids, found.type_ids)]
        return Tokens(ids, bool(found.overflowing))

    def asked(self, query: str, documents: Sequence[str]) -> list[Tokens]:
        """What has to be run to find out how relevant documents are to a query: `relevance` takes the vectors."""
        if self.facts.relevance:
            return [self.pair(query, document) for document in documents]
        before = [self.prompt(next((n for n in names if n in self.facts.prompts), None)) for names in (QUERY, DOCUMENT)]
        return [self.tokens(query, before[0]), *(self.tokens(document, before[1]) for document in documents)]

    def relevance(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """How relevant each document is, f64 [documents], from the vectors of what was `asked`: what a classifier says of it
        and the query, or the cosine of their angle."""
        found = np.array(vectors, np.float64)
        if self.facts.relevance:
            numbers = found[:, 0]
            return 1 / (1 + np.exp(-numbers)) if self.facts.relevance == "sigmoid" else numbers
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found[1:] @ found[0]

    def rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """Numbers of the documents with how relevant they are to the query, the most relevant first; says on stderr how many
        were cut."""
        tokens = self.asked(query, documents)
        say_cut(sum(found.cut for found in tokens), len(tokens), self.facts.max_tokens)
        return ranked(self.relevance([self.vector(found) for found in tokens])) if documents else []

    def check_vectors(self) -> None:
        """PipelineError for a model whose vectors are no embeddings."""
        if self.facts.relevance:
            raise PipelineError(f"{self.name} judges two texts together and gives no vectors: rerank texts with it")

    def vector(self, tokens: Tokens, dimensions: int | None = None) -> np.ndarray:
        """The vector of a text, f32 [dimensions], by default all that there are; PipelineError for more than these."""
        self.check_dimensions(dimensions)
        with self._alone:
            found = self.encoder.encode(tokens.ids)
        return cut_to(found, dimensions, self.facts.normalised)

    def check_dimensions(self, dimensions: int | None) -> None:
        hidden = self.bundle.manifest.hidden
        if dimensions is not None and not 1 <= dimensions <= hidden:
            raise PipelineError(f"dimensions are {dimensions}, and the vectors of {self.name} have 1 to {hidden}")

    def embed(
        self, texts: Iterable[Given], prompt_name: str | None = None, prompt: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """The vectors of texts, f32 [texts, dimensions], in their order; says on stderr how many were cut."""
        self.check_vectors()
        before = self.prompt(prompt_name) if prompt is None else prompt
        tokens = [self.tokens(text, before) for text in texts]
        self.check_dimensions(dimensions)
        say_cut(sum(found.cut for found in tokens), len(tokens), self.facts.max_tokens)
        rows = [self.vector(found, dimensions) for found in tokens]
        return np.stack(rows) if rows else np.empty((0, dimensions or self.bundle.manifest.hidden), np.float32)


def ranked(scores: np.ndarray) -> list[tuple[int, float]]:
    """Number and score of each, the highest first, of equals in their order."""
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")]


def facts_of(bundle: Bundle) -> Facts:
    """How a bundle encodes; PipelineError for one that generates."""
    if bundle.manifest.encoder is None:
        raise PipelineError(
            f"{bundle.path} generates text and was not made to encode it: castiron run answers with it; castiron embed takes a "
            "model that came with a modules.json, as sentence-transformers saves it"
        )
    return bundle.manifest.encoder


def cut_to(vector: np.ndarray, dimensions: int | None, normalised: bool) -> np.ndarray:
    """The first numbers of a vector, and where vectors are `normalised` these of length 1 again (Matryoshka embeddings,
    arXiv:2205.13147)."""
    if dimensions is None or dimensions == vector.size:
        return vector
    found = vector[:dimensions]
    return found / np.maximum(np.linalg.norm(found), np.float32(1e-12)) if normalised else found.copy()


def say_cut(cut: int, total: int, most: int) -> None:
    """A line on stderr if texts were cut."""
    if cut:
        say(f"{cut} of {total} texts ha{'ve' if cut > 1 else 's'} more than {most} tokens, of which the first {most} count")
