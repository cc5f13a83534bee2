"""Layer operations that read a sequence by a recurrence: what they carry from token to token does not grow with it.

Each carries a recurrent state on (`states.py`), one slice of it a layer, and gives the same whether its tokens come one by
one, in chunks, padded, or beside those of other sequences. `layer` counts the layers that have such a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from castiron.emitter.ir import Value, append, fail, scope
from castiron.emitter.step import Step


def causal_conv(step: Step, layer: int, x: Value, name: str, bias: bool, state: str = "conv") -> Value:
    """`torch.nn.Conv1d` called `name` over time, a filter for each feature: x [T, features] to [T, features].

    y_t = bias + sum over i of w_i x_(t - n + 1 + i), for filters of n positions, `<name>.weight` [features, 1, n].
    state: [layers, n - 1, features], the last rows of x, the latest last; n follows from it.
    """
    positions = step.states[state].shape[1] + 1
    with scope(name):
        weights = [step.vector("weight", (x.shape[1], 1, positions))]
        weights += [step.vector("bias", (x.shape[1],))] if bias else []
        return _recur(step, "causal_conv", (x, *weights), layer, state, x)


def gated_delta(step: Step, layer: int, q: Value, k: Value, v: Value, a: Value, b: Value, state: str = "delta") -> Value:
    """The gated delta rule (arXiv:2412.06464), HF's `torch_chunk_gated_delta_rule`: [T, v_heads, v_dim].

        S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) k_t S_(t-1))),  out_t = q_t S_t / sqrt(k_dim)

    where q and k [T, k_heads, k_dim] are first divided by their length (epsilon 1e-6 under the root) and serve
    v_heads / k_heads heads of v [T, v_heads, v_dim] each; g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), with
    a and b [T, v_heads] and the vectors `A_log` and `dt_bias` [v_heads].
    state: S, [layers, v_heads, k_dim, v_dim].
    """
    rates = _rate(step, v.shape[1]), step.vector("dt_bias", (v.shape[1],))
    return _recur(step, "gated_delta", (q, k, v, a, b, *rates), layer, state, v)


def selective_scan(step: Step, layer: int, x: Value, dt: Value, b: Value, c: Value, state: str = "scan") -> Value:
    """The scan of Mamba 2 (arXiv:2405.21060), HF's `mamba2_chunk_scan`: [T, heads, head_dim].

        S_t = exp(A d_t) S_(t-1) + d_t x_t B_t,  y_t = S_t C_t + D x_t

    for x [T, heads, head_dim], d = softplus(dt + dt_bias) of dt [T, heads], A = -exp(A_log), and B and C [T, groups, n], which
    serve heads / groups heads each; `A_log`, `D` and `dt_bias` are vectors [heads].
    state: S, [layers, heads, head_dim, n].
    """
    heads = x.shape[1]
    vectors = _rate(step, heads), step.vector("dt_bias", (heads,)), step.vector("D", (heads,))
    return _recur(step, "selective_scan", (x, dt, b, c, *vectors), layer, state, x)


def _rate(step: Step, heads: int) -> Value:
    """-exp(A_log) [heads]."""
    return step.vector("A_log", (heads,), _negative_exp)


def _negative_exp(x: np.ndarray) -> np.ndarray:
    return -np.exp(x)


def _recur(step: Step, kind: str, operands: Sequence[Value], layer: int, name: str, like: Value) -> Value:
    """Append the operation, whose result is of the type of `like`, and carry the state on; its rule checks the rest."""
    state = step.states[name]
    if step.kept[name].kind != "recurrent" or not 0 <= layer < state.shape[0] // step.sequences:
        raise fail(kind, f"there is no recurrent state {name!r} at layer {layer}", (*operands, state))
    numbers = (step.start,) + ((step.length,) if step.length is not None else ())
    attrs = {"layer": layer, "mode": step.mode}
    result, step.states[name] = append(kind, (*operands, state, *numbers), (like.type, state.type), attrs)
    return result
