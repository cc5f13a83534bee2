"""Measure the perplexity of a text, and the distance of a model's distributions from a base's.

Chunks, statistics and formulas are those of llama.cpp's `tools/perplexity/perplexity.cpp`
(`log_softmax`, `kl_divergence`), except that softmax and divergence are computed in f64, and that
the base's probabilities are not rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import numpy as np

from castiron.pipelines.engine.sampling import logit_rows, score_width
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.manifest import Accuracy
from castiron.vmfb.session import Session

# Percentiles that llama.cpp prints.
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


# Chapters I to IV of Lewis Carroll, Alice's Adventures in Wonderland (1865), which is in the public domain, by the 29th
# edition of Project Gutenberg's text; a paragraph is a line.
DEFAULT_TEXT = "evaluate_text.txt"
# Random tokens for a bundle without tokenizer.
RANDOM_TOKENS = 8192
# Chunks and tokens of a chunk in `own_accuracy`.
SHORT_CHUNKS, SHORT_CONTEXT = 2, 256

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Compared:
    """The statistics of each scored token by a model and a base model, all `[tokens]`.

    nll, nll_base: negative log-likelihood by the model and by the base. kld: KL divergence of the
    base from the model. same_top: whether both have the same most probable token.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray

    @property
    def delta_p(self) -> np.ndarray:
        """The token's probability by the model minus its probability by the base."""
        return np.exp(-self.nll) - np.exp(-self.nll_base)


def negative_log_likelihood(logits: np.ndarray, token: int) -> float:
    """Return -ln of the probability that `logits`, `[vocab]`, give to `token`."""
    x = logits.astype(np.float64)
    x -= x.max()
    return float(np.log(np.exp(x).sum()) - x[token])


def compare_row(logits: np.ndarray, base: np.ndarray, token: int) -> tuple[float, float, float, bool]:
    """Return the fields of `Compared` for one token.

    logits, base: logits of the model and of the base, both `[vocab]`.
    """
    x, y = logits.astype(np.float64), base.astype(np.float64)
    same_top = bool(x.argmax() == y.argmax())
    x -= x.max()
    y -= y.max()
    p = np.exp(y)
    total, log_total = p.sum(), np.log(np.exp(x).sum())
    log_base_total = np.log(total)
    # Sum of p (ln p - ln q), with the two partition sums factored out.
    kld = float(p @ (y - x) / total + log_total - log_base_total)
    return float(log_total - x[token]), float(log_base_total - y[token]), kld, same_top


def mean_and_error(values: np.ndarray) -> dict[str, float]:
    """Return the mean and its standard error, which is 0 for up to ten values, as in llama.cpp."""
    error = np.sqrt(values.var() / (values.size - 1)) if values.size > 10 else 0.0
    return {"mean": float(values.mean()), "error": float(error)}


def perplexity(nll: np.ndarray) -> dict[str, float]:
    """Return the perplexity, exp of the mean negative log-likelihood, and its standard error."""
    found = mean_and_error(nll)
    value = float(np.exp(found["mean"]))
    return {"mean": value, "error": value * found["error"]}


def statistics(found: Compared) -> dict:
    """Return the statistics of `llama-perplexity --kl-divergence`, with probabilities from 0 to 1.

    As in llama.cpp, the error of a ratio or a difference is computed from the differences of the
    tokens, which include the covariance. The correlation is None if one model's likelihoods do not
    vary.
    """
    q, base = perplexity(found.nll), perplexity(found.nll_base)
    ln_ratio = mean_and_error(found.nll - found.nll_base)
    ratio = float(np.exp(ln_ratio["mean"]))
    spread = found.nll.std() * found.nll_base.std()
    covariance = np.mean((found.nll - found.nll.mean()) * (found.nll_base - found.nll_base.mean()))
    difference = mean_and_error(q["mean"] * found.nll - base["mean"] * found.nll_base)["error"]
    squares = mean_and_error(found.delta_p**2)
    rms = squares["mean"] ** 0.5
    same = float(found.same_top.mean())
    return {
        "ppl": q,
        "ppl_base": base,
        "correlation": float(covariance / spread) if spread else None,
        "ln_ppl_ratio": ln_ratio,
        "ppl_ratio": {"mean": ratio, "error": ratio * ln_ratio["error"]},
        "ppl_difference": {"mean": q["mean"] - base["mean"], "error": difference},
        "kld": mean_and_error(found.kld) | _order(found.kld, KLD_PERCENTILES),
        "delta_p": mean_and_error(found.delta_p)
        | _order(found.delta_p, DELTA_P_PERCENTILES)
        | {"rms": rms, "rms_error": 0.5 / rms * squares["error"] if rms else 0.0},
        "same_top_p": {"mean": same, "error": (same * (1 - same) / max(found.kld.size - 1, 1)) ** 0.5},
    }


