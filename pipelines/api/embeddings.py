"""The endpoints of an embedding model or reranker: /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from castiron.pipelines.api.api_errors import ApiError, QueueFull, Stopping, invalid
from castiron.pipelines.api.async_engine import QUEUES
from castiron.pipelines.api.byte_limit import CLIENT
from castiron.pipelines.api.model_api import Limits, ModelApi, run_in_thread
from castiron.pipelines.api.request_fields import EmbeddingsRequest, RerankRequest, ScoreRequest
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import counted
from castiron.pipelines.text.embedder import Embedder, Given, Tokens, ranked


class EmbeddingsEngine:
    """A thread that embeds one text at a time; concurrent requests take turns after each text."""

    slots = 1

    def __init__(self, embedder: Embedder, queue: int, count_text: Callable[[int], None]):
        """Prepare the thread; count_text is called with the number of tokens of each text."""
        self.embedder, self.queue, self.count_text = embedder, queue, count_text
        self._thread = ThreadPoolExecutor(1, "model")
        self._in_flight = Counter[str]()
        self._draining = self._aborted = False

    @property
    def healthy(self) -> bool:
        return not self._draining

    @property
    def unfinished(self) -> int:
        return self._in_flight.total()

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Do nothing: the thread starts when the first text arrives."""

    def drain(self) -> None:
        self._draining = True

    def abort(self) -> None:
        """End every unfinished request with the error `Stopping`, after its current text."""
        self._aborted = True

    def stop(self) -> None:
        self._draining = self._aborted = True
        self._thread.shutdown(cancel_futures=True)

    async def vectors(self, texts: Sequence[Tokens], dimensions: int | None) -> list[np.ndarray]:
        """Return the embedding of each text, f32 [dimensions]; None for the full size.

        Raises QueueFull if too many requests wait, and Stopping if the server shuts down.
        """
        if self._draining:
            raise Stopping
        client, total = CLIENT.get(), self._in_flight.total()
        if self._in_flight[client] > self.queue or total > QUEUES * self.queue:
            raise QueueFull(f"the queue is full: {total} embedding requests are in flight; try again later")
        self._in_flight[client] += 1
        try:
            return [await self._vector(text, dimensions) for text in texts]
        finally:
            # Counter subtraction also removes a client whose count is 0.
            self._in_flight -= Counter([client])

    async def _vector(self, text: Tokens, dimensions: int | None) -> np.ndarray:
        if self._aborted:
            raise Stopping
        self.count_text(len(text.ids))
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.embedder.vector, text, dimensions)


@dataclass
class EmbeddingsJob:
    """A request in progress; `answer` computes the JSON of its answer."""

    texts: Sequence[Tokens]
    answer: Callable[[], Any]

    @property
    def summary(self) -> str:
        """The numbers of texts and tokens as text, for the log."""
        return f"{counted(len(self.texts), 'text')} of {sum(len(text.ids) for text in self.texts)} tokens"


