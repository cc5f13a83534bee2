"""An attention model whose keys and values are rings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from castiron.emitter.abi import State
from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import attention, embedding, linear, lm_head, split_heads, wanted_rows
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.ops import add
from castiron.emitter.step import Step

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    layers: int
    window: int
    max_positions: int


def read(c: ConfigReader) -> Config:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "sliding_window", "max_position_embeddings")
    return Config(*map(c.take, names))


def states(c: Config, context: int) -> tuple[State, ...]:
    rows = (c.layers, context, KV_HEADS, HEAD_DIM)
    layers = tuple(range(c.layers))
    return tuple(State(name, rows, kind="window", window=c.window, layers=layers) for name in ("keys", "values"))


def forward(step: Step, c: Config) -> Value:
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                rows = zip("qkv", (HEADS, KV_HEADS, KV_HEADS))
                q, k, v = (split_heads(linear(step, x, f"{name}_proj", n * HEAD_DIM), n) for name, n in rows)
                out = attention(step, layer, q, k, v, HEAD_DIM**-0.5, c.window)
                x = add(x, linear(step, out, "o_proj", c.hidden))
    return lm_head(step, wanted_rows(step, x), c.vocab, tied=False)


def shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by name."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    found = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, n in zip("qkv", (HEADS, KV_HEADS, KV_HEADS)):
            found[f"model.layers.{layer}.{name}_proj.weight"] = (n * HEAD_DIM, hidden)
        found[f"model.layers.{layer}.o_proj.weight"] = (hidden, HEADS * HEAD_DIM)
    return found


def define(config: Mapping, weights: Mapping[str, np.ndarray], tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield logits [vocab] after each token, computed with NumPy."""
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(config["num_hidden_layers"])]
    for token in tokens:
        x = weights["model.embed_tokens.weight"][token].astype(np.float64)
        for layer, seen in enumerate(rows):
            w = {name: weights[f"model.layers.{layer}.{name}_proj.weight"] for name in "qkvo"}
            q, k, v = ((w[name] @ x).reshape(-1, HEAD_DIM) for name in "qkv")
            seen.append((k, v))
            del seen[: -config["sliding_window"]]
            keys, values = (np.repeat([pair[i] for pair in seen], HEADS // KV_HEADS, axis=1) for i in (0, 1))
            scores = np.einsum("hd,shd->hs", q, keys) * HEAD_DIM**-0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            x = x + w["o"] @ np.einsum("hs,shd->hd", shares, values).reshape(-1)
        yield weights["lm_head.weight"] @ x


CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "sliding_window": 6, "max_position_embeddings": 126}
