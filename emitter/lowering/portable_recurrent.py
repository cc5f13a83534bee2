"""Recurrences as StableHLO alone: a token at a time where there is one of each sequence, else a chunk at a time.

A chunk is a few products of matrices, in which sums of logarithms of decays are taken between each two of its tokens. Rows of
padding add nothing to the state and let nothing decay, so that the state after a chunk is that after its last real token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from castiron.emitter import ops, state_rows
from castiron.emitter.ir import Op, Value
from castiron.emitter.lowering.rewrite import Rule
from castiron.emitter.types import F32, I32

# Tokens of a chunk, as in HF's gated delta rule. It changes no result but by rounding.
CHUNK = 64


@dataclass
class _Tokens:
    """The tokens of one operation: one of each sequence (`alone`), or several of one of which `length` are real (None: all).

    before: what the layer's state is before the first, [sequences, ...].
    """

    op: Op
    alone: bool
    before: Value
    length: Value | None

    def real(self, x: Value) -> Value:
        """x [T, ...] with zeros in rows of padding."""
        if self.length is None:
            return x
        rows = ops.compare("LT", ops.iota(x.shape, 0), ops.broadcast_in_dim(self.length, x.shape, ()))
        return ops.select(rows, x, ops.constant(0.0, F32, x.shape))


def _recurrence(rule: Callable[..., tuple[Value, Value]]) -> Rule:
    """A rule out of one that gets the tokens and its own operands, and gives the result and the layer's state after them."""

    def lowered(op: Op, *operands) -> tuple[Value, Value]:
        mode, layer = op.attrs["mode"], op.attrs["layer"]
        numbers = 2 if mode == "prefill" else 1
        *own, state = operands[:-numbers]
        start, *length = operands[-numbers:]
        sequences = start.shape[0] if mode == "batch" else 1
        before = state_rows.of_layer(state, layer, sequences)
        tokens = _Tokens(op, mode in ("decode", "batch"), before, length[0] if length else None)
        result, after = rule(tokens, *own)
        if mode == "batch":
            after = state_rows.where_run(start, after, before)
        return result, state_rows.with_layer(state, layer, after)

    return lowered


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), as exactly as its value is."""
    zero = ops.constant(0.0, F32, x.shape)
    return ops.add(ops.maximum(x, zero), ops.log_plus_one(ops.exponential(ops.negate(ops.abs_(x)))))


def _along(vector: Value, like: Value, *dims: int) -> Value:
    """A value whose dimensions are the dimensions `dims` of `like`, repeated along the others."""
    return ops.broadcast_in_dim(vector, like.shape, dims)


def causal_conv(tokens: _Tokens, x: Value, weight, bias=None) -> tuple[Value, Value]:
    (count, features), positions = x.shape, weight.weight.shape[-1]
    filters = ops.transpose(ops.reshape(weight.value(), (features, positions)), (1, 0))
    before = tokens.before
    if tokens.alone:
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
        own = ops.slice_(filters, (i, 0), (i + 1, features))
        term = ops.multiply(ops.reshape(row, x.shape), ops.broadcast_in_dim(own, x.shape, (0, 1)))
        y = term if y is None else ops.add(y, term)
    assert y is not None, "a filter has at least one position"
    return y, after


def _per_head(x: Value, heads: int) -> Value:
    """x [T, groups, n] for each of `heads` heads, as many consecutive ones of a group: [T, heads, n]."""
    count, groups, width = x.shape
    wide = ops.broadcast_in_dim(x, (count, groups, heads // groups, width), (0, 1, 3))
    return ops.reshape(wide, (count, heads, width))


def _swapped(x: Value) -> Value:
    """x [T, heads, ...] as [heads, T, ...], or back."""
    return ops.transpose(x, (1, 0, *range(2, x.type.rank)))


def _dot(a: Value, b: Value, i: int, j: int) -> Value:
    """Of each head, a [heads, ., .] and b [heads, ., .] contracted over their dimensions i and j."""
    return ops.dot_general(a, b, ((i,), (j,)), ((0,), (0,)))


@dataclass
class _Decays:
    """How much is left, in a chunk, of what there was: f32 in [0, 1].

    between: at token i of what token j brought in, [heads, C, C], 0 where j is after i. since_start: of what there was
    before the chunk, at token i, [heads, C, 1]. to_end: at the last token of what token j brought in, [heads, C, 1].
    whole: of what there was before, after the last, [heads, 1, 1].
    """

    between: Value
    since_start: Value
    to_end: Value
    whole: Value


def _decays(log: Value) -> _Decays:
    """log [heads, C]: the logarithm of each token's decay, at most 0.

    The sum between two tokens is taken as such. HF's delta rule takes the difference of two sums since the chunk's start,
    which loses digits where much decayed before.
    """
    heads, count = log.shape
    shape = (heads, count, count + 1)
    # Column j holds the tokens from j on, and their sums up to each token; column 0 is of what there was before the chunk,
    # column j + 1 of what token j brought in.
    token, column = np.indices(shape[1:])
    own = ops.multiply(ops.broadcast_in_dim(log, shape, (0, 1)), _constant(token >= column, shape))
    sums = ops.dot_general(own, _constant(np.tri(count), (count, count)), ((1,), (1,)))
    left = ops.exponential(ops.transpose(sums, (0, 2, 1)))

    def part(row: int, first: int, last: int) -> Value:
        return ops.slice_(left, (0, row, first), (heads, count, last))

    between = ops.multiply(part(0, 1, count + 1), _constant(np.tri(count), (heads, count, count)))
    to_end = ops.transpose(part(count - 1, 1, count + 1), (0, 2, 1))
    return _Decays(between, part(0, 0, 1), to_end, part(count - 1, 0, 1))


def _constant(mask: np.ndarray, shape: tuple[int, ...]) -> Value:
    """Numbers [C, .] for each head."""
    value = ops.constant(mask.astype(np.float32), F32)
    return value if shape == mask.shape else ops.broadcast_in_dim(value, shape, (1, 2))


def _times(x: Value, y: Value) -> Value:
    """x [a, b, c] times y, repeated along what it has once."""
    return ops.multiply(x, ops.broadcast_in_dim(y, x.shape, (0, 1, 2)))


def _chunks(tokens: _Tokens, rows: list[Value], one: Callable[..., tuple[Value, Value]]) -> tuple[Value, Value]:
    """Of values [T, heads, ...], `one` in turn on those of up to `CHUNK` tokens, [heads, C, ...], and the state before them,
    which gives a result of that form and the state after them."""
    results, count, state = [], rows[0].shape[0], ops.reshape(tokens.before, tokens.before.shape[1:])
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        own = (ops.slice_(x, (start, *[0] * (x.type.rank - 1)), (stop, *x.shape[1:])) for x in rows)
        result, state = one(*map(_swapped, own), state)
        results.append(_swapped(result))
    return ops.concatenate(results, 0), ops.reshape(state, tokens.before.shape)


def _inverse(lower: Value) -> Value:
    """Of I + what of `lower` [heads, C, C] stands below the diagonal.

    Of diagonal blocks of one element, then of two, and so on: [[A, 0], [B, D]] has A', D' and -D' B A'. Powers of `lower`,
    which would be fewer products, grow beyond what f32 holds where keys are alike.
    """
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


def gated_delta(tokens: _Tokens, q: Value, k: Value, v: Value, a: Value, b: Value, rate, bias) -> tuple[Value, Value]:
    """HF's recurrent form where there is one token of each sequence, else its chunk form."""
    heads = v.shape[1]
    log = ops.multiply(softplus(ops.add(a, _along(bias.value(), a, 1))), _along(rate.value(), a, 1))
    beta = ops.reshape(tokens.real(ops.logistic(b)), (*b.shape, 1))
    q, k = (_per_head(_unit(x), heads) for x in (q, k))
    q = ops.multiply(q, ops.constant(q.shape[2] ** -0.5, F32, q.shape))
    if tokens.alone:
        return _delta_of_token(q, k, v, ops.exponential(log), beta, tokens.before)
    return _chunks(tokens, [q, k, v, tokens.real(log), beta], _delta_of_chunk)


