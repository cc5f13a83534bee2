"""The vocabulary that model families are written in: layer operations over weights named as the checkpoint names them.

A layer operation is one node of the graph that says what is computed; `castiron.emitter.lowering` says how (StableHLO, or
kernels of our own). Scopes name both the module path and the weights: inside `scope("self_attn")`,
`linear(x, "q_proj", n)` reads the checkpoint tensor `<path>.self_attn.q_proj.weight`.

Shapes: T tokens of one sequence; x is `[T, features]`, heads are `[T, heads, head_dim]`, all f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Module, Source, Value, append, current_path, fail, scope
from castiron.emitter.rotary import Rotary
from castiron.emitter.types import F32, I32, EmitError, TensorType

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that the model reads.

    name, shape: the checkpoint's tensor, or the name of a table computed from the config.
    codec: how it is stored in the bundle (a key of `castiron.emitter.codecs.CODECS`).
    transform: applied to its f32 values before storing (`w + 1` of Gemma's norms); then the codec is f32.
    values: computes a table that is in no checkpoint.
    parts, rows: the tensors (name, shape) whose rows are stacked, and the first and the past-the-last row it takes of
    them, where it is not the one tensor of its name: a projection out of a fused one, the experts of a layer.
    """

    name: str
    shape: tuple[int, ...]
    codec: str = "f32"
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    values: Callable[[], np.ndarray] | None = None
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rows: tuple[int, int] | None = None

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of every checkpoint tensor that it is made of."""
        if self.values is not None:
            return ()
        return self.parts or ((self.name, self.shape),)

    def raw(self, *tensors: np.ndarray) -> np.ndarray:
        """Its bytes out of those of its `tensors`: uint8 [*shape[:-1], row_bytes]."""
        rows = np.concatenate([t.reshape(-1, t.shape[-1]) for t in tensors]) if len(tensors) > 1 else tensors[0]
        return rows[slice(*self.rows)] if self.rows else rows


def source(weights: Sequence[Weight], pack: Callable[..., np.ndarray]) -> Source:
    """How a parameter that holds `weights` comes out of a checkpoint: `pack` gets the bytes of each, in order."""

    def pack_tensors(*tensors: np.ndarray) -> np.ndarray:
        left = iter(tensors)
        return pack(*(w.raw(*islice(left, len(w.tensors))) for w in weights))

    return Source(tuple((name, w.codec) for w in weights for name, _ in w.tensors), pack_tensors)


class ModelModule(Module):
    """A module of layer operations. `codecs` gives the stored codec of a checkpoint tensor by name.

    `weights` are the checkpoint's tensors and the tables that the module calls for, by name.
    """

    def __init__(self, name: str, codecs: Callable[[str], str]) -> None:
        super().__init__(name)
        self.codecs = codecs
        self.weights: dict[str, Weight] = {}

    def weight(self, weight: Weight) -> Value:
        """The value of a weight in the function being built; one node a use."""
        for name, shape in weight.tensors or ((weight.name, weight.shape),):
            known = self.weights.setdefault(name, weight if name == weight.name else Weight(name, shape, weight.codec))
            if known.shape != shape:
                raise EmitError(f"weight {name} has shape {known.shape} in one place and {shape} in another")
        known = self.weights.get(weight.name, weight)
        return append("weight", (), (TensorType(weight.shape, F32),), {"weight": known})[0]


@dataclass(eq=False)
class Step:
    """One pass over T tokens at positions start .. start + T - 1, of which `length` are real (None: all).

    k and v are the caches `[layers, context, kv_heads, head_dim]`; attention replaces them as it appends. A batch is T
    tokens of as many sequences, `start` [T] their positions, and the caches hold the layers of one sequence after
    another: `[T * layers, context, kv_heads, head_dim]`. `every`: logits are wanted at each position.
    """

    module: ModelModule
    tokens: Value
    start: Value
    length: Value | None
    k: Value
    v: Value
    every: bool = False

    @property
    def context(self) -> int:
        return self.k.shape[1]

    @property
    def batched(self) -> bool:
        return self.start.type.rank == 1

    def weight(self, name: str, shape: Sequence[int], codec: str | None = None, transform=None) -> Value:
        """The checkpoint tensor `<module path>.<name>`; `codec` overrides the stored one."""
        full = ".".join(filter(None, (current_path(), name)))
        return self.module.weight(Weight(full, tuple(shape), codec or self.module.codecs(full), transform))

    def vector(self, name: str, shape: Sequence[int], transform=None) -> Value:
        """A small tensor (norm weight, bias), stored in f32."""
        return self.weight(name, shape, "f32", transform)

    def stack(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> Value:
        """Tensors `<module path>.<part>` of one shape [..., in], their rows under one another: [len(parts) * ..., in].

        Tensors of different codecs are held in f32.
        """
        path = current_path()
        names = [f"{path}.{part}" for part in parts]
        codecs = {self.module.codecs(n) for n in names}
        rows = len(parts) * (shape[0] if len(shape) > 1 else 1)
        codec = codecs.pop() if len(codecs) == 1 else "f32"
        whole = Weight(f"{path}.{name}", (rows, shape[-1]), codec, parts=tuple((n, tuple(shape)) for n in names))
        return self.module.weight(whole)

    def table(self, name: str, shape: Sequence[int], values: Callable[[], np.ndarray]) -> Value:
        """An f32 table computed from the config."""
        return self.module.weight(Weight(name, tuple(shape), values=values))


def embedding(step: Step, name: str, vocab: int, hidden: int, scale: float = 1.0) -> Value:
    """Rows of `<name>.weight` [vocab, hidden] for the step's tokens, times `scale`: [T, hidden]."""
    with scope(name):
        weight = step.weight("weight", (vocab, hidden))
        rows = TensorType((step.tokens.shape[0], hidden), F32)
        return scaled(append("embedding", (step.tokens, weight), (rows,))[0], scale)


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


