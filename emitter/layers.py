"""The vocabulary that model families are written in: layer operations over weights named as the checkpoint names them.

A layer operation is one node of the graph that says what is computed; `castiron.emitter.lowering` says how (StableHLO, or
kernels of our own). Scopes name both the module path and the weights: inside `scope("self_attn")`,
`linear(x, "q_proj", n)` reads the checkpoint tensor `<path>.self_attn.q_proj.weight`.

Shapes: T tokens of one sequence; x is `[T, features]`, heads are `[T, heads, head_dim]`, all f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter import ops, state_rows
from castiron.emitter.caches import cache_of
from castiron.emitter.ir import Value, append, current_path, fail, scope
from castiron.emitter.rotary import Rotary
from castiron.emitter.states import ROLES, ring_rows
from castiron.emitter.step import Step, Weight
from castiron.emitter.types import F32, I32, TensorType

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gate: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), where g = min(gate, limit)."""

    alpha: float
    limit: float


def embedding(step: Step, name: str, vocab: int, hidden: int, scale: float = 1.0, ids: Value | None = None) -> Value:
    """Rows of `<name>.weight` [vocab, hidden] for the step's tokens, or for `ids` i32 [T], times `scale`: [T, hidden]."""
    with scope(name):
        weight = step.weight("weight", (vocab, hidden))
        rows = TensorType((step.tokens.shape[0], hidden), F32)
        return scaled(append("embedding", (step.tokens if ids is None else ids, weight), (rows,))[0], scale)


def positions(step: Step) -> Value:
    """i32 [T]: the position of each of the step's tokens; some position of the context for what is none."""
    shape = step.tokens.shape
    if step.mode == "batch":
        return ops.maximum(step.start, ops.constant(0, I32, shape))
    following = ops.add(ops.iota(shape, 0), ops.broadcast_in_dim(step.start, shape, ()))
    return ops.minimum(following, ops.constant(step.context - 1, I32, shape))


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


def linear_parts(
    step: Step, x: Value, name: str, parts: Mapping[str, int], bias: bool = False, groups: int = 1
) -> tuple[Value, ...]:
    """The projections that one `torch.nn.Linear` called `name` fuses, apart: x [T, in] to [T, rows] for each.

    parts: what each is called and how many rows it has, in the order in which the fused weight holds them; with `groups` it
    holds them so many times over, each time an equal share of each part's rows.
    """
    path, total = current_path(), sum(parts.values())

    def own(part: str, kind: str, rows: int, first: int, inner: tuple[int, ...]) -> Value:
        fused = f"{path}.{name}.{kind}"
        taken = first // groups, (first + rows) // groups
        whole, codec = ((fused, (total, *inner)),), step.module.codecs(fused) if inner else "f32"
        weight = Weight(f"{path}.{part}.{kind}", (rows, *inner), codec, parts=whole, rows=taken, groups=groups)
        return step.module.weight(weight)

    projected, first = [], 0
    for part, rows in parts.items():
        with scope(part):
            weight = own(part, "weight", rows, first, x.shape[1:])
            projected.append(project(x, weight, own(part, "bias", rows, first, ()) if bias else None))
        first += rows
    return tuple(projected)


def values(step: Step, name: str, shape: tuple[int, ...]) -> Value:
    """The numbers of the tensor `name`, f32, for operations of `castiron.emitter.ops`."""
    weight = step.weight(name, shape)
    return append("values", (weight,), (weight.type,))[0]


def rms_norm(step: Step, x: Value, name: str | None, eps: float, transform=None, groups: int = 1) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), in f32; with no name, without weight.

    With `groups`, x is [T, features] and each of so many equal parts of a row is divided by its own mean.
    """
    if name is None:
        ones = step.table(f"ones.{x.shape[-1]}", x.shape[-1:], lambda: np.ones(x.shape[-1:], np.float32))
        return append("rms_norm", (x, ones), (x.type,), {"eps": eps})[0]
    with scope(name):
        if groups > 1:
            shape, whole = (groups, x.shape[1] // groups), ((f"{current_path()}.weight", x.shape[1:]),)
            weight = step.module.weight(Weight(f"{current_path()}.groups", shape, transform=transform, parts=whole))
            parts = ops.reshape(x, (x.shape[0], *shape))
            return ops.reshape(append("rms_norm", (parts, weight), (parts.type,), {"eps": eps})[0], x.shape)
        weight = step.vector("weight", x.shape[-1:], transform)
        return append("rms_norm", (x, weight), (x.type,), {"eps": eps})[0]


def layer_norm(step: Step, x: Value, name: str, eps: float, bias: bool = True) -> Value:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv:1607.06450), in f32."""
    with scope(name):
        operands = [x, *(step.vector(vector, x.shape[-1:]) for vector in ("weight", *["bias"] * bias))]
        return append("layer_norm", operands, (x.type,), {"eps": eps})[0]


