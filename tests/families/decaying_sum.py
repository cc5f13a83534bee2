"""A recurrent model: each layer's state is a decaying sum of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from castiron.emitter.abi import State
from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import embedding, linear, lm_head, scaled, wanted_rows
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.ops import add, broadcast_in_dim, constant, dot_general, multiply, tanh
from castiron.emitter.recurrences import carry, recurrent
from castiron.emitter.step import Step
from castiron.emitter.types import F32


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    layers: int
    decay: float
    max_positions: int


def read(c: ConfigReader) -> Config:
    sizes = (c.take("vocab_size"), c.take("hidden_size"), c.take("num_hidden_layers"))
    return Config(*sizes, c.number("decay"), c.take("max_position_embeddings"))


def states(c: Config, context: int) -> tuple[State, ...]:
    return (State("sum", (c.layers, c.hidden), kind="recurrent"),)


def sums(step: Step, c: Config, layer: int, x: Value) -> Value:
    """Return s_t = decay * s_(t-1) + x_t for x [T, hidden], with a matmul for a chunk."""
    before, tokens = recurrent(step, "sum", layer), x.shape[0]
    if step.mode in ("decode", "batch"):
        after = add(scaled(before, c.decay), x)
    else:
        row, column = np.indices((tokens, tokens))
        own = constant(np.where(row >= column, c.decay ** (row - column), 0), F32)
        faded = constant(c.decay ** (np.arange(tokens) + 1.0)[:, None] * np.ones((1, c.hidden)), F32)
        start = broadcast_in_dim(before, (tokens, c.hidden), (0, 1))
        after = add(dot_general(own, x, ((1,), (0,))), multiply(faded, start))
    carry(step, "sum", layer, after)
    return after


def forward(step: Step, c: Config) -> Value:
    with scope("model"):
        x = embedding(step, "embed_tokens", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                x = add(x, tanh(linear(step, sums(step, c, layer, x), "proj", c.hidden)))
    return lm_head(step, wanted_rows(step, x), c.vocab, tied=False)


def shapes(config: Mapping) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by name."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    layers = {f"model.layers.{i}.proj.weight": (hidden, hidden) for i in range(config["num_hidden_layers"])}
    return {"model.embed_tokens.weight": (vocab, hidden), **layers, "lm_head.weight": (vocab, hidden)}


def define(config: Mapping, weights: Mapping[str, np.ndarray], tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield logits [vocab] after each token, computed with NumPy."""
    sums_by_layer = np.zeros((config["num_hidden_layers"], config["hidden_size"]))
    for token in tokens:
        x = weights["model.embed_tokens.weight"][token].astype(np.float64)
        for layer, state in enumerate(sums_by_layer):
            state[:] = config["decay"] * state + x
            x = x + np.tanh(weights[f"model.layers.{layer}.proj.weight"] @ state)
        yield weights["lm_head.weight"] @ x


CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "decay": 0.75, "max_position_embeddings": 126}
