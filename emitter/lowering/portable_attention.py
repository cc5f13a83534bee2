"""Lower attention to StableHLO, for KV caches that store all positions and for ring buffers.

A cache is [layers, positions, kv_heads, *row], where `row` is the shape in which a format stores
the key or value of one head (`Cache.row`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from castiron.emitter.codecs.fixed_point import MAX_INTEGER, MIN_SCALED
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Op, Value
from castiron.emitter.graph.types import F32, I8, I32
from castiron.emitter.layers.kv_cache import CACHES, SCALE_BYTES, Cache


def attention(
    op: Op, q: Value, k: Value, v: Value, k_cache: Value, v_cache: Value, start: Value, *rest: Any
) -> tuple[Value, ...]:
    """Return the result of attention [T, heads * head_dim] and the updated key and value caches.

    q: [T, heads, head_dim]. k, v: [T, kv_heads, head_dim].
    start: i32 position of the first token; in a batch i32 [T], negative for an idle sequence.
    rest: in a prefill the length; then the attention sinks, if the model has them.
    """
    *given, stored = rest if op.attrs["sinks"] else (*rest, None)
    sinks = stored.value() if stored is not None else None
    over = _over_ring if op.attrs["cache"] == "window" else _over_positions
    attend: Callable[..., tuple[Value, Value, Value]] = partial(over, op, sinks)
    if op.attrs["mode"] != "batch":
        return attend(op.attrs["layer"], start, given[0] if given else None, q, k, v, k_cache, v_cache)
    sequences = q.shape[0]
    layers, outs = k_cache.shape[0] // sequences, []
    for i in range(sequences):
        rows = (ops.slice_(x, (i, 0, 0), (i + 1, *x.shape[1:])) for x in (q, k, v))
        position = ops.reshape(ops.slice_(start, (i,), (i + 1,)), ())
        # An idle sequence has no real tokens.
        runs = ops.compare("GE", position, ops.constant(0, I32, ()))
        one = ops.select(runs, ops.constant(1, I32, ()), ops.constant(0, I32, ()))
        position = ops.maximum(position, ops.constant(0, I32, ()))
        out, k_cache, v_cache = attend(i * layers + op.attrs["layer"], position, one, *rows, k_cache, v_cache)
        outs.append(out)
    return ops.concatenate(outs, 0), k_cache, v_cache


def _of_layer(cache: Value, layer: int) -> Value:
    rows = ops.slice_(cache, (layer, *[0] * (cache.type.rank - 1)), (layer + 1, *cache.shape[1:]))
    return ops.reshape(rows, cache.shape[1:])


def _with_layer(cache: Value, layer: int, rows: Value, first: Value) -> Value:
    at = (ops.constant(layer, I32, ()), first, *[ops.constant(0, I32, ())] * (cache.type.rank - 2))
    return ops.dynamic_update_slice(cache, ops.reshape(rows, (1, *rows.shape)), at)


def _over_positions(
    op: Op, sinks: Value | None, layer: int, start: Value, length: Value | None,
    q: Value, k: Value, v: Value, k_cache: Value, v_cache: Value,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Compute attention of one sequence; an idle one of a batch has the length 0."""
    tokens, context, stored = q.shape[0], k_cache.shape[1], CACHES[op.attrs["storage"]]
    k, v = _rounded(k, stored), _rounded(v, stored)
    if op.attrs["mode"] == "batch" and length is not None:
        k, v = (_stored_or_new(new, cache, layer, start, length) for new, cache in ((k, k_cache), (v, v_cache)))
    k_cache, v_cache = _with_layer(k_cache, layer, k, start), _with_layer(v_cache, layer, v, start)
    shape = (tokens, context)
    if op.attrs["bidirectional"] and length is not None:
        seen = _seen_both_ways(start, length, shape, op.attrs["window"])
    else:
        seen = _seen(_positions(start, shape), ops.iota(shape, 1), op.attrs["window"])
    cached_k, cached_v = (_widened(_of_layer(cache, layer), stored) for cache in (k_cache, v_cache))
    return _attend(op, sinks, q, cached_k, cached_v, seen), k_cache, v_cache