def _unit(x: Value) -> Value:
    """x [T, heads, n] divided by its length."""
    total = ops.reduce("add", ops.multiply(x, x), (2,))
    length = ops.rsqrt(ops.add(total, ops.constant(1e-6, F32, total.shape)))
    return ops.multiply(x, ops.broadcast_in_dim(length, x.shape, (0, 1)))


def _delta_of_token(q: Value, k: Value, v: Value, decay: Value, beta: Value, state: Value) -> tuple[Value, Value]:
    """q, k, v [sequences, heads, .], decay [sequences, heads]; the state [sequences, heads, k_dim, v_dim]."""
    state = ops.multiply(state, _along(decay, state, 0, 1))
    delta = _times(ops.subtract(v, _read(k, state, 2)), beta)
    state = ops.add(state, ops.multiply(_along(k, state, 0, 1, 2), _along(delta, state, 0, 1, 3)))
    return _read(q, state, 2), state


def _read(x: Value, state: Value, dim: int) -> Value:
    """x [sequences, heads, n] times a state [sequences, heads, ., .] over its dimension `dim`: [sequences, heads, .]."""
    return ops.dot_general(x, state, ((2,), (dim,)), ((0, 1), (0, 1)))


def _delta_of_chunk(q: Value, k: Value, v: Value, log: Value, beta: Value, state: Value) -> tuple[Value, Value]:
    """q, k, v [heads, C, .], logarithms of decays [heads, C] and beta [heads, C, 1]; the state [heads, k_dim, v_dim].

    What tokens write depends on what those before them wrote: a triangular system, solved once for what is new to the
    state. HF solves it for v and for k, and takes what the state holds away afterwards.
    """
    decays, written = _decays(log), _times(k, beta)
    system = ops.multiply(_dot(written, k, 2, 2), decays.between)
    held = _dot(_times(written, decays.since_start), state, 2, 1)
    new = _dot(_inverse(system), ops.subtract(_times(v, beta), held), 2, 1)
    inside = _dot(ops.multiply(_dot(q, k, 2, 2), decays.between), new, 2, 1)
    out = ops.add(_dot(_times(q, decays.since_start), state, 2, 1), inside)
    return out, ops.add(_times(state, decays.whole), _dot(_times(k, decays.to_end), new, 1, 1))


