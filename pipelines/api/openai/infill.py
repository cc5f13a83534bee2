"""llama.cpp's POST /infill, which completes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from castiron.pipelines.api.async_engine import Job
from castiron.pipelines.api.generation import Generation
from castiron.pipelines.api.generation_api import generating
from castiron.pipelines.api.model_api import ModelApi, run_in_thread
from castiron.pipelines.api.oldest_messages import ANSWER_TOKENS
from castiron.pipelines.api.openai.records import CompletionFields
from castiron.pipelines.api.openai.replies import ChoicesReply
from castiron.pipelines.api.request_body import Body, Unsupported
from castiron.pipelines.engine.request import Finished, Request
from castiron.pipelines.text.fill_in_the_middle import LineStops
from castiron.pipelines.text.text_output import Delta
from castiron.pipelines.text.tokenizer import TokenBytes

STOP_TYPES = {"length": "limit", "context": "limit"}


class ExtraFile(Body):
    """A part of another file, for context."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    text: str
    filename: str = "tmp"


class InfillRequest(CompletionFields):
    """The body of POST /infill, whose defaults are greedy decoding without a repeat penalty."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=1024, fail_fast=True)] = []
    # The start of the line; it follows the prefix.
    prompt: str = ""
    # -1 means no limit. 0 only reads the prompt, so that a later request finds it in the cache.
    n_predict: int = -1
    temperature: float | None = Field(0.0, ge=0)
    repeat_penalty: float | None = Field(1.0, ge=0.01, le=100)
    n_indent: int = Field(0, ge=0)
    t_max_predict_ms: int = 0
    response_fields: list[str] | None = None
    n: Annotated[int | None, Unsupported(1)] = None
    n_cmpl: Annotated[int | None, Unsupported(1)] = None
    samplers: Annotated[None, BeforeValidator(lambda _: None)] = None


class InfillReply(ChoicesReply):
    """A builder of the answer to an infill request, in the format of llama.cpp's completions."""

    last = None

    def __init__(self, model: str, token_bytes: TokenBytes, body: InfillRequest):
        super().__init__(model, token_bytes, body, False)
        self.fields = body.response_fields

    def choice(self, index: int, delta: Delta, end: Finished) -> dict:
        return self._selected(self.delta(index, delta, end))

    def complete(self, choices: list[dict], usage: dict) -> dict:
        return choices[0]

    def extend(self, index: int, delta: Delta, end: Finished | None) -> list[dict]:
        found = self.delta(index, delta, end)
        return [self._selected(found) if end else found]

    def delta(self, index: int, delta: Delta, end: Finished | None = None) -> dict:
        request, tokens = self.requests[0], len(self.requests[0].tokens)
        found: dict[str, Any] = {
            "index": index, "content": delta.text, "tokens": [token.id for token in delta.tokens], "stop": end is not None,
            "tokens_predicted": tokens, "tokens_evaluated": len(request.prompt),
        }  # fmt: skip
        if not end:
            return found
        kind = "word" if end.stop_string else STOP_TYPES.get(end.reason, "eos")
        return found | {
            "model": self.head["model"], "stop_type": kind, "stopping_word": end.stop_string or "", "truncated": False,
            "tokens_cached": len(request.prompt) + tokens, "timings": timings(request, tokens),
            **self.receipt(index),
        }  # fmt: skip

    def _selected(self, answer: dict) -> dict:
        """Return the fields in `response_fields`, where a/b means the field b of the object a."""
        if self.fields is None:
            return answer
        found = {}
        for name in self.fields:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found

    def finish(self, usage: dict) -> Iterable[dict]:
        return []


def timings(request: Request, tokens: int) -> dict[str, float]:
    """Return llama.cpp's object `timings`; prompt_n excludes tokens from the prefix cache."""
    times, read = request.timing, len(request.prompt) - request.cached
    spent = {"prompt": (read, times.first - times.started), "predicted": (tokens, times.last - times.first)}
    found: dict[str, float] = {"cache_n": request.cached}
    for name, (count, seconds) in spent.items():
        found |= {
            f"{name}_n": count, f"{name}_ms": seconds * 1e3, f"{name}_per_token_ms": seconds * 1e3 / max(count, 1),
            f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
        }  # fmt: skip
    return found


async def start_infill(model: ModelApi, body: InfillRequest) -> Job:
    """Start the answer to a request to /infill."""
    api = generating(model)
    fim = await api.fim("input_suffix")
    limit = body.n_predict if body.n_predict >= 0 or (body.max_tokens or -1) < 0 else body.max_tokens
    limit = None if limit < 0 else limit
    reserve = min(ANSWER_TOKENS if limit is None else max(limit, 1), max(api.context // 2, 1))
    files = [(file.filename, file.text) for file in body.input_extra]
    prefix = body.input_prefix + body.prompt
    api.check_length(len(prefix) + len(body.input_suffix) + sum(len(text) for _, text in files), "input_prefix")
    prompt = await run_in_thread(fim.prompt, prefix, body.input_suffix, files, api.context - reserve + 1)
    stops = LineStops(body.stop or (), body.n_indent, max(body.t_max_predict_ms, 0) / 1e3 or None)
    options = body.options | {"max_tokens": limit, "stop_strings": stops}
    generation = Generation(param="input_prefix", prompts=[prompt], end_tokens=fim.ends, **options)
    return await api.start(generation, InfillReply(api.names[0], api.token_bytes, body))
