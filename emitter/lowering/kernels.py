"""Layer operations as kernels of our own: the fusions of `castiron.emitter.lowering.fusion`, one kernel call each.

What no kernel covers is lowered by the definitions of `portable`.
"""

from __future__ import annotations

from collections.abc import Callable

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Op, Value
from castiron.emitter.kernels import norm as norms
from castiron.emitter.kernels.argmax import argmax
from castiron.emitter.kernels.attention.decode import attention_decode
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.lowering import portable
from castiron.emitter.lowering.fusion import Heads, Linear, plan
from castiron.emitter.lowering.projection import NORM_LIMIT, embed, project, project_experts
from castiron.emitter.lowering.rewrite import Rule, rewrite
from castiron.emitter.step import ModelModule
from castiron.emitter.types import I32, TensorType

# Parts that a long context is split into for one token's attention, so that threads have equal shares.
SPLITS = 8


def lower(module: ModelModule, isa: Isa, kernel_of: Callable[[Product], Kernel]) -> Module:
    """A module of StableHLO operations and kernel calls, those of products by `kernel_of`, the others for `isa`."""
    into = Module(module.name)
    for function in module.functions.values():
        lowering = _Lowering(function, isa, kernel_of)
        rewrite(function, lowering.rule, into, lowering.mapped)
    return into


