"""How far one model's next-token distributions are from another's: the statistics of llama.cpp's perplexity tool.

The formulas are those of `tools/perplexity/perplexity.cpp` in github.com/ggml-org/llama.cpp (`log_softmax`, `kl_divergence`),
whose names the reports have. Two things differ: softmax and divergence are computed in double here, and the base's
probabilities are what the base gives, where llama.cpp has rounded them to 16 bits for a file and leaves out those below e^-16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Shares of the values below, in percent, as llama.cpp prints them.
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class Compared:
    """Of each token that counts: its negative log-likelihood under the model and under the base, the base's Kullback-Leibler
    divergence from the model there, and whether both have the same most probable token. All `[tokens]`."""

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray

    @property
    def delta_p(self) -> np.ndarray:
        """How much more probable than to the base the text's token is to the model."""
        return np.exp(-self.nll) - np.exp(-self.nll_base)


def negative_log_likelihood(logits: np.ndarray, token: int) -> float:
    """-ln of the probability that `logits` `[vocab]` give to `token`."""
    x = logits.astype(np.float64)
    x -= x.max()
    return float(np.log(np.exp(x).sum()) - x[token])


def negative_log_likelihoods(rows: Iterable[np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Of each of `tokens`, by the row of logits before it: f64 `[tokens]`."""
    return np.array([negative_log_likelihood(row, token) for row, token in zip(rows, tokens, strict=True)])


def compare_row(logits: np.ndarray, base: np.ndarray, token: int) -> tuple[float, float, float, bool]:
    """A row of `Compared` for the model's logits, the base's, both `[vocab]`, and the token that the text has there."""
    x, y = logits.astype(np.float64), base.astype(np.float64)
    same_top = bool(x.argmax() == y.argmax())
    x -= x.max()
    y -= y.max()
    p = np.exp(y)
    total, log_total = p.sum(), np.log(np.exp(x).sum())
    log_base_total = np.log(total)
    # sum of p (ln p - ln q), the two partition sums taken out.
    kld = float(p @ (y - x) / total + log_total - log_base_total)
    return float(log_total - x[token]), float(log_base_total - y[token]), kld, same_top


def compare_rows(rows: Iterable[np.ndarray], base: Iterable[np.ndarray], tokens: Sequence[int]) -> Compared:
    """`compare_row` of each row, model and base in step."""
    found = [compare_row(*each) for each in zip(rows, base, tokens, strict=True)]
    nll, nll_base, kld, same_top = (np.array(column) for column in zip(*found, strict=True))
    return Compared(nll, nll_base, kld, same_top)


def joined(parts: Sequence[Compared]) -> Compared:
    names = Compared.__dataclass_fields__
    return Compared(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def mean_and_error(values: np.ndarray) -> dict[str, float]:
    """The mean and its standard error, 0 for up to ten values (`mean_and_uncertainty` in llama.cpp)."""
    error = np.sqrt(values.var() / (values.size - 1)) if values.size > 10 else 0.0
    return {"mean": float(values.mean()), "error": float(error)}


def perplexity(nll: np.ndarray) -> dict[str, float]:
    """exp of the mean negative log-likelihood, and the error that follows from that of the mean."""
    found = mean_and_error(nll)
    value = float(np.exp(found["mean"]))
    return {"mean": value, "error": value * found["error"]}


def statistics(found: Compared) -> dict:
    """What `llama-perplexity --kl-divergence` prints, as JSON; probabilities are shares of 1, not percent.

    The error of a ratio or difference is that of the tokens' differences, which counts the covariance in as llama.cpp does.
    The correlation is null where either side does not vary.
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
    """Largest to smallest, percentiles between neighbours by straight lines."""
    named = {"maximum": 100.0, **{f"{p:.1f}%": p for p in percentiles}, "median": 50.0, "minimum": 0.0}
    falling = sorted(named.items(), key=lambda item: -item[1])
    return {name: float(np.percentile(values, share)) for name, share in falling}
