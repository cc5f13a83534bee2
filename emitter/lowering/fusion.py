"""Fuse layer operations of a function, so that one kernel computes several of them.

Operations that match no pattern stay as they are, so fusion works for every model family.

Patterns, for T tokens:
- norms of q and k, rotary embedding and attention become `fused_attention`. Interleaved rotary
  pairs (features 2 i and 2 i + 1) become features i and i + rotary_dim / 2: the rows of the q and k
  weights are reordered, which does not change q . k.
- siblings, that is, linear layers with the same input and codec, become one matmul.
- act(linear(x)) * linear(x) becomes a matmul with a GLU.
- y + linear(x) becomes a matmul with a residual.
- an RMS norm that only linear layers use becomes a part of their matmul, for few tokens (CPUs: T = 1).
- act(causal_conv(x)) becomes a causal_conv; rms_norm(gated_delta(...)) * silu(z) a gated_delta.
- on GPUs also:
  - y + norm(x) and y + experts(x) become a norm, or experts, with a residual;
  - an RMS norm whose result experts use becomes a part of the experts operation;
  - norms of v become a part of `fused_attention`, also if layers share k and v (`shared_heads`);
  - gate and up of a GLU and other linear layers with the same input become one matmul;
  - constant factors move from the input of linear layers to the result (`factors`);
  - an RMS norm of one short row becomes StableHLO if its result is only reshaped.

The new operations, with their operands (optional ones in parentheses) and attributes:

    matmul(x, (norm weight), weights ..., biases ..., (residual)) -> [T, out]
      weights, biases   the number of weights, and of biases
      eps               epsilon of the RMS norm of x, or None
      residual          whether there is a residual
      glu               activation of a GLU of two weights, or None
    fused_attention(rows ..., prepared ..., k_cache, v_cache, start, (length), (sinks))
      rows              the number of operands `rows`, 1 to 3; together their columns are q, k and v
      layout            the `HeadLayout`: numbers of heads, their norms and rotation
      prepared          the names of the norm weights and rotary tables, such as "cos"
      the attributes of attention

Other operations may get more operands, and an attribute:

    causal_conv(...)                                 activation: name of the activation of the result
    rms_norm, layer_norm and experts(..., residual)  residual: True
    rms_norm(...)                                    inline: True; it becomes StableHLO
    experts(x, (norm weight), chosen, ...)           eps: epsilon of an RMS norm of x
    gated_delta(..., (norm weight, z), state, ...)   norm_eps: epsilon of the gated norm
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from castiron.emitter.graph.ir import Graph, Op, Value, users
from castiron.emitter.graph.types import F32, TensorType
from castiron.emitter.kernels.attention.heads import HeadLayout
from castiron.emitter.kernels.epilogue import ACTIVATIONS
from castiron.emitter.lowering.factors import with_factors_after
from castiron.emitter.lowering.shared_heads import with_own_heads

# The longest row whose RMS norm a GPU computes again for each of its elements.
INLINE_LIMIT = 1024


@dataclass
class _Heads:
    """The inputs of a `fused_attention` that is not built yet.

    sources: where q, k and v come from: values, or lists of linear operations that become one
        matmul.
    reordered: weight operations with rows reordered for the rotary embedding.
    prepared: norm weights and rotary tables, by name, such as "q_norm" and "cos".
    """

    sources: list[Value | list[Op]]
    layout: HeadLayout
    reordered: list[Op] = field(default_factory=list)
    prepared: dict[str, Value] = field(default_factory=dict)


class _Uses:
    """The producer and readers of each value of a function, and the fusions found so far."""

    def __init__(self, function: Graph) -> None:
        self.producer = {value: op for op in function.ops for value in op.results}
        self.uses = users(function)
        self.readers: dict[Value, list[Op]] = {}
        for op in function.ops:
            for value in op.operands:
                self.readers.setdefault(value, []).append(op)
        # `replaced`: new operations in place of an operation. `absorbed`: operations that other operations replace too.
        # `norms`: RMS norms that matmuls compute, by their results.
        self.replaced: dict[Op, list[Op]] = {}
        self.absorbed: set[Op] = set()
        self.norms: dict[Value, Op] = {}

    def only(self, value: Value, kind: str) -> Op | None:
        """Return the producer of `value` if its kind is `kind` and it has one use, else None."""
        op = self.producer.get(value)
        return op if op is not None and op.kind == kind and self.uses[value] == 1 else None


def fuse(function: Graph, norm_limit: int, norm_tokens: int = 1, gpu: bool = False) -> Graph:
    """Return a copy of a function in which one operation replaces each pattern of this module.

    norm_limit, norm_tokens: the max features and tokens of an RMS norm that joins a matmul.
    gpu: whether to fuse the patterns for GPUs too.
    """
    if gpu:
        function = with_own_heads(with_factors_after(function))
    graph = _Uses(function)
    for op in function.ops:
        if op.kind == "attention":
            graph.replaced[op] = _fused_attention(graph, op, _heads(graph, op, gpu))
        elif op.kind == "multiply":
            _glu(graph, op, siblings_first=gpu and op.results[0].shape[0] <= norm_tokens)
            _gated_norm(graph, op)
        elif op.kind == "activation":
            _activated_conv(graph, op)
        elif op.kind == "add":
            # Experts come last, so that a matmul which is added to them can run beside them.
            if gpu:
                _residual_of_other(graph, op, "experts")
            if op not in graph.replaced:
                _residual(graph, op)
            if gpu:
                _residual_of_other(graph, op, "rms_norm", "layer_norm")
        elif op.kind == "experts" and op.operands[0] in graph.norms:
            norm = graph.norms[op.operands[0]]
            operands, attrs = (*norm.operands, *op.operands[1:]), {**op.attrs, "eps": norm.attrs["eps"]}
            graph.replaced[op] = [replace(op, operands=operands, attrs=attrs)]
        elif op.kind == "rms_norm":
            _norm(graph, op, norm_limit, norm_tokens, ("linear", "experts") if gpu else ("linear",))
    for op in function.ops:
        if gpu and op.kind == "reshape":
            _inline_norm(graph, op)
    _siblings(graph, function)
    fused: list[Op] = []
    for op in function.ops:
        fused += graph.replaced.get(op, () if op in graph.absorbed else (op,))
    return replace(function, ops=fused)


def _matmul(
    graph: _Uses, linears: list[Op], result: Value, path: str, residual: Value | None = None, glu: str | None = None
) -> Op:
    """Return one `matmul` operation for linear operations with the same input and codec."""
    x = linears[0].operands[0]
    norm = graph.norms.get(x)
    biases = [op.operands[2] for op in linears if len(op.operands) > 2]
    operands = [
        *(norm.operands if norm else (x,)),
        *(op.operands[1] for op in linears),
        *biases,
        *([residual] if residual else []),
    ]
    attrs = {
        "weights": len(linears),
        "biases": len(biases),
        "eps": norm.attrs["eps"] if norm else None,
        "residual": residual is not None,
        "glu": glu,
    }
    return Op("matmul", tuple(operands), (result,), attrs, path)


def _fused_attention(graph: _Uses, op: Op, heads: _Heads) -> list[Op]:
    """Return the operations that replace the attention `op`: matmuls and a `fused_attention`."""
    made, rows = list(heads.reordered), []
    tokens = op.operands[0].shape[0]
    for source in heads.sources:
        if isinstance(source, list):
            out = sum(linear.results[0].shape[1] for linear in source)
            row = Value(TensorType((tokens, out), F32))
            made.append(_matmul(graph, source, row, op.path))
            rows.append(row)
        else:
            rows.append(source)
    operands = (*rows, *heads.prepared.values(), *op.operands[3:])
    attrs = {**op.attrs, "rows": len(rows), "layout": heads.layout, "prepared": tuple(heads.prepared)}
    return [*made, Op("fused_attention", operands, op.results, attrs, op.path)]


def _heads(graph: _Uses, op: Op, gpu: bool) -> _Heads:
    (_, count, head_dim), kv_heads = op.operands[0].shape, op.operands[1].shape[1]
    unfused = _Heads(list(op.operands[:3]), HeadLayout(count, kv_heads, head_dim, None))
    chains = _chain(graph, op.operands[0]), _chain(graph, op.operands[1])
    shared = 0
    for pair in zip(*chains):
        if not _alike(*pair):
            break
        shared += 1
    kinds = [o.kind for o in chains[0][:shared]]
    v_norm = graph.only(op.operands[2], "rms_norm") if gpu else None
    v = graph.only(v_norm.operands[0] if v_norm else op.operands[2], "reshape")
    if "reshape" not in kinds or v is None:
        return unfused
    ends = (chains[0][shared - 1], chains[1][shared - 1], v)
    sources, reordered = [end.operands[0] for end in ends], []
    if kinds[0] == "rope" and chains[0][0].attrs["interleaved"]:
        if kinds != ["rope", "reshape"] or not all(graph.only(source, "linear") for source in sources[:2]):
            return unfused
        for rope, source in ((chains[0][0], sources[0]), (chains[1][0], sources[1])):
            reordered += _apart(graph, graph.producer[source], (rope.results[0].shape[1], rope.attrs["rotary_dim"]))
    heads = _Heads(_stacks(graph, sources), unfused.layout, reordered)
    graph.absorbed.update(op for op in (v, v_norm) if op)
    if v_norm:
        heads.prepared["v_norm"] = v_norm.operands[1]
        heads.layout = replace(heads.layout, v_norm=v_norm.attrs["eps"])
    for q_op, k_op in zip(chains[0][:shared], chains[1]):
        graph.absorbed.update((q_op, k_op))
        if q_op.kind == "rope":
            heads.prepared["cos"], heads.prepared["sin"] = q_op.operands[1:3]
            heads.layout = replace(heads.layout, rotary_dim=q_op.attrs["rotary_dim"])
        elif q_op.kind == "rms_norm":
            heads.prepared["q_norm"], heads.prepared["k_norm"] = q_op.operands[1], k_op.operands[1]
            eps, is_row = q_op.attrs["eps"], q_op.results[0].type.rank == 2
            heads.layout = replace(heads.layout, qk_norm=eps, qk_norm_row=is_row)
    return heads


def _apart(graph: _Uses, linear: Op, order: tuple[int, int]) -> list[Op]:
    """Return copies of weight and bias in which rows 2 i and 2 i + 1 are i and i + dim / 2."""
    made = []
    for value in linear.operands[1:]:
        weight = graph.producer[value]
        attrs = {"weight": replace(weight.attrs["weight"], apart=order)}
        made.append(Op("weight", (), (Value(value.type),), attrs, weight.path))
        graph.producer[made[-1].results[0]] = made[-1]
    operands = linear.operands[0], *(op.results[0] for op in made)
    graph.absorbed.add(linear)
    graph.producer[linear.results[0]] = replace(linear, operands=operands)
    return made


def _chain(graph: _Uses, value: Value) -> list[Op]:
    """Return the operations between a projection and q or k of attention, the last one first."""
    chain: list[Op] = []
    for kind in ("rope", "rms_norm", "reshape", "rms_norm"):
        op = graph.only(value, kind)
        if op is not None and not (kind == "rms_norm" and any(o.kind == kind for o in chain)):
            chain.append(op)
            value = op.operands[0]
    return chain


def _alike(q: Op, k: Op) -> bool:
    # Equal rotary tables of rope, or equal epsilons of a norm.
    if q.kind != k.kind:
        return False
    return q.operands[1:] == k.operands[1:] if q.kind == "rope" else q.attrs.get("eps") == k.attrs.get("eps")


def _stacks(graph: _Uses, values: list[Value]) -> list[Value | list[Op]]:
    """Group consecutive linear operations that compute q, k and v and can become one matmul."""
    sources: list[Value | list[Op]] = []
    for value in values:
        linear = graph.only(value, "linear")
        if linear is None:
            sources.append(value)
            continue
        graph.absorbed.add(linear)
        before = sources[-1] if sources and isinstance(sources[-1], list) else None
        if before and _stackable(graph, before[-1], linear):
            before.append(linear)
        else:
            sources.append([linear])
    return sources


def _stackable(graph: _Uses, a: Op, b: Op) -> bool:
    return a.operands[0] is b.operands[0] and len(a.operands) == len(b.operands) and _codec(graph, a) == _codec(graph, b)


def _codec(graph: _Uses, linear: Op) -> str:
    return graph.producer[linear.operands[1]].attrs["weight"].codec


def _glu(graph: _Uses, op: Op, siblings_first: bool) -> None:
    """Replace the multiplication `op` by one matmul if it is act(gate) * up of a GLU."""
    for a, b in (op.operands, op.operands[::-1]):
        act, up = graph.only(a, "activation"), graph.only(b, "linear")
        gate = graph.only(act.operands[0], "linear") if act else None
        if act is None or gate is None or up is None or gate is up or gate.operands[0] is not up.operands[0]:
            continue
        readers = graph.readers[gate.operands[0]]
        free = [o for o in readers if o.kind == "linear" and o not in graph.absorbed and o not in (gate, up)]
        if siblings_first and any(_stackable(graph, o, gate) and _stackable(graph, up, gate) for o in free):
            return
        plain = len(gate.operands) == len(up.operands) == 2 and act.attrs["function"] in ACTIVATIONS
        if plain and gate.operands[1].type == up.operands[1].type and _codec(graph, gate) == _codec(graph, up):
            graph.replaced[op] = [_matmul(graph, [gate, up], op.results[0], op.path, glu=act.attrs["function"])]
            graph.absorbed.update((act, gate, up))
            return


def _residual(graph: _Uses, op: Op) -> None:
    # Try the later operand first, because the earlier one is the residual stream.
    for value, other in (op.operands[::-1], op.operands):
        linear = graph.only(value, "linear")
        if linear and linear not in graph.absorbed and value.type == other.type and value is not other:
            graph.replaced[op] = [_matmul(graph, [linear], op.results[0], op.path, residual=other)]
            graph.absorbed.add(linear)
            return


def _residual_of_other(graph: _Uses, op: Op, *kinds: str) -> None:
    for value, other in (op.operands[::-1], op.operands):
        before = next(filter(None, (graph.only(value, kind) for kind in kinds)), None)
        ready = before and op not in graph.replaced and before not in graph.absorbed
        if before and ready and value.type.rank == 2 and value is not other:
            current = graph.replaced.pop(before, [before])[0]
            attrs = {**current.attrs, "residual": True}
            graph.replaced[op] = [Op(before.kind, (*current.operands, other), op.results, attrs, op.path)]
            graph.absorbed.add(before)
            return


def _norm(graph: _Uses, op: Op, limit: int, tokens: int, kinds: tuple[str, ...]) -> None:
    x = op.results[0]
    readers = graph.readers.get(x, [])
    if op in graph.absorbed or x.type.rank != 2 or x.shape[0] > tokens or x.shape[1] > limit or not readers:
        return
    if all(reader.kind in kinds and reader.operands[0] is x for reader in readers) and graph.uses[x] == len(readers):
        graph.norms[x] = op
        graph.absorbed.add(op)


def _inline_norm(graph: _Uses, op: Op) -> None:
    """If the reshape `op` reads an RMS norm of one short row, mark the norm for StableHLO."""
    norm = graph.only(op.operands[0], "rms_norm")
    tokens, features = op.operands[0].shape if op.operands[0].type.rank == 2 else (1, INLINE_LIMIT + 1)
    if norm and norm not in graph.absorbed and tokens == 1 and features <= INLINE_LIMIT:
        graph.replaced[norm] = [replace(norm, attrs={**norm.attrs, "inline": True})]


def _activated_conv(graph: _Uses, op: Op) -> None:
    conv, function = graph.only(op.operands[0], "causal_conv"), op.attrs["function"]
    if conv is not None and function in ACTIVATIONS:
        attrs = {**conv.attrs, "activation": function}
        graph.replaced[op] = [replace(conv, results=(op.results[0], conv.results[1]), attrs=attrs)]
        graph.absorbed.add(conv)


def _gated_norm(graph: _Uses, op: Op) -> None:
    norm, gate = graph.only(op.operands[0], "rms_norm"), graph.only(op.operands[1], "activation")
    delta = graph.only(norm.operands[0], "gated_delta") if norm else None
    if norm is None or delta is None or gate is None or gate.attrs["function"] != "silu" or norm.operands[1].type.rank != 1:
        return
    *inputs, state = delta.operands[:8]
    attrs = {**delta.attrs, "norm_eps": norm.attrs["eps"]}
    operands = (*inputs, norm.operands[1], gate.operands[0], state, *delta.operands[8:])
    graph.replaced[op] = [Op("gated_delta", operands, (op.results[0], delta.results[1]), attrs, delta.path)]
    graph.absorbed.update((norm, gate, delta))


def _siblings(graph: _Uses, function: Graph) -> None:
    """Replace the remaining linear operations by matmuls: one for each input and codec."""
    groups: dict[tuple, list[Op]] = {}
    for op in function.ops:
        if op.kind == "linear" and op not in graph.absorbed:
            groups.setdefault((op.operands[0], _codec(graph, op), len(op.operands)), []).append(op)
    for first, *others in groups.values():
        graph.absorbed.update(others)
        graph.absorbed.update(graph.producer[weight] for op in others for weight in op.operands[1:])
        single = [_matmul(graph, [first], first.results[0], first.path)]
        graph.replaced[first] = _stack(graph, [first, *others]) if others else single


def _common(paths: list[str]) -> str:
    # The common prefix of module paths.
    parts = list(zip(*(path.split(".") for path in paths)))
    return ".".join(own[0] for own in itertools.takewhile(lambda own: len(set(own)) == 1, parts))


def _stack(graph: _Uses, linears: list[Op]) -> list[Op]:
    """Return operations that replace `linears` (with the same input): a matmul and slices of it."""
    tokens, path = linears[0].results[0].shape[0], _common([op.path for op in linears])
    ends = np.cumsum([op.results[0].shape[1] for op in linears]).tolist()
    row = Value(TensorType((tokens, ends[-1]), F32))
    parts = [graph.producer[weight] for op in linears[1:] for weight in op.operands[1:]]
    parts.append(_matmul(graph, linears, row, path))
    parts += [Op("slice", (row,), op.results, {"starts": (0, first)}, op.path) for op, first in zip(linears, [0, *ends])]
    return parts
