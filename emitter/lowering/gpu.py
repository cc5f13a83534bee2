"""Lowering rules that replace fused layer operations by calls of GPU kernels.

The rules of matmuls and recurrent operations are those of `lowering.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Op, Param, Value, parameter
from castiron.emitter.graph.types import I32, TensorType
from castiron.emitter.kernels.attention.decode import DecodeTokens
from castiron.emitter.kernels.attention.rows import Caches
from castiron.emitter.kernels.attention.scores import Scores
from castiron.emitter.kernels.gpu import recurrent
from castiron.emitter.kernels.gpu.activations import ACTIVATIONS
from castiron.emitter.kernels.gpu.argmax import best_of_parts, best_of_rows, parts_of
from castiron.emitter.kernels.gpu.attention import append
from castiron.emitter.kernels.gpu.attention import attention as attention_kernel
from castiron.emitter.kernels.gpu.embed import embed
from castiron.emitter.kernels.gpu.gemm import gemm
from castiron.emitter.kernels.gpu.heads import QkvRows
from castiron.emitter.kernels.gpu.matvec import MAX_TOKENS, matvec
from castiron.emitter.kernels.gpu.norm import norm as norm_kernel
from castiron.emitter.kernels.gpu.route import route as route_kernel
from castiron.emitter.kernels.gpu.words import layout_of
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.layers.step import Weight, source
from castiron.emitter.lowering import kernels, portable
from castiron.emitter.lowering.portable import Stored
from castiron.emitter.lowering.projection import Projection, joined_name
from castiron.emitter.lowering.rewrite import Rule

# The widest RMS norm fused into a matmul. It costs a load of the norm's weight for each load of x.
NORM_LIMIT = 1 << 16


def words_param(weights: Sequence[Weight], experts: int = 1) -> Param:
    """Return one parameter i32 [rows, words per row] with the rows of all `weights`.

    experts: the parameter has the rows of expert 0 of every weight, then those of expert 1.
    """
    codec, inner = weights[0].codec, weights[0].shape[1]
    layout, rows = layout_of(codec), sum(w.shape[0] for w in weights)

    def packed(*raws: np.ndarray) -> np.ndarray:
        by_expert = zip(*(np.split(raw.reshape(-1, raw.shape[-1]), experts) for raw in raws))
        return np.concatenate([layout.pack(raw, inner) for parts in by_expert for raw in parts])

    type_ = TensorType((rows, layout.row_words(inner)), I32)
    return Param(joined_name([w.name for w in weights]), type_, source(weights, packed))


def projected(p: Projection, factors: Value | None = None) -> Value:
    """Append the GPU kernel call of the matmul `p`; return f32 [rows of x, out].

    factors: f32 [T, n], to sum the results of each token's n experts; x is [T * n, in].
    """
    p = replace(p, length=None)
    matmul, given = p.matmul, p.operands(words_param(p.weights, p.experts or 1))
    if factors is not None:
        kernel, given["weights"] = matvec(matmul, factors.shape[1]), ops.reshape(factors, (matmul.tokens,))
    else:
        kernel = matvec(matmul) if p.experts or matmul.tokens <= MAX_TOKENS else gemm(matmul)
    return kernel_call(kernel, x=p.x, **given)["y"]


def experts(op: Op, x: Value, *operands: Any) -> Value:
    norm, eps, given = None, op.attrs.get("eps"), list(operands)
    if eps is not None:
        norm = (given.pop(0).value(), eps)
    residual = given.pop() if op.attrs.get("residual") else None
    (chosen, weights, *stacked), count = given, 2 if op.attrs["gated"] else 1
    if any(op.attrs["ordered"]):
        if norm is not None:
            x = kernel_call(norm_kernel("rms_norm", *x.shape, eps), x=x, weight=norm[0])["y"]
        y = kernels.experts(_CONTEXT, op, x, chosen, weights, *stacked)
        return y if residual is None else ops.add(y, residual)
    pairs, function = ops.reshape(chosen, (chosen.type.elements,)), op.attrs["function"]
    into, down, biases = [part.weight for part in stacked[:count]], stacked[count].weight, stacked[count + 1 :]
    through = partial(Projection, chosen=pairs, experts=op.attrs["experts"])
    of_pairs = [bias.value(lambda part: ops.gather_rows(part, pairs)) for bias in biases]
    if len({weight.codec for weight in into}) == 1 and function in ACTIVATIONS and not biases:
        inner = projected(through(x, into, norm=norm, glu=function if count == 2 else None))
        inner = inner if count == 2 else portable.into_down([inner], function)
    else:
        parts = _parts(partial(through, x, norm=norm), into)
        parts = [ops.add(y, bias) for y, bias in zip(parts, of_pairs)] if biases else parts
        inner = portable.into_down(parts, function)
    y = projected(through(inner, [down], residual=residual), weights)
    if not biases:
        return y
    shares = ops.reshape(of_pairs[count], (*chosen.shape, y.shape[1]))
    shares = ops.multiply(shares, ops.broadcast_in_dim(weights, shares.shape, (0, 1)))
    return ops.add(y, ops.reduce("add", shares, (1,)))


def _parts(through: Callable[[list[Weight]], Projection], weights: list[Weight]) -> list[Value]:
    if len({weight.codec for weight in weights}) > 1:
        return [projected(through([weight])) for weight in weights]
    y = projected(through(weights))
    width = y.shape[1] // len(weights)
    return [ops.slice_(y, (0, i * width), (y.shape[0], (i + 1) * width)) for i in range(len(weights))]


def embedding(op: Op, tokens: Value, weight: Stored) -> Value:
    (vocab, hidden), codec = weight.weight.shape, weight.weight.codec
    kernel = embed(codec, vocab, hidden, tokens.shape[0])
    return kernel_call(kernel, ids=tokens, weight=parameter(words_param([weight.weight])))["y"]


def norm(op: Op, x: Value, *operands: Any) -> Value:
    residual = operands[-1] if op.attrs.get("residual") else None
    stored = operands[:-1] if residual is not None else operands
    if x.type.rank != 2 or op.attrs.get("inline"):
        return portable.RULES[op.kind](op, x, *stored)
    given = {name: part.value() for name, part in zip(("weight", "bias"), stored)}
    if residual is not None:
        given["residual"] = residual
    kernel = norm_kernel(op.kind, *x.shape, op.attrs["eps"], "bias" in given, "residual" in given)
    return kernel_call(kernel, x=x, **given)["y"]


def fused_attention(op: Op, *operands: Any) -> tuple[Value, Value, Value]:
    count, names, layout, attrs = op.attrs["rows"], op.attrs["prepared"], op.attrs["layout"], op.attrs
    values = [ops.reshape(x, (x.shape[0], prod(x.shape[1:]))) for x in operands[:count]]
    k_cache, v_cache, start, *rest = operands[count + len(names) :]
    scores = Scores(attrs["scale"], attrs["window"], attrs["softcap"], attrs["sinks"], attrs["bidirectional"])
    given = {name: stored.value() for name, stored in zip(names, operands[count : count + len(names)], strict=True)}
    sinks = {"sinks": rest.pop().value()} if scores.sinks else {}
    (layers, cache_rows), tokens = k_cache.shape[:2], values[0].shape[0]
    ring = cache_rows if attrs["cache"] == "window" else None
    # A ring buffer has fewer rows than there are positions, so the rotary tables give the context.
    context = given["cos"].shape[0] if ring and "cos" in given else cache_rows
    caches, rows = Caches(layers, context, CACHES[attrs["storage"]], ring), QkvRows(tuple(x.shape[1] for x in values))
    given |= {f"rows{i}": x for i, x in enumerate(values)}
    cached: dict[str, Any] = {"k_cache": k_cache, "v_cache": v_cache, "layer": attrs["layer"]}
    if attrs["mode"] in ("decode", "batch"):
        kind = DecodeTokens("batch", tokens) if attrs["mode"] == "batch" else DecodeTokens()
        kernel = attention_kernel(caches, layout, scores, kind, rows)
        results = kernel_call(kernel, **_ordered(kernel, {**given, **sinks, "position": start, **cached}))
        return results["out"], results["k_cache"], results["v_cache"]
    given |= {"start": start, "length": rest[0] if rest else ops.constant(tokens, I32, ())}
    kernel = append(caches, layout, tokens, rows)
    appended = kernel_call(kernel, **_ordered(kernel, {**given, **cached}))
    kernel = attention_kernel(caches, layout, scores, DecodeTokens("chunk", tokens), rows)
    results = kernel_call(kernel, **_ordered(kernel, {**given, **sinks, **cached, **appended}))
    return results["out"], appended["k_cache"], appended["v_cache"]


def _ordered(kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in kernel.operands}


def route(op: Op, logits: Value, correction: Stored | None = None) -> tuple[Value, Value]:
    attrs = op.attrs
    given = {} if correction is None else {"correction": correction.value()}
    chosen_from = (attrs["groups"], attrs["rated"]) if attrs["groups"][0] > 1 else ()
    kernel = route_kernel(*logits.shape, attrs["top_k"], attrs["scores"], attrs["normalised"], bool(given), *chosen_from)
    results = kernel_call(kernel, logits=logits, **given)
    return results["chosen"], results["weights"]


def argmax_rows(op: Op, logits: Value) -> Value:
    *rows, vocab = logits.shape
    count = rows[0] if rows else 1
    parts = kernel_call(best_of_parts(count, vocab), logits=ops.reshape(logits, (count, vocab)))
    index = kernel_call(best_of_rows(count, parts_of(vocab)), best=parts["best"], index=parts["index"])["argmax"]
    return ops.reshape(index, tuple(rows))


RECURRENT: dict[str, Callable[..., Kernel]] = {
    "causal_conv": recurrent.causal_conv,
    "gated_delta": recurrent.gated_delta,
    "selective_scan": recurrent.selective_scan,
}
# The rules of `lowering.kernels` that are shared do not use the instruction set.
_CONTEXT = kernels.Context(ISAS["avx2"], 1, projected, RECURRENT)
RULES: dict[str, Rule] = {
    **portable.RULES,
    **{kind: partial(kernels.RULES[kind], _CONTEXT) for kind in ("matmul", *RECURRENT)},
    "embedding": embedding,
    **dict.fromkeys(("rms_norm", "layer_norm"), norm),
    "experts": experts,
    "fused_attention": fused_attention,
    "route": route,
    "argmax_rows": argmax_rows,
}
