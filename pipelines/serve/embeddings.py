"""/v1/embeddings: texts in, their vectors out, by a bundle that encodes texts."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from castiron.pipelines.embedding import Embedder, Given, Tokens, ranked
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.engine import QUEUES, QueueFull, Stopping
from castiron.pipelines.generation.scheduler import ModelFailed
from castiron.pipelines.serve.clients import ASKER
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.metrics import ModelMetrics
from castiron.pipelines.serve.schemas import Document, EmbeddingsRequest, RerankRequest
from castiron.pipelines.serve.text_api import Limits, TextApi, on_the_side
from castiron.pipelines.serve.turns import Turns
from castiron.vmfb.program import FileChanged


class EmbeddingsEngine:
    """One thread that runs the model, a text at a time; for the next one it is another client's turn, if others wait. Of one
    client at most `queue` requests wait, and of all `QUEUES` times as many."""

    slots = 1

    def __init__(self, embedder: Embedder, queue: int, metrics: ModelMetrics):
        self.embedder, self.queue, self.metrics = embedder, queue, metrics
        self._thread = ThreadPoolExecutor(1, "model")
        self._turns, self._under_way = Turns(), Counter[str]()
        self._draining = self._aborted = False
        self.lost: FileChanged | None = None

    @property
    def healthy(self) -> bool:
        return not self._draining and not self.lost

    @property
    def unfinished(self) -> int:
        return self._under_way.total()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is nothing to start: the thread comes with the first text."""

    def drain(self) -> None:
        """Takes no more requests; those that it has go on."""
        self._draining = True

    def abort(self) -> None:
        """Ends every request with an error, after the text that is under way."""
        self._aborted = True

    def stop(self) -> None:
        self._draining = self._aborted = True
        self._thread.shutdown(cancel_futures=True)

    async def vectors(self, texts: Sequence[Tokens], dimensions: int | None) -> list[np.ndarray]:
        """The vector of each text; QueueFull, Stopping, or ModelFailed where the weights are not what they were."""
        if self._draining:
            raise Stopping
        client = ASKER.get().client
        mine, all_ = self._under_way[client], self._under_way.total()
        if mine > self.queue or all_ > QUEUES * self.queue:
            raise QueueFull(f"the server is busy: {all_} requests for embeddings are under way; try again later")
        self._under_way[client] += 1
        try:
            return [await self._vector(client, text, dimensions) for text in texts]
        finally:
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]

    async def _vector(self, client: str, text: Tokens, dimensions: int | None) -> np.ndarray:
        async with self._turns.of(client):
            if self._aborted:
                raise Stopping
            self.metrics.embedded(len(text.ids))
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self.embedder.vector, text, dimensions)
            except FileChanged as error:
                self.lost = error
                raise ModelFailed(error) from error


class EmbeddingsJob:
    """A request under way: its texts, and what makes the answer."""

    def __init__(self, texts: Sequence[Tokens], answer: Callable[[], Any]):
        self.texts, self.answer = texts, answer

    @property
    def summary(self) -> str:
        """For the log: what it was."""
        count = len(self.texts)
        return f"{count} text{'s' * (count != 1)} of {sum(len(text.ids) for text in self.texts)} tokens"


class EmbeddingsApi(TextApi):
    """The endpoints of a model that encodes texts."""

    chats = False

    def __init__(self, engine: EmbeddingsEngine, names: list[str], limits: Limits):
        embedder = engine.embedder
        if embedder.text is None:
            raise PipelineError(f"{embedder.name} has no tokenizer, because its checkpoint had none: it cannot serve text")
        super().__init__(engine, embedder.text, names, embedder.bundle.manifest, limits)
        self.engine: EmbeddingsEngine = engine
        self.embedder, self.context = embedder, embedder.facts.max_tokens
        if embedder.facts.relevance:
            self.endpoint = "/v1/rerank"

    async def embeddings(self, body: EmbeddingsRequest) -> EmbeddingsJob:
        """A request whose texts are tokens; ApiError for one that cannot be answered."""
        try:
            self.embedder.check_vectors()
        except PipelineError as error:
            raise ApiError(400, f"{error}, at /v1/rerank", "model", "model_not_supported") from None
        given = body.input
        texts: list[Given] = [given] if isinstance(given, str) or isinstance(given[0], int) else given  # type: ignore
        try:
            self.embedder.check_dimensions(body.dimensions)
        except PipelineError as error:
            raise ApiError(400, str(error), "dimensions", "invalid_value") from None
        try:
            prompt = self.embedder.prompt(body.prompt_name)
        except PipelineError as error:
            raise ApiError(400, str(error), "prompt_name", "invalid_value") from None
        tokens = await on_the_side(lambda: [self._tokens(i, text, prompt, body) for i, text in enumerate(texts)])

        async def answer() -> dict:
            vectors = await self.engine.vectors(tokens, body.dimensions)
            return await on_the_side(lambda: self._answer(tokens, vectors, body.encoding_format == "base64"))

        return EmbeddingsJob(tokens, answer)

    async def rerank(self, body: RerankRequest) -> EmbeddingsJob:
        """A request to say how relevant documents are to a query."""
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        tokens = await on_the_side(self.embedder.asked, body.query, texts)

        async def answer() -> dict:
            found = ranked(self.embedder.relevance(await self.engine.vectors(tokens, None)))
            results = [
                {"index": index, "relevance_score": score}
                | ({} if body.return_documents is False else {"document": self._document(body.documents[index])})
                for index, score in found[: body.top_n]
            ]
            count = sum(len(text.ids) for text in tokens)
            usage = {"prompt_tokens": count, "total_tokens": count}
            return {"id": f"rerank-{uuid.uuid4().hex}", "model": self.names[0], "results": results, "usage": usage}

        return EmbeddingsJob(tokens, answer)

    @staticmethod
    def _document(document: str | Document) -> dict:
        return {"text": document} if isinstance(document, str) else document.model_dump()

    def _tokens(self, index: int, text: Given, prompt: str, body: EmbeddingsRequest) -> Tokens:
        place, most = f"input[{index}]", self.embedder.facts.max_tokens
        if not isinstance(text, str):
            self.check_ids(list(text), place)
            text = text[:most] if body.truncate else text
        try:
            found = self.embedder.tokens(text, prompt)
        except PipelineError as error:
            raise ApiError(400, f"{place}: {error}", "input", "invalid_value") from None
        if found.cut and not body.truncate:
            message = f"{place} has more than {most} tokens, which is all that this model takes: shorten it, or send truncate"
            raise ApiError(400, message, "input", "context_length_exceeded")
        return found

    def _answer(self, tokens: Sequence[Tokens], vectors: Sequence[np.ndarray], packed: bool) -> dict:
        written = [_base64(v) if packed else v.astype(np.float64).tolist() for v in vectors]
        count = sum(len(text.ids) for text in tokens)
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
            "model": self.names[0],
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }


def _base64(vector: np.ndarray) -> str:
    """Its f32 numbers, least byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
