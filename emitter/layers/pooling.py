"""Pooling of a text's hidden states to one embedding vector, as in sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from castiron.emitter.abi import State
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.graph.types import F32, EmitError
from castiron.emitter.layers import activation, last_row, layer_norm, linear
from castiron.emitter.layers.recurrences import carry, recurrent
from castiron.emitter.layers.step import Step

# The name of the state with the sum of a text's hidden states so far, if the text takes several calls.
SUM = "sum"
# torch.nn.functional.normalize never divides by less than this.
MIN_LENGTH = 1e-12

_ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "identity": lambda x: x,
    "tanh": ops.tanh,
    **{name: partial(activation, kind=name) for name in ("relu", "gelu", "silu")},
}
ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclass(frozen=True)
class Dense:
    """A linear layer `<name>.linear` after pooling, an activation and an optional LayerNorm.

    norm: (epsilon, whether it has a bias) of the LayerNorm `<name>.norm`; None for no norm.
    """

    name: str
    features: int
    bias: bool = False
    activation: str = "identity"
    norm: tuple[float, bool] | None = None


def _mean(step: Step, x: Value, chunks: bool) -> Value:
    count = step.length
    assert count is not None, "a text has a length"
    real = ops.compare("LT", ops.iota(x.shape[:1], 0), ops.broadcast_in_dim(count, x.shape[:1], ()))
    total = ops.reduce("add", ops.select(ops.broadcast_in_dim(real, x.shape, (0,)), x, ops.constant(0.0, F32, x.shape)), (0,))
    total = ops.reshape(total, (1, x.shape[1]))
    if chunks:
        total, count = ops.add(total, recurrent(step, SUM, 0)), ops.add(step.start, count)
        carry(step, SUM, 0, ops.broadcast_in_dim(total, x.shape, (0, 1)))
    return ops.divide(total, ops.broadcast_in_dim(ops.convert(count, F32), total.shape, ()))


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text's tokens become one embedding.

    mode: "mean" of all tokens, "last" for the last token, or "cls" for the first token.
    normalised: whether the embedding is scaled to length 1.
    """

    mode: str
    dense: tuple[Dense, ...] = ()
    normalised: bool = True

    def states(self, hidden: int) -> list[State]:
        """Return the sum of a text's hidden states so far, [1, hidden], if the mode is "mean"."""
        return [State(SUM, (1, hidden), "recurrent", layers=(0,))] if self.mode == "mean" else []

    def pool(self, step: Step, x: Value, chunks: bool) -> Value:
        """Append the pooling of x [T, hidden] to the function being built; return f32 [features].

        chunks: whether a text may take several calls.
        """
        if self.mode == "cls" and chunks:
            raise EmitError("pooling 'cls' does not support causal models; use pooling 'mean' or 'last'")
        if self.mode == "cls":
            y = ops.slice_(x, (0, 0), (1, x.shape[1]))
        else:
            y = _mean(step, x, chunks) if self.mode == "mean" else last_row(step, x)
        for dense in self.dense:
            with scope(dense.name):
                y = _ACTIVATIONS[dense.activation](linear(step, y, "linear", dense.features, dense.bias))
                y = layer_norm(step, y, "norm", *dense.norm) if dense.norm else y
        if self.normalised:
            squares = ops.reduce("add", ops.multiply(y, y), (1,))
            length = ops.maximum(ops.sqrt(squares), ops.constant(MIN_LENGTH, F32, squares.shape))
            y = ops.divide(y, ops.broadcast_in_dim(length, y.shape, (0,)))
        return ops.reshape(y, y.shape[1:])
