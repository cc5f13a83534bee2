"""Measure the perplexity of a text, and the KL divergence of a model from a base model.

Chunks, statistics and formulas are llama.cpp's (`tools/perplexity/perplexity.cpp`), with two
differences: softmax and divergence are computed in f64, and the base model's probabilities are not
rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from castiron.pipelines.engine.sampling import logit_rows, score_width
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import read_text
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.bundle.manifest import Accuracy
from castiron.vmfb.run.session import Session

# Percentiles of the KL divergence; llama.cpp prints more.
PERCENTILES = {"maximum": 100.0, "99.0%": 99.0, "90.0%": 90.0, "median": 50.0}

# Chapters I to IV of Lewis Carroll, Alice's Adventures in Wonderland (1865, in the public domain), from the 29th edition
# of Project Gutenberg's text, with one paragraph per line.
DEFAULT_TEXT = "evaluate_text.txt"
# Number of random tokens for a bundle without tokenizer.
RANDOM_TOKENS = 8192
# Number of chunks, and tokens of a chunk, in `own_accuracy`.
SHORT_CHUNKS, SHORT_CONTEXT = 2, 256

Progress = Callable[[int, int], None]
# A function of (tokens, first) that yields a model's logits, f32 [vocab], after each of `tokens[first:]`. Each array is
# valid until the next one is read.
LogitsFunction = Callable[[Sequence[int], int], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Compared:
    """A model and a base model at every scored token; arrays are [tokens].

    kld: KL(base || model). same_top: whether both have the same most probable token.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities, f64 [vocab]."""
    x = logits.astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def compare_row(logits: np.ndarray, base: np.ndarray, token: int) -> tuple[float, float, float, bool]:
    """Return the fields of `Compared` for one position; token: the next token of the text."""
    q, p = log_softmax(logits), log_softmax(base)
    return -float(q[token]), -float(p[token]), float(np.exp(p) @ (p - q)), bool(q.argmax() == p.argmax())


def mean_and_error(values: np.ndarray) -> dict[str, float]:
    """Return the mean and its standard error, which is 0 for up to ten values, as in llama.cpp."""
    error = np.sqrt(values.var() / (values.size - 1)) if values.size > 10 else 0.0
    return {"mean": float(values.mean()), "error": float(error)}


def perplexity(nll: np.ndarray) -> dict[str, float]:
    """Return the perplexity and its standard error, from negative log-likelihoods."""
    found = mean_and_error(nll)
    value = float(np.exp(found["mean"]))
    return {"mean": value, "error": value * found["error"]}


def statistics(found: Compared) -> dict:
    """Return the statistics of `llama-perplexity --kl-divergence`, as a dict by name.

    Probabilities are from 0 to 1. As in llama.cpp, the error of the perplexity ratio takes into
    account that the likelihoods of the two models are correlated.
    """
    log_ratio = mean_and_error(found.nll - found.nll_base)
    ratio = float(np.exp(log_ratio["mean"]))
    # The probability of the token by the model, minus that by the base.
    delta_p = np.exp(-found.nll) - np.exp(-found.nll_base)
    squares = mean_and_error(delta_p**2)
    rms, same = squares["mean"] ** 0.5, float(found.same_top.mean())
    percentiles = {name: float(np.percentile(found.kld, share)) for name, share in PERCENTILES.items()}
    return {
        "ppl": perplexity(found.nll),
        "ppl_base": perplexity(found.nll_base),
        "ppl_ratio": {"mean": ratio, "error": ratio * log_ratio["error"]},
        "kld": mean_and_error(found.kld) | percentiles,
        "rms_delta_p": {"mean": rms, "error": 0.5 / rms * squares["error"] if rms else 0.0},
        "same_top_p": {"mean": same, "error": (same * (1 - same) / max(found.kld.size - 1, 1)) ** 0.5},
    }


@dataclass(frozen=True)
class Chunk:
    """A part of a text, scored from position `first` on.

    targets: the correct next token after each of `tokens[first:]`.
    """

    tokens: list[int]
    targets: list[int]
    first: int


def llama_cpp_logits(checkpoint: Path, context: int, threads: int) -> LogitsFunction:
    """Open a GGUF file in llama.cpp; context: max number of token ids."""
    from castiron.reference.peers import open_llama

    try:
        llama = open_llama(checkpoint, threads, context, logits_all=True)
    except ValueError as error:
        raise PipelineError(f"llama.cpp cannot read {checkpoint}: {error}; give a GGUF file that it supports") from None

    def rows(tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        llama.reset()
        llama.eval(list(tokens))
        yield from llama.scores[first : len(tokens)]

    return rows


def bundle_logits(session: Session, steps: bool = False) -> LogitsFunction:
    """Return the logits of a bundle's model; steps: whether every token is a decode step."""

    def rows(tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        session.rewind(0)
        if not steps:
            if first:
                session.prefill(tokens[:first], total=len(tokens))
            width = score_width(session.manifest.widths("verify"), len(tokens))
            yield from logit_rows(session, tokens[first:], width, len(tokens))
            return
        for index, token in enumerate(tokens):
            session.prefill([token], total=len(tokens))
            if index >= first:
                yield session.logits()

    return rows


def text_of(path: str | None = None) -> str:
    """Return the text of a file, by default of DEFAULT_TEXT, without the last line feed."""
    return read_text(Path(path) if path else files("castiron.pipelines.evaluate") / DEFAULT_TEXT).removesuffix("\n")


def tokens_of(bundle: Bundle, path: str | None = None) -> list[int]:
    """Return the token ids of `text_of(path)`, or random ids for a bundle without a tokenizer."""
    if bundle.tokenizer is not None:
        return load_tokenizer(bundle).encode(text_of(path))
    if path is not None:
        raise PipelineError(f"{bundle.path} has no tokenizer; remove --text to use random token ids")
    return [int(token) for token in np.random.default_rng(0).integers(bundle.manifest.vocab, size=RANDOM_TOKENS)]


def text_name(bundle: Bundle, path: str | None = None) -> str:
    return path or (DEFAULT_TEXT if bundle.tokenizer else "random tokens")


def chunks_of(tokens: Sequence[int], context: int, max_chunks: int | None = None, bos: int | None = None) -> list[Chunk]:
    """Split a text into chunks of `context` tokens; an incomplete last chunk is left out.

    As in llama.cpp, tokens from index context // 2 + 1 on are scored, and `bos` replaces the first
    token of every chunk if the text begins with it.
    """
    if context < 4:
        raise PipelineError(f"--context is {context}, but a chunk needs at least 4 tokens; give a larger --context")
    if max_chunks is not None and max_chunks < 1:
        raise PipelineError(f"--chunks is {max_chunks}; it must be at least 1")
    if len(tokens) < 2 * context:
        raise PipelineError(
            f"the text has {len(tokens)} tokens, and chunks of {context} need at least {2 * context}; "
            "give a longer --text or a smaller --context"
        )
    found, first = [], context // 2
    for start in range(0, len(tokens) - context + 1, context)[:max_chunks]:
        chunk = list(tokens[start : start + context])
        if bos is not None and tokens[0] == bos:
            chunk[0] = bos
        found.append(Chunk(chunk[:-1], chunk[first + 1 :], first))
    return found


def _scored(chunks: Sequence[Chunk], progress: Progress, *models: LogitsFunction) -> Iterator[tuple]:
    for done, chunk in enumerate(chunks):
        progress(done, len(chunks))
        yield from zip(*(model(chunk.tokens, chunk.first) for model in models), chunk.targets, strict=True)
    progress(len(chunks), len(chunks))


def likelihoods(model: LogitsFunction, chunks: Sequence[Chunk], progress: Progress = lambda done, total: None) -> np.ndarray:
    """Return the negative log-likelihood of every scored token, f64 [tokens]."""
    return np.array([-log_softmax(logits)[token] for logits, token in _scored(chunks, progress, model)])


def compare(
    model: LogitsFunction, base: LogitsFunction, chunks: Sequence[Chunk], progress: Progress = lambda done, total: None
) -> Compared:
    """Compare a model with a base model at every scored token."""
    found = [compare_row(*each) for each in _scored(chunks, progress, model, base)]
    return Compared(*map(np.array, zip(*found, strict=True)))


def own_accuracy(bundle: Bundle, progress: Progress = lambda done, total: None) -> Accuracy | None:
    """Compare the logits of calls of several tokens with those of decode steps.

    Returns None if the text or the context is too short.
    """
    context = min(SHORT_CONTEXT, bundle.manifest.context)
    try:
        chunks = chunks_of(tokens_of(bundle), context, SHORT_CHUNKS, bundle.manifest.tokens.bos)
    except PipelineError:
        return None
    session = Session(bundle)
    compared = compare(bundle_logits(session), bundle_logits(Session(session.program), steps=True), chunks, progress)
    found = statistics(compared)
    kld, same = found["kld"], found["same_top_p"]
    return Accuracy(
        "decode_step", text_name(bundle), context, int(compared.kld.size),
        kld["mean"], kld["error"], kld["99.0%"], kld["maximum"], same["mean"], same["error"],
    )  # fmt: skip
