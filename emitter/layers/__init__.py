"""The layers that model families call to build a graph, such as `linear` and `attention`.

They append layer operations, which `emitter.lowering` replaces by StableHLO or kernels. Scopes give
the names of weights: inside `scope("self_attn")`, `linear(x, "q_proj", n)` reads the checkpoint
tensor `<path>.self_attn.q_proj.weight`.

Shapes: T tokens of one sequence; x is `[T, features]`, heads are `[T, heads, head_dim]`, all f32.

    operations   the checks and the text of the layer operations
    step         weights, modules, and the function that is being built
    kv_cache     KV caches and their storage formats
    recurrences  layers with a recurrent state
    rotary       frequencies of rotary embeddings
    pooling      from hidden states to an embedding
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from castiron.emitter.abi import ROLES
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Value, current_path, fail, scope
from castiron.emitter.graph.stablehlo import build
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.layers.operations import LAYERS
from castiron.emitter.layers.rotary import Rotary
from castiron.emitter.layers.step import Step, Weight


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""

    alpha: float
    limit: float


def embedding(step: Step, name: str, vocab: int, hidden: int, scale: float = 1.0, ids: Value | None = None) -> Value:
    """Return `scale` times the embeddings [T, hidden] of `ids` i32 [T] (default: step.tokens)."""
    with scope(name):
        weight = step.weight("weight", (vocab, hidden))
        rows = TensorType((step.tokens.shape[0], hidden), F32)
        return scaled(build(LAYERS, "embedding", (step.tokens if ids is None else ids, weight), (rows,))[0], scale)


def positions(step: Step) -> Value:
    """Return the position of each token, i32 [T], clamped to 0 .. context - 1.

    Padding may be after the end of the context; in a batch, an idle sequence has a negative
    position.
    """
    shape = step.tokens.shape
    if step.mode == "batch":
        return ops.maximum(step.start, ops.constant(0, I32, shape))
    following = ops.add(ops.iota(shape, 0), ops.broadcast_in_dim(step.start, shape, ()))
    return ops.minimum(following, ops.constant(step.context - 1, I32, shape))


def project(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Return x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    return build(LAYERS, "linear", operands, (TensorType((x.shape[0], weight.shape[0]), F32),))[0]


def linear(step: Step, x: Value, name: str, out_features: int, bias: bool = False) -> Value:
    """Apply the `torch.nn.Linear` called `name` to x [T, in]; return [T, out_features]."""
    with scope(name):
        weight = step.weight("weight", (out_features, x.shape[-1]))
        x = _reordered(step, x, f"{current_path()}.weight")
        return project(x, weight, step.vector("bias", (out_features,)) if bias else None)


def _reordered(step: Step, x: Value, weight: str) -> Value:
    """Permute the features of x [T, in] as the columns of `weight` are (`orders`)."""
    if (order := step.module.orders.get(weight)) is None:
        return x
    step.module.reordered.add(weight)
    if (x, order) not in step.reordered:
        vector = step.module.weight(Weight(order, x.shape[1:]))
        features = ops.convert(build(LAYERS, "values", (vector,), (vector.type,))[0], I32)
        step.reordered[x, order] = ops.transpose(ops.gather_rows(ops.transpose(x, (1, 0)), features), (1, 0))
    return step.reordered[x, order]


def linear_parts(
    step: Step, x: Value, name: str, parts: Mapping[str, int], bias: bool = False, groups: int = 1
) -> tuple[Value, ...]:
    """Apply a fused `torch.nn.Linear`, such as one for q, k and v; return a [T, n] for each part.

    groups: if above 1, each part is cut into `groups` pieces, which alternate: q0, k0, q1, k1.
    """
    path, total = current_path(), sum(parts.values())

    def own(part: str, kind: str, rows: int, first: int, inner: tuple[int, ...]) -> Value:
        fused = f"{path}.{name}.{kind}"
        taken = first // groups, (first + rows) // groups
        full, codec = ((fused, (total, *inner)),), step.module.codecs(fused) if inner else "f32"
        weight = Weight(f"{path}.{part}.{kind}", (rows, *inner), codec, parts=full, rows=taken, groups=groups)
        return step.module.weight(weight)

    projected, first, x = [], 0, _reordered(step, x, f"{path}.{name}.weight")
    for part, rows in parts.items():
        with scope(part):
            weight = own(part, "weight", rows, first, x.shape[1:])
            projected.append(project(x, weight, own(part, "bias", rows, first, ()) if bias else None))
        first += rows
    return tuple(projected)


def values(step: Step, name: str, shape: tuple[int, ...]) -> Value:
    """Return the checkpoint tensor `<module path>.<name>` as f32, for StableHLO operations."""
    weight = step.weight(name, shape)
    return build(LAYERS, "values", (weight,), (weight.type,))[0]


def rms_norm(step: Step, x: Value, name: str | None, eps: float, transform=None, groups: int = 1) -> Value:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467).

    name: None for a norm without a weight.
    transform: applied to the weight at compile time.
    groups: number of equal parts of a row that are normalised separately.
    """
    if name is None:
        ones = step.table(f"ones.{x.shape[-1]}", x.shape[-1:], lambda: np.ones(x.shape[-1:], np.float32))
        return build(LAYERS, "rms_norm", (x, ones), (x.type,), {"eps": eps})[0]
    with scope(name):
        if groups > 1:
            shape, full = (groups, x.shape[1] // groups), ((f"{current_path()}.weight", x.shape[1:]),)
            weight = step.module.weight(Weight(f"{current_path()}.groups", shape, transform=transform, parts=full))
            parts = ops.reshape(x, (x.shape[0], *shape))
            return ops.reshape(build(LAYERS, "rms_norm", (parts, weight), (parts.type,), {"eps": eps})[0], x.shape)
        weight = step.vector("weight", x.shape[-1:], transform)
        return build(LAYERS, "rms_norm", (x, weight), (x.type,), {"eps": eps})[0]


def rms_norm_plus_one(step: Step, x: Value, name: str, eps: float) -> Value:
    """Apply Gemma's RMS norm, which multiplies by 1 + weight, to the last dimension of x."""
    return rms_norm(step, x, name, eps, lambda weight: np.float32(1.0) + weight)


def layer_norm(step: Step, x: Value, name: str, eps: float, bias: bool = True) -> Value:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    with scope(name):
        operands = [x, *(step.vector(vector, x.shape[-1:]) for vector in ("weight", *["bias"] * bias))]
        return build(LAYERS, "layer_norm", operands, (x.type,), {"eps": eps})[0]


def head_norms(step: Step, x: Value, name: str, eps: float) -> Value:
    """Apply a LayerNorm with the weight `<name>.norms.<head>` to each head of x."""
    with scope(name):
        weight = step.stack("weight", [f"norms.{head}.weight" for head in range(x.shape[1])], x.shape[2:])
        return build(LAYERS, "head_norms", (x, weight), (x.type,), {"eps": eps})[0]


def rotary_tables(
    step: Step, rotary: Rotary, name: str = "rotary", growth: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[Value, Value]:
    """Return the tables (cos, sin) for `rope`, each f32 [context, rotary_dim / 2].

    growth: maps positions [context] to factors f32 [context] of the rows of both tables.
    """
    if step.is_long:
        assert rotary.long
        rotary, name = rotary.long, f"{name}.long"
    shape = (step.context, rotary.inv_freq.size)

    def values(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        table = rotary.table(step.context, function)
        return table if growth is None else table * growth(np.arange(step.context))[:, None]

    cos = step.table(f"{name}.cos", shape, lambda: values(np.cos))
    sin = step.table(f"{name}.sin", shape, lambda: values(np.sin))
    return cos, sin


def rope(step: Step, x: Value, tables: tuple[Value, Value], interleaved: bool = False) -> Value:
    """Rotate heads x [T, heads, head_dim] by their positions (rotary embedding, arXiv:2104.09864).

    Only the first rotary_dim features of a head are rotated, in pairs: features i and i +
    rotary_dim / 2, as in HF's `rotate_half`, or features 2 i and 2 i + 1 if `interleaved`.
    """
    cos, sin = tables
    if cos.shape[0] < step.context:
        problem = f"the tables have {cos.shape[0]} positions; they must have at least {step.context}, the context"
        raise fail("rope", problem, (x, cos, sin))
    attrs = {"rotary_dim": 2 * cos.shape[1], "interleaved": interleaved, "mode": step.mode}
    return build(LAYERS, "rope", (x, cos, sin, step.start), (x.type,), attrs)[0]


def split_heads(x: Value, heads: int) -> Value:
    """Reshape x [T, heads * head_dim] to [T, heads, head_dim]."""
    return ops.reshape(x, (x.shape[0], heads, x.shape[1] // heads))


def qkv_heads(step: Step, x: Value, heads: int, kv_heads: int, head_dim: int, bias: bool = False) -> tuple[Value, Value, Value]:
    """Project x with `q_proj`, `k_proj`, `v_proj` to q, k, v [T, heads or kv_heads, head_dim]."""
    counts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    q, k, v = (split_heads(linear(step, x, name, n * head_dim, bias), n) for name, n in counts.items())
    return q, k, v


def attention(
    step: Step,
    layer: int,
    q: Value,
    k: Value,
    v: Value,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Value | None = None,
    bidirectional: bool = False,
) -> Value:
    """Append k, v [T, kv_heads, head_dim] to the KV cache; apply causal grouped-query attention.

    q is [T, heads, head_dim]; the result is [T, heads * head_dim]. Keys and values are rounded to
    the cache's storage format before any query reads them.

    scale: factor of the scores q . k.
    window: a query at position p attends to positions j with p - window < j <= p.
    softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118).
    sinks: [heads], an extra score in the softmax of each head (gpt-oss, arXiv:2508.10925).
    bidirectional: for encoders, which take a complete text in one call: all positions, or |p - j| <
        window. The layers overwrite one KV cache in turn.
    """
    cache, layer = step.cache_of(0 if bidirectional else layer)
    k_cache, v_cache = (step.states[name] for name in cache)
    record = step.records[cache[0]]
    if bidirectional and step.role != "encode":
        problem = f"role is {step.role!r}; bidirectional attention needs role 'encode'"
        raise fail("attention", problem, (q, k, v))
    operands = (q, k, v, k_cache, v_cache, step.start) + ((step.length,) if step.length is not None else ())
    if sinks is not None:
        operands = (*operands, sinks)
    out = TensorType((q.shape[0], q.shape[1] * q.shape[2]), F32)
    attrs = {"layer": layer, "scale": scale, "window": window, "softcap": softcap, "mode": step.mode, "cache": record.kind}
    attrs |= {"storage": record.storage, "sinks": sinks is not None, "bidirectional": bidirectional}
    result, *carried = build(LAYERS, "attention", operands, (out, k_cache.type, v_cache.type), attrs)
    step.states.update(zip(cache, carried, strict=True))
    return result


def route(
    logits: Value,
    top_k: int,
    normalised: bool,
    scores: str = "softmax",
    correction: Value | None = None,
    groups: tuple[int, int] = (1, 1),
    rated: int = 2,
) -> tuple[Value, Value]:
    """Choose the experts of each token: indices i32 and weights f32, both [T, top_k].

    On a tie the lower index comes first.
    logits: [T, experts]. scores: "softmax" over all experts, or "sigmoid" of each logit.
    normalised: whether to divide the weights of a token by their sum.
    correction: [experts], added to the scores only to choose experts (arXiv:2408.15664).
    groups: (n, m): the experts form n groups; a token uses experts of its best m groups only.
    rated: a group is ranked by the sum of its `rated` best scores (1 in arXiv:2405.04434, 2 in
        arXiv:2412.19437).
    """
    tokens, experts = logits.shape
    operands = (logits,) if correction is None else (logits, correction)
    types = TensorType((tokens, top_k), I32), TensorType((tokens, top_k), F32)
    attrs = {"top_k": top_k, "normalised": normalised, "scores": scores, "groups": groups, "rated": rated}
    chosen, weights = build(LAYERS, "route", operands, types, attrs)
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
    """Return the sum over chosen experts of weight * down(function(gate(x)) * up(x)): [T, hidden].

    routing: the result of `route`. Only the experts that it chooses for a token are computed.
    intermediate: width of the hidden layer of an expert.
    function: the activation. A `ClampedSwiGLU` computes all of function(gate(x)) * up(x).
    names: of gate, up and down, or of up and down. Expert e has the weights `<e>.<name>.weight`.
    """
    hidden = x.shape[1]
    shapes = (*[(intermediate, hidden)] * (len(names) - 1), (hidden, intermediate))
    stacked = [
        step.stack(f"{name}.{kind}", [f"{e}.{name}.{kind}" for e in range(count)], shape[:rank])
        for kind, rank in (("weight", 2), *[("bias", 1)] * bias)
        for name, shape in zip(names, shapes)
    ]
    chosen, weights = routing
    orders = [_orders_of_experts(step, names[:-1], count, hidden), _orders_of_experts(step, names[-1:], count, intermediate)]
    ordered = tuple(order is not None for order in orders)
    attrs = {"experts": count, "function": function, "gated": len(names) == 3, "ordered": ordered}
    operands = (x, chosen, weights, *stacked, *(order for order in orders if order is not None))
    return build(LAYERS, "experts", operands, (x.type,), attrs)[0]


def _orders_of_experts(step: Step, names: tuple[str, ...], count: int, features: int) -> Value | None:
    """Return the column orders of all experts' weights, f32 [count, features], or None."""
    path, module = current_path(), step.module
    weights = [[f"{path}.{e}.{name}.weight" for name in names] for e in range(count)]
    orders = [{module.orders.get(weight) for weight in expert} for expert in weights]
    if any(len(expert) > 1 or None in expert for expert in orders):
        return None
    module.reordered.update(weight for expert in weights for weight in expert)
    parts = tuple((str(*expert), (features,)) for expert in orders)
    return module.weight(Weight(f"{path}.{names[0]}.column_order", (count, features), parts=parts))


def activation(x: Value, kind: str) -> Value:
    """Apply silu, gelu (exact), gelu_tanh (approximate), relu or relu2 (relu squared) to x."""
    return build(LAYERS, "activation", (x,), (x.type,), {"function": kind})[0]


def gated_mlp(step: Step, x: Value, intermediate: int, function: str, bias: bool = False) -> Value:
    """Return `down_proj(function(gate_proj(x)) * up_proj(x))`, [T, hidden] (arXiv:2002.05202)."""
    gate = activation(linear(step, x, "gate_proj", intermediate, bias), function)
    up = linear(step, x, "up_proj", intermediate, bias)
    return linear(step, ops.multiply(gate, up), "down_proj", x.shape[1], bias)


def scaled(x: Value, factor: float) -> Value:
    """Return x * factor, or x itself if the factor is 1."""
    return x if factor == 1.0 else ops.multiply(x, ops.constant(factor, F32, x.shape))


def softcapped(x: Value, cap: float | None) -> Value:
    """Return cap * tanh(x / cap), or x itself if the cap is None."""
    return x if cap is None else scaled(ops.tanh(ops.divide(x, ops.constant(cap, F32, x.shape))), cap)


def last_row(step: Step, x: Value) -> Value:
    """Return the row [1, ...] of x [T, ...] for the last token that is not padding."""
    if step.length is None:
        row = ops.constant(step.tokens.shape[0] - 1, I32, ())
    else:
        row = ops.subtract(step.length, ops.constant(1, I32, ()))
    rest = [ops.constant(0, I32, ()) for _ in x.shape[1:]]
    return ops.dynamic_slice(x, (row, *rest), (1, *x.shape[1:]))


def wanted_rows(step: Step, x: Value) -> Value:
    """Return the rows of x [T, hidden] from which logits are computed; one in prefill."""
    every = ROLES[step.role].every_token or x.shape[0] == 1
    return x if every else last_row(step, x)


def lm_head(step: Step, x: Value, vocab: int, tied: bool, embedding: str = "model.embed_tokens") -> Value:
    """Return the logits [rows, vocab] of x [rows, hidden]; also store x in `step.hidden`.

    tied: whether to use the weight of the module `embedding` instead of that of `lm_head`.
    """
    step.hidden = x
    if tied:
        return project(x, step.weight(f"{embedding}.weight", (vocab, x.shape[1])))
    return linear(step, x, "lm_head", vocab)


def argmax(logits: Value) -> Value:
    """Return the index of the largest logit in each row, the lowest on a tie, i32 [T]."""
    return build(LAYERS, "argmax_rows", (logits,), (TensorType(logits.shape[:-1], I32),))[0]
