"""Give each attention layer a copy of the norms and rotary embeddings of its keys and values.

In Gemma 4, several layers use the same keys and values. With copies, every attention kernel can
include their norms and rotary embeddings (`lowering.fusion`).
"""

from __future__ import annotations

from dataclasses import replace

from castiron.emitter.graph.ir import Graph, Op, Value

_KINDS = ("rope", "rms_norm", "reshape")


def with_own_heads(function: Graph) -> Graph:
    """Return a copy of a function in which no two attention operations share norms or rotations."""
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
            copies = [copied(value) if value in seen else value for value in heads]
            seen.update(heads)
            op = replace(op, operands=(q, *copies, *op.operands[3:]))
        ops.append(op)
    return replace(function, ops=ops)
