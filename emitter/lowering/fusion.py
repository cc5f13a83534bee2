"""Finds, in a function of layer operations, what one kernel can do at once.

The plan only names operations: `absorbed` ones disappear into the operation that anchors a fusion. Whatever no pattern
matches is lowered by itself, so that a family may write anything and still be correct.

Patterns, T tokens:
- heads: q and k through an optional norm and rotary embedding into attention; the norm over a head or over the row.
- siblings: linear layers of one input and codec whose rows can be stacked (q, k, v).
- GLU: act(linear(x)) * linear(x).
- residual: y + linear(x).
- norm: an RMS norm read by linear layers only, when T is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from castiron.emitter.ir import Function, Op, Value, users
from castiron.emitter.kernels.products.epilogue import ACTIVATIONS


@dataclass(eq=False)
class Linear:
    """A projection: its operation, and what is added to its result."""

    op: Op
    residual: Value | None = None

    @property
    def x(self) -> Value:
        return self.op.operands[0]

    @property
    def bias(self) -> Value | None:
        return self.op.operands[2] if len(self.op.operands) > 2 else None


@dataclass(eq=False)
class Glu:
    """act(gate(x)) * up(x); `function` is the activation's name."""

    gate: Linear
    up: Linear
    function: str


@dataclass(eq=False)
class AttentionInputs:
    """What attention does to q and k itself, and what it starts from.

    sources: q, k and v rows in order, each a value or a stack of linear operations of one input and codec.
    prepared: what it takes for that, by the names of `HeadLayout.operands`.
    """

    sources: list[Value | list[Op]]
    prepared: dict[str, Value] = field(default_factory=dict)
    rotary_dim: int | None = None
    eps: float | None = None
    norm_row: bool = False


@dataclass(eq=False)
class Plan:
    """What to do at an anchor operation, and which operations are done elsewhere.

    `norms` maps a normed value to its norm where every reader takes the norm in.
    """

    linears: dict[Op, Linear] = field(default_factory=dict)
    residuals: dict[Op, Linear] = field(default_factory=dict)
    glus: dict[Op, Glu] = field(default_factory=dict)
    attentions: dict[Op, AttentionInputs] = field(default_factory=dict)
    norms: dict[Value, Op] = field(default_factory=dict)
    absorbed: set[Op] = field(default_factory=set)


class _Graph:
    def __init__(self, function: Function) -> None:
        self.producer = {value: op for op in function.ops for value in op.results}
        self.uses = users(function)
        self.readers: dict[Value, list[Op]] = {}
        for op in function.ops:
            for value in op.operands:
                self.readers.setdefault(value, []).append(op)

    def only(self, value: Value, kind: str) -> Op | None:
        """The operation of this kind that makes `value`, if nobody else reads it."""
        op = self.producer.get(value)
        return op if op is not None and op.kind == kind and self.uses[value] == 1 else None


def plan(function: Function, norm_limit: int) -> Plan:
    """The fusions of a function. `norm_limit`: the widest norm that a projection of one token may take in."""
    graph, found = _Graph(function), Plan()
    found.linears = {op: Linear(op) for op in function.ops if op.kind == "linear"}
    for op in function.ops:
        if op.kind == "attention" and op.attrs["cache"] == "positional":
            found.attentions[op] = _attention(graph, op, found.absorbed)
        elif op.kind == "multiply":
            _glu(graph, op, found)
        elif op.kind == "add":
            _residual(graph, op, found)
        elif op.kind == "rms_norm":
            _norm(graph, op, found, norm_limit)
    return found