def head_norms(step: Step, x: Value, name: str, eps: float) -> Value:
    """A LayerNorm without bias for each head of [T, heads, head_dim], with weight `<name>.norms.<head>.weight`, in f32."""
    with scope(name):
        weight = step.stack("weight", [f"norms.{head}.weight" for head in range(x.shape[1])], x.shape[2:])
        return append("head_norms", (x, weight), (x.type,), {"eps": eps})[0]


def rotary_tables(
    step: Step, rotary: Rotary, name: str = "rotary", growth: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[Value, Value]:
    """cos and sin for `rope`, [context, rotary_dim / 2], as tables `<name>.cos` and `<name>.sin`.

    growth: what a head is multiplied by besides, f32 [context] of positions [context].
    """
    shape = (step.context, rotary.inv_freq.size)

    def values(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        table = rotary.table(step.context, function)
        return table if growth is None else table * growth(np.arange(step.context))[:, None]

    cos = step.table(f"{name}.cos", shape, lambda: values(np.cos))
    sin = step.table(f"{name}.sin", shape, lambda: values(np.sin))
    return cos, sin


def rope(step: Step, x: Value, tables: tuple[Value, Value], interleaved: bool = False) -> Value:
    """Rotary embedding (arXiv:2104.09864) of heads [T, heads, head_dim] at the step's positions.

    tables: cos and sin, [context, rotary_dim / 2]. The first rotary_dim features turn: half against half as HF's
    `rotate_half` does, or where `interleaved` each even one against the odd one after it. The rest pass through.
    """
    cos, sin = tables
    if x.type.rank != 3 or cos.type != sin.type or cos.shape[0] < step.context or 2 * cos.shape[1] > x.shape[2]:
        raise fail("rope", "needs heads [T, heads, head_dim] and tables [context, rotary_dim / 2]", (x, cos, sin))
    attrs = {"rotary_dim": 2 * cos.shape[1], "interleaved": interleaved, "mode": step.mode}
    return append("rope", (x, cos, sin, step.start), (x.type,), attrs)[0]


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
    cache: tuple[str, str] | None = None,
    sinks: Value | None = None,
    bidirectional: bool = False,
) -> Value:
    """Append k, v [T, kv_heads, head_dim] to a layer's cache, then causal grouped-query attention.

    layer: of the model, whose states `k` and `v`, or `k_sliding` and `v_sliding`, have it; or of the states `cache`.

    q is [T, heads, head_dim]; a query at position p sees positions j with j <= p and, under a window, p - j < window.
    Scores are `q . k * scale`, soft-capped as `softcap * tanh(score / softcap)` where given (Gemma 2, arXiv:2408.00118).
    sinks [heads] are scores of nothing: each is one more in the softmax of its head (gpt-oss, arXiv:2508.10925).
    bidirectional: a query sees later tokens too, |p - j| < window; in functions that take a whole text (role encode), whose
    states are rows of one layer that every layer writes anew.
    The states are positional, or rings for such windows. What is appended is rounded as the states store it
    (`emitter.caches`) before any query sees it; all else is f32. Returns [T, heads * head_dim].
    """
    if bidirectional:
        cache, layer = ("k", "v"), 0
    if cache is None:
        cache, layer = step.cache_of(layer)
    k_cache, v_cache = (step.states[name] for name in cache)
    kind, (layers, rows, kv_heads, *row) = step.kept[cache[0]].kind, k_cache.shape
    turned = kind == "window" and (not window or ring_rows(window, 1 if step.mode == "batch" else q.shape[0]) > rows)
    held = cache_of(k_cache.dtype)
    ok = q.type.rank == 3 and k.type == v.type and k.shape[:2] == (q.shape[0], kv_heads)
    ok = ok and held is not None and held.row(k.shape[2]) == tuple(row)
    ok = ok and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0 and 0 <= layer < layers // step.sequences
    ok = ok and not (bidirectional and (step.role != "encode" or kind != "positional"))
    if not ok or kind not in ("positional", "window") or turned:
        raise fail("attention", f"operands do not fit the {kind} cache {k_cache.type} at layer {layer}", (q, k, v))
    operands = (q, k, v, k_cache, v_cache, step.start) + ((step.length,) if step.length is not None else ())
    if sinks is not None:
        operands = (*operands, sinks)
    out = TensorType((q.shape[0], q.shape[1] * q.shape[2]), F32)
    attrs = {"layer": layer, "scale": scale, "window": window, "softcap": softcap, "mode": step.mode, "cache": kind}
    attrs |= {"sinks": sinks is not None, "bidirectional": bidirectional}
    result, *carried = append("attention", operands, (out, k_cache.type, v_cache.type), attrs)
    step.states.update(zip(cache, carried, strict=True))
    return result


def recurrent(step: Step, name: str, layer: int) -> Value:
    """The state `name` of a layer before the step's first token, [1, ...], or that of each sequence of a batch, [T, ...]."""
    state = step.states[name]
    if step.kept[name].kind != "recurrent" or not 0 <= layer < state.shape[0] // step.sequences:
        raise fail("recurrent", f"there is no recurrent state {name!r} at layer {layer}", (state,))
    return state_rows.of_layer(state, layer, step.sequences)


def carry(step: Step, name: str, layer: int, after: Value) -> None:
    """Carry the state `name` of a layer on: it becomes what it is after the last real token.

    after: the state after each of the step's tokens, [T, ...]. A sequence of a batch that is left alone keeps its own.
    """
    state, before = step.states[name], recurrent(step, name, layer)
    if after.shape != (step.tokens.shape[0], *state.shape[1:]):
        raise fail("carry", f"needs the state {name!r} after each token, [T, ...]", (after, state))
    last = state_rows.where_run(step.start, after, before) if step.mode == "batch" else last_row(step, after)
    step.states[name] = state_rows.with_layer(state, layer, last)


def route(
    logits: Value,
    top_k: int,
    normalised: bool,
    scores: str = "softmax",
    correction: Value | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Value, Value]:
    """The experts of each token: numbers i32 [T, top_k] and weights f32 [T, top_k], the most likely first.

    logits: [T, experts]. The weights are the softmax over all experts, or each one's sigmoid, as `scores` says, divided by
    their sum over the chosen ones where `normalised`. correction [experts] is added to them to choose, and not to what is
    chosen (arXiv:2408.15664). groups (n, m): of n equal groups of experts those m are chosen from whose two best ones come
    to most (arXiv:2412.19437). On a tie the lower number comes first.
    """
    tokens, experts = logits.shape
    operands = (logits,) if correction is None else (logits, correction)
    of, kept = groups
    if of != 1 and (of < 1 or experts % of or experts // of < 2 or not 1 <= kept <= of or kept * experts // of < top_k):
        raise fail("route", f"cannot choose {top_k} experts from {kept} of {of} groups of {experts}", operands)
    if not 1 <= top_k <= experts or scores not in ("softmax", "sigmoid"):
        raise fail("route", f"cannot choose {top_k} of {experts} experts by {scores}", operands)
    types = TensorType((tokens, top_k), I32), TensorType((tokens, top_k), F32)
    attrs = {"top_k": top_k, "normalised": normalised, "scores": scores, "groups": groups}
    chosen, weights = append("route", operands, types, attrs)
    return chosen, weights


def experts(
    step: Step,
    x: Value,
    routing: tuple[Value, Value],
    count: int,
    intermediate: int,
    function: str | ClampedSwiGLU,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> Value:
    """Sum over a token's experts e of weight_e * down_e(function(gate_e(x)) * up_e(x)): [T, hidden] to [T, hidden].

    With two names there is no gate, and an expert is down_e(function(up_e(x))).

    routing: what `route` gives. Only chosen experts are computed. `<e>.<names>.weight` are the tensors of gate and up
    [intermediate, hidden] and of down [hidden, intermediate], `<e>.<names>.bias` what is added to each; the operation reads
    all experts' rows stacked. function: an activation, or all of the gate.
    """
    hidden = x.shape[1]
    shapes = (*[(intermediate, hidden)] * (len(names) - 1), (hidden, intermediate))
    stacked = [
        step.stack(f"{name}.{kind}", [f"{e}.{name}.{kind}" for e in range(count)], shape[:rank])
        for kind, rank in (("weight", 2), *[("bias", 1)] * bias)
        for name, shape in zip(names, shapes)
    ]
    chosen, weights = routing
    known = function in ACTIVATIONS or (isinstance(function, ClampedSwiGLU) and len(names) == 3)
    if chosen.shape != weights.shape or chosen.shape[0] != x.shape[0] or not known:
        raise fail("experts", "needs x [T, hidden], and numbers and weights [T, k] of each token's experts", (x, *routing))
    attrs = {"experts": count, "function": function, "gated": len(names) == 3}
    return append("experts", (x, chosen, weights, *stacked), (x.type,), attrs)[0]


def activation(x: Value, kind: str) -> Value:
    """silu, gelu (exact), gelu_tanh (the tanh form), relu or relu2 (its square), element by element."""
    if kind not in ACTIVATIONS:
        raise fail("activation", f"{kind!r} is not one of {', '.join(ACTIVATIONS)}", (x,))
    return append("activation", (x,), (x.type,), {"function": kind})[0]


def gated_mlp(step: Step, x: Value, intermediate: int, function: str, bias: bool = False) -> Value:
    """`down_proj(function(gate_proj(x)) * up_proj(x))` (arXiv:2002.05202): [T, hidden] to [T, hidden]."""
    gate = activation(linear(step, x, "gate_proj", intermediate, bias), function)
    up = linear(step, x, "up_proj", intermediate, bias)
    return linear(step, ops.multiply(gate, up), "down_proj", x.shape[1], bias)


def scaled(x: Value, factor: float) -> Value:
    """x times a constant; the value itself for 1."""
    return x if factor == 1.0 else ops.multiply(x, ops.constant(factor, F32, x.shape))


def softcapped(x: Value, cap: float | None) -> Value:
    """cap * tanh(x / cap), or the value itself without a cap."""
    return x if cap is None else scaled(ops.tanh(ops.divide(x, ops.constant(cap, F32, x.shape))), cap)


def last_real(step: Step) -> Value:
    """The row of the step's last real token, i32."""
    if step.length is None:
        return ops.constant(step.tokens.shape[0] - 1, I32, ())
    return ops.subtract(step.length, ops.constant(1, I32, ()))


def _row(x: Value, row: Value) -> Value:
    """Row `row` of x [T, ...]: [1, ...]."""
    rest = [ops.constant(0, I32, ()) for _ in x.shape[1:]]
    return ops.dynamic_slice(x, (row, *rest), (1, *x.shape[1:]))


def last_row(step: Step, x: Value) -> Value:
    """The row of x [T, ...] of the step's last real token: [1, ...]."""
    return _row(x, last_real(step))


def wanted_rows(step: Step, x: Value) -> Value:
    """The rows of x [T, hidden] whose results are wanted: every token's in verify, batch, embed and encode, else the last
    real one's."""
    every = ROLES[step.role][1] or x.shape[0] == 1
    return x if every else last_row(step, x)


def lm_head(step: Step, x: Value, vocab: int, tied: bool, embedding: str = "model.embed_tokens") -> Value:
    """Logits [rows, vocab] of x [rows, hidden], by the weight of the embedding of this path where `tied`, else by `lm_head`.

    x is what a text's embedding is made of; a family's `forward` does nothing after this that carries a state on.
    """
    step.hidden = x
    if tied:
        return project(x, step.weight(f"{embedding}.weight", (vocab, x.shape[1])))
    return linear(step, x, "lm_head", vocab)


def argmax(logits: Value) -> Value:
    """Index of the largest logit, the lowest of equals: [vocab] to a scalar i32, [T, vocab] to [T]."""
    if logits.type.rank not in (1, 2) or logits.dtype is not F32:
        raise fail("argmax_rows", "needs logits [vocab] or [T, vocab]", (logits,))
    return append("argmax_rows", (logits,), (TensorType(logits.shape[:-1], I32),))[0]