def linear_parts(step: Step, x: Value, name: str, parts: Mapping[str, int]) -> tuple[Value, ...]:
    """The projections that one `torch.nn.Linear` called `name` fuses, apart: x [T, in] to [T, rows] for each.

    parts: what each is called and how many rows it has, in the order in which the fused weight holds them.
    """
    path, total = current_path(), sum(parts.values())
    fused, codec = f"{path}.{name}.weight", step.module.codecs(f"{path}.{name}.weight")
    projected, start = [], 0
    for part, rows in parts.items():
        with scope(part):
            own = Weight(
                f"{path}.{part}.weight",
                (rows, x.shape[-1]),
                codec,
                parts=((fused, (total, x.shape[-1])),),
                rows=(start, start + rows),
            )
            projected.append(project(x, step.module.weight(own)))
        start += rows
    return tuple(projected)


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


def head_norms(step: Step, x: Value, name: str, eps: float) -> Value:
    """A LayerNorm without bias for each head of [T, heads, head_dim], with weight `<name>.norms.<head>.weight`, in f32."""
    with scope(name):
        weight = step.stack("weight", [f"norms.{head}.weight" for head in range(x.shape[1])], x.shape[2:])
        return append("head_norms", (x, weight), (x.type,), {"eps": eps})[0]


def rotary_tables(step: Step, rotary: Rotary, name: str = "rotary") -> tuple[Value, Value]:
    """cos and sin for `rope`, [context, rotary_dim / 2], as tables `<name>.cos` and `<name>.sin`."""
    shape = (step.context, rotary.inv_freq.size)
    cos = step.table(f"{name}.cos", shape, lambda: rotary.table(step.context, np.cos))
    sin = step.table(f"{name}.sin", shape, lambda: rotary.table(step.context, np.sin))
    return cos, sin


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
    if step.batched:
        layers //= q.shape[0]
    ok = q.type.rank == 3 and k.type == v.type and k.shape == (q.shape[0], kv_heads, head_dim)
    if not ok or q.shape[2] != head_dim or q.shape[1] % kv_heads or not 0 <= layer < layers:
        raise fail("attention", f"operands do not fit the cache {step.k.type} at layer {layer}", (q, k, v))
    operands = (q, k, v, step.k, step.v, step.start) + ((step.length,) if step.length is not None else ())
    out = TensorType((q.shape[0], q.shape[1] * head_dim), F32)
    attrs = {"layer": layer, "scale": scale, "window": window, "softcap": softcap}
    result, step.k, step.v = append("attention", operands, (out, step.k.type, step.v.type), attrs)
    return result


def route(logits: Value, top_k: int, normalised: bool) -> tuple[Value, Value]:
    """The experts of each token: numbers i32 [T, top_k] and weights f32 [T, top_k], the most likely first.

    logits: [T, experts]. The weights are the softmax over all experts, divided by their sum over the chosen ones where
    `normalised`. On a tie the lower number comes first.
    """
    tokens, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise fail("route", f"cannot choose {top_k} of {experts} experts", (logits,))
    types = TensorType((tokens, top_k), I32), TensorType((tokens, top_k), F32)
    return append("route", (logits,), types, {"top_k": top_k, "normalised": normalised})


def experts(
    step: Step,
    x: Value,
    routing: tuple[Value, Value],
    count: int,
    intermediate: int,
    function: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """Sum over a token's experts e of weight_e * down_e(function(gate_e(x)) * up_e(x)): [T, hidden] to [T, hidden].

    routing: what `route` gives. Only chosen experts are computed. `<e>.<names>.weight` are the tensors of gate and up
    [intermediate, hidden] and of down [hidden, intermediate]; the operation reads all experts' rows stacked.
    """
    hidden = x.shape[1]
    gate, up, down = (
        step.stack(f"{name}.weight", [f"{e}.{name}.weight" for e in range(count)], shape)
        for name, shape in zip(names, ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate)))
    )
    chosen, weights = routing
    if chosen.shape != weights.shape or chosen.shape[0] != x.shape[0] or function not in ACTIVATIONS:
        raise fail("experts", "needs x [T, hidden], and numbers and weights [T, k] of each token's experts", (x, *routing))
    attrs = {"experts": count, "function": function}
    return append("experts", (x, chosen, weights, gate, up, down), (x.type,), attrs)[0]


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
    """The rows whose logits are wanted: that of the last real token, or all of a batch or where `every` is set."""
    if step.batched or step.every:
        return x
    if step.length is None:
        return ops.slice_(x, (x.shape[0] - 1, 0), x.shape) if x.shape[0] > 1 else x
    last = ops.subtract(step.length, ops.constant(1, I32, ()))
    return ops.dynamic_slice(x, (last, ops.constant(0, I32, ())), (1, x.shape[1]))


def argmax(logits: Value) -> Value:
    """Index of the largest logit, the lowest of equals: [vocab] to a scalar i32, [T, vocab] to [T]."""
    if logits.type.rank not in (1, 2) or logits.dtype is not F32:
        raise fail("argmax_rows", "needs logits [vocab] or [T, vocab]", (logits,))
    return append("argmax_rows", (logits,), (TensorType(logits.shape[:-1], I32),))[0]