class _Lowering:
    """The rules of one function; `mapped` holds what stands for each value, weights as `portable.Stored`."""

    def __init__(self, function: Function, isa: Isa, kernel_of: Callable[[Product], Kernel]) -> None:
        self.plan = plan(function, NORM_LIMIT)
        self.isa, self.kernel_of = isa, kernel_of
        self.mapped: dict = {}
        self.counters: dict[TensorType, Value] = {}
        named = {v.name: v for v in function.inputs}
        self._length = named.get("length")
        self._kinds: dict[str, Rule] = {
            "embedding": self.embedding,
            "linear": self.linear,
            "rms_norm": self.rms_norm,
            "layer_norm": self.layer_norm,
            "attention": self.attention,
            "experts": self.experts,
            "argmax_rows": self.argmax,
        }

    def rule(self, op: Op) -> Rule | None:
        if op in self.plan.absorbed:
            return lambda op, *operands: (None,) * len(op.results)
        if op in self.plan.glus:
            return self.glu
        if op in self.plan.residuals:
            return self.residual
        return self._kinds.get(op.kind) or portable.RULES.get(op.kind)

    def length_of(self, rows: int) -> Value | None:
        """The run-time number of real rows, for values that have one row a token."""
        return self.mapped[self._length] if rows > 1 and self._length is not None else None

    def embedding(self, op: Op, tokens: Value, weight: portable.Stored) -> Value:
        return embed(tokens, weight.weight, self.isa)

    def rms_norm(self, op: Op, x: Value, weight: portable.Stored) -> Value:
        if x.type.rank != 2:
            return portable.rms_norm(op, x, weight)
        return self._norm(norms.rms_norm, x, weight.value(), eps=op.attrs["eps"])

    def layer_norm(self, op: Op, x: Value, weight: portable.Stored, bias: portable.Stored | None = None) -> Value:
        operands = (weight.value(),) + ((bias.value(),) if bias else ())
        return self._norm(norms.layer_norm, x, *operands, eps=op.attrs["eps"], bias=bias is not None)

    def _norm(self, maker, x: Value, *operands: Value, **options) -> Value:
        length = self.length_of(x.shape[0])
        kernel = maker(*x.shape, isa=self.isa, length=length is not None, **options)
        return ops.kernel_call(kernel, (x, *operands, *((length,) if length else ())))[0]

    def linear(self, op: Op, *operands) -> Value:
        return self._project([op])

    def residual(self, op: Op, *operands) -> Value:
        fused: Linear = self.plan.residuals[op]
        return self._project([fused.op], residual=self.mapped[fused.residual])

    def glu(self, op: Op, *operands) -> Value:
        fused = self.plan.glus[op]
        return self._project([fused.gate.op, fused.up.op], glu=fused.function)

    def _project(self, linears: list[Op], residual: Value | None = None, glu: str | None = None) -> Value:
        """Linear operations of one input and codec as one kernel."""
        x, norm = linears[0].operands[0], self.plan.norms.get(linears[0].operands[0])
        prologue = None
        if norm is not None:
            x, prologue = norm.operands[0], (self.mapped[norm.operands[1]].value(), norm.attrs["eps"])
        return project(
            self.mapped[x],
            [self.mapped[op.operands[1]].weight for op in linears],
            [self.mapped[op.operands[2]].weight for op in linears if len(op.operands) > 2],
            kernel_of=self.kernel_of,
            norm=prologue,
            residual=residual,
            glu=glu,
            length=self.length_of(x.shape[0]),
        )

    def experts(self, op: Op, x: Value, chosen: Value, weights: Value, gate, up, down) -> Value:
        count, function = op.attrs["experts"], op.attrs["function"]
        (tokens, hidden), per_token = x.shape, chosen.shape[1]
        chosen, length = ops.reshape(chosen, (tokens * per_token,)), self.length_of(tokens)

        def through(x: Value, *stored: portable.Stored, glu: str | None = None, length: Value | None = length) -> Value:
            weights = [s.weight for s in stored]
            return project_experts(x, chosen, weights, count, kernel_of=self.kernel_of, glu=glu, length=length)

        if gate.weight.codec == up.weight.codec and function in ACTIVATIONS:
            inner = through(x, gate, up, glu=function)
        else:
            inner = ops.multiply(portable.activated(through(x, gate), function), through(x, up))
        if length is not None:
            length = ops.multiply(length, ops.constant(per_token, I32, ()))
        y = through(inner, down, length=length)
        y = ops.reshape(y, (tokens, per_token, hidden))
        return ops.reduce("add", ops.multiply(y, ops.broadcast_in_dim(weights, y.shape, (0, 1))), (1,))

    def attention(self, op: Op, q, k, v, k_cache: Value, v_cache: Value, start: Value, length: Value | None = None):
        heads: Heads | None = self.plan.heads.get(op)
        if heads is None:
            return portable.attention(op, q, k, v, k_cache, v_cache, start, length)
        tokens, count, head_dim = op.operands[0].shape
        layers, context, kv_heads, _ = k_cache.shape
        shape = (count, kv_heads, head_dim)
        scores = {key: op.attrs[key] for key in ("scale", "window", "softcap")}
        prepared = {"rope": heads.rotary_dim, "qk_norm": heads.eps, "qk_norm_row": heads.norm_row}
        rows = [self._project(source) if isinstance(source, list) else _flat(self.mapped[source]) for source in heads.sources]
        qkv = rows[0] if len(rows) == 1 else ops.concatenate(rows, 1)
        options = [self.mapped[v].value() for v in (*(heads.tables or ()), *(heads.norms or ()))]
        layer = (op.attrs["layer"],)
        if op.attrs["mode"] in ("decode", "batch"):
            batch = tokens if op.attrs["mode"] == "batch" else None
            kernel = attention_decode(layers, context, *shape, isa=self.isa, splits=SPLITS, batch=batch, **prepared, **scores)
            counters = self._counters(kernel.operands[-2])
            operands = (qkv, *options, start, k_cache, v_cache, counters)
            out, k_cache, v_cache, self.counters[counters.type], _ = ops.kernel_call(kernel, operands, layer)
            return out, k_cache, v_cache
        if length is None:
            length = ops.constant(tokens, I32, ())
        kernel = rope_append(layers, context, tokens, *shape, isa=self.isa, **prepared)
        q, k_cache, v_cache = ops.kernel_call(kernel, (qkv, *options, start, length, k_cache, v_cache), layer)
        kernel = attention_prefill(layers, context, tokens, *shape, isa=self.isa, **scores)
        (out,) = ops.kernel_call(kernel, (q, start, length, k_cache, v_cache), layer)
        return out, k_cache, v_cache

    def _counters(self, type_: TensorType) -> Value:
        """Zeros that every layer leaves as zeros."""
        if type_ not in self.counters:
            self.counters[type_] = ops.constant(0, I32, type_.shape)
        return self.counters[type_]

    def argmax(self, op: Op, logits: Value) -> Value:
        *rows, vocab = logits.shape
        return ops.kernel_call(argmax(vocab, isa=self.isa, rows=rows[0] if rows else None), (logits,))[0]


def _flat(x: Value) -> Value:
    """Heads [T, heads, head_dim] as rows [T, heads * head_dim]."""
    return x if x.type.rank == 2 else ops.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
