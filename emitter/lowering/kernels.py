"""Lowering rules that replace fused layer operations (`lowering.fusion`) by CPU kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Op, Param, Value, current_function, parameter
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.kernels.argmax import argmax as argmax_kernel
from castiron.emitter.kernels.attention.decode import DecodeTokens, attention_decode, head_parts
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.embed import embed as embed_kernel
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.emitter.kernels.norm import norm as norm_kernel
from castiron.emitter.kernels.recurrent.causal_conv import causal_conv as conv_kernel
from castiron.emitter.kernels.recurrent.gated_delta import gated_delta as delta_kernel
from castiron.emitter.kernels.recurrent.selective_scan import selective_scan as scan_kernel
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.layers.step import Weight, source
from castiron.emitter.lowering import portable
from castiron.emitter.lowering.portable import Stored
from castiron.emitter.lowering.projection import Projection, packed_param
from castiron.emitter.lowering.rewrite import Rule


@dataclass
class Context:
    """The options of the lowering rules, and values that one rule passes to the next.

    recurrent: the kernels of recurrent operations; None for those of CPUs.
    counters: i32 counters of finished workgroups; an attention kernel returns them for the next
        one.
    """

    isa: Isa
    threads: int
    project: Callable[[Projection], Value]
    recurrent: Mapping[str, Callable[..., Kernel]] | None = None
    counters: dict[TensorType, Value] = field(default_factory=dict)

    def recurrent_kernel(self, kind: str) -> Callable[..., Kernel]:
        return self.recurrent[kind] if self.recurrent else partial(RECURRENT[kind], isa=self.isa)

    def rules(self) -> dict[str, Rule]:
        """Return the rule of each kind of operation; those without a kernel become StableHLO."""
        return {**portable.RULES, **{kind: partial(rule, self) for kind, rule in RULES.items()}}


def _length(rows: int) -> Value | None:
    length = current_function().length
    # A constant if there is no padding, so that all functions with as many rows share kernels.
    return None if rows == 1 else ops.constant(rows, I32, ()) if length is None else length


def embedding(c: Context, op: Op, tokens: Value, weight: Stored) -> Value:
    (vocab, hidden), codec = weight.weight.shape, weight.weight.codec
    kernel = embed_kernel(codec, vocab, hidden, tokens.shape[0], isa=c.isa)
    return kernel_call(kernel, ids=tokens, weight=parameter(packed_param([weight.weight])))["y"]


def norm(c: Context, op: Op, x: Value, *stored: Stored) -> Value:
    if x.type.rank != 2:
        return portable.RULES[op.kind](op, x, *stored)
    given = {name: part.value() for name, part in zip(("weight", "bias"), stored)}
    if (length := _length(x.shape[0])) is not None:
        given["length"] = length
    (T, hidden), eps = x.shape, op.attrs["eps"]
    kernel = norm_kernel(op.kind, T, hidden, eps, isa=c.isa, length="length" in given, bias="bias" in given)
    return kernel_call(kernel, x=x, **given)["y"]


def matmul(c: Context, op: Op, x: Value, *operands: Any) -> Value:
    given, eps = iter(operands), op.attrs["eps"]
    norm = None if eps is None else (next(given).value(), eps)
    weights = [next(given).weight for _ in range(op.attrs["weights"])]
    biases = [next(given).weight for _ in range(op.attrs["biases"])]
    residual = next(given) if op.attrs["residual"] else None
    return c.project(Projection(x, weights, biases, norm, residual, op.attrs["glu"], _length(x.shape[0])))


def experts(c: Context, op: Op, x: Value, chosen: Value, weights: Value, *stacked: Stored) -> Value:
    count, function = op.attrs["experts"], op.attrs["function"]
    (tokens, hidden), per_token = x.shape, chosen.shape[1]
    chosen, length = ops.reshape(chosen, (tokens * per_token,)), _length(tokens)
    stacked, orders = portable.split_orders(op, stacked)
    of_pairs = None if length is None else ops.multiply(length, ops.constant(per_token, I32, ()))
    if orders[0]:
        x, length = portable.ordered(portable.rows_of_pairs(x, per_token), orders[0], chosen), of_pairs
    count_in = 2 if op.attrs["gated"] else 1
    into, down, biases = stacked[:count_in], stacked[count_in], stacked[count_in + 1 :]

    def through(x: Value, *stored: Stored, glu: str | None = None, length: Value | None = length) -> Value:
        weights = [s.weight for s in stored]
        return c.project(Projection(x, weights, glu=glu, length=length, chosen=chosen, experts=count))

    def biased(y: Value, i: int) -> Value:
        return ops.add(y, biases[i].value(lambda part: ops.gather_rows(part, chosen))) if biases else y

    if op.attrs["gated"] and len({part.weight.codec for part in into}) == 1 and function in ACTIVATIONS and not biases:
        inner = through(x, *into, glu=function)
    else:
        inner = portable.into_down([biased(through(x, part), i) for i, part in enumerate(into)], function)
    inner = portable.ordered(inner, orders[1], chosen)
    y = biased(through(inner, down, length=of_pairs), count_in)
    y = ops.reshape(y, (tokens, per_token, hidden))
    return ops.reduce("add", ops.multiply(y, ops.broadcast_in_dim(weights, y.shape, (0, 1))), (1,))


def fused_attention(c: Context, op: Op, *operands: Any) -> tuple[Value, Value, Value]:
    count, names, layout = op.attrs["rows"], op.attrs["prepared"], op.attrs["layout"]
    rows = [ops.reshape(x, (x.shape[0], prod(x.shape[1:]))) for x in operands[:count]]
    prepared = operands[count : count + len(names)]
    k_cache, v_cache, start, *rest = operands[count + len(names) :]
    (layers, cache_rows), tokens, attrs = k_cache.shape[:2], rows[0].shape[0], op.attrs
    scores = Scores(attrs["scale"], attrs["window"], attrs["softcap"], attrs["sinks"], attrs["bidirectional"])
    sinks = {"sinks": rest.pop().value()} if scores.sinks else {}
    ring = cache_rows if attrs["cache"] == "window" else None
    qkv = rows[0] if count == 1 else ops.concatenate(rows, 1)
    given = {name: stored.value() for name, stored in zip(names, prepared, strict=True)}
    # A ring buffer has fewer rows than there are positions, so the rotary tables give the context.
    context = given["cos"].shape[0] if ring and "cos" in given else cache_rows
    caches = Caches(layers, context, CACHES[attrs["storage"]], ring)
    updated = {"k_cache": k_cache, "v_cache": v_cache, "layer": attrs["layer"]}

    def token_by_token(kind: DecodeTokens, **where: Value) -> tuple[Value, Value, Value]:
        parts = head_parts(layout, c.isa, caches.format)
        part_layout = replace(layout, heads=layout.heads // parts)
        kernel = attention_decode(caches, part_layout, scores, kind, isa=c.isa)
        outs = []
        for part in range(parts):
            # All layers can share the counters, which are zero after each call. Every part appends the same keys and values.
            type_ = kernel.tensors["counters"]
            counters = c.counters.get(type_) or ops.constant(0, I32, type_.shape)
            heads = {"qkv": _part_of_queries(qkv, layout, parts, part)}
            if sinks:
                heads["sinks"] = _part_of_heads(sinks["sinks"], layout, parts, part)
            results = kernel_call(kernel, **heads, **given, **where, counters=counters, **updated)
            c.counters[type_] = results["counters"]
            updated.update({name: results[name] for name in ("k_cache", "v_cache") if name in results})
            outs.append(ops.reshape(results["out"], (tokens, layout.kv_heads, part_layout.group, layout.head_dim)))
        out = ops.reshape(ops.concatenate(outs, 2), (tokens, layout.keys)) if parts > 1 else results["out"]
        return out, updated["k_cache"], updated["v_cache"]

    if attrs["mode"] in ("decode", "batch"):
        return token_by_token(DecodeTokens("batch", tokens) if attrs["mode"] == "batch" else DecodeTokens(), position=start)
    chunk = {"start": start, "length": rest[0] if rest else ops.constant(tokens, I32, ())}
    kernel = rope_append(caches, tokens, layout, isa=c.isa)
    appended = kernel_call(kernel, qkv=qkv, **given, **chunk, **updated)
    kernel = attention_prefill(caches, tokens, layout, scores, isa=c.isa, threads=c.threads)
    out = kernel_call(kernel, **chunk, **sinks, **appended, layer=attrs["layer"])["out"]
    return out, appended["k_cache"], appended["v_cache"]


def _part_of_heads(x: Value, layout: HeadLayout, parts: int, part: int) -> Value:
    """Return [..., heads * n / parts]: the columns of the query heads in subset `part`."""
    if parts == 1:
        return x
    *rows, last = x.shape
    group = layout.group // parts
    by_head = ops.reshape(x, (prod(rows), layout.kv_heads, layout.group, last // layout.heads))
    low, high = (0, 0, part * group, 0), (*by_head.shape[:2], (part + 1) * group, by_head.shape[3])
    return ops.reshape(ops.slice_(by_head, low, high), (*rows, last // parts))


def _part_of_queries(qkv: Value, layout: HeadLayout, parts: int, part: int) -> Value:
    if parts == 1:
        return qkv
    tokens = qkv.shape[0]
    q, rest = ops.slice_(qkv, (0, 0), (tokens, layout.keys)), ops.slice_(qkv, (0, layout.keys), qkv.shape)
    return ops.concatenate((_part_of_heads(q, layout, parts, part), rest), 1)


def _tokens(op: Op, count: int, state: Value, numbers: Sequence[Value]) -> tuple[Tokens, dict[str, Value]]:
    """Return which tokens a recurrent kernel computes, and the operands of these tokens."""
    if op.attrs["mode"] == "batch":
        return Tokens(count, state.shape[0], batch=True), {"positions": numbers[0]}
    length = numbers[1:] if count > 1 else ()
    return Tokens(count, state.shape[0], length=bool(length)), {"length": length[0]} if length else {}


def _columns(x: Value) -> tuple[Value, Columns]:
    """Return the tensor [T, width] of which x [T, ...] is a slice of columns, and which columns."""
    tokens, first, made = x.shape[0], 0, current_function().ops
    rows = x
    while op := next((op for op in reversed(made) if rows in op.results), None):
        before = op.operands[0] if op.kind in ("reshape", "slice") else None
        if before is None or before.shape[:1] != (tokens,) or (op.kind == "slice" and before.type.rank != 2):
            break
        first += op.attrs["starts"][1] if op.kind == "slice" else 0
        rows = before
    if rows.type.rank != 2:
        rows = ops.reshape(rows, (tokens, prod(rows.shape[1:])))
    return rows, Columns(rows.shape[1], first)


def _recurrent(
    make: Callable[..., Kernel], op: Op, state: Value, numbers: Sequence[Value], rows: Mapping[str, Value], **given: Value
) -> tuple[Value, Value]:
    """Append the kernel call of a recurrent operation; return its result and the new state."""
    tokens, of_tokens = _tokens(op, op.results[0].shape[0], state, numbers)
    sources = {name: _columns(x) for name, x in rows.items()}
    kernel = make(tokens, {name: columns for name, (_, columns) in sources.items()})
    cache_rows = {name: source for name, (source, _) in sources.items()}
    after = kernel_call(kernel, **cache_rows, **given, **of_tokens, state=state, layer=op.attrs["layer"])
    result, carried = after.values()
    return ops.reshape(result, op.results[0].shape), carried


def causal_conv(c: Context, op: Op, x: Value, weight: Stored, *rest: Any) -> tuple[Value, Value]:
    numbers = 2 if op.attrs["mode"] == "prefill" else 1
    *bias, state = rest[:-numbers]
    features, _, positions = weight.weight.shape
    given = {"weight": parameter(_filters(weight.weight)), **({"bias": bias[0].value()} if bias else {})}

    def make(tokens: Tokens, columns: Mapping[str, Columns]) -> Kernel:
        function = op.attrs.get("activation")
        kernel = c.recurrent_kernel("causal_conv")
        return kernel(tokens, features, positions, columns["x"], bias=bool(bias), activation=function)

    return _recurrent(make, op, state, rest[-numbers:], {"x": x}, **given)


def _filters(weight: Weight) -> Param:
    """Return the filters [features, 1, n] of a convolution as f32 [n, features]."""
    features, _, positions = weight.shape

    def pack(raw: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(raw.reshape(features, -1).view(np.float32).T)

    return Param(f"{weight.name}.by_position", TensorType((positions, features), F32), source([weight], pack))


def gated_delta(c: Context, op: Op, q: Value, k: Value, v: Value, a: Value, b: Value, *rest: Any) -> tuple[Value, Value]:
    numbers, eps = 2 if op.attrs["mode"] == "prefill" else 1, op.attrs.get("norm_eps")
    rate, bias, *norm, state = rest[:-numbers]
    rows = {"q": q, "k": k, "v": v, "alpha": a, "beta": b, **({"z": norm[1]} if norm else {})}
    given = {"rate": rate.value(), "bias": bias.value(), **({"norm": norm[0].value()} if norm else {})}
    shape = (q.shape[1], *v.shape[1:2], q.shape[2], v.shape[2])
    make = lambda tokens, columns: c.recurrent_kernel("gated_delta")(tokens, shape, columns, norm_eps=eps)
    return _recurrent(make, op, state, rest[-numbers:], rows, **given)


def selective_scan(c: Context, op: Op, x: Value, dt: Value, b: Value, c_: Value, *rest: Any) -> tuple[Value, Value]:
    rate, bias, skip, state, *numbers = rest
    given = {"rate": rate.value(), "bias": bias.value(), "skip": skip.value()}
    shape = (b.shape[1], x.shape[1], x.shape[2], b.shape[2])
    make = lambda tokens, columns: c.recurrent_kernel("selective_scan")(tokens, shape, columns)
    return _recurrent(make, op, state, numbers, {"x": x, "dt": dt, "B": b, "C": c_}, **given)


def argmax_rows(c: Context, op: Op, logits: Value) -> Value:
    *rows, vocab = logits.shape
    return kernel_call(argmax_kernel(vocab, isa=c.isa, rows=rows[0] if rows else None), logits=logits)["index"]


RECURRENT: dict[str, Callable[..., Kernel]] = {
    "causal_conv": conv_kernel,
    "gated_delta": delta_kernel,
    "selective_scan": scan_kernel,
}
RULES: dict[str, Rule] = {
    "embedding": embedding,
    **dict.fromkeys(("rms_norm", "layer_norm"), norm),
    "matmul": matmul,
    "experts": experts,
    "fused_attention": fused_attention,
    "causal_conv": causal_conv,
    "gated_delta": gated_delta,
    "selective_scan": selective_scan,
    "argmax_rows": argmax_rows,
}
