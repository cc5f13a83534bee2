"""The models of a server: one that stays open, or several that are opened for requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from castiron.pipelines.api.api_errors import ApiError, Stopping
from castiron.pipelines.api.model_api import Limits, ModelApi, ModelEngine, default_sampling, names_of, unknown_model
from castiron.pipelines.engine.memory import needed, slots_of, total_bytes
from castiron.pipelines.errors import PipelineError, error_message
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.chat_template import variables_of
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.manifest import Manifest


@dataclass(eq=False)
class ServedModel:
    """A model that a server offers, which may be closed, that is, not in memory.

    open: opens the model; None if it is always open. lock: locked while it is opened or closed.
    last_used: end of the last request, in `time.monotonic` seconds.
    """

    name: str
    names: Collection[str]
    manifest: Manifest
    template: str | None
    open: Callable[[], ModelApi] | None = None
    api: ModelApi | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    last_used: float = 0.0

    @property
    def bytes(self) -> int:
        """Memory that the open model needs for weights and states (KV caches), in bytes."""
        return needed(self.manifest, slots_of(self.manifest)).total


class ModelPool:
    """The models of a server, opened when a request names them and closed when unused."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        open: Callable[[Bundle, list[str]], ModelApi],
        *,
        keep: float,
        arguments: Sequence[str] | None = None,
        limits: Limits = Limits(),
        forget: Callable[[str], None] = lambda name: None,
    ):
        """Create a pool in which all models are closed.

        arguments: the command-line argument that selected each bundle, a path or a name.
        keep: a model is closed after this many seconds without a request.
        forget: called with the name of each model that has been closed.
        Raises PipelineError if a bundle has no tokenizer, or two have the same name.
        """
        for bundle in bundles:
            check_tokenizer(bundle)
        known = [names_of(bundle, model) for bundle, model in zip(bundles, arguments or [None] * len(bundles), strict=True)]
        # Choose the first kind of name by which the models differ.
        chosen = next((names for names in zip(*known) if len({*names}) == len(names)), None)
        if bundles and chosen is None:
            own = ", ".join(names[0] for names in known)
            raise PipelineError(f"two models have the same name: {own}; rename one model")
        self.models = [
            ServedModel(name, {*names}, bundle.manifest, bundle.chat_template, partial(open, bundle, [name, *names]))
            for bundle, name, names in zip(bundles, chosen or (), known)
        ]
        self.keep: float | None = keep
        self.forget, self.limits = forget, limits
        self.started, self.draining = int(time.time()), False

    @classmethod
    def single(cls, api: ModelApi) -> ModelPool:
        """Return a pool of one model, which is already open and is never closed."""
        pool = cls([], lambda bundle, names: api, keep=0, limits=api.limits)
        pool.models = [ServedModel(api.names[0], api.names, api.manifest, api.tokenizer.chat_template, api=api)]
        pool.keep = None
        return pool

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ModelApi]:
        """Yield the endpoints of a model, which stays open; None is the first model."""
        model = self.find(name)
        model.users += 1
        try:
            # Opening continues if the client leaves, because other clients may wait for the model.
            yield model.api or await asyncio.shield(asyncio.ensure_future(self._opened(model)))
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            if self.keep is not None and not model.users:
                loop = asyncio.get_running_loop()
                loop.call_later(self.keep, lambda: loop.create_task(self._close_unused(model)))

    def find(self, name: str | None) -> ServedModel:
        """Return the model `name`, or the first for None and "" (llama.vim); ApiError 404."""
        found = self.models[:1] if not name else [model for model in self.models if model.name == name]
        found = found or [model for model in self.models if name in model.names]
        if len(found) != 1:
            raise unknown_model(name, [model.name for model in self.models])
        return found[0]

    def describe(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the JSON objects of GET /v1/models: for all models, or only the model `name`."""
        return [self._record(model, name or model.name) for model in (self.models if name is None else [self.find(name)])]

    @property
    def start_date(self) -> datetime:
        return datetime.fromtimestamp(self.started, UTC)

    def _record(self, model: ServedModel, name: str) -> dict[str, Any]:
        manifest = model.manifest
        does: dict[str, Any]
        if facts := manifest.encoder:
            context = facts.max_tokens
            does = {} if facts.relevance else {"dimensions": manifest.hidden, "prompts": dict(facts.prompts)}
        else:
            context, does = manifest.context, {
                "sampling": default_sampling(manifest, self.limits).settings, "chat_template": model.template is not None,
                "template_variables": variables_of(model.template or ""),
            }  # fmt: skip
        if self.keep is not None:
            does["loaded"] = model.api is not None
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "castiron", "type": "model",
            "display_name": name, "created_at": f"{self.start_date:%Y-%m-%dT%H:%M:%SZ}", "lifecycle": "active",
            # OpenAI has no field for the context length; these are castiron's, Anthropic's and vLLM's.
            "context_length": context, "max_input_tokens": context, "max_tokens": context, "max_model_len": context, **does,
        }  # fmt: skip

    @property
    def home(self) -> str | None:
        """The text at GET / of a server of one embedding model; None for the chat page."""
        api = self.models[0].api
        if api is None or api.has_chat or len(self.models) > 1:
            return None
        return f"{api.names[0]} is an embedding model: POST texts to {api.endpoint}\n"

    async def _opened(self, model: ServedModel) -> ModelApi:
        async with model.lock:
            if self.draining:
                raise Stopping
            if model.api is None:
                await self._free_memory(model)
                loop, start = asyncio.get_running_loop(), time.monotonic()
                try:
                    api = await loop.run_in_executor(None, model.open)
                except Exception as error:
                    reason = error_message(error)
                    if reason is None:
                        raise
                    print_message(f"cannot open {model.name}: {reason}")
                    raise ApiError(
                        500, f"cannot open the model {model.name!r}: {reason}; use another model", "model", "model_failure"
                    ) from None
                api.engine.start(loop)
                model.api = api
                print_message(f"{model.name} opened in {time.monotonic() - start:.1f} s")
            return model.api

    async def _free_memory(self, model: ServedModel) -> None:
        """Close unused models, the least recently used first, until `model` fits in memory."""
        for other in sorted(self.models, key=lambda m: m.last_used):
            # A model that is being opened counts as open.
            opened = [m for m in self.models if m is not model and (m.api or m.lock.locked())]
            if sum(m.bytes for m in opened) + model.bytes <= total_bytes():
                return
            if other.api and not other.users and not other.lock.locked():
                await self._close(other)

    async def _close_unused(self, model: ServedModel) -> None:
        if not model.users and time.monotonic() - model.last_used >= (self.keep or 0):
            await self._close(model)

    async def _close(self, model: ServedModel) -> None:
        async with model.lock:
            if model.api is None or model.users:
                return
            # The list has the last reference, so that the other thread frees the weights and states.
            apis, model.api = [model.api], None
            self.forget(model.name)

            def close() -> None:
                apis.pop().engine.stop()
                gc.collect()

            await asyncio.get_running_loop().run_in_executor(None, close)
            print_message(f"{model.name} closed")

    @property
    def _engines(self) -> list[ModelEngine]:
        return [model.api.engine for model in self.models if model.api]

    @property
    def healthy(self) -> bool:
        """Whether the server accepts requests."""
        return not self.draining and all(engine.healthy for engine in self._engines)

    @property
    def unfinished(self) -> int:
        return sum(engine.unfinished for engine in self._engines)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the engines of open models; without `loop`, only their threads."""
        for engine in self._engines:
            engine.start(loop)

    def drain(self) -> None:
        """Reject new requests from now on; accepted requests continue."""
        self.draining = True
        for engine in self._engines:
            engine.drain()

    def abort(self) -> None:
        """End every request with an error."""
        for engine in self._engines:
            engine.abort()

    def stop(self) -> None:
        """Stop all engines; requests that are still running are cancelled."""
        self.draining = True
        for engine in self._engines:
            engine.stop()


def check_tokenizer(bundle: Bundle) -> None:
    if bundle.tokenizer is None:
        raise PipelineError(f"{bundle.path} has no tokenizer and cannot serve text; compile a checkpoint that has one")
