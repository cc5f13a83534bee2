"""A model as a Python program uses it: loaded by path or name, asked in text, messages or token ids."""

# An overload is no redefinition, whoever defines it.
# ruff: noqa: F811
from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, get_args

import numpy as np

from castiron.pipelines.casting.cast import cast as bundle_of
from castiron.pipelines.casting.cast import is_bundle, options_of
from castiron.pipelines.embedding import NO_RERANKER, Embedder, cut_to
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.draft import open_draft
from castiron.pipelines.generation.many import Result, results
from castiron.pipelines.generation.positions import USUAL_TOKENS, stand
from castiron.pipelines.generation.prefix_store import PrefixStore
from castiron.pipelines.generation.request import Prompt, Request, is_prompt
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.scoring import Scored, scored
from castiron.pipelines.generation.sequence import Delta, Failed, Finished
from castiron.pipelines.generation.sequence import Sequence as Generated
from castiron.pipelines.generation.shared import Client, SharedScheduler
from castiron.pipelines.generation.text import Text, load_text
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.session import Session

if TYPE_CHECKING:
    from typing import overload
else:
    # That of typing keeps a method for ever, and with it the devices, which the runtime then reports as leaked.
    def overload(method):
        return method


Message = Mapping[str, Any]
Pooling = Literal["mean", "last"]
POOLINGS = get_args(Pooling)


class Asking(TypedDict, total=False):
    """What every question to a model can say: how much, where to end, and how to choose, as `Sampling` has it."""

    max_tokens: int | None
    stop_strings: str | Iterable[str]
    stop_tokens: Collection[int] | None
    template_args: Mapping[str, Any]
    json_schema: Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None
    sampling: Sampling
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]


# The rest of Asking is how to choose.
LIMITS = {"max_tokens", "stop_strings", "stop_tokens", "template_args"}
STRUCTURES = {"json_schema", "regex", "grammar"}


