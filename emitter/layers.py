"""The vocabulary that model families are written in: layer operations over weights named as the checkpoint names them.

A layer operation is one node of the graph that says what is computed; `emitter.lowering` says how (StableHLO, or
kernels of our own). Scopes name both the module path and the weights: inside `scope("self_attn")`,
`linear(x, "q_proj", n)` reads the checkpoint tensor `<path>.self_attn.q_proj.weight`.

Shapes: T tokens of one sequence; x is `[T, features]`, heads are `[T, heads, head_dim]`, all f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emitter import ops
from emitter.ir import Module, Value, append, current_path, fail, scope
from emitter.types import F32, I32, EmitError, TensorType

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that the model reads.

    name, shape: the checkpoint's tensor, or the name of a table computed from the config.
    codec: how it is stored in the bundle (a key of `emitter.codecs.CODECS`).
    transform: applied to its f32 values before storing (`w + 1` of Gemma's norms); then the codec is f32.
    values: computes a table that is in no checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    codec: str = "f32"
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    values: Callable[[], np.ndarray] | None = None


class ModelModule(Module):
    """A module of layer operations. `codecs` gives the stored codec of a checkpoint tensor by name."""

    def __init__(self, name: str, codecs: Callable[[str], str]) -> None:
        super().__init__(name)
        self.codecs = codecs
        self.weights: dict[str, Weight] = {}

    def weight(self, weight: Weight) -> Value:
        """The value of a weight in the function being built; one node a use."""
        known = self.weights.setdefault(weight.name, weight)
        if known.shape != weight.shape:
            raise EmitError(f"weight {weight.name} has shape {known.shape} in one place and {weight.shape} in another")
        return append("weight", (), (TensorType(weight.shape, F32),), {"weight": known})[0]


@dataclass(eq=False)
class Step:
    """One pass over T tokens at positions start .. start + T - 1, of which `length` are real (None: all).

    k and v are the caches `[layers, context, kv_heads, head_dim]`; attention replaces them as it appends.
    """

    module: ModelModule
    tokens: Value
    start: Value
    length: Value | None
    k: Value
    v: Value

    @property
    def context(self) -> int:
        return self.k.shape[1]

    def weight(self, name: str, shape: Sequence[int], codec: str | None = None, transform=None) -> Value:
        """The checkpoint tensor `<module path>.<name>`; `codec` overrides the stored one."""
        full = ".".join(filter(None, (current_path(), name)))
        return self.module.weight(Weight(full, tuple(shape), codec or self.module.codecs(full), transform))

    def vector(self, name: str, shape: Sequence[int], transform=None) -> Value:
        """A small tensor (norm weight, bias), stored in f32."""
        return self.weight(name, shape, "f32", transform)

    def table(self, name: str, shape: Sequence[int], values: Callable[[], np.ndarray]) -> Value:
        """An f32 table computed from the config."""
        return self.module.weight(Weight(name, tuple(shape), values=values))


def embedding(step: Step, name: str, vocab: int, hidden: int) -> Value:
    """Rows of `<name>.weight` [vocab, hidden] for the step's tokens: [T, hidden]."""
    with scope(name):
        weight = step.weight("weight", (vocab, hidden))
        return append("embedding", (step.tokens, weight), (TensorType((step.tokens.shape[0], hidden), F32),))[0]


def project(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if x.type.rank != 2 or weight.type.rank != 2 or x.shape[1] != weight.shape[1]:
        raise fail("linear", "needs x [T, in] and a weight [out, in]", operands)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise fail("linear", "the bias must be [out]", operands)
    return append("linear", operands, (TensorType((x.shape[0], weight.shape[0]), F32),))[0]


def linear(step: Step, x: Value, name: str, out_features: int, bias: bool = False) -> Value:
    """`torch.nn.Linear` called `name`: [T, in] to [T, out_features]."""
    with scope(name):
        weight = step.weight("weight", (out_features, x.shape[-1]))
        return project(x, weight, step.vector("bias", (out_features,)) if bias else None)


def rms_norm(step: Step, x: Value, name: str, eps: float, transform=None) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), in f32."""
    with scope(name):
        weight = step.vector("weight", x.shape[-1:], transform)
        return append("rms_norm", (x, weight), (x.type,), {"eps": eps})[0]


def layer_norm(step: Step, x: Value, name: str, eps: float, bias: bool = True) -> Value:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv:1607.06450), in f32."""
    with scope(name):
        operands = (x, step.vector("weight", x.shape[-1:]))
        operands += (step.vector("bias", x.shape[-1:]),) if bias else ()
        return append("layer_norm", operands, (x.type,), {"eps": eps})[0]


