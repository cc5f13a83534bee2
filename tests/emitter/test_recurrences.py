"""Recurrences as a chunk, token by token and in a batch: all are the recurrence of the paper, computed in f64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from castiron.emitter import ops
from castiron.emitter.ir import current_function
from castiron.emitter.lowering import LOWERINGS, lower
from castiron.emitter.recurrences import causal_conv, gated_delta, selective_scan
from castiron.emitter.states import KINDS as KINDS_OF_STATES
from castiron.emitter.states import State
from castiron.emitter.step import ModelModule
from castiron.emitter.types import F32, EmitError
from castiron.reference import interpreter

ROOT = Path(__file__).parent.parent.parent
Arrays = Mapping[str, np.ndarray]
# Sums in f32, as a share of the largest number: measured up to 9e-7.
TOLERANCE = 2e-6
FEATURES, POSITIONS, HEADS, GROUPS, WIDE, DEEP = 6, 4, 6, 2, 5, 16
STATES = {
    "causal_conv": State("conv", (2, POSITIONS - 1, FEATURES), kind="recurrent"),
    "gated_delta": State("delta", (2, HEADS, DEEP, WIDE), kind="recurrent"),
    "selective_scan": State("scan", (2, HEADS, WIDE, DEEP), kind="recurrent"),
}
OPERATIONS: dict[str, Callable] = {
    "causal_conv": lambda step, x: causal_conv(step, 1, x, "conv1d", bias=True),
    "gated_delta": lambda step, *given: gated_delta(step, 1, *given),
    "selective_scan": lambda step, *given: selective_scan(step, 1, *given),
}
WEIGHTS: dict[str, dict[str, tuple[int, ...]]] = {
    "causal_conv": {"conv1d.weight": (FEATURES, 1, POSITIONS), "conv1d.bias": (FEATURES,)},
    "gated_delta": {"A_log": (HEADS,), "dt_bias": (HEADS,)},
    "selective_scan": {"A_log": (HEADS,), "dt_bias": (HEADS,), "D": (HEADS,)},
}
# How fast what is remembered decays; "alike" are keys that are nearly the same, and written as a whole.
KINDS = {"slow": -6.0, "fast": 2.0, "alike": -6.0}


def drawn(kind: str, count: int, how: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """What an operation takes, for `count` tokens, and its weights."""
    rng = np.random.default_rng(3)
    alike = 3.0 * (how == "alike")
    weights = {name: rng.normal(size=shape) for name, shape in WEIGHTS[kind].items()}
    if "A_log" in weights:
        weights["A_log"] += KINDS[how]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "causal_conv": [(FEATURES,)],
        "gated_delta": [(GROUPS, DEEP), (GROUPS, DEEP), (HEADS, WIDE), (HEADS,), (HEADS,)],
        "selective_scan": [(HEADS, WIDE), (HEADS,), (GROUPS, DEEP), (GROUPS, DEEP)],
    }
    given = [rng.normal(size=(count, *shape)) for shape in shapes[kind]]
    if kind == "gated_delta":
        given[1] += alike
        given[4] += alike
    f32 = lambda x: x.astype(np.float32)
    return [f32(x) for x in given], {name: f32(x) for name, x in weights.items()}


def conv_step(state: np.ndarray, w: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen = np.concatenate([state, x[None]])
    return (seen * w["conv1d.weight"][:, 0].T).sum(0) + w["conv1d.bias"], seen[1:]


def delta_step(S: np.ndarray, w: Arrays, q, k, v, a, b) -> tuple[np.ndarray, np.ndarray]:
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), HEADS // GROUPS, 0) for x in (q, k))
    S = S * np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, a + w["dt_bias"]))[:, None, None]
    new = (v - np.einsum("hk,hkv->hv", k, S)) / (1 + np.exp(-b))[:, None]
    S = S + np.einsum("hk,hv->hkv", k, new)
    return np.einsum("hk,hkv->hv", q, S) * DEEP**-0.5, S


def scan_step(S: np.ndarray, w: Arrays, x, dt, b, c) -> tuple[np.ndarray, np.ndarray]:
    b, c = (np.repeat(y, HEADS // GROUPS, 0) for y in (b, c))
    dt = np.logaddexp(0, dt + w["dt_bias"])
    S = S * np.exp(-np.exp(w["A_log"]) * dt)[:, None, None] + np.einsum("h,hp,hn->hpn", dt, x, b)
    return np.einsum("hpn,hn->hp", S, c) + w["D"][:, None] * x, S


STEPS = {"causal_conv": conv_step, "gated_delta": delta_step, "selective_scan": scan_step}


def defined(kind: str, given: list[np.ndarray], weights: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Results after each token, and the state after the last: token by token in f64."""
    wide = {name: w.astype(np.float64) for name, w in weights.items()}
    results, state = [], state.astype(np.float64)
    for token in zip(*(x.astype(np.float64) for x in given), strict=True):
        result, state = STEPS[kind](state, wide, *token)
        results.append(result)
    return np.array(results), state