def selective_scan(tokens: _Tokens, x: Value, dt: Value, b: Value, c: Value, rate, bias, skip) -> tuple[Value, Value]:
    """HF's recurrent form where there is one token of each sequence, else its chunk form."""
    heads, state = x.shape[1], tokens.before
    step = tokens.real(softplus(ops.add(dt, _along(bias.value(), dt, 1))))
    log, written = ops.multiply(step, _along(rate.value(), dt, 1)), ops.multiply(x, _along(step, x, 0, 1))
    b, c = _per_head(b, heads), _per_head(c, heads)
    if tokens.alone:
        new = ops.multiply(_along(written, state, 0, 1, 2), _along(b, state, 0, 1, 3))
        state = ops.add(ops.multiply(state, _along(ops.exponential(log), state, 0, 1)), new)
        out = _read(c, state, 3)
    else:
        out, state = _chunks(tokens, [written, b, c, log], _scan_of_chunk)
    return ops.add(out, ops.multiply(x, _along(skip.value(), x, 1))), state


def _scan_of_chunk(written: Value, b: Value, c: Value, log: Value, state: Value) -> tuple[Value, Value]:
    """What is written [heads, C, head_dim], B and C [heads, C, n], logarithms of decays [heads, C]; the state
    [heads, head_dim, n]."""
    decays = _decays(log)
    inside = _dot(ops.multiply(_dot(c, b, 2, 2), decays.between), written, 2, 1)
    out = ops.add(inside, _dot(_times(c, decays.since_start), state, 2, 2))
    return out, ops.add(_times(state, decays.whole), _dot(written, _times(b, decays.to_end), 1, 1))


RULES: dict[str, Rule] = {
    "causal_conv": _recurrence(causal_conv),
    "gated_delta": _recurrence(gated_delta),
    "selective_scan": _recurrence(selective_scan),
}
