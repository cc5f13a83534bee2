"""The layer operations, such as `linear` and `attention`: their checks, and their text in MLIR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from castiron.emitter.abi import ring_rows
from castiron.emitter.graph.ir import Op
from castiron.emitter.graph.stablehlo import STABLEHLO, Operation, number, quoted, shapes_of, types_of
from castiron.emitter.graph.types import F32, I32, TensorType
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.layers.step import Weight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def _weight(op: Op) -> str | None:
    return None if op.results[0].type == TensorType(op.attrs["weight"].shape, F32) else "the result's type is not the weight's"


def _values(op: Op) -> str | None:
    return None if op.operands[0].type == op.results[0].type else "the result's type is not that of the tensor"


def _embedding(op: Op) -> str | None:
    tokens, table, rows = shapes_of(op)
    ok = op.operands[0].dtype is I32 and len(tokens) == 1 and len(table) == 2
    return None if ok and rows == (*tokens, table[1]) else "needs tokens [T] and a table [vocab, hidden]"


def _linear(op: Op) -> str | None:
    x, weight, *bias, y = shapes_of(op)
    ok = len(x) == len(weight) == 2 and x[1] == weight[1] and y == (x[0], weight[0])
    return None if ok and bias in ([], [weight[:1]]) else "needs x [T, in], a weight [out, in] and at most a bias [out]"


_POSITIONS = "the positions must be i32: [T] in a batch, start and length in prefill, otherwise start"


def _norm(max_weights: int, *ranks: int) -> Callable[[Op], str | None]:
    """Return a check of a norm with at most `max_weights` weights, bias included, of `ranks`."""

    def rule(op: Op) -> str | None:
        x, *weights = op.operands
        ok = x.type == op.results[0].type and 1 <= len(weights) <= max_weights and op.attrs["eps"] > 0
        ok = ok and all(w.shape in [x.shape[x.type.rank - rank :] for rank in ranks] for w in weights)
        return None if ok else "needs x, weights of its last dimension, and a positive epsilon"

    return rule


def _has_start(op: Op, tokens: int) -> bool:
    # The position `start` is [tokens] in a batch function and a scalar in other functions.
    start = next(v for v in op.operands[3:] if v.dtype is I32)
    return start.shape == ((tokens,) if op.attrs["mode"] == "batch" else ())


def _rope(op: Op) -> str | None:
    x, cos, sin, _start = (v.shape for v in op.operands)
    ok = len(x) == 3 and cos == sin and len(cos) == 2 and 2 * cos[1] == op.attrs["rotary_dim"] <= x[2]
    return None if ok and _has_start(op, x[0]) and x == op.results[0].shape else "needs heads [T, heads, head_dim] and tables"


def _attention(op: Op) -> str | None:
    q, k, v, k_cache, v_cache, *numbers = op.operands
    (tokens, heads, head_dim), (layers, rows, kv_heads, *_) = q.shape, k_cache.shape
    if op.attrs["sinks"] and (not numbers or numbers.pop().type != TensorType((heads,), F32)):
        return "sinks must be f32 [heads]"
    out = TensorType((tokens, heads * head_dim), F32)
    if [v.type for v in op.results] != [out, k_cache.type, v_cache.type]:
        return "the results must be f32 [T, heads * head_dim] and the two caches"
    if k.shape != v.shape or k.shape != (tokens, kv_heads, head_dim):
        return "k and v must be [T, kv_heads, head_dim]"
    if heads % kv_heads:
        return f"{heads} heads are not a multiple of {kv_heads} kv heads"
    are_positions = all(n.dtype is I32 for n in numbers) and len(numbers) == 1 + (op.attrs["mode"] == "prefill")
    if not are_positions or not _has_start(op, tokens):
        return _POSITIONS
    if op.attrs["cache"] not in ("positional", "window"):
        return f"unknown kind of cache: {op.attrs['cache']}"
    count = layers // (tokens if op.attrs["mode"] == "batch" else 1)
    window = op.attrs["window"]
    taken = 1 if op.attrs["mode"] == "batch" else tokens
    turned = op.attrs["cache"] == "window" and ring_rows(window or rows, taken) > rows
    stored = CACHES[op.attrs["storage"]].type(layers, rows, kv_heads, head_dim)
    if k_cache.type != v_cache.type or k_cache.type != stored:
        return f"the caches are {k_cache.type} and {v_cache.type}; both must be {stored}"
    if op.attrs["bidirectional"] and (op.attrs["layer"] or op.attrs["cache"] == "window"):
        return "bidirectional attention needs a positional cache of one layer"
    ok = 0 <= op.attrs["layer"] < count and (window is None or window > 0) and (window or op.attrs["cache"] == "positional")
    return None if ok and not turned else "the layer is out of range, or the ring is too short for its window and tokens"


def _activation(op: Op) -> str | None:
    ok = op.attrs["function"] in ACTIVATIONS and op.operands[0].type == op.results[0].type
    return None if ok else "unknown function, or the result's type differs"


def _route(op: Op) -> str | None:
    tokens, experts = op.operands[0].shape
    shape = (tokens, op.attrs["top_k"])
    ok = [v.type for v in op.results] == [TensorType(shape, I32), TensorType(shape, F32)]
    ok = ok and [v.shape for v in op.operands[1:]] in ([], [(experts,)]) and op.attrs["scores"] in ("softmax", "sigmoid")
    groups, top_groups = op.attrs["groups"]
    rated = op.attrs["rated"]
    ok = ok and experts % groups == 0 and 1 <= top_groups <= groups and (groups == 1 or 1 <= rated <= experts // groups)
    ok = ok and 1 <= shape[1] <= experts // groups * top_groups
    return None if ok else "needs logits [T, experts], and a valid top_k and groups"


def _experts(op: Op) -> str | None:
    x, chosen, weights, *stacked, y = shapes_of(op)
    orders = [stacked.pop() for _ in range(sum(op.attrs["ordered"]))][::-1]
    into, function = 2 if op.attrs["gated"] else 1, op.attrs["function"]
    count, inner = op.attrs["experts"], stacked[0][0] // op.attrs["experts"]
    ok = x == y and chosen == weights and chosen[0] == x[0]
    ok = ok and orders == [(count, size) for size, ordered in zip((x[1], inner), op.attrs["ordered"]) if ordered]
    ok = ok and (function in ACTIVATIONS or (op.attrs["gated"] and not isinstance(function, str)))
    ok = ok and stacked[: into + 1] == [(count * inner, x[1])] * into + [(count * x[1], inner)]
    ok = ok and stacked[into + 1 :] in ([], [(count, inner)] * into + [(count, x[1])])
    return None if ok else "needs x [T, hidden], the experts of each token, and their stacked weights"


def _recurrence(fits: Callable[[list[tuple[int, ...]], tuple[int, ...]], bool]) -> Callable[[Op], str | None]:
    """Return a check of an operation with a recurrent state."""

    def rule(op: Op) -> str | None:
        mode, (y, after) = op.attrs["mode"], op.results
        numbers = 1 + (mode == "prefill")
        *inputs, state = op.operands[:-numbers]
        starts, tokens = op.operands[-numbers:], inputs[0].shape[0]
        start = (tokens,) if mode == "batch" else ()
        if [(v.dtype, v.shape) for v in starts] != [(I32, start), (I32, ())][:numbers]:
            return _POSITIONS
        if after.type != state.type or not 0 <= op.attrs["layer"] < state.shape[0] // (tokens if mode == "batch" else 1):
            return "the layer is out of range, or the state's type changes"
        if any(v.dtype is not F32 for v in (*inputs, state, y)) or mode == "decode" and tokens != 1:
            return "operands must be f32, and decode takes one token"
        return (
            None if fits([*(v.shape for v in inputs), y.shape], state.shape[1:]) else "shapes of operands do not fit the state"
        )

    return rule


def _causal_conv(shapes: list[tuple[int, ...]], state: tuple[int, ...]) -> bool:
    x, weight, *bias, y = shapes
    rows, features = state
    return x == y == (x[0], features) and weight == (features, 1, rows + 1) and bias in ([], [(features,)])


def _gated_delta(shapes: list[tuple[int, ...]], state: tuple[int, ...]) -> bool:
    q, k, v, a, b, rate, bias, y = shapes
    heads, k_dim, v_dim = state
    ok = q == k == (v[0], q[1], k_dim) and heads % q[1] == 0 and v == y == (v[0], heads, v_dim)
    return ok and a == b == (v[0], heads) and rate == bias == (heads,)


def _selective_scan(shapes: list[tuple[int, ...]], state: tuple[int, ...]) -> bool:
    x, dt, b, c, rate, bias, skip, y = shapes
    heads, head_dim, n = state
    ok = b == c == (x[0], b[1], n) and heads % b[1] == 0 and x == y == (x[0], heads, head_dim)
    return ok and dt == (x[0], heads) and rate == bias == skip == (heads,)


def _argmax_rows(op: Op) -> str | None:
    logits = op.operands[0].type
    ok = logits.dtype is F32 and logits.rank in (1, 2) and op.results[0].type == TensorType(logits.shape[:-1], I32)
    return None if ok else "needs logits [vocab] or [rows, vocab]"


def _text(op: Op, args: list[str]) -> str:
    attrs = {key: value for key, value in op.attrs.items() if value is not None}
    facts = ", ".join(f"{key} = {_attribute(value)}" for key, value in attrs.items())
    return f'"castiron.{op.kind}"({", ".join(args)}){f" {{{facts}}}" if facts else ""} : {types_of(op)}'


def _attribute(value: Any) -> str:
    if isinstance(value, Weight):
        return f"{{name = {quoted(value.name)}, codec = {quoted(value.codec)}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{number(np.float64(value), F32)} : f32"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_attribute, value))}]"
    return str(value) if isinstance(value, int) else quoted(str(value))


LAYERS: dict[str, Operation] = {
    **STABLEHLO,
    "weight": Operation(0, 1, _weight, _text),
    "values": Operation(1, 1, _values, _text),
    "embedding": Operation(2, 1, _embedding, _text),
    "linear": Operation(None, 1, _linear, _text),
    "rms_norm": Operation(2, 1, _norm(1, 1, 2), _text),
    "layer_norm": Operation(None, 1, _norm(2, 1), _text),
    "head_norms": Operation(2, 1, _norm(1, 2), _text),
    "rope": Operation(4, 1, _rope, _text),
    "attention": Operation(None, 3, _attention, _text),
    "activation": Operation(1, 1, _activation, _text),
    "route": Operation(None, 2, _route, _text),
    "experts": Operation(None, 1, _experts, _text),
    "causal_conv": Operation(None, 2, _recurrence(_causal_conv), _text),
    "gated_delta": Operation(None, 2, _recurrence(_gated_delta), _text),
    "selective_scan": Operation(None, 2, _recurrence(_selective_scan), _text),
    "argmax_rows": Operation(1, 1, _argmax_rows, _text),
}
