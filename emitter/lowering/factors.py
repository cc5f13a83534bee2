"""Move constant factors from the input of linear layers to the result: W (c x) becomes c (W x).

Linear layers whose inputs are x times different constants can then become one matmul, which can
also compute an RMS norm of x.
"""

from __future__ import annotations

from dataclasses import replace

from castiron.emitter.graph.ir import Graph, Op, Value, users


def with_factors_after(function: Graph) -> Graph:
    """Return a copy of a function in which c (W x) replaces W (c x), for layers without a bias."""
    producer = {value: op for op in function.ops for value in op.results}
    uses, readers = users(function), dict[Value, list[Op]]()
    for op in function.ops:
        for value in op.operands:
            readers.setdefault(value, []).append(op)

    def factor_of(linear: Op) -> Op | None:
        """Return the operation that defines c if c (W x) can replace `linear`, otherwise None."""
        scaled = producer.get(linear.operands[0])
        if scaled is None or scaled.kind != "multiply":
            return None
        constant, others = producer.get(scaled.operands[1]), readers[scaled.results[0]]
        is_scalar = constant is not None and constant.kind == "constant" and not constant.attrs["value"].ndim
        plain = all(op.kind == "linear" and len(op.operands) == 2 for op in others)
        return constant if is_scalar and plain and uses[scaled.results[0]] == len(others) else None

    ops: list[Op] = []
    for op in function.ops:
        constant = factor_of(op) if op.kind == "linear" else None
        if constant is None:
            ops.append(op)
            continue
        y, factor = Value(op.results[0].type), Value(op.results[0].type)
        x = producer[op.operands[0]].operands[0]
        ops.append(replace(op, operands=(x, *op.operands[1:]), results=(y,)))
        ops.append(replace(constant, results=(factor,)))
        ops.append(Op("multiply", (y, factor), op.results, {}, op.path))
    used = {value for op in ops for value in op.operands} | set(function.outputs)
    return replace(function, ops=[op for op in ops if used.intersection(op.results)])
