"""Layer operations with a recurrent state: causal convolution, gated delta rule, selective scan.

A state has a slice for each layer in `State.layers`; `layer` is a layer's index in the model. The
results are the same whether tokens come one by one, in chunks, padded, or in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Value, fail, scope
from castiron.emitter.graph.stablehlo import build
from castiron.emitter.graph.types import I32
from castiron.emitter.layers import last_row
from castiron.emitter.layers.operations import LAYERS
from castiron.emitter.layers.step import Step


def causal_conv(step: Step, layer: int, x: Value, name: str, bias: bool) -> Value:
    """Apply the depthwise causal `torch.nn.Conv1d` called `name` to x [T, features].

        y_t = bias + sum over i < n of w_i x_(t - n + 1 + i)

    w is the weight `<name>.weight` [features, 1, n]. The state `conv` [layers, n - 1, features] has
    the latest n - 1 rows of x, oldest first.
    """
    positions = step.states["conv"].shape[1] + 1
    with scope(name):
        weights = [step.vector("weight", (x.shape[1], 1, positions))]
        weights += [step.vector("bias", (x.shape[1],))] if bias else []
        return _recur(step, "causal_conv", (x, *weights), layer, "conv", x)


def gated_delta(step: Step, layer: int, q: Value, k: Value, v: Value, a: Value, b: Value) -> Value:
    """Apply the gated delta rule (arXiv:2412.06464), HF's `torch_chunk_gated_delta_rule`.

        S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) k_t S_(t-1)))
        out_t = q_t S_t / sqrt(k_dim)

    q, k: [T, k_heads, k_dim], divided by the root of (sum of squares + 1e-6) by the operation
        itself.
    v: [T, v_heads, v_dim]. Each head of q and k is used for v_heads / k_heads heads of v.
    a, b: [T, v_heads], with g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b).
    S: the state `delta` [layers, v_heads, k_dim, v_dim]. The result is [T, v_heads, v_dim].
    """
    rates = _rate(step, v.shape[1]), step.vector("dt_bias", (v.shape[1],))
    return _recur(step, "gated_delta", (q, k, v, a, b, *rates), layer, "delta", v)


def selective_scan(step: Step, layer: int, x: Value, dt: Value, b: Value, c: Value) -> Value:
    """Apply the scan of Mamba 2 (arXiv:2405.21060), HF's `mamba2_chunk_scan`; return y.

        S_t = exp(A d_t) S_(t-1) + d_t x_t B_t,  y_t = S_t C_t + D x_t

    x, y: [T, heads, head_dim]. dt: [T, heads], with d = softplus(dt + dt_bias).
    b, c: B and C, [T, groups, n]. Each group is used for heads / groups heads. A = -exp(A_log). S
        is the state `scan` [layers, heads, head_dim, n].
    """
    heads = x.shape[1]
    vectors = _rate(step, heads), step.vector("dt_bias", (heads,)), step.vector("D", (heads,))
    return _recur(step, "selective_scan", (x, dt, b, c, *vectors), layer, "scan", x)


def _rate(step: Step, heads: int) -> Value:
    return step.vector("A_log", (heads,), lambda log: -np.exp(log))


def _recur(step: Step, kind: str, operands: Sequence[Value], layer: int, name: str, like: Value) -> Value:
    state = step.states[name]
    numbers = (step.start,) + ((step.length,) if step.length is not None else ())
    attrs = {"layer": _index(step, kind, name, layer, operands), "mode": step.mode}
    result, step.states[name] = build(LAYERS, kind, (*operands, state, *numbers), (like.type, state.type), attrs)
    return result


def _index(step: Step, kind: str, name: str, layer: int, operands: Sequence[Value] = ()) -> int:
    """Return the index of a layer in the recurrent state `name`; EmitError if it has none."""
    record = step.records[name]
    if record.kind != "recurrent" or layer not in record.layers:
        raise fail(
            kind,
            f"{name!r} is not a recurrent state of layer {layer}; declare it with kind 'recurrent' and this layer in `layers`",
            (*operands, step.states[name]),
        )
    return record.layers.index(layer)


def recurrent(step: Step, name: str, layer: int) -> Value:
    """Return a layer's recurrent state `name` before the tokens of this call, [sequences, ...]."""
    return of_layer(step.states[name], _index(step, "recurrent", name, layer), step.sequences)


def carry(step: Step, name: str, layer: int, after: Value) -> None:
    """Store a layer's state for the next call: of the last real token, or of each active sequence.

    after: the state after each of the T tokens, [T, ...].
    """
    state, before = step.states[name], recurrent(step, name, layer)
    if after.shape != (wanted := (step.tokens.shape[0], *state.shape[1:])):
        problem = f"state {name!r} after each token has the shape {list(after.shape)}; it must be {list(wanted)}"
        raise fail("carry", problem, (after, state))
    last = where_active(step.start, after, before) if step.mode == "batch" else last_row(step, after)
    step.states[name] = with_layer(state, _index(step, "carry", name, layer), last)


def of_layer(state: Value, layer: int, sequences: int) -> Value:
    """Return one layer's slice [sequences, ...] of a state [sequences * layers, ...]."""
    per, shape = state.shape[0] // sequences, state.shape[1:]
    by_sequence = ops.reshape(state, (sequences, per, *shape))
    rest = [0] * len(shape)
    return ops.reshape(ops.slice_(by_sequence, (0, layer, *rest), (sequences, layer + 1, *shape)), (sequences, *shape))


def with_layer(state: Value, layer: int, after: Value) -> Value:
    """Return a copy of `state` in which `after` [sequences, ...] replaces one layer's slice."""
    sequences, shape = after.shape[0], state.shape[1:]
    zero = ops.constant(0, I32, ())
    at = [zero, ops.constant(layer, I32, ()), *(zero for _ in shape)]
    by_sequence = ops.reshape(state, (sequences, state.shape[0] // sequences, *shape))
    carried = ops.dynamic_update_slice(by_sequence, ops.reshape(after, (sequences, 1, *shape)), at)
    return ops.reshape(carried, state.shape)


def where_active(positions: Value, after: Value, before: Value) -> Value:
    """Return `after` for active sequences and `before` for idle ones (negative positions)."""
    runs = ops.compare("GE", positions, ops.constant(0, I32, positions.shape))
    return ops.select(ops.broadcast_in_dim(runs, after.shape, (0,)), after, before)
