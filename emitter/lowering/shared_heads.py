"""Give each attention operation its own norm and rotation of keys and values.

Layers that use the keys and values of an earlier layer (Gemma 4) then compute them again in their
attention kernel, because `lowering.fusion` makes them a part of `fused_attention`.
"""

from __future__ import annotations

from dataclasses import replace

from castiron.emitter.ir import Graph, Op, Value

_KINDS = ("rope", "rms_norm", "reshape")


def with_own_heads(function: Graph) -> Graph:
    """Return a copy of a function in which no two attention operations have the same k or v."""
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