def rope(step: Step, x: Value, tables: tuple[Value, Value]) -> Value:
    """Rotary embedding (arXiv:2104.09864) of heads [T, heads, head_dim] at the step's positions.

    tables: cos and sin, [context, rotary_dim / 2]. The first rotary_dim features turn, half against half as HF's
    `rotate_half` does; the rest pass through.
    """
    cos, sin = tables
    if x.type.rank != 3 or cos.type != sin.type or cos.shape[0] < step.context or 2 * cos.shape[1] > x.shape[2]:
        raise fail("rope", "needs heads [T, heads, head_dim] and tables [context, rotary_dim / 2]", (x, cos, sin))
    return append("rope", (x, cos, sin, step.start), (x.type,), {"rotary_dim": 2 * cos.shape[1]})[0]


def split_heads(x: Value, heads: int) -> Value:
    """[T, heads * head_dim] to [T, heads, head_dim]."""
    return ops.reshape(x, (x.shape[0], heads, x.shape[1] // heads))


def attention(
    step: Step,
    layer: int,
    q: Value,
    k: Value,
    v: Value,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Value:
    """Append k, v [T, kv_heads, head_dim] to layer `layer` of the cache, then causal grouped-query attention.

    q is [T, heads, head_dim]; a query at position p sees positions j with j <= p and, under a window, p - j < window.
    Scores are `q . k * scale`, soft-capped as `softcap * tanh(score / softcap)` where given (Gemma 2,
    arXiv:2408.00118). Returns [T, heads * head_dim].
    """
    layers, _, kv_heads, head_dim = step.k.shape
    ok = q.type.rank == 3 and k.type == v.type and k.shape == (q.shape[0], kv_heads, head_dim)
    if not ok or q.shape[2] != head_dim or q.shape[1] % kv_heads or not 0 <= layer < layers:
        raise fail("attention", f"operands do not fit the cache {step.k.type} at layer {layer}", (q, k, v))
    operands = (q, k, v, step.k, step.v, step.start) + ((step.length,) if step.length is not None else ())
    out = TensorType((q.shape[0], q.shape[1] * head_dim), F32)
    attrs = {"layer": layer, "scale": scale, "window": window, "softcap": softcap}
    result, step.k, step.v = append("attention", operands, (out, step.k.type, step.v.type), attrs)
    return result


def activation(x: Value, kind: str) -> Value:
    """silu, gelu (exact), gelu_tanh (the tanh form) or relu, element by element."""
    if kind not in ACTIVATIONS:
        raise fail("activation", f"{kind!r} is not one of {', '.join(ACTIVATIONS)}", (x,))
    return append("activation", (x,), (x.type,), {"function": kind})[0]


def scaled(x: Value, factor: float) -> Value:
    """x times a constant; the value itself for 1."""
    return x if factor == 1.0 else ops.multiply(x, ops.constant(factor, F32, x.shape))


def softcapped(x: Value, cap: float | None) -> Value:
    """cap * tanh(x / cap), or the value itself without a cap."""
    return x if cap is None else scaled(ops.tanh(ops.divide(x, ops.constant(cap, F32, x.shape))), cap)


def last_token(step: Step, x: Value) -> Value:
    """The row of the last real token: [T, features] to [1, features]."""
    if step.length is None:
        return ops.slice_(x, (x.shape[0] - 1, 0), x.shape) if x.shape[0] > 1 else x
    last = ops.subtract(step.length, ops.constant(1, I32, ()))
    return ops.dynamic_slice(x, (last, ops.constant(0, I32, ())), (1, x.shape[1]))