class Stream(Iterator[str]):
    """An answer's text as it comes; `tokens` and `finish_reason` are as in a Result, so far."""

    def __init__(self, pieces: Generator[str, None, None], sequence: Generated):
        self._pieces, self._sequence = pieces, sequence

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stops the answer here; so does dropping the stream."""
        self._pieces.close()

    @property
    def tokens(self) -> list[int]:
        return self._sequence.tokens

    @property
    def finish_reason(self) -> str | None:
        """None until the end."""
        return self._sequence.finish_reason


class Model:
    """A bundle that is loaded and answers.

        with castiron.load("smollm2-135m-instruct") as model:
            print(model.chat("Why is the sky blue?"))

    A prompt is text, which is taken as it is; messages, {"role", "content"} each, for the chat template; or token ids.
    Questions say `max_tokens` (1024; None is as many as the context holds), `stop_strings`, `stop_tokens` (the model's own
    end; () is none), `template_args` for the chat template, what the text has to be (a `json_schema`, a `regex`, or a
    `grammar` of Lark's or GBNF), and how to choose tokens: `sampling`, or the fields of
    `Sampling` by name. Without these the likeliest token is taken. PipelineError, one sentence, for what cannot be run.

    What prompts share is read once, and a conversation that goes on costs only what is new. Several threads may ask one
    model: what they ask runs together in the bundle's batch, and each gets the tokens that it gets alone.
    """

    def __init__(
        self, bundle: Bundle | Path | str, threads: int | None = None, prefix_cache: str | Path | None = None,
        draft: Bundle | Path | str | None = None, parse_special: bool = False,
    ):  # fmt: skip
        """`threads` default to the physical cores. `prefix_cache`: a folder that keeps states of long beginnings. `draft`: a
        bundle with a smaller model that proposes tokens, for a prompt that runs alone. `parse_special`: words of messages that
        are spelled as control tokens are these, and not text."""
        self.bundle = open_bundle(bundle)
        # One of the two: a model encodes texts or generates them.
        self._embedder: Embedder | None = None
        self._shared: SharedScheduler | None = None
        if self.bundle.manifest.encoder:
            self._embedder = Embedder(self.bundle, threads)
            self.text: Text | None = self._embedder.text
            self.threads: int = self._embedder.encoder.threads
        else:
            self.text = load_text(self.bundle, parse_special=parse_special) if self.bundle.tokenizer else None
            store = PrefixStore(prefix_cache, self.bundle.manifest) if prefix_cache else None
            proposing = open_draft(draft, self.bundle, threads) if draft else None
            scheduler = Scheduler(self.bundle, threads, store=store, draft=proposing)
            self.threads = scheduler.batch.program.threads
            self._shared = SharedScheduler(scheduler)
        # For embeddings, which leave the conversations' states as they are; made when first asked for.
        self._reader: Session | None = None

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def family(self) -> str:
        return str(self.bundle.manifest.config.get("model_type", "unknown"))

    @property
    def context(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self.bundle.manifest.context

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions that the bundle was compiled with."""
        return tuple(function.name for function in self.bundle.manifest.functions)

    def __repr__(self) -> str:
        closed = self._shared.closed if self._shared else self._embedder is None
        threads = "closed" if closed else f"{self.threads} thread{'s' * (self.threads > 1)}"
        functions = ", ".join(self.functions)
        return f"<castiron.Model {self.name}: {self.family}, context {self.context}, {threads}, functions {functions}>"

    @overload
    def generate(self, prompts: str, **asking: Unpack[Asking]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[int], **asking: Unpack[Asking]) -> Result: ...
    @overload
    def generate(self, prompts: Sequence[Message], **asking: Unpack[Asking]) -> Result: ...
    @overload
    def generate(self, prompts: Iterable[Prompt], **asking: Unpack[Asking]) -> list[Result]: ...
    def generate(self, prompts: Prompt | Iterable[Prompt], **asking: Unpack[Asking]) -> Result | list[Result]:
        """What follows a prompt; or, of several prompts, a list in their order, run as many at once as the batch holds.

        A prompt by itself that cannot be run raises; of several, one has a result whose `error` says why.
        """
        if not is_prompt(prompts):
            return sorted(self.generate_many(cast(Iterable[Prompt], prompts), **asking), key=lambda result: result.index)
        client, request = self._client(asking)
        (result,) = results(client, [cast(Prompt, prompts)], request)
        if result.error:
            raise result.error
        return result

    def generate_many(self, prompts: Iterable[Prompt], **asking: Unpack[Asking]) -> Iterator[Result]:
        """A Result for each prompt as it is done; a prompt is taken from the iterable when there is a slot for it."""
        client, request = self._client(asking)
        return results(client, prompts, request)

    def chat(self, messages: str | Sequence[Message], **asking: Unpack[Asking]) -> Result:
        """The answer to messages, or to one message of the user."""
        return self.generate([{"role": "user", "content": messages}] if isinstance(messages, str) else messages, **asking)

    def stream(self, prompt: Prompt, **asking: Unpack[Asking]) -> Stream:
        """The text that follows a prompt, as soon as it is certain; never in the middle of a character. It can be left at
        any time, and runs nothing until it is asked."""
        client, request = self._client(asking)
        if self.text is None:
            raise PipelineError(f"{self.name} has no tokenizer, so there is no text to stream; generate gives token ids")
        sequence = request.sequence(prompt)
        return Stream(_pieces(client, sequence), sequence)

    @overload
    def score(self, texts: str, *, top: int = 0) -> Scored: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, texts: Sequence[int], *, top: int = 0) -> Scored: ...
    @overload
    def score(self, texts: Sequence[Message], *, top: int = 0) -> Scored: ...
    @overload
    def score(self, texts: Iterable[Prompt], *, top: int = 0) -> list[Scored]: ...
    def score(self, texts: Prompt | Iterable[Prompt], *, top: int = 0) -> Scored | list[Scored]:
        """How likely the model finds a text, token ids or messages; of several a list in their order, as many at once as the
        batch holds. `top`: how many of the likeliest tokens are told in the place of each. PipelineError for one that has no
        tokens or more than the context holds, and for a model that generates none."""
        if top < 0:
            raise PipelineError(f"top is {top}; it must be 0 or more")
        client, request = self._client({})
        one = is_prompt(texts)
        found = list(scored(client, [cast(Prompt, texts)] if one else cast(Iterable[Prompt], texts), request, top))
        return found[0] if one else found

    def embed(
        self, texts: str | Sequence[int] | Iterable[str | Sequence[int]], *, prompt_name: str | None = None,
        prompt: str | None = None, dimensions: int | None = None, pooling: Pooling | None = None, normalise: bool | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The embedding of a text or of token ids, f32 `[dimensions]`; of several, `[texts, dimensions]` in their order.

        Of a model that was made for it, what sentence-transformers gives: the model's prompt `prompt_name`, or `prompt`, comes
        before each text, and a text that is longer than the model takes is cut. Of another one, whose bundle was compiled with
        `embed`, the mean of the tokens' hidden states after the last norm, or with `pooling="last"` that of the last token,
        divided by its length unless `normalise` is False. `dimensions` takes the first of the numbers. PipelineError for what
        the model does not have, and for a text without tokens or, by a model not made for it, longer than the context.
        """
        if self.bundle.manifest.encoder:
            return self._encoded(texts, prompt_name, prompt, dimensions, pooling, normalise)
        if prompt_name is not None:
            raise PipelineError(f"{self.name} has no prompts for embeddings; put words of your own before the texts")
        pooling, normalise = pooling or "mean", normalise is not False
        if not (known := self.bundle.manifest.widths("embed")):
            raise PipelineError(f"{self.name} gives no hidden states: compile it with --embed 128, or load it with embed=128")
        if pooling not in POOLINGS:
            raise PipelineError(f"pooling is {pooling!r}, and can be {' or '.join(POOLINGS)}")
        hidden = self.bundle.manifest.hidden
        if dimensions is not None and not 1 <= dimensions <= hidden:
            raise PipelineError(f"dimensions are {dimensions}, and the vectors of {self.name} have 1 to {hidden}")
        several = [cast(Prompt, texts)] if (one := is_prompt(texts)) else [cast(Prompt, text) for text in texts]
        words = [prompt + text if prompt and isinstance(text, str) else text for text in several]
        rows = [cut_to(self._embedding(text, max(known), pooling, normalise), dimensions, normalise) for text in words]
        return rows[0] if one else np.stack(rows) if rows else np.empty((0, dimensions or hidden), np.float32)

    def rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """Numbers of the documents with how relevant each is to the query, the most relevant first: by a model that judges two
        texts together, as its makers have it, or the cosine of embeddings. PipelineError for a model that generates."""
        if self._embedder is None:
            raise PipelineError(f"{self.name} {'is closed; load it again' if self.bundle.manifest.encoder else NO_RERANKER}")
        return self._embedder.rerank(query, documents)

    def _encoded(self, texts, prompt_name, prompt, dimensions, pooling, normalise) -> np.ndarray:
        embedder = self._embedder
        if embedder is None:
            raise PipelineError("this model is closed; load it again")
        facts = embedder.facts
        if pooling not in (None, facts.pooling) or normalise not in (None, facts.normalised):
            length = "of length 1" if facts.normalised else "not of length 1"
            raise PipelineError(f"{self.name} was made to pool by {facts.pooling}, with vectors {length}: leave both out")
        one = is_prompt(texts)
        found = embedder.embed([texts] if one else texts, prompt_name, prompt, dimensions)
        return found[0] if one else found

    def _embedding(self, text: Prompt, width: int, pooling: Pooling, normalise: bool) -> np.ndarray:
        ids = list(self._client({})[1].encode(text))
        most = self.context // width * width
        if not 1 <= len(ids) <= most:
            raise PipelineError(f"a text of {len(ids)} tokens cannot be embedded; it needs 1 to {most} of them")
        assert self._shared is not None
        with self._shared.between_turns() as scheduler:
            self._reader = self._reader or Session(scheduler.batch.program)
            stand(self._reader, 0)
            states = self._reader.embed(ids)
        pooled = states.mean(axis=0, dtype=np.float32) if pooling == "mean" else states[-1]
        return pooled / np.linalg.norm(pooled) if normalise else pooled

    def close(self) -> None:
        """Lets go of the weights and the caches; what still runs ends with an error."""
        if self._shared:
            self._shared.close()
        self._reader = self._embedder = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _client(self, asking: Asking) -> tuple[Client, Request]:
        if self._shared is None:
            raise PipelineError(f"{self.name} encodes texts and generates none: embed gives their vectors")
        client, known = Client(self._shared), dict[str, Any](asking)
        limits = {"max_tokens": USUAL_TOKENS} | {name: known.pop(name) for name in LIMITS & known.keys()}
        structure = {name: value for name in STRUCTURES & known.keys() if (value := known.pop(name)) is not None}
        if structure and self.text is None:
            raise PipelineError(f"{self.name} has no tokenizer, so there is no text to hold to a {'_'.join(structure)}")
        grammar = self.text.grammar(**structure) if structure and self.text else None
        sampling = replace(known.pop("sampling", Sampling()), **known)
        return client, Request(client.manifest, client.context, self.text, sampling=sampling, grammar=grammar, **limits)


def _pieces(client: Client, sequence: Generated) -> Generator[str, None, None]:
    try:
        client.submit(sequence)
        while not client.idle:
            for _, event in client.turn():
                match event:
                    case Delta() if event.text:
                        yield event.text
                    case Failed():
                        raise event.error
                    case Finished():
                        return
    finally:
        client.cancel(sequence)


def load(
    model: str | Path | Bundle,
    *,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    prefix_cache: str | Path | None = None,
    draft: str | Path | Bundle | None = None,
    parse_special: bool = False,
    **options: Any,
) -> Model:
    """The model at a path or of a name: a bundle, a GGUF file, an HF directory, a name from the catalogue, or
    org/name on the hub.

    What is no bundle yet is compiled, with `options` as `castiron.compile` takes them, into castiron's cache, and found there
    the next time. `threads`, which default to the physical cores, run it. `progress(stage, done)` hears of a compile; a
    terminal has a bar without it. `prefix_cache`: a folder that keeps the states of long beginnings of prompts, for other
    processes too. `draft`: a smaller model with the same vocabulary that proposes tokens, by path or name. `parse_special`:
    words of messages that are spelled as control tokens, such as <|im_end|>, are these; without it what is said is text.
    BundleError, CheckpointError, EmitError, CompileError or PipelineError, each one sentence.
    """
    ready = is_bundle(model) and not options
    bundle = bundle_of(model, None if ready else options_of(**{"threads": threads, **options}), progress)
    proposing = None if draft is None else bundle_of(draft, None, progress)
    return Model(bundle, threads, prefix_cache, proposing, parse_special)
