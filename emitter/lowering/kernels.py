"""Layer operations as kernels of our own: the fusions of `castiron.emitter.lowering.fusion`, one kernel call each.

What no kernel covers is lowered by the definitions of `portable`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Op, Value
from castiron.emitter.kernels import norm as norms
from castiron.emitter.kernels.argmax import argmax
from castiron.emitter.kernels.attention.decode import attention_decode
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.attention.prefill import attention_prefill
from castiron.emitter.kernels.attention.rope_append import rope_append
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import Isa
from castiron.emitter.lowering import portable
from castiron.emitter.lowering.fusion import Linear, plan
from castiron.emitter.lowering.projection import NORM_LIMIT, Projector, embed
from castiron.emitter.lowering.rewrite import Rule, rewrite
from castiron.emitter.step import ModelModule
from castiron.emitter.types import I32, TensorType


def lower(module: ModelModule, isa: Isa, kernel_of: Callable[[Product], Kernel], numerics: str = "exact") -> Module:
    """A module of StableHLO operations and kernel calls, those of products by `kernel_of`, the others for `isa`.

    numerics: of the products, a row of `products.product.NUMERICS`; ValueError for others.
    """
    into = Module(module.name)
    for function in module.functions.values():
        lowering = _Lowering(function, isa, Projector(kernel_of, numerics))
        rewrite(function, lowering.rule, into, lowering.mapped)
    return into


class _Lowering:
    """The rules of one function; `mapped` holds what stands for each value, weights as `portable.Stored`."""

    def __init__(self, function: Function, isa: Isa, project: Projector) -> None:
        self.plan = plan(function, NORM_LIMIT)
        self.isa, self.project = isa, project
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
        return self._norm(norms.rms_norm, op, x, weight=weight.value())

    def layer_norm(self, op: Op, x: Value, weight: portable.Stored, bias: portable.Stored | None = None) -> Value:
        given = {"weight": weight.value()} | ({"bias": bias.value()} if bias else {})
        return self._norm(partial(norms.layer_norm, bias=bias is not None), op, x, **given)

    def _norm(self, maker: Callable[..., Kernel], op: Op, x: Value, **given: Value) -> Value:
        length = self.length_of(x.shape[0])
        kernel = maker(*x.shape, op.attrs["eps"], isa=self.isa, length=length is not None)
        return ops.kernel_call(kernel, x=x, **given, **({} if length is None else {"length": length}))["y"]

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
        return self.project(
            self.mapped[x],
            [self.mapped[op.operands[1]].weight for op in linears],
            [self.mapped[op.operands[2]].weight for op in linears if len(op.operands) > 2],
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
            return self.project(x, weights, chosen=chosen, experts=count, glu=glu, length=length)

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
        inputs = self.plan.attentions.get(op)
        if inputs is None:
            return portable.attention(op, q, k, v, k_cache, v_cache, start, length)
        tokens, heads, head_dim = op.operands[0].shape
        layers, context, kv_heads, _ = k_cache.shape
        layout = HeadLayout(heads, kv_heads, head_dim, inputs.rotary_dim, inputs.eps, inputs.norm_row)
        scores = {key: op.attrs[key] for key in ("scale", "window", "softcap")}
        rows = [self._project(source) if isinstance(source, list) else _flat(self.mapped[source]) for source in inputs.sources]
        qkv = rows[0] if len(rows) == 1 else ops.concatenate(rows, 1)
        given = {name: self.mapped[value].value() for name, value in inputs.prepared.items()}
        caches = {"k_cache": k_cache, "v_cache": v_cache, "layer": op.attrs["layer"]}
        if op.attrs["mode"] in ("decode", "batch"):
            batch = tokens if op.attrs["mode"] == "batch" else None
            kernel = attention_decode(layers, context, layout, isa=self.isa, batch=batch, **scores)
            counters = self._counters(kernel.tensors["counters"])
            found = ops.kernel_call(kernel, qkv=qkv, **given, position=start, counters=counters, **caches)
            self.counters[counters.type] = found["counters"]
            return found["out"], found["k_cache"], found["v_cache"]
        if length is None:
            length = ops.constant(tokens, I32, ())
        chunk = {"start": start, "length": length}
        kernel = rope_append(layers, context, tokens, layout, isa=self.isa)
        appended = ops.kernel_call(kernel, qkv=qkv, **given, **chunk, **caches)
        kernel = attention_prefill(layers, context, tokens, layout, isa=self.isa, **scores)
        out = ops.kernel_call(kernel, **chunk, **appended, layer=op.attrs["layer"])["out"]
        return out, appended["k_cache"], appended["v_cache"]

    def _counters(self, type_: TensorType) -> Value:
        """Zeros that every layer leaves as zeros."""
        if type_ not in self.counters:
            self.counters[type_] = ops.constant(0, I32, type_.shape)
        return self.counters[type_]

    def argmax(self, op: Op, logits: Value) -> Value:
        *rows, vocab = logits.shape
        return ops.kernel_call(argmax(vocab, isa=self.isa, rows=rows[0] if rows else None), logits=logits)["index"]


def _flat(x: Value) -> Value:
    """Heads [T, heads, head_dim] as rows [T, heads * head_dim]."""
    return x if x.type.rank == 2 else ops.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