def _order(values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    """Return the percentiles, extremes and median, largest first, interpolated between values."""
    named = {"maximum": 100.0, **{f"{p:.1f}%": p for p in percentiles}, "median": 50.0, "minimum": 0.0}
    falling = sorted(named.items(), key=lambda item: -item[1])
    return {name: float(np.percentile(values, share)) for name, share in falling}


class Rows(Protocol):
    """A model that returns logits."""

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        """Yield the logits, f32 `[vocab]`, after each of `tokens[first:]`; each is valid until the
        next one."""
        ...


@dataclass(frozen=True)
class Chunk:
    """A part of the text: the model reads `tokens`, and `targets`, the tokens after each of
    `tokens[first:]`, are scored."""

    tokens: list[int]
    targets: list[int]
    first: int


class BundleRows:
    """The logits of a bundle, from its verify functions or, with `steps`, from decode steps."""

    def __init__(self, session: Session, steps: bool = False):
        self.session, self.steps = session, steps

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        session = self.session
        session.rewind(0)
        if not self.steps:
            if first:
                session.prefill(tokens[:first])
            yield from logit_rows(session, tokens[first:], score_width(session.manifest.widths("verify"), len(tokens)))
            return
        for index, token in enumerate(tokens):
            session.step(token)
            if index >= first:
                yield session.logits()


def text_of(path: str | None = None) -> str:
    """Return the text of a file without its last line feed; by default the one castiron ships."""
    try:
        text = (Path(path) if path else files("castiron.pipelines.evaluate") / DEFAULT_TEXT).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PipelineError(f"{path} is not text in UTF-8") from None
    return text.removesuffix("\n")


def tokens_of(bundle: Bundle, path: str | None = None) -> list[int]:
    """Return the token ids of a text, or random ids for a bundle without tokenizer."""
    if bundle.tokenizer is not None:
        return load_tokenizer(bundle).encode(text_of(path))
    if path is not None:
        raise PipelineError(f"{bundle.path} has no tokenizer; remove --text to use random token ids")
    return [int(token) for token in np.random.default_rng(0).integers(bundle.manifest.vocab, size=RANDOM_TOKENS)]


def text_name(bundle: Bundle, path: str | None = None) -> str:
    """Return the name of the text that `tokens_of` reads."""
    return path or (DEFAULT_TEXT if bundle.tokenizer else "random tokens")


def chunks_of(tokens: Sequence[int], context: int, max_chunks: int | None = None, bos: int | None = None) -> list[Chunk]:
    """Split a text into chunks of `context` tokens, and drop an incomplete last one.

    As in llama.cpp, tokens from context // 2 + 1 on are scored, and if the text begins with the
    token `bos`, `bos` replaces the first token of every chunk.
    """
    if context < 4:
        raise PipelineError(f"--context is {context}; a chunk needs at least 4 tokens")
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


def _scored(chunks: Sequence[Chunk], progress: Progress, *models: Rows) -> Iterator[tuple]:
    """Yield (logits of each model, token) for every scored token; progress counts chunks."""
    for done, chunk in enumerate(chunks):
        progress(done, len(chunks))
        yield from zip(*(model.rows(chunk.tokens, chunk.first) for model in models), chunk.targets, strict=True)
    progress(len(chunks), len(chunks))


def likelihoods(model: Rows, chunks: Sequence[Chunk], progress: Progress = lambda done, total: None) -> np.ndarray:
    """Return the negative log-likelihood of every scored token, f64 `[tokens]`."""
    return np.array([negative_log_likelihood(*each) for each in _scored(chunks, progress, model)])


def compare(model: Rows, base: Rows, chunks: Sequence[Chunk], progress: Progress = lambda done, total: None) -> Compared:
    """Compare a model and a base on every scored token."""
    found = [compare_row(*each) for each in _scored(chunks, progress, model, base)]
    return Compared(*map(np.array, zip(*found, strict=True)))


def own_accuracy(bundle: Bundle, progress: Progress = lambda done, total: None) -> Accuracy | None:
    """Measure how far a bundle's prefill and verify functions are from its exact decode steps.

    None if the context, or the tokenized text, is too short.
    """
    context = min(SHORT_CONTEXT, bundle.manifest.context)
    try:
        chunks = chunks_of(tokens_of(bundle), context, SHORT_CHUNKS, bundle.manifest.tokens.bos)
    except PipelineError:
        return None
    session = Session(bundle)
    compared = compare(BundleRows(session), BundleRows(Session(session.program), steps=True), chunks, progress)
    found = statistics(compared)
    kld, same = found["kld"], found["same_top_p"]
    return Accuracy(
        "decode_step", text_name(bundle), context, int(compared.kld.size),
        kld["mean"], kld["error"], kld["99.0%"], kld["maximum"], same["mean"], same["error"],
    )  # fmt: skip
