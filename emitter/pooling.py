"""From the hidden states of a text's tokens to its one vector, as the modules of sentence-transformers and the heads of HF's
sequence classifiers do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from castiron.emitter import ops
from castiron.emitter.ir import Value, scope
from castiron.emitter.layers import activation, carry, last_row, layer_norm, linear, recurrent
from castiron.emitter.states import State
from castiron.emitter.step import Step
from castiron.emitter.types import F32, EmitError

# The sum of the states so far, of a text that is taken in several calls.
SUM = "sum"
# torch.nn.functional.normalize divides by no less.
LEAST_LENGTH = 1e-12

_ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "identity": lambda x: x,
    "tanh": ops.tanh,
    **{name: partial(activation, kind=name) for name in ("relu", "gelu", "silu")},
}
ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclass(frozen=True)
class Dense:
    """A linear layer after pooling: tensors `<name>.linear.weight` [features, in] and, with `bias`, `<name>.linear.bias`; then
    `activation`, one of `ACTIVATIONS`, and a LayerNorm, `<name>.norm.weight`, where there is a `norm`: its eps, and whether it
    has a bias."""

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


def _last(step: Step, x: Value, chunks: bool) -> Value:
    return last_row(step, x)


def _first(step: Step, x: Value, chunks: bool) -> Value:
    if chunks:
        raise EmitError("pooling cls takes the first token, which in a model that looks backwards has seen no other")
    return ops.slice_(x, (0, 0), (1, x.shape[1]))


# Of each mode, what makes one row [1, hidden] of rows [T, hidden]; chunks: of a text that comes in several calls.
MODES: dict[str, Callable[[Step, Value, bool], Value]] = {"mean": _mean, "last": _last, "cls": _first}


@dataclass(frozen=True)
class Pooling:
    """mode: a key of `MODES`. dense: what follows it. normalised: the vector is divided by its length at the end."""

    mode: str
    dense: tuple[Dense, ...] = ()
    normalised: bool = True

    def states(self, hidden: int) -> list[State]:
        """What it remembers of a text that is taken in several calls."""
        return [State(SUM, (1, hidden), F32, "recurrent")] if self.mode == "mean" else []

    def pool(self, step: Step, x: Value, chunks: bool) -> Value:
        """The vector f32 [features] of hidden states x [T, hidden]: with `chunks` of the text up to here, of which these are
        the latest, else of the whole text."""
        y = MODES[self.mode](step, x, chunks)
        for dense in self.dense:
            with scope(dense.name):
                y = _ACTIVATIONS[dense.activation](linear(step, y, "linear", dense.features, dense.bias))
                y = layer_norm(step, y, "norm", *dense.norm) if dense.norm else y
        if self.normalised:
            squares = ops.reduce("add", ops.multiply(y, y), (1,))
            length = ops.maximum(ops.sqrt(squares), ops.constant(LEAST_LENGTH, F32, squares.shape))
            y = ops.divide(y, ops.broadcast_in_dim(length, y.shape, (0,)))
        return ops.reshape(y, y.shape[1:])