def _rounded(x: Value, stored: Cache) -> Value:
    """Convert f32 [n, kv_heads, head_dim] to the format `stored`, [n, kv_heads, *row]."""
    if not stored.grouped:
        return ops.convert(x, stored.dtype)
    groups, size = stored.row(x.shape[2])
    x = ops.reshape(x, (*x.shape[:2], groups, size - SCALE_BYTES))
    peak = ops.reduce("maximum", ops.abs_(x), (3,))
    number = lambda value: ops.constant(value, F32, peak.shape)
    tiny = ops.compare("LT", peak, number(MIN_SCALED))
    inverse = ops.select(tiny, number(0.0), ops.divide(number(MAX_INTEGER[1]), peak))
    numbers = ops.round_nearest_even(ops.multiply(x, ops.broadcast_in_dim(inverse, x.shape, (0, 1, 2))))
    scale = ops.bitcast_convert(ops.divide(peak, number(MAX_INTEGER[1])), I8)
    return ops.concatenate((scale, ops.convert(numbers, I8)), 3)


def _widened(rows: Value, stored: Cache) -> Value:
    """Convert [n, kv_heads, *row] of the format `stored` to f32 [n, kv_heads, head_dim]."""
    if not stored.grouped:
        return ops.convert(rows, F32)
    *peak, size = rows.shape
    scale, numbers = (ops.slice_(rows, (0, 0, 0, a), (*peak, e)) for a, e in ((0, SCALE_BYTES), (SCALE_BYTES, size)))
    scale = ops.broadcast_in_dim(ops.bitcast_convert(scale, F32), numbers.shape, (0, 1, 2))
    x = ops.multiply(ops.convert(numbers, F32), scale)
    return ops.reshape(x, (*rows.shape[:2], numbers.type.elements // (rows.shape[0] * rows.shape[1])))


def _stored_or_new(new: Value, cache: Value, layer: int, start: Value, length: Value) -> Value:
    """Return the row to write at `start`: `new`, or the cached one if `length` is 0 (idle)."""
    zero = ops.constant(0, I32, ())
    at = (ops.constant(layer, I32, ()), start, *[zero] * (cache.type.rank - 2))
    old = ops.dynamic_slice(cache, at, (1, 1, *cache.shape[2:]))
    runs = ops.broadcast_in_dim(ops.compare("GT", length, zero), new.shape, ())
    return ops.select(runs, new, ops.reshape(old, new.shape))


def _over_ring(
    op: Op, sinks: Value | None, layer: int, start: Value, length: Value | None,
    q: Value, k: Value, v: Value, k_cache: Value, v_cache: Value,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Compute attention of one sequence over ring buffers, as `_over_positions` does."""
    tokens, rows, stored = q.shape[0], k_cache.shape[1], CACHES[op.attrs["storage"]]
    every = ops.constant(tokens, I32, ())
    # Each row gets its last real position, if that position is new.
    last = _ring_positions(ops.add(start, every if length is None else length), rows)
    last = ops.subtract(last, ops.broadcast_in_dim(start, (rows,), ()))
    zeros = ops.constant(0, I32, (rows,))
    fresh, source = ops.compare("GE", last, zeros), ops.maximum(last, zeros)

    def turned(cache: Value, x: Value) -> Value:
        old, new = _of_layer(cache, layer), _rounded(x, stored)
        taken = ops.gather_rows(ops.reshape(new, (tokens, new.type.elements // tokens)), source)
        return ops.select(ops.broadcast_in_dim(fresh, old.shape, (0,)), ops.reshape(taken, old.shape), old)

    cached_k, cached_v = turned(k_cache, k), turned(v_cache, v)
    # Padding may be included, because real tokens come before it and do not attend to it.
    position = ops.broadcast_in_dim(_ring_positions(ops.add(start, every), rows), (tokens, rows), (1,))
    taken = ops.compare("GE", position, ops.constant(0, I32, position.shape))
    seen = ops.and_(taken, _seen(_positions(start, position.shape), position, op.attrs["window"]))
    out = _attend(op, sinks, q, _widened(cached_k, stored), _widened(cached_v, stored), seen)
    zero = ops.constant(0, I32, ())
    return out, _with_layer(k_cache, layer, cached_k, zero), _with_layer(v_cache, layer, cached_v, zero)


def _ring_positions(end: Value, rows: int) -> Value:
    """Return the position in each row of a ring that has stored 0 .. end - 1; negative if empty."""
    row = ops.iota((rows,), 0)
    # Add `rows` first, so that the dividend is not negative: division rounds towards zero.
    turn = ops.constant(rows, I32, (rows,))
    ahead = ops.add(ops.subtract(ops.broadcast_in_dim(ops.subtract(end, ops.constant(1, I32, ())), (rows,), ()), row), turn)
    return ops.add(row, ops.multiply(ops.subtract(ops.divide(ahead, turn), ops.constant(1, I32, (rows,))), turn))


def _positions(start: Value, shape: tuple[int, ...]) -> Value:
    return ops.add(ops.iota(shape, 0), ops.broadcast_in_dim(start, shape, ()))


def _seen(position: Value, other: Value, window: int | None) -> Value:
    """Return the mask of causal attention, i1 [T, n], of a token's position to other positions."""
    seen = ops.compare("LE", other, position)
    if window is None or window >= other.shape[1]:
        return seen
    near = ops.compare("LT", ops.subtract(position, other), ops.constant(window, I32, other.shape))
    return ops.and_(seen, near)


def _seen_both_ways(start: Value, length: Value, shape: tuple[int, ...], window: int | None) -> Value:
    """Return the mask of bidirectional attention, i1 [T, n]: real positions inside the window."""
    last = ops.subtract(ops.add(start, length), ops.constant(1, I32, ()))
    position, other = ops.minimum(_positions(start, shape), ops.broadcast_in_dim(last, shape, ())), ops.iota(shape, 1)
    seen = ops.compare("LE", other, ops.broadcast_in_dim(last, shape, ()))
    if window is None:
        return seen
    reach = ops.constant(window, I32, shape)
    for one, two in ((position, other), (other, position)):
        seen = ops.and_(seen, ops.compare("LT", ops.subtract(one, two), reach))
    return seen


def _attend(op: Op, sinks: Value | None, q: Value, k: Value, v: Value, seen: Value) -> Value:
    """Return attention of q [T, heads, head_dim] to k, v [n, kv_heads, head_dim] where `seen`."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # [T, kv_heads, group, head_dim] . [n, kv_heads, head_dim] -> [kv_heads, T, group, n]
    q = ops.reshape(q, (tokens, kv_heads, heads // kv_heads, head_dim))
    scores = ops.dot_general(q, k, ((3,), (2,)), ((1,), (1,)))
    scores = ops.multiply(scores, ops.constant(op.attrs["scale"], F32, scores.shape))
    if op.attrs["softcap"] is not None:
        cap = ops.constant(op.attrs["softcap"], F32, scores.shape)
        scores = ops.multiply(ops.tanh(ops.divide(scores, cap)), cap)
    seen = ops.broadcast_in_dim(seen, scores.shape, (1, 3))
    scores = ops.select(seen, scores, ops.constant(-np.inf, F32, scores.shape))
    peak = ops.reduce("maximum", scores, (3,))
    if sinks is not None:
        sinks = ops.broadcast_in_dim(ops.reshape(sinks, (kv_heads, heads // kv_heads)), peak.shape, (0, 2))
        peak = ops.maximum(peak, sinks)
    weights = ops.exponential(ops.subtract(scores, ops.broadcast_in_dim(peak, scores.shape, (0, 1, 2))))
    total = ops.reduce("add", weights, (3,))
    if sinks is not None:
        total = ops.add(total, ops.exponential(ops.subtract(sinks, peak)))
    total = ops.broadcast_in_dim(total, scores.shape, (0, 1, 2))
    # [kv_heads, T, group, n] . [n, kv_heads, head_dim] -> [kv_heads, T, group, head_dim]
    out = ops.dot_general(ops.divide(weights, total), v, ((3,), (0,)), ((0,), (1,)))
    return ops.reshape(ops.transpose(out, (1, 0, 2, 3)), (tokens, heads * head_dim))
