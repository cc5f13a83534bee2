"""Lower recurrent layers to StableHLO, for one token of each sequence or several tokens of one.

The gated delta rule and the scan of Mamba 2 compute several tokens in chunks, as in HF: by a few
matmuls, which need the decay of the state between every two tokens, not by a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Op, Value
from castiron.emitter.graph.types import F32, I32
from castiron.emitter.layers import recurrences
from castiron.emitter.lowering.rewrite import Rule

# Tokens of a chunk, as in HF's gated delta rule; the size changes results by rounding only.
CHUNK = 64


@dataclass
class _Call:
    """The tokens that a recurrent operation computes in one call.

    single: one token of each sequence; otherwise several tokens of one sequence.
    before: the state of the layer before these tokens, [sequences, ...].
    length: number of tokens that are not padding; None if there is no padding.
    """

    single: bool
    before: Value
    length: Value | None

    def real(self, x: Value) -> Value:
        if self.length is None:
            return x
        rows = ops.compare("LT", ops.iota(x.shape, 0), ops.broadcast_in_dim(self.length, x.shape, ()))
        return ops.select(rows, x, ops.constant(0.0, F32, x.shape))


def _recurrence(rule: Callable[..., tuple[Value, Value]]) -> Rule:
    """Return a lowering rule that reads a layer's state, calls `rule`, and stores the state."""

    def lowered(op: Op, *operands) -> tuple[Value, Value]:
        mode, layer = op.attrs["mode"], op.attrs["layer"]
        numbers = 2 if mode == "prefill" else 1
        *inputs, state = operands[:-numbers]
        start, *length = operands[-numbers:]
        sequences = start.shape[0] if mode == "batch" else 1
        before = recurrences.of_layer(state, layer, sequences)
        tokens = _Call(mode in ("decode", "batch"), before, length[0] if length else None)
        result, after = rule(tokens, *inputs)
        if mode == "batch":
            after = recurrences.where_active(start, after, before)
        return result, recurrences.with_layer(state, layer, after)

    return lowered


def softplus(x: Value) -> Value:
    """Return log(1 + exp(x)), accurate also for small results."""
    zero = ops.constant(0.0, F32, x.shape)
    return ops.add(ops.maximum(x, zero), ops.log_plus_one(ops.exponential(ops.negate(ops.abs_(x)))))


def _along(vector: Value, like: Value, *dims: int) -> Value:
    """Broadcast `vector` to the shape of `like`; its dimension i becomes dimension `dims[i]`."""
    return ops.broadcast_in_dim(vector, like.shape, dims)


def causal_conv(tokens: _Call, x: Value, weight, bias=None) -> tuple[Value, Value]:
    (count, features), positions = x.shape, weight.weight.shape[-1]
    filters = ops.transpose(ops.reshape(weight.value(), (features, positions)), (1, 0))
    before = tokens.before
    if tokens.single:
        seen = ops.concatenate((before, ops.reshape(x, (count, 1, features))), 1)
        rows = [ops.slice_(seen, (0, i, 0), (count, i + 1, features)) for i in range(positions)]
        after = ops.slice_(seen, (0, 1, 0), seen.shape)
    else:
        seen = ops.concatenate((ops.reshape(before, before.shape[1:]), x), 0)
        rows = [ops.slice_(seen, (i, 0), (i + count, features)) for i in range(positions)]
        end = ops.constant(count, I32, ()) if tokens.length is None else tokens.length
        after = ops.dynamic_slice(seen, (end, ops.constant(0, I32, ())), before.shape[1:])
        after = ops.reshape(after, before.shape)
    y = None if bias is None else _along(bias.value(), x, 1)
    for i, row in enumerate(rows):
        weight_row = ops.slice_(filters, (i, 0), (i + 1, features))
        term = ops.multiply(ops.reshape(row, x.shape), ops.broadcast_in_dim(weight_row, x.shape, (0, 1)))
        y = term if y is None else ops.add(y, term)
    assert y is not None, "a filter has at least one position"
    return y, after


