"""What the endpoints of every model share, apart from HTTP: who it is, and what its tokenizer does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from castiron.pipelines.embedding import NO_RERANKER
from castiron.pipelines.generation.chat_template import variables_of
from castiron.pipelines.generation.text import Text
from castiron.pipelines.generation.tokenizing import COUNTED, by_the_library, encoded
from castiron.pipelines.serve.clients import ASKER
from castiron.pipelines.serve.errors import ApiError
from castiron.pipelines.serve.messages import check_noticed, placed
from castiron.pipelines.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Message,
    RerankRequest,
    TokenizeRequest,
)
from castiron.pipelines.serve.turns import Turns
from castiron.vmfb.manifest import Manifest

# Characters of a text that is made tokens of for its own sake; each takes 200 bytes.
MOST_COUNTED = 1_000_000


@dataclass(frozen=True)
class Limits:
    """seconds: of one request, from its arrival to its end. body_bytes: of what it sends. temperature: of requests that
    name none, None for the model's own. priorities: whether a request may say which goes first. kept_bytes: of
    log-probabilities and grammars of all requests under way, None for a part of the machine's memory."""

    seconds: float = 600.0
    body_bytes: int = 4_000_000
    temperature: float | None = None
    priorities: bool = False
    kept_bytes: int | None = None


class Runs(Protocol):
    """What runs the model while the server does. slots: how much of it at once; unfinished: requests under way; lost: why
    nothing can be run any more."""

    slots: int

    @property
    def healthy(self) -> bool: ...
    @property
    def unfinished(self) -> int: ...
    @property
    def lost(self) -> Exception | None: ...
    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def drain(self) -> None: ...
    def abort(self) -> None: ...
    def stop(self) -> None: ...


class TextApi:
    """The endpoints that every model has; what a kind of model does not do is refused here."""

    # Whether the model answers at a page.
    chats = True
    # What asks a model for what it does that answers at none.
    endpoint = "/v1/embeddings"

    def __init__(self, engine: Runs, text: Text, names: list[str], manifest: Manifest, limits: Limits):
        """`names[0]` is the model's name; the others are taken for it too."""
        self.engine, self.text, self.names, self.limits = engine, text, tuple(names), limits
        self.manifest, self.context, self.vocab = manifest, manifest.context, manifest.vocab
        # One process renders templates: whoever keeps it busy waits until the others have been there.
        self.rendering = Turns()

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's; none at all is this model."""
        if name is not None and name not in self.names:
            message = f"the model {name!r} does not exist; this server has {self.names[0]!r}"
            raise ApiError(404, message, "model", "model_not_found")

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the model's chat template reads besides messages and tools."""
        return frozenset(variables_of(self.text.chat_template or ""))

    async def chat(self, body: ChatRequest, reply: Callable[[], Any] | None = None, **how: bool) -> Any:
        self._generates_none()

    async def count(self, body: ChatRequest, **how: bool) -> int:
        self._generates_none()

    async def complete(self, body: CompletionRequest) -> Any:
        self._generates_none()

    def _generates_none(self) -> NoReturn:
        message = f"{self.names[0]} encodes texts and generates none; use {self.endpoint}"
        raise ApiError(400, message, "model", "model_not_supported")

    async def embeddings(self, body: EmbeddingsRequest) -> Any:
        message = f"{self.names[0]} generates text and has no embeddings; serve a model that encodes texts"
        raise ApiError(400, message, "model", "model_not_supported")

    async def rerank(self, body: RerankRequest) -> Any:
        raise ApiError(400, f"{self.names[0]} {NO_RERANKER}", "model", "model_not_supported")

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        given = [body.content, body.prompt, body.messages]
        if sum(part is not None for part in given) != 1:
            raise ApiError(400, "give one of content, prompt and messages", "content", "invalid_value")
        if body.messages is not None:
            if body.add_special is not None or body.add_special_tokens is not None:
                message = "the chat template of messages says itself where special tokens are; leave add_special out"
                raise ApiError(400, message, "add_special", "invalid_value")
            return await self.render(body.messages)
        text = body.content if body.content is not None else body.prompt
        name = "prompt" if body.content is None else "content"
        if len(text) > MOST_COUNTED:
            message = f"{name} has {len(text)} characters, and {MOST_COUNTED} at most are made tokens of: send it in parts"
            raise ApiError(400, message, name, "invalid_value")
        special = body.add_special if body.add_special is not None else body.add_special_tokens
        # Where nothing is said llama.cpp, whose name is content, adds none, and vLLM, whose name is prompt, does.
        if body.prompt is not None if special is None else special:
            return await on_the_side(self.text.encode, text)
        return await on_the_side(encoded, self.text.tokenizer, text, False)

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """What lm-eval's remote tokenizer asks for, by vLLM's names."""
        text = self.text
        names = {"bos_token": text.bos, "eos_token": text.eos[0] if text.eos else None}
        special = {name: None if index is None else text.tokenizer.id_to_token(index) for name, index in names.items()}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **special, "pad_token": None,
                "chat_template": text.chat_template, "model_max_length": self.context}  # fmt: skip

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of the ids, special tokens included."""
        self.check_ids(tokens, "tokens")

        def decode() -> str:
            with by_the_library():
                return self.text.tokenizer.decode(tokens, False)

        return await on_the_side(decode)

    async def render(
        self, messages: list[Message], template_args: Mapping[str, Any] = MappingProxyType({}), *, go_on: bool = False
    ) -> list[int]:
        """The ids of messages in the chat template, up to the end of the last one's words where the model is to `go_on` with
        them; ApiError for what the template would ignore."""
        if self.text.chat_template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        self.check_count(len(messages))
        plain = [message.plain() for message in messages]
        self.check_length(sum(len(message["content"]) for message in plain), "messages")

        def encode() -> list[int]:
            render = lambda some: self.text.render_chat(some, **template_args)
            check_noticed(render, said := placed(render, plain))
            written = self.text.encode_unfinished_chat if go_on else self.text.encode_chat
            return written(said, **template_args)

        async with self.rendering.of(ASKER.get().client):
            return await on_the_side(encode)

    async def ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self.check_length(len(prompt), "prompt")
            return await on_the_side(self.text.encode, prompt)
        self.check_ids(prompt, "prompt")
        return prompt

    def check_length(self, characters: int, param: str) -> None:
        """ApiError 400, before it is made tokens of, for a text that has more than the context whatever it says."""
        if characters > COUNTED and characters > (most := self.context * self.text.longest_token):
            message = (
                f"this model's maximum context length is {self.context} tokens, in which {most} characters fit at most; the "
                f"{param} {'have' if param == 'messages' else 'has'} {characters}: shorten the {param}"
            )
            raise ApiError(400, message, param, "context_length_exceeded")

    def check_count(self, messages: int) -> None:
        """ApiError 400, before they are rendered, for more messages than there can be tokens."""
        if messages > self.context:
            message = (
                f"this model's maximum context length is {self.context} tokens, and there are {messages} messages: send fewer"
            )
            raise ApiError(400, message, "messages", "context_length_exceeded")

    def check_ids(self, tokens: list[int], param: str) -> None:
        if tokens and max(tokens) >= self.vocab:
            message = f"token {max(tokens)} is outside the vocabulary of {self.vocab} tokens"
            raise ApiError(400, message, param, "invalid_value")


async def on_the_side(function: Callable, *arguments):
    """Runs what may take long for a long text without holding up the other requests; who is cancelled still waits for its end,
    as it goes on."""
    work = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        await asyncio.wait([work])
        # Whatever came of it, nobody asks.
        work.exception()
        raise
    return work.result()
