"""What stands between kernels, in a form whose bits no compiler can change: for `numerics="canonical"`.

A compiler joins a product with a sum into one fma where it likes, and adds the elements of a row in the order that its
vectors suggest. Here a product goes through a minimum and a maximum first, which leave every finite number as it is, and a sum
is folded in halves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Module, Op, Value
from castiron.emitter.lowering.rewrite import Rule, rewrite
from castiron.emitter.types import F32, EmitError

LARGEST = float(np.finfo(np.float32).max)


def multiply(op: Op, a: Value, b: Value) -> Value:
    """a * b, rounded before anything is added to it; f32 alone, of which infinities become the largest numbers."""
    product = ops.multiply(a, b)
    if product.dtype is not F32:
        return product
    high, low = (ops.constant(x, F32, product.shape) for x in (LARGEST, -LARGEST))
    return ops.minimum(ops.maximum(product, low), high)


def reduce(op: Op, x: Value, init: Value) -> Value:
    """A sum over one dimension after another, each in halves; a maximum as it is, and a sum in which nothing is rounded."""
    if op.attrs["reducer"] != "add" or op.attrs["exact"]:
        return ops.reduce(op.attrs["reducer"], x, op.attrs["dims"], op.attrs["exact"])
    for dim in sorted(op.attrs["dims"], reverse=True):
        x = _folded(x, dim)
    return x


def _folded(x: Value, dim: int) -> Value:
    """The sum over `dim`, which disappears."""
    size = 1 << (x.shape[dim] - 1).bit_length()
    if size > x.shape[dim]:
        zeros = (*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :])
        x = ops.concatenate([x, ops.constant(0.0, F32, zeros)], dim)
    while size > 1:
        size //= 2
        x = ops.add(_part(x, dim, 0, size), _part(x, dim, size, 2 * size))
    return ops.reshape(x, (*x.shape[:dim], *x.shape[dim + 1 :]))


def _part(x: Value, dim: int, first: int, last: int) -> Value:
    starts, limits = [0] * x.type.rank, list(x.shape)
    starts[dim], limits[dim] = first, last
    return ops.slice_(x, starts, limits)


def dot_general(op: Op, *operands: Value) -> Value:
    raise EmitError(f"{op.path or 'the model'} has a product of activations for which there is no canonical kernel: use exact")


RULES: Mapping[str, Rule] = {"multiply": multiply, "reduce": reduce, "dot_general": dot_general}


def canonical(module: Module) -> Module:
    """The lowered module with such operations; EmitError for a product that is no kernel's."""
    found = Module(module.name)
    found.params = module.params
    for function in module.functions.values():
        rewrite(function, RULES, found)
    return found