def _per_head(x: Value, heads: int) -> Value:
    """Repeat each group of x [T, groups, n] for all heads of the group; return [T, heads, n]."""
    count, groups, width = x.shape
    wide = ops.broadcast_in_dim(x, (count, groups, heads // groups, width), (0, 1, 3))
    return ops.reshape(wide, (count, heads, width))


def _swapped(x: Value) -> Value:
    return ops.transpose(x, (1, 0, *range(2, x.type.rank)))


def _dot(a: Value, b: Value, i: int, j: int) -> Value:
    """Multiply matrices [heads, ., .], summed over dimension i of `a` and dimension j of `b`."""
    return ops.dot_general(a, b, ((i,), (j,)), ((0,), (0,)))


@dataclass
class _Decays:
    """The factors by which the state shrinks between the C tokens of a chunk.

    between: [heads, C, C]; element [h, i, j] is the decay from token j to token i, 0 if j > i.
    since_start: from the state before the chunk to each token, [heads, C, 1].
    to_end: from each token to the last token, [heads, C, 1].
    total: from the state before the chunk to the last token, [heads, 1, 1].
    """

    between: Value
    since_start: Value
    to_end: Value
    total: Value


def _decays(log: Value) -> _Decays:
    """Return the decays of a chunk from their logarithms at each token, [heads, C]."""
    # The logarithms are summed directly, because HF's difference of two sums loses precision.
    heads, count = log.shape
    shape = (heads, count, count + 1)
    # Column 0 has the sums of logarithms from the state before the chunk to each token, and column j + 1 those from token j.
    token, column = np.indices(shape[1:])
    masked = ops.multiply(ops.broadcast_in_dim(log, shape, (0, 1)), _constant(token >= column, shape))
    sums = ops.dot_general(masked, _constant(np.tri(count), (count, count)), ((1,), (1,)))
    left = ops.exponential(ops.transpose(sums, (0, 2, 1)))

    def part(row: int, first: int, last: int) -> Value:
        return ops.slice_(left, (0, row, first), (heads, count, last))

    between = ops.multiply(part(0, 1, count + 1), _constant(np.tri(count), (heads, count, count)))
    to_end = ops.transpose(part(count - 1, 1, count + 1), (0, 2, 1))
    return _Decays(between, part(0, 0, 1), to_end, part(count - 1, 0, 1))


def _constant(mask: np.ndarray, shape: tuple[int, ...]) -> Value:
    value = ops.constant(mask.astype(np.float32), F32)
    return value if shape == mask.shape else ops.broadcast_in_dim(value, shape, (1, 2))


def _times(x: Value, y: Value) -> Value:
    return ops.multiply(x, ops.broadcast_in_dim(y, x.shape, (0, 1, 2)))


def _chunks(tokens: _Call, rows: list[Value], chunk: Callable[..., tuple[Value, Value]]) -> tuple[Value, Value]:
    """Return results [T, heads, ...] and the last state; `chunk` computes C tokens."""
    results, count, state = [], rows[0].shape[0], ops.reshape(tokens.before, tokens.before.shape[1:])
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        of_chunk = (ops.slice_(x, (start, *[0] * (x.type.rank - 1)), (stop, *x.shape[1:])) for x in rows)
        result, state = chunk(*map(_swapped, of_chunk), state)
        results.append(_swapped(result))
    return ops.concatenate(results, 0), ops.reshape(state, tokens.before.shape)


def _inverse(lower: Value) -> Value:
    """Return the inverse of I + L for the part L of `lower` [heads, C, C] below the diagonal."""
    # Diagonal blocks of 1, 2, 4, ...: that of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. Powers of `lower` would
    # need fewer matmuls, but overflow f32 if keys are similar.
    heads, count, _ = lower.shape
    row, column = np.indices((count, count))
    inverse = _constant(np.eye(count), lower.shape)
    size = 1
    while size < count:
        joined = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        between = ops.multiply(lower, _constant(joined, lower.shape))
        if size > 1:
            between = _dot(_dot(inverse, between, 2, 1), inverse, 2, 1)
        inverse = ops.subtract(inverse, between)
        size *= 2
    return inverse


def gated_delta(tokens: _Call, q: Value, k: Value, v: Value, a: Value, b: Value, rate, bias) -> tuple[Value, Value]:
    """Apply the gated delta rule (arXiv:2412.06464); return [T, heads, v_dim] and the new state.

    q, k: [T, k_heads, k_dim]. v: [T, heads, v_dim]. rate, bias: -exp(A_log) and dt_bias, [heads].
    a, b: [T, heads]. The state decays by exp(rate * softplus(a + bias)), and beta is sigmoid(b).
    """
    heads = v.shape[1]
    log = ops.multiply(softplus(ops.add(a, _along(bias.value(), a, 1))), _along(rate.value(), a, 1))
    beta = ops.reshape(tokens.real(ops.logistic(b)), (*b.shape, 1))
    q, k = (_per_head(_unit(x), heads) for x in (q, k))
    q = ops.multiply(q, ops.constant(q.shape[2] ** -0.5, F32, q.shape))
    if tokens.single:
        return _delta_of_token(q, k, v, ops.exponential(log), beta, tokens.before)
    return _chunks(tokens, [q, k, v, tokens.real(log), beta], _delta_of_chunk)


def _unit(x: Value) -> Value:
    total = ops.reduce("add", ops.multiply(x, x), (2,))
    length = ops.rsqrt(ops.add(total, ops.constant(1e-6, F32, total.shape)))
    return ops.multiply(x, ops.broadcast_in_dim(length, x.shape, (0, 1)))


def _delta_of_token(q: Value, k: Value, v: Value, decay: Value, beta: Value, state: Value) -> tuple[Value, Value]:
    """Apply the rule to q, k [sequences, heads, k_dim] and v [sequences, heads, v_dim]."""
    state = ops.multiply(state, _along(decay, state, 0, 1))
    delta = _times(ops.subtract(v, _read(k, state, 2)), beta)
    state = ops.add(state, ops.multiply(_along(k, state, 0, 1, 2), _along(delta, state, 0, 1, 3)))
    return _read(q, state, 2), state


def _read(x: Value, state: Value, dim: int) -> Value:
    """Multiply x [sequences, heads, n] by the state over its dimension `dim` (2 or 3)."""
    return ops.dot_general(x, state, ((2,), (dim,)), ((0, 1), (0, 1)))


def _delta_of_chunk(q: Value, k: Value, v: Value, log: Value, beta: Value, state: Value) -> tuple[Value, Value]:
    """Apply the rule to q, k, v [heads, C, ...], with the log of the decay, beta and state."""
    # Updates depend on earlier ones: they solve a triangular system with the right side beta * (v - decay * k @ state).
    decays, written = _decays(log), _times(k, beta)
    system = ops.multiply(_dot(written, k, 2, 2), decays.between)
    recalled = _dot(_times(written, decays.since_start), state, 2, 1)
    new = _dot(_inverse(system), ops.subtract(_times(v, beta), recalled), 2, 1)
    inside = _dot(ops.multiply(_dot(q, k, 2, 2), decays.between), new, 2, 1)
    out = ops.add(_dot(_times(q, decays.since_start), state, 2, 1), inside)
    return out, ops.add(_times(state, decays.total), _dot(_times(k, decays.to_end), new, 1, 1))


def selective_scan(tokens: _Call, x: Value, dt: Value, b: Value, c: Value, rate, bias, skip) -> tuple[Value, Value]:
    """Apply the scan of Mamba 2 (arXiv:2405.21060); return [T, heads, head_dim] and the new state.

    x: [T, heads, head_dim]. b, c: [T, groups, n]. rate, bias, skip: -exp(A_log), dt_bias, D,
        [heads].
    dt: [T, heads]. The time step is d = softplus(dt + bias), and the state decays by exp(rate * d).
    """
    heads, state = x.shape[1], tokens.before
    step = tokens.real(softplus(ops.add(dt, _along(bias.value(), dt, 1))))
    log, written = ops.multiply(step, _along(rate.value(), dt, 1)), ops.multiply(x, _along(step, x, 0, 1))
    b, c = _per_head(b, heads), _per_head(c, heads)
    if tokens.single:
        new = ops.multiply(_along(written, state, 0, 1, 2), _along(b, state, 0, 1, 3))
        state = ops.add(ops.multiply(state, _along(ops.exponential(log), state, 0, 1)), new)
        out = _read(c, state, 3)
    else:
        out, state = _chunks(tokens, [written, b, c, log], _scan_of_chunk)
    return ops.add(out, ops.multiply(x, _along(skip.value(), x, 1))), state


def _scan_of_chunk(written: Value, b: Value, c: Value, log: Value, state: Value) -> tuple[Value, Value]:
    """Apply the scan to written = x * d [heads, C, head_dim] and b, c [heads, C, n]."""
    decays = _decays(log)
    inside = _dot(ops.multiply(_dot(c, b, 2, 2), decays.between), written, 2, 1)
    out = ops.add(inside, _dot(_times(c, decays.since_start), state, 2, 2))
    return out, ops.add(_times(state, decays.total), _dot(written, _times(b, decays.to_end), 1, 1))


RULES: dict[str, Rule] = {
    "causal_conv": _recurrence(causal_conv),
    "gated_delta": _recurrence(gated_delta),
    "selective_scan": _recurrence(selective_scan),
}