class EmbeddingsApi(ModelApi):
    """The endpoints of an embedding model or reranker."""

    has_chat = False

    def __init__(self, engine: EmbeddingsEngine, names: list[str], limits: Limits):
        embedder = engine.embedder
        if embedder.tokenizer is None:
            raise PipelineError(f"{embedder.name} has no tokenizer and cannot serve text; compile a checkpoint that has one")
        super().__init__(engine, embedder.tokenizer, names, embedder.bundle.manifest, limits)
        self.engine: EmbeddingsEngine = engine
        self.embedder, self.context = embedder, embedder.facts.max_tokens
        if embedder.facts.relevance:
            self.endpoint = "/v1/rerank"

    async def embeddings(self, body: EmbeddingsRequest) -> EmbeddingsJob:
        """Tokenize the texts of a request and return the job that computes their embeddings."""
        if self.embedder.facts.relevance:
            raise ApiError(
                400,
                f"{self.embedder.name} is a reranking model and cannot embed text; rerank texts with it, at /v1/rerank",
                "model",
                "model_not_supported",
            )
        with _field("dimensions"):
            self.embedder.check_dimensions(body.dimensions)
        with _field("prompt_name"):
            prompt = self.embedder.prompt(body.prompt_name)
        given: Any = body.input
        texts: list[Given] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        tokens = await run_in_thread(lambda: [self._tokens(i, text, prompt, body) for i, text in enumerate(texts)])

        async def answer() -> dict:
            vectors = await self.engine.vectors(tokens, body.dimensions)
            return await run_in_thread(lambda: self._answer(tokens, vectors, body.encoding_format == "base64"))

        return EmbeddingsJob(tokens, answer)

    async def rerank(self, body: RerankRequest) -> EmbeddingsJob:
        """Tokenize the query with each document and return the job that ranks the documents."""
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        tokens, relevance = await self._relevance([(body.query, texts)])

        async def answer() -> dict:
            found = ranked(await relevance())
            results = [{"index": index, "relevance_score": score} for index, score in found[: body.top_n]]
            if body.return_documents is not False:
                for result in results:
                    document = body.documents[result["index"]]
                    result["document"] = {"text": document} if isinstance(document, str) else document.model_dump()
            return {
                "id": f"rerank-{uuid.uuid4().hex}", "model": self.names[0], "results": results, "usage": _usage(tokens)
            }  # fmt: skip

        return EmbeddingsJob(tokens, answer)

    async def score(self, body: ScoreRequest) -> EmbeddingsJob:
        """Tokenize the pairs of texts and return the job that computes their relevance."""
        queries, documents = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
        if len(queries) not in (1, len(documents)):
            raise invalid(
                "text_1",
                f"text_1 has {len(queries)} texts and text_2 has {len(documents)}; give one text_1, or as many as text_2",
            )
        pairs = [(query, [document]) for query, document in zip(queries, documents)]
        tokens, relevance = await self._relevance([(queries[0], documents)] if len(queries) == 1 else pairs)

        async def answer() -> dict:
            data = [{"index": i, "object": "score", "score": float(score)} for i, score in enumerate(await relevance())]
            head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": self.names[0]}
            return {**head, "data": data, "usage": _usage(tokens)}

        return EmbeddingsJob(tokens, answer)

    async def _relevance(
        self, groups: Sequence[tuple[str, Sequence[str]]]
    ) -> tuple[list[Tokens], Callable[[], Awaitable[np.ndarray]]]:
        """Tokenize (query, documents); return tokens and what scores them, f64 [documents]."""
        inputs = await run_in_thread(lambda: [self.embedder.relevance_inputs(*group) for group in groups])
        tokens = list(chain.from_iterable(inputs))

        async def relevance() -> np.ndarray:
            vectors = iter(await self.engine.vectors(tokens, None))
            return np.concatenate([self.embedder.relevance(list(islice(vectors, len(group)))) for group in inputs])

        return tokens, relevance

    def _tokens(self, index: int, text: Given, prompt: str, body: EmbeddingsRequest) -> Tokens:
        name, limit = f"input[{index}]", self.embedder.facts.max_tokens
        if not isinstance(text, str):
            self.check_ids(list(text), name)
            text = text[:limit] if body.truncate else text
        with _field("input", f"{name}: "):
            found = self.embedder.tokens(text, prompt)
        if found.cut and not body.truncate:
            raise ApiError(
                400,
                f"{name} has more than {limit} tokens, the limit of this model; shorten it, or set truncate to true",
                "input",
                "context_length_exceeded",
            )
        return found

    def _answer(self, tokens: Sequence[Tokens], vectors: Sequence[np.ndarray], as_base64: bool) -> dict:
        # OpenAI's base64 format encodes little-endian f32 values.
        encoded: list[Any] = [
            base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.astype(np.float64).tolist()
            for vector in vectors
        ]
        data = [{"object": "embedding", "index": i, "embedding": embedding} for i, embedding in enumerate(encoded)]
        return {"object": "list", "data": data, "model": self.names[0], "usage": _usage(tokens)}


def _usage(tokens: Sequence[Tokens]) -> dict[str, int]:
    count = sum(len(text.ids) for text in tokens)
    return {"prompt_tokens": count, "total_tokens": count}


@contextlib.contextmanager
def _field(param: str, prefix: str = "") -> Iterator[None]:
    try:
        yield
    except PipelineError as error:
        raise invalid(param, f"{prefix}{error}") from None