def run(
    kind: str, role: str, given: list[np.ndarray], weights: Arrays, state: np.ndarray, *numbers, lowering: str = "portable"
) -> list[np.ndarray]:
    """The operation alone as the function of a role, through the interpreter: its result and the whole state after it."""
    module, width = ModelModule("alone", lambda name: "f32"), len(given[0])
    with module.step(role, width, (STATES[kind],), 512) as step:
        function = current_function()
        result = OPERATIONS[kind](step, *(ops.constant(x, F32) for x in given))
        name = STATES[kind].name
        held = next(v for v in function.inputs if v.name == name)
        function.returns({1: held}, result=result, after=step.states[name])
    lowered = lower(module, lowering)
    (called,) = lowered.functions
    sources = {name: param.source for name, param in lowered.params.items()}
    packed = {name: own.pack(*(weights[n].view(np.uint8) for n, _ in own.tensors)) for name, own in sources.items()}
    tokens = np.int32(0) if role == "decode" else np.zeros(width, np.int32)
    return interpreter.run(lowered, called, [tokens, *numbers, state], packed)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def started(kind: str) -> np.ndarray:
    """A state that has seen something, of every layer."""
    return np.random.default_rng(4).normal(size=STATES[kind].shape).astype(np.float32)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(("width", "length"), [(8, 8), (8, 1), (44, 30), (64, 64), (65, 65), (150, 150), (150, 64), (150, 3)])
def test_a_chunk_is_the_recurrence_whatever_its_padding_holds(kind, how, width, length):
    given, weights = drawn(kind, width, how)
    state = started(kind)
    expected, last = defined(kind, [x[:length] for x in given], weights, state[1])
    result, after = run(kind, "prefill", given, weights, state, np.int32(0), np.int32(length))
    close(result[:length], expected)
    close(after[1], last)
    np.testing.assert_array_equal(after[0], state[0])
    result, after = run(kind, "verify", [x[:length] for x in given], weights, state, np.int32(0))
    close(result, expected)
    close(after[1], last)


@pytest.mark.parametrize("kind", STATES)
def test_kernels_are_defined_as_the_recurrence(kind):
    given, weights = drawn(kind, 12, "slow")
    state = started(kind)
    expected, last = defined(kind, [x[:7] for x in given], weights, state[1])
    result, after = run(kind, "prefill", given, weights, state, np.int32(0), np.int32(7), lowering="kernels")
    close(result[:7], expected)
    close(after[1], last)
    np.testing.assert_array_equal(result[7:], 0)
    np.testing.assert_array_equal(after[0], state[0])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", STATES)
def test_one_token_and_one_of_each_sequence(kind, lowering):
    given, weights = drawn(kind, 3, "slow")
    states = [started(kind) * scale for scale in (1, 2, 3)]
    together = np.concatenate(states)
    result, after = run(kind, "batch", given, weights, together, np.array([5, -1, 0], np.int32), lowering=lowering)
    for i, state in enumerate(states):
        expected, last = defined(kind, [x[i : i + 1] for x in given], weights, state[1])
        own = [x[i : i + 1] for x in given]
        alone, alone_after = run(kind, "decode", own, weights, state, np.int32(7), lowering=lowering)
        close(alone, expected)
        close(alone_after[1], last)
        own = after[2 * i : 2 * i + 2]
        if i == 1:
            np.testing.assert_array_equal(own, state)
        else:
            close(result[i], expected[0])
            close(own[1], last)
            np.testing.assert_array_equal(own[0], state[0])


def test_operands_that_do_not_fit_are_refused():
    given, weights = drawn("gated_delta", 8, "slow")
    with pytest.raises(EmitError, match="gated_delta in no scope: operands do not fit the state"):
        run("gated_delta", "verify", [given[0][..., :-1], *given[1:]], weights, started("gated_delta"), np.int32(0))
    with pytest.raises(EmitError, match="there is no recurrent state 'scan' at layer 1"):
        of_one_layer = State("scan", (1, HEADS, WIDE, DEEP), kind="recurrent")
        with ModelModule("alone", lambda name: "f32").step("verify", 8, (of_one_layer,), 16) as step:
            selective_scan(step, 1, *(ops.constant(x, F32) for x in drawn("selective_scan", 8, "slow")[0]))


def test_the_page_on_states_quotes_the_families_and_names_what_there_is():
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    for path, code in re.findall(r"```python\n# (.*?)\n(.*?)```", page, re.DOTALL):
        assert code in (ROOT / path).read_text(encoding="utf-8"), path
    for path in re.findall(r"`((?:emitter|tests|vmfb)/[\w./]+\.py)`", page):
        assert (ROOT / path).is_file(), path
    assert all(f"`{name}`" in page for name in OPERATIONS) and all(f"| {kind} |" in page for kind in KINDS_OF_STATES)
