"""Rewrite operations outside kernels so that every compiler gives the same bits.

Compilers may change results in two ways:

- They fuse a multiplication and an addition into an fma. To prevent this, each multiplication is
  followed by a minimum and a maximum, which leave finite numbers unchanged.
- They add the elements of a row in any order. So each sum becomes repeated additions of the two
  halves of the row.
"""

from __future__ import annotations

from collections.abc import Mapping

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Op, Value
from castiron.emitter.graph.types import F32, LARGEST, EmitError
from castiron.emitter.lowering.rewrite import Rule, rewrite


def multiply(op: Op, a: Value, b: Value) -> Value:
    """Return a * b in a form that compilers do not fuse with an addition; `op` is not used.

    An infinite f32 result becomes the largest finite f32 with the same sign.
    """
    y = ops.multiply(a, b)
    if y.dtype is not F32:
        return y
    high, low = (ops.constant(x, F32, y.shape) for x in (LARGEST, -LARGEST))
    return ops.minimum(ops.maximum(y, low), high)


def reduce(op: Op, x: Value, init: Value) -> Value:
    """Apply the reduction `op` to x; compute sums in an order that no compiler changes.

    To sum over a dimension, the code adds the second half to the first half, repeatedly, until one
    element is left. Maxima, and sums without rounding errors, are the same in every order, so these
    reductions stay as they are. `init` is not used.
    """
    if op.attrs["reducer"] != "add" or op.attrs["exact"]:
        return ops.reduce(op.attrs["reducer"], x, op.attrs["dims"], op.attrs["exact"])
    for dim in sorted(op.attrs["dims"], reverse=True):
        before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
        size = 1 << (length - 1).bit_length()
        if size > length:
            x = ops.concatenate([x, ops.constant(0.0, F32, (*before, size - length, *after))], dim)
        while size > 1:
            size //= 2
            x = ops.add(_part(x, dim, 0, size), _part(x, dim, size, 2 * size))
        x = ops.reshape(x, (*before, *after))
    return x


def _part(x: Value, dim: int, first: int, last: int) -> Value:
    starts, limits = [0] * x.type.rank, list(x.shape)
    starts[dim], limits[dim] = first, last
    return ops.slice_(x, starts, limits)


def dot_general(op: Op, *operands: Value) -> Value:
    raise EmitError(
        f"numerics 'canonical' has no kernel for a matmul of two activations: {op.path or 'the model'}; use --numerics exact"
    )


RULES: Mapping[str, Rule] = {"multiply": multiply, "reduce": reduce}


def canonical(module: Module, numerics: str) -> Module:
    """Return a copy of a lowered module whose operations outside kernels give the same bits everywhere.

    A matmul that was not lowered to a kernel stays as it is; with numerics "canonical", it raises
    EmitError.
    """
    rules = RULES if numerics != "canonical" else {**RULES, "dot_general": dot_general}
    copied = Module(module.name)
    copied.params = module.params
    for function in module.functions.values():
        rewrite(function, rules, copied)
    return copied