def _attention(graph: _Graph, op: Op, absorbed: set[Op]) -> AttentionInputs:
    chains = _chain(graph, op.operands[0]), _chain(graph, op.operands[1])
    shared = 0
    for pair in zip(*chains):
        if not _alike(*pair):
            break
        shared += 1
    kinds = [o.kind for o in chains[0][:shared]]
    v = graph.only(op.operands[2], "reshape")
    if "reshape" not in kinds or v is None:
        return AttentionInputs(list(op.operands[:3]))
    ends = (chains[0][shared - 1], chains[1][shared - 1], v)
    inputs = AttentionInputs(_stacks(graph, [end.operands[0] for end in ends], absorbed))
    absorbed.add(v)
    for q_op, k_op in zip(chains[0][:shared], chains[1]):
        absorbed.update((q_op, k_op))
        if q_op.kind == "rope":
            inputs.prepared["cos"], inputs.prepared["sin"] = q_op.operands[1:3]
            inputs.rotary_dim = q_op.attrs["rotary_dim"]
        elif q_op.kind == "rms_norm":
            inputs.prepared["q_norm"], inputs.prepared["k_norm"] = q_op.operands[1], k_op.operands[1]
            inputs.eps = q_op.attrs["eps"]
            inputs.norm_row = q_op.results[0].type.rank == 2
    return inputs


def _chain(graph: _Graph, value: Value) -> list[Op]:
    """What makes q or k, last first: [rope] [norm of a head] reshape [norm of the row], each read by the next alone."""
    chain: list[Op] = []
    for kind in ("rope", "rms_norm", "reshape", "rms_norm"):
        op = graph.only(value, kind)
        if op is not None and not (kind == "rms_norm" and any(o.kind == kind for o in chain)):
            chain.append(op)
            value = op.operands[0]
    return chain


def _alike(q: Op, k: Op) -> bool:
    """Whether one kernel can do both: same kind, and same tables or same epsilon."""
    if q.kind != k.kind:
        return False
    return q.operands[1:] == k.operands[1:] if q.kind == "rope" else q.attrs.get("eps") == k.attrs.get("eps")


def _stacks(graph: _Graph, values: list[Value], absorbed: set[Op]) -> list[Value | list[Op]]:
    """Runs of linear operations that can be one, and values that are something else."""
    sources: list[Value | list[Op]] = []
    for value in values:
        linear = graph.only(value, "linear")
        if linear is None:
            sources.append(value)
            continue
        absorbed.add(linear)
        before = sources[-1] if sources and isinstance(sources[-1], list) else None
        if before and _stackable(graph, before[-1], linear):
            before.append(linear)
        else:
            sources.append([linear])
    return sources


def _stackable(graph: _Graph, a: Op, b: Op) -> bool:
    return a.operands[0] is b.operands[0] and len(a.operands) == len(b.operands) and _codec(graph, a) == _codec(graph, b)


def _codec(graph: _Graph, linear: Op) -> str:
    return graph.producer[linear.operands[1]].attrs["weight"].codec


def _glu(graph: _Graph, op: Op, found: Plan) -> None:
    for a, b in (op.operands, op.operands[::-1]):
        act, up = graph.only(a, "activation"), graph.only(b, "linear")
        gate = graph.only(act.operands[0], "linear") if act else None
        if act is None or gate is None or up is None or gate is up or gate.operands[0] is not up.operands[0]:
            continue
        plain = len(gate.operands) == len(up.operands) == 2 and act.attrs["function"] in ACTIVATIONS
        if plain and gate.operands[1].type == up.operands[1].type and _codec(graph, gate) == _codec(graph, up):
            found.glus[op] = Glu(found.linears.pop(gate), found.linears.pop(up), act.attrs["function"])
            found.absorbed.update((act, gate, up))
            return


def _residual(graph: _Graph, op: Op, found: Plan) -> None:
    # The later operand is tried first: the earlier one is the stream that has to exist by then.
    for value, other in (op.operands[::-1], op.operands):
        linear = graph.only(value, "linear")
        if linear in found.linears and value.type == other.type and value is not other:
            fused = found.linears.pop(linear)
            fused.residual = other
            found.residuals[op] = fused
            found.absorbed.add(linear)
            return


def _norm(graph: _Graph, op: Op, found: Plan, limit: int) -> None:
    x = op.results[0]
    readers = graph.readers.get(x, [])
    if op in found.absorbed or x.shape[0] != 1 or x.type.rank != 2 or x.shape[1] > limit or not readers:
        return
    if all(reader.kind == "linear" and reader.operands[0] is x for reader in readers) and graph.uses[x] == len(readers):
        found.norms[x] = op
        found.absorbed.add(op)
