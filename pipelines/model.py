"""The Python API: load a model by path or name, and generate from text, messages or token ids."""

# The function `overload` below is not typing's, so ruff takes overloads for redefinitions.
# ruff: noqa: F811
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, get_args

import numpy as np

from castiron.pipelines.compile.open_model import check_draft_model, compile_to, is_bundle, open_or_compile, options_of
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.engine.request import DEFAULT_MAX_TOKENS, Request
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError, check_names, did_you_mean
from castiron.pipelines.evaluate.perplexity import own_accuracy
from castiron.pipelines.text.embedder import RERANKERS, Embedder, cut_to
from castiron.pipelines.text.generate import (
    Prompt,
    Result,
    Scored,
    encode_prompt,
    generate_many,
    is_messages,
    is_prompt,
    open_draft,
    score_many,
)
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.json_record import short
from castiron.vmfb.run.session import Session, move_to

if TYPE_CHECKING:
    from typing import overload
else:
    # typing.overload stores each method in a registry until exit. This keeps the IREE devices
    # alive, and the runtime then reports them as leaked.
    def overload(method):
        return method


Message = Mapping[str, Any]
# A `Prompt` in types that a type checker can distinguish from an iterable of prompts.
OnePrompt = str | Sequence[int] | Sequence[Message]
Pooling = Literal["mean", "last"]
POOLINGS = get_args(Pooling)


class GenerationOptions(TypedDict, total=False):
    """Options of `Model.generate` and the other methods that generate; `Model` describes them."""

    max_tokens: int | None
    stop_strings: str | Iterable[str]
    stop_tokens: Collection[int] | None
    template_args: Mapping[str, Any]
    json_schema: Mapping[str, Any] | bool | type | None
    regex: str | None
    grammar: str | None
    compact_json: bool
    sampling: Sampling
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    temperature_schedule: str | None
    samplers: tuple[str, ...]
    receipt: bool


