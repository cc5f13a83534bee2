"""Copy norms and rotations of keys and values that several attention layers share (Gemma 4).

Norms and rotations become a part of an attention kernel only if nothing else uses their results.
With copies, the kernel of every layer can compute them (see `lowering.fusion`).
"""

from __future__ import annotations

from dataclasses import replace

from castiron.emitter.ir import Graph, Op, Value

_KINDS = ("rope", "rms_norm", "reshape")


def with_own_heads(function: Graph) -> Graph:
    """Return a copy of a function in which attention operations share no norms or rotations."""
    producer = {value: op for op in function.ops for value in op.results}
    ops, seen = list[Op](), set[Value]()

    def copied(value: Value) -> Value:
        op = producer.get(value)
        if op is None or op.kind not in _KINDS:
            return value
        result = Value(value.type)
        ops.append(replace(op, operands=(copied(op.operands[0]), *op.operands[1:]), results=(result,)))
        return result

    for op in function.ops:
        if op.kind == "attention":
            q, *heads = op.operands[:3]
            own = [copied(value) if value in seen else value for value in heads]
            seen.update(heads)
            op = replace(op, operands=(q, *own, *op.operands[3:]))
        ops.append(op)
    return replace(function, ops=ops)
