"""Lower each layer operation to StableHLO in f32, for arbitrary StableHLO compilers.

Quantised weights stay quantised; the lowered function dequantises a weight where it uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from castiron.emitter.codecs import codec_of, numbers
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Op, Param, Source, Value, parameter
from castiron.emitter.graph.types import BF16, F16, F32, I8, I32, DType, TensorType
from castiron.emitter.layers import ClampedSwiGLU
from castiron.emitter.layers.step import Weight, source
from castiron.emitter.lowering import portable_recurrent
from castiron.emitter.lowering.portable_attention import attention
from castiron.emitter.lowering.rewrite import Rule

_FLOATS: dict[str, DType] = {"f32": F32, "f16": F16, "bf16": BF16}


class Stored:
    """A weight in its stored format, quantised or float; `value` dequantises it."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.codec = codec_of(weight.codec)

    def value(self, pick: Callable[[Value], Value] = lambda part: part) -> Value:
        """Append operations that dequantise the weight; return f32 [rows, in].

        pick(part): selects rows of each stored array [rows, ...]; default: all rows.
        """
        weight, codec = self.weight, self.codec
        if not codec.quantised:
            return ops.convert(pick(parameter(float_param(weight, _FLOATS[weight.codec]))), F32)
        inner = weight.shape[1]
        blocks, groups = inner // codec.block, inner // codec.group

        def split(raw: np.ndarray) -> dict[str, np.ndarray]:
            # The arrays of `Parts` by field name.
            parts = numbers(codec, codec.split(raw.reshape(-1, codec.block_bytes)))
            return {name: part for name, part in vars(parts).items() if part is not None}

        sample = split(np.zeros(codec.block_bytes, np.uint8))

        def part(name: str, width: int) -> Value:
            dtype = {"<f2": F16, "<f4": F32}.get(sample[name].dtype.str, I8)
            take = lambda raw: split(raw)[name].view(np.int8) if dtype == I8 else split(raw)[name]
            type_ = TensorType((weight.shape[0], width), dtype)
            stored = Param(f"{weight.name}.{name}", type_, source([weight], lambda raw: take(raw).reshape(type_.shape)))
            return ops.convert(pick(parameter(stored)), F32)

        def factor(of_block: str, of_group: str) -> Value:
            """Return the scales or the minima of all groups, f32 [rows, groups]."""
            value = part(of_block, blocks)
            shape = (value.shape[0], blocks, groups // blocks)
            wide = ops.broadcast_in_dim(value, shape, (0, 1))
            if of_group in sample:
                wide = ops.multiply(wide, ops.reshape(part(of_group, groups), shape))
            return ops.reshape(wide, (shape[0], groups))

        codes = part("codes", inner)
        shape = (codes.shape[0], groups, codec.group)
        scale = ops.broadcast_in_dim(factor("d", "scales"), shape, (0, 1))
        value = ops.multiply(scale, ops.reshape(codes, shape))
        if codec.minimum:
            minimum = ops.broadcast_in_dim(factor("m", "minima"), shape, (0, 1))
            value = (ops.add if codec.minimum > 0 else ops.subtract)(value, minimum)
        return ops.reshape(value, (shape[0], inner))


def float_param(weight: Weight, dtype: DType) -> Param:
    """Return a parameter of type `dtype` with the elements of a float weight."""
    type_ = TensorType(weight.shape, dtype)
    if (values := weight.values) is not None:
        return Param(weight.name, type_, Source((), lambda: np.asarray(values(), np.float32)))

    def pack(raw: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(raw).view(dtype.numpy).reshape(weight.shape)
        return weight.transform(array) if weight.transform else array

    return Param(weight.name, type_, source([weight], pack))


def _numbers(value: Value | Stored) -> Value:
    return value.value() if isinstance(value, Stored) else value


def embedding(op: Op, tokens: Value, weight: Stored) -> Value:
    return weight.value(lambda part: ops.gather_rows(part, tokens))


def linear(op: Op, x: Value, weight: Value | Stored, bias: Value | Stored | None = None) -> Value:
    y = ops.dot_general(x, _numbers(weight), ((1,), (1,)))
    return y if bias is None else ops.add(y, _along_last(_numbers(bias), y))


def _along_last(vector: Value, like: Value) -> Value:
    """Broadcast `vector` to the shape of `like`, which has the same last dimensions."""
    return ops.broadcast_in_dim(vector, like.shape, range(like.type.rank - vector.type.rank, like.type.rank))


def _mean(x: Value) -> Value:
    total = ops.reduce("add", x, (x.type.rank - 1,))
    mean = ops.divide(total, ops.constant(float(x.shape[-1]), F32, total.shape))
    return ops.broadcast_in_dim(mean, x.shape, range(x.type.rank - 1))


def rms_norm(op: Op, x: Value, weight: Stored) -> Value:
    variance = ops.add(_mean(ops.multiply(x, x)), ops.constant(op.attrs["eps"], F32, x.shape))
    return ops.multiply(ops.multiply(x, ops.rsqrt(variance)), _along_last(_numbers(weight), x))


def layer_norm(op: Op, x: Value, weight: Stored, bias: Stored | None = None) -> Value:
    centred = ops.subtract(x, _mean(x))
    variance = ops.add(_mean(ops.multiply(centred, centred)), ops.constant(op.attrs["eps"], F32, x.shape))
    y = ops.multiply(ops.multiply(centred, ops.rsqrt(variance)), _along_last(_numbers(weight), x))
    return y if bias is None else ops.add(y, _along_last(_numbers(bias), x))


def rope(op: Op, x: Value, cos: Stored, sin: Stored, start: Value) -> Value:
    tokens, heads, head_dim = x.shape
    rotary_dim = op.attrs["rotary_dim"]
    half = rotary_dim // 2
    zero = ops.constant(0, I32, ())

    def rows(table: Stored) -> Value:
        numbers = _numbers(table)
        together = op.attrs["mode"] != "batch"
        rows = ops.dynamic_slice(numbers, (start, zero), (tokens, half)) if together else ops.gather_rows(numbers, start)
        return ops.broadcast_in_dim(rows, (tokens, heads, half), (0, 2))

    def features(first: int, last: int) -> Value:
        return ops.slice_(x, (0, 0, first), (tokens, heads, last))

    pairs, each = (tokens, heads, half, 2), (tokens, heads, half, 1)

    def of_pairs(i: int) -> Value:
        turning = ops.reshape(features(0, rotary_dim), pairs)
        return ops.reshape(ops.slice_(turning, (0, 0, 0, i), (*each[:3], i + 1)), each[:3])

    if op.attrs["interleaved"]:
        a, b = of_pairs(0), of_pairs(1)
    else:
        a, b = features(0, half), features(half, rotary_dim)
    c, s = rows(cos), rows(sin)
    parts = [
        ops.subtract(ops.multiply(a, c), ops.multiply(b, s)),
        ops.add(ops.multiply(b, c), ops.multiply(a, s)),
    ]
    if op.attrs["interleaved"]:
        turned = ops.concatenate([ops.reshape(part, each) for part in parts], 3)
        parts = [ops.reshape(turned, (tokens, heads, rotary_dim))]
    if rotary_dim < head_dim:
        parts.append(features(rotary_dim, head_dim))
    return ops.concatenate(parts, 2) if len(parts) > 1 else parts[0]


def activated(x: Value, kind: str) -> Value:
    if kind == "silu":
        return ops.multiply(x, ops.logistic(x))
    if kind in ("relu", "relu2"):
        positive = ops.maximum(x, ops.constant(0.0, F32, x.shape))
        return positive if kind == "relu" else ops.multiply(positive, positive)
    half = ops.multiply(x, ops.constant(0.5, F32, x.shape))
    if kind == "gelu":
        inner = _erf(ops.multiply(x, ops.constant(2**-0.5, F32, x.shape)))
    else:
        cube = ops.multiply(ops.multiply(ops.multiply(x, x), x), ops.constant(0.044715, F32, x.shape))
        inner = ops.tanh(ops.multiply(ops.add(x, cube), ops.constant((2 / np.pi) ** 0.5, F32, x.shape)))
    return ops.multiply(half, ops.add(inner, ops.constant(1.0, F32, x.shape)))


def _erf(x: Value) -> Value:
    """Return erf as XLA and Eigen approximate it for f32: x * P(x^2) / Q(x^2) on [-4, 4]."""
    bound = ops.constant(4.0, F32, x.shape)
    x = ops.maximum(ops.minimum(x, bound), ops.negate(bound))
    square = ops.multiply(x, x)

    def polynomial(coefficients: tuple[float, ...]) -> Value:
        total = ops.constant(coefficients[0], F32, x.shape)
        for coefficient in coefficients[1:]:
            total = ops.add(ops.multiply(total, square), ops.constant(coefficient, F32, x.shape))
        return total

    numerator = polynomial(
        (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05)
        + (-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)
    )
    denominator = polynomial(
        (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)
    )
    return ops.divide(ops.multiply(x, numerator), denominator)


def route(op: Op, logits: Value, correction: Stored | None = None) -> tuple[Value, Value]:
    """Choose experts for each token; return their indices i32 and weights f32, both [T, top_k]."""
    tokens, experts = logits.shape
    if op.attrs["scores"] == "sigmoid":
        likely = ops.logistic(logits)
    else:
        peak = ops.broadcast_in_dim(ops.reduce("maximum", logits, (1,)), logits.shape, (0,))
        likely = ops.exponential(ops.subtract(logits, peak))
        likely = ops.divide(likely, ops.broadcast_in_dim(ops.reduce("add", likely, (1,)), likely.shape, (0,)))
    rated = likely if correction is None else ops.add(likely, _along_last(correction.value(), likely))
    if op.attrs["groups"][0] > 1:
        groups, best = op.attrs["groups"]
        rated = of_best_groups(rated, groups, best, op.attrs["rated"])
    rank = ranks(rated)
    slots = (tokens, op.attrs["top_k"], experts)
    here = ops.compare("EQ", ops.broadcast_in_dim(rank, slots, (0, 2)), ops.iota(slots, 1, F32))
    nothing = ops.constant(0.0, F32, slots)
    chosen = ops.reduce("add", ops.select(here, ops.iota(slots, 2, F32), nothing), (2,), exact=True)
    weights = ops.reduce("add", ops.select(here, ops.broadcast_in_dim(likely, slots, (0, 2)), nothing), (2,), exact=True)
    if op.attrs["normalised"]:
        total = ops.broadcast_in_dim(ops.reduce("add", weights, (1,)), weights.shape, (0,))
        weights = ops.divide(weights, total)
    return ops.convert(chosen, I32), weights


def ranks(rated: Value) -> Value:
    """Return the rank of each number in its row, f32 [rows, n]: 0 for the largest.

    Of equal numbers, the one with the lower index has the lower rank.
    """
    rows, n = rated.shape
    pairs = (rows, n, n)
    own, other = (ops.broadcast_in_dim(rated, pairs, dims) for dims in ((0, 1), (0, 2)))
    lower = ops.compare("LT", ops.iota(pairs, 2), ops.iota(pairs, 1))
    before = ops.or_(ops.compare("GT", other, own), ops.and_(ops.compare("EQ", other, own), lower))
    return ops.reduce("add", ops.convert(before, F32), (2,), exact=True)


def of_best_groups(rated: Value, groups: int, chosen_groups: int, best_of_group: int) -> Value:
    """Replace the scores [T, experts] outside the `chosen_groups` best groups by -inf.

    best_of_group: the score of a group is the sum of its `best_of_group` largest scores.
    """
    (tokens, experts), each = rated.shape, rated.shape[1] // groups
    apart = ops.reshape(rated, (tokens * groups, each))
    best = ops.compare("LT", ranks(apart), ops.constant(float(best_of_group), F32, apart.shape))
    sums = ops.reduce("add", ops.select(best, apart, ops.constant(0.0, F32, apart.shape)), (1,))
    rank = ranks(ops.reshape(sums, (tokens, groups)))
    rank = ops.reshape(ops.broadcast_in_dim(rank, (tokens, groups, each), (0, 1)), (tokens, experts))
    taken = ops.compare("LT", rank, ops.constant(float(chosen_groups), F32, rank.shape))
    return ops.select(taken, rated, ops.constant(-np.inf, F32, rated.shape))


def rows_of_pairs(x: Value, per_token: int) -> Value:
    """Repeat each row of x [T, in] `per_token` times in sequence; return [T * per_token, in]."""
    (tokens, features), pairs = x.shape, x.shape[0] * per_token
    return ops.reshape(ops.broadcast_in_dim(x, (tokens, per_token, features), (0, 2)), (pairs, features))


def into_down(projected: Sequence[Value], function: str | ClampedSwiGLU) -> Value:
    """Apply the activation of an MLP to gate and up, or to up; return the input of `down`."""
    if len(projected) == 1:
        return activated(projected[0], str(function))
    gate, up = projected
    if isinstance(function, str):
        return ops.multiply(activated(gate, function), up)
    limit = ops.constant(function.limit, F32, gate.shape)
    gate, up = ops.minimum(gate, limit), ops.maximum(ops.minimum(up, limit), ops.negate(limit))
    gate = ops.multiply(gate, ops.logistic(ops.multiply(gate, ops.constant(function.alpha, F32, gate.shape))))
    return ops.multiply(ops.add(up, ops.constant(1.0, F32, up.shape)), gate)


# Weights of gate, up or down, stacked for all experts; the rows of one expert; the bias [experts, rows] or None.
_Stacked = tuple[Stored, int, Stored | None]


def experts(op: Op, x: Value, chosen: Value, weights: Value, *stacked: Stored) -> Value:
    """Return the weighted sum of the results of each token's experts, [T, hidden].

    chosen, weights: the experts of each token, [T, n], and their factors.
    stacked: gate (if any), up and down, then biases and column orders; each with rows of all
        experts.
    """
    stacked, orders = split_orders(op, stacked)
    count = 3 if op.attrs["gated"] else 2
    biases = stacked[count:] or (None,) * count
    parts = [(part, part.weight.shape[0] // op.attrs["experts"], bias) for part, bias in zip(stacked, biases)]
    if x.shape[0] == 1 and not any(orders):
        return _experts_of_token(x, chosen, weights, op.attrs["function"], parts)
    return _experts_of_pairs(x, chosen, weights, op.attrs["function"], parts, orders)


def split_orders(op: Op, stacked: tuple[Stored, ...]) -> tuple[tuple[Stored, ...], list[Stored | None]]:
    """Separate `stacked` into weights with biases, and the column orders of (gate and up, down)."""
    count = sum(op.attrs["ordered"])
    orders = iter(stacked[len(stacked) - count :])
    return stacked[: len(stacked) - count], [next(orders) if ordered else None for ordered in op.attrs["ordered"]]


def ordered(x: Value, order: Stored | None, expert: Value) -> Value:
    """Permute the features of each row of x [n, in] as the columns of its expert's weight are.

    order: [experts, in]; element [e, c] is the feature that column c multiplies. None: no change.
    """
    if order is None:
        return x
    pairs, features = x.shape
    columns = ops.convert(order.value(lambda part: ops.gather_rows(part, expert)), I32)
    first = ops.multiply(ops.iota(x.shape, 0), ops.constant(features, I32, x.shape))
    at = ops.reshape(ops.add(first, columns), (pairs * features,))
    return ops.reshape(ops.gather_rows(ops.reshape(x, (pairs * features, 1)), at), x.shape)


def _experts_of_token(x: Value, chosen: Value, weights: Value, function: str | ClampedSwiGLU, parts: list[_Stacked]) -> Value:
    zero = ops.constant(0, I32, ())
    total: Value | None = None
    for slot in range(chosen.shape[1]):
        expert, weight = (ops.reshape(ops.slice_(v, (0, slot), (1, slot + 1)), ()) for v in (chosen, weights))

        def project(x: Value, stacked: Stored, out: int, bias: Stored | None) -> Value:
            first = ops.multiply(expert, ops.constant(out, I32, ()))
            of_expert = stacked.value(lambda part: ops.dynamic_slice(part, (first, zero), (out, part.shape[1])))
            y = ops.dot_general(x, of_expert, ((1,), (1,)))
            return y if bias is None else ops.add(y, bias.value(lambda part: ops.dynamic_slice(part, (expert, zero), (1, out))))

        *into, down = parts
        y = project(into_down([project(x, *part) for part in into], function), *down)
        y = ops.multiply(y, ops.broadcast_in_dim(weight, y.shape, ()))
        total = y if total is None else ops.add(total, y)
    assert total is not None, "a token has at least one expert"
    return total


def _experts_of_pairs(
    x: Value,
    chosen: Value,
    weights: Value,
    function: str | ClampedSwiGLU,
    parts: list[_Stacked],
    orders: Sequence[Stored | None],
) -> Value:
    """Compute `experts` with one batch of all (token, expert) pairs: few operations."""
    (tokens, hidden), per_token = x.shape, chosen.shape[1]
    pairs = tokens * per_token
    expert = ops.reshape(chosen, (pairs,))

    def project(x: Value, stacked: Stored, out: int, bias: Stored | None) -> Value:
        first = ops.multiply(expert, ops.constant(out, I32, expert.shape))
        rows = ops.add(ops.broadcast_in_dim(first, (pairs, out), (0,)), ops.iota((pairs, out), 1))
        rows = ops.reshape(rows, (pairs * out,))
        of_experts = ops.reshape(stacked.value(lambda part: ops.gather_rows(part, rows)), (pairs, out, x.shape[1]))
        y = ops.dot_general(x, of_experts, ((1,), (2,)), ((0,), (0,)))
        return y if bias is None else ops.add(y, bias.value(lambda part: ops.gather_rows(part, expert)))

    x = ordered(rows_of_pairs(x, per_token), orders[0], expert)
    *into, down = parts
    y = project(ordered(into_down([project(x, *part) for part in into], function), orders[1], expert), *down)
    y = ops.reshape(y, (tokens, per_token, hidden))
    return ops.reduce("add", ops.multiply(y, ops.broadcast_in_dim(weights, y.shape, (0, 1))), (1,))


def argmax_rows(op: Op, logits: Value) -> Value:
    if logits.type.rank == 1:
        return ops.argmax(logits)
    rows, vocab = logits.shape
    indices = [ops.argmax(ops.reshape(ops.slice_(logits, (i, 0), (i + 1, vocab)), (vocab,))) for i in range(rows)]
    return ops.concatenate([ops.reshape(index, (1,)) for index in indices], 0)


RULES: dict[str, Rule] = {
    "weight": lambda op: Stored(op.attrs["weight"]),
    "values": lambda op, weight: weight.value(),
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "head_norms": layer_norm,
    "rope": rope,
    "attention": attention,
    "activation": lambda op, x: activated(x, op.attrs["function"]),
    "argmax_rows": argmax_rows,
    "route": route,
    "experts": experts,
    **portable_recurrent.RULES,
}