STRUCTURES = {"json_schema", "regex", "grammar"}
# Of an argument: the class of its value, the class of what this contains, and what to call it in an error message.
KINDS: dict[str, tuple[Any, Any, str]] = {
    "max_tokens": (Integral | None, None, "an integer or None"), "stop_strings": (Iterable, str, "text, or a list of texts"),
    "stop_tokens": (Collection | None, Integral, "a list of token ids or None"), "template_args": (Mapping, str, "a dict"),
    "json_schema": (Mapping | bool | None, None, "a schema or a pydantic class"), "regex": (str | None, None, "text or None"),
    "grammar": (str | None, None, "text or None"), "compact_json": (bool, None, "True or False"),
    "sampling": (Sampling, None, "a castiron.Sampling"), "model": (str | Path | Bundle, None, "a path, a name or a bundle"),
    "threads": (Integral | None, None, "an integer or None"), "context": (Integral | None, None, "an integer or None"),
    "draft": (str | Path | Bundle | None, None, "a path, a name or a bundle"),
    "top": (Integral, None, "an integer"), "out": (str | Path, None, "a path"),
    "prefix_cache": (str | Path | None, None, "a path or None"), "receipt": (bool, None, "True or False"),
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")


class Model:
    """A loaded bundle, which generates text or embeds texts.

        with castiron.load("smollm2-135m-instruct") as model:
            print(model.chat("Why is the sky blue?"))

    A prompt is a text, a list of token ids, or a list of messages for the chat template, such as
    {"role": "user", "content": "Hello"}.

    Options of a generation:
        max_tokens: max tokens of the answer, 1024 by default; None: until the context is full.
        stop_strings, stop_tokens: what ends the answer; stop_tokens=() disables the end token.
        template_args: variables of the chat template.
        json_schema, regex, grammar: what the answer must match; the schema may be a pydantic class,
            and a grammar is in Lark's syntax or GBNF. With compact_json=True, JSON has no spaces.
        sampling: a `Sampling`, or its fields as options: temperature=0.7. The default is greedy.
        receipt: whether the result has a `receipt`, with which `castiron audit` repeats the answer.

    A prefix that prompts share is computed only once. Several threads may use one model: their
    requests run in one batch, and each request generates the same tokens as if it ran by itself. A
    request that cannot run raises PipelineError.
    """

    def __init__(
        self, bundle: Bundle | Path | str, threads: int | None = None, prefix_cache: str | Path | None = None,
        draft: Bundle | Path | str | None = None, parse_special: bool = False,
    ):  # fmt: skip
        """Open a bundle. `castiron.load` describes the other arguments."""
        self.bundle = open_bundle(bundle)
        # A model either embeds texts or generates them: one of the two stays None.
        self._embedder: Embedder | None = None
        self._engine: Engine | None = None
        if self.bundle.manifest.encoder:
            self._embedder = Embedder(self.bundle, threads)
            self.tokenizer: Tokenizer | None = self._embedder.tokenizer
            self.threads: int = self._embedder.encoder.threads
        else:
            self.tokenizer = load_tokenizer(self.bundle, parse_special=parse_special) if self.bundle.tokenizer else None
            store = PrefixStore(prefix_cache, self.bundle.manifest) if prefix_cache else None
            proposing = open_draft(draft, self.bundle, threads) if draft else None
            self._engine = Engine(self.bundle, threads, store=store, draft=proposing)
            self.threads = self._engine.threads
        # The session with which a generating model embeds texts; the first `embed` opens it.
        self._reader: Session | None = None

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def family(self) -> str:
        """The model family: `model_type` of the HF config, such as "llama"."""
        return str(self.bundle.manifest.config.get("model_type", "unknown"))

    @property
    def context(self) -> int:
        return self.bundle.manifest.context

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.bundle.manifest.functions)

    def __repr__(self) -> str:
        closed = self._engine.closed if self._engine else self._embedder is None
        threads = "closed" if closed else f"{self.threads} thread{'s' * (self.threads > 1)}"
        functions = ", ".join(self.functions)
        return f"<castiron.Model {self.name}: {self.family}, context {self.context}, {threads}, functions {functions}>"

    @overload
    def generate(self, prompts: OnePrompt, **options: Unpack[GenerationOptions]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Iterable[Prompt], **options: Unpack[GenerationOptions]) -> list[Result]: ...
    def generate(self, prompts: Prompt | Iterable[Prompt], **options: Unpack[GenerationOptions]) -> Result | list[Result]:
        """Generate the answer to a prompt, or a list of answers in the order of several prompts.

        If one of several prompts cannot run, its result has an `error`.
        """
        results = self.generate_many(cast(Iterable[Prompt], prompts), **options)
        if not is_prompt(prompts):
            return sorted(results, key=lambda result: result.index)
        (result,) = results
        if result.error:
            raise result.error
        return result

    def generate_many(self, prompts: Iterable[Prompt], **options: Unpack[GenerationOptions]) -> Iterator[Result]:
        """Yield the result of each prompt as soon as it is complete, in any order."""
        given = [cast(Prompt, prompts)] if is_prompt(prompts) else prompts
        return generate_many(self._open_engine(), given, self._requests(options))

    def chat(self, messages: str | Sequence[Message], **options: Unpack[GenerationOptions]) -> Result:
        """Generate the answer to a conversation. A string is sent as one user message."""
        return self.generate([{"role": "user", "content": messages}] if isinstance(messages, str) else messages, **options)

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Stream:
        """Generate the answer to a prompt; return an iterator over pieces of its text.

        The model runs only while the caller waits for a piece. Closing the iterator ends the
        request.
        """
        engine, make_request = self._open_engine(), self._requests(options)
        if self.tokenizer is None:
            raise PipelineError(f"{self.name} has no tokenizer and cannot stream text; use generate, which returns token ids")
        return Stream(engine, make_request(prompt))

    @overload
    def score(self, texts: OnePrompt, *, top: int = 0) -> Scored: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, texts: Iterable[Prompt], *, top: int = 0) -> list[Scored]: ...
    def score(self, texts: Prompt | Iterable[Prompt], *, top: int = 0) -> Scored | list[Scored]:
        """Return the log-probability of each token of a text; for several texts, a list of results.

        top: how many of the most probable tokens to report at each position.
        """
        _check_kinds({"top": top})
        if top < 0:
            raise PipelineError(f"top is {top}; it must be 0 or more")
        engine, one = self._open_engine(), is_prompt(texts)

        def scored(prompt: Prompt) -> Request:
            return Request(self._encode(prompt), engine.context, max_tokens=0, prompt_logprobs=top)

        found = score_many(engine, [cast(Prompt, texts)] if one else cast(Iterable[Prompt], texts), scored)
        return found[0] if one else found

    def embed(
        self, texts: str | Sequence[int] | Iterable[str | Sequence[int]], *, prompt_name: str | None = None,
        prompt: str | None = None, dimensions: int | None = None, pooling: Pooling | None = None, normalise: bool | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return the embedding of a text, f32 [dimensions], or of n texts, f32 [n, dimensions].

        An embedding model computes the same vectors as sentence-transformers, and truncates long
        texts. A generating model must be compiled with `--embed`; its hidden states are pooled.

        Args:
            prompt_name, prompt: name or text of a prompt that is put before each text.
            dimensions: return only this many numbers from the start of each vector.
            pooling: "mean" of all tokens or "last" token; a generating model's default is "mean".
            normalise: whether to scale vectors to length 1; a generating model's default is True.
        """
        one = is_prompt(texts)
        embed = self._encoded if self.bundle.manifest.encoder else self._pooled
        rows = embed([texts] if one else texts, prompt_name, prompt, dimensions, pooling, normalise)
        return rows[0] if one else rows

    def _pooled(self, texts, prompt_name, prompt, dimensions, pooling, normalise) -> np.ndarray:
        if prompt_name is not None:
            raise PipelineError(f"{self.name} has no prompt {prompt_name!r}; give its text with the argument prompt")
        pooling, normalise = pooling or "mean", normalise is not False
        if not (known := self.bundle.manifest.widths("embed")):
            raise PipelineError(f"{self.name} has no embed functions; compile it with --embed 128, or load it with embed=128")
        if pooling not in POOLINGS:
            raise PipelineError(f"unknown pooling: {pooling!r}; use {' or '.join(POOLINGS)}")
        hidden = self.bundle.manifest.hidden
        if dimensions is not None and not 1 <= dimensions <= hidden:
            raise PipelineError(f"dimensions is {dimensions}; {self.name} supports 1 to {hidden}")
        engine, rows, max_tokens = self._open_engine(), [], self.context // max(known) * max(known)
        for text in texts:
            ids = list(self._encode(prompt + text if prompt and isinstance(text, str) else text))
            if not 1 <= len(ids) <= max_tokens:
                raise PipelineError(f"the text has {len(ids)} tokens; a text to embed must have 1 to {max_tokens}")
            with engine.exclusive() as scheduler:
                self._reader = self._reader or Session(scheduler.batch.slots[0].program)
                move_to(self._reader, 0)
                states = self._reader.embed(ids)
            pooled = states.mean(axis=0, dtype=np.float32) if pooling == "mean" else states[-1]
            rows.append(cut_to(pooled / np.linalg.norm(pooled) if normalise else pooled, dimensions, normalise))
        return np.stack(rows) if rows else np.empty((0, dimensions or hidden), np.float32)

    def rerank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """Return (index, relevance) of each document, beginning with the most relevant.

        The relevance is a reranker's score, or the cosine of two embeddings.
        """
        if self._embedder is None:
            if self.bundle.manifest.encoder:
                raise PipelineError(f"{self.name} is closed; load it again")
            raise PipelineError(f"{self.name} generates text and cannot rerank; rerank with {RERANKERS}")
        if isinstance(documents, str):
            raise PipelineError("documents is a text; it must be a list of texts")
        return self._embedder.rerank(query, documents)

    def _encoded(self, texts, prompt_name, prompt, dimensions, pooling, normalise) -> np.ndarray:
        embedder = self._embedder
        if embedder is None:
            raise PipelineError(f"{self.name} is closed; load it again")
        facts = embedder.facts
        if pooling not in (None, facts.pooling) or normalise not in (None, facts.normalised):
            length = "of length 1" if facts.normalised else "not of length 1"
            raise PipelineError(
                f"{self.name} always pools by {facts.pooling} and returns vectors {length}; remove the arguments pooling and "
                "normalise"
            )
        return embedder.embed(texts, prompt_name, prompt, dimensions)

    def close(self) -> None:
        """Free the weights and caches. Requests in progress end with an error."""
        if self._engine:
            self._engine.close()
        self._reader = self._embedder = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise PipelineError(f"{self.name} is an embedding model and cannot generate text; use embed")
        _ = self._engine.scheduler
        return self._engine

    def _requests(self, given: GenerationOptions) -> Callable[[Prompt], Request]:
        engine, options = self._open_engine(), dict[str, Any](given)
        check_names(options, GenerationOptions.__annotations__)
        if schema_of := getattr(options.get("json_schema"), "model_json_schema", None):
            options["json_schema"] = schema_of()
        _check_kinds(options)
        limit = options.pop("max_tokens", DEFAULT_MAX_TOKENS)
        stops = options.pop("stop_strings", ())
        stops = stops if isinstance(stops, str) else tuple(stops)
        stop_tokens, template_args = options.pop("stop_tokens", None), options.pop("template_args", {})
        structure = {name: value for name in STRUCTURES & options.keys() if (value := options.pop(name)) is not None}
        if structure and self.tokenizer is None:
            raise PipelineError(f"{self.name} has no tokenizer, but structured output needs one; remove {', '.join(structure)}")
        compact, receipt = options.pop("compact_json", False), options.pop("receipt", False)
        grammar = self.tokenizer.grammar(**structure, compact_json=compact) if structure and self.tokenizer else None
        sampling = replace(options.pop("sampling", Sampling()), **options)

        def make_request(prompt: Prompt) -> Request:
            ids = self._encode(prompt, template_args)
            return text_request(
                ids, engine.context, self.tokenizer, max_tokens=limit,
                sampling=sampling, stop_tokens=stop_tokens, stop_strings=stops, grammar=grammar,
                reasoning=grammar is not None and is_messages(prompt), receipt=receipt,
            )  # fmt: skip

        make_request([0])
        return make_request

    def _encode(self, prompt: Prompt, template_args: Mapping[str, Any] = {}) -> Collection[int]:
        for message in cast(Sequence[Message], prompt) if is_messages(prompt) else ():
            role, template = str(message.get("role")), (self.tokenizer and self.tokenizer.chat_template) or ""
            # A template may have roles of its own.
            if role not in ROLES and f"'{role}'" not in template.replace('"', "'"):
                raise PipelineError(f"unknown role: {role!r}{did_you_mean(role, ROLES) or '; use ' + ', '.join(ROLES)}")
        return encode_prompt(prompt, self.tokenizer, self.bundle.manifest.vocab, template_args)


def load(
    model: str | Path | Bundle,
    *,
    threads: int | None = None,
    context: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    prefix_cache: str | Path | None = None,
    draft: str | Path | Bundle | None = None,
    parse_special: bool = False,
    **options: Any,
) -> Model:
    """Load a model. If it is not a bundle, compile it first, and cache the bundle.

    Args:
        model: a bundle or its path, the path of a GGUF file or HF directory, a name of castiron's
            catalogue, or org/name on the Hugging Face hub.
        threads: CPU threads, by default one per physical core.
        context: max tokens of prompt and answer, up to the model's limit; by default the bundle's.
        progress: called with (name of a stage, fraction done); by default prints a progress bar.
        prefix_cache: folder that stores the states (KV caches) of long prefixes.
        draft: a smaller model with the same vocabulary, which proposes tokens; as `model`.
        parse_special: whether special tokens in messages, such as <|im_end|>, are tokens.
        options: keyword arguments of `castiron.compile`.
    """
    check_names(options, _option_names("threads", "context", "progress", "prefix_cache", "draft", "parse_special"))
    _check_kinds({"model": model, "threads": threads, "context": context, "draft": draft, "prefix_cache": prefix_cache})
    chosen = None if is_bundle(model) and not options else options_of(**{"threads": threads, **options})
    if draft is not None:
        check_draft_model(draft, model, chosen, progress)
    bundle = open_or_compile(model, chosen, progress, evaluate=own_accuracy)
    if context is not None:
        bundle = bundle.with_context(context)
    draft_bundle = None if draft is None else open_or_compile(draft, None, progress, draft=True)
    return Model(bundle, threads, prefix_cache, draft_bundle, parse_special)


def compile_bundle(
    model: str | Path, out: str | Path, *, progress: Callable[[str, float], None] | None = None, **options: Any
) -> Bundle:
    """Compile a GGUF file, an HF directory or a named model into the bundle directory `out`.

    options: fields of `castiron.pipelines.compile.compile_options.Options`. An up-to-date bundle is
    not compiled again. After an error, no files are left.
    """
    check_names(options, _option_names("progress"))
    _check_kinds({"model": model, "out": out})
    path = compile_to(Path(model).expanduser(), Path(out).expanduser(), options_of(**options), progress, own_accuracy)
    # The bundle may be for another machine.
    return open_bundle(path, run=False)


def _check_kinds(options: dict[str, Any]) -> None:
    for name in options.keys() & KINDS.keys():
        kind, content, words = KINDS[name]
        value = options[name]
        if isinstance(value, kind) and isinstance(value, Iterable) and content:
            # An iterator is read once.
            options[name] = value = value if isinstance(value, str | Collection) else tuple(value)
        # Python's True is an integer.
        is_flag = isinstance(value, bool) and Integral in (kind, *get_args(kind))
        is_valid = isinstance(value, kind) and not isinstance(value, bytes) and not is_flag
        if not is_valid or content and value is not None and not all(isinstance(each, content) for each in value):
            raise PipelineError(f"{name} is {short(repr(value))}; it must be {words}")


def _option_names(*more: str) -> list[str]:
    from castiron.pipelines.compile.compile_options import FORMER_NAMES, Options

    return [*more, *(field.name for field in fields(Options)), *FORMER_NAMES]
