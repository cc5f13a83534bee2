"""Recurrences as a chunk, token by token and in a batch equal the kernels' definitions in f64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from castiron.emitter.abi import KINDS, LOWERINGS, Function, State
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import current_function
from castiron.emitter.graph.types import F32, EmitError
from castiron.emitter.layers.recurrences import causal_conv, gated_delta, selective_scan
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import lower
from castiron.reference import interpreter

ROOT = Path(__file__).parent.parent.parent
Arrays = Mapping[str, np.ndarray]
# Error of f32 sums relative to the largest number; measured: up to 9e-7.
TOLERANCE = 2e-6
FEATURES, POSITIONS, HEADS, GROUPS, WIDE, DEEP = 6, 4, 6, 2, 5, 16
STATES = {
    "causal_conv": State("conv", (2, POSITIONS - 1, FEATURES), kind="recurrent", layers=(0, 1)),
    "gated_delta": State("delta", (2, HEADS, DEEP, WIDE), kind="recurrent", layers=(0, 1)),
    "selective_scan": State("scan", (2, HEADS, WIDE, DEEP), kind="recurrent", layers=(0, 1)),
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
# Logarithms of decay rates; "alike": keys are nearly equal, and written with a factor of nearly 1.
DECAYS = {"slow": -6.0, "fast": 2.0, "alike": -6.0}


def drawn(kind: str, count: int, how: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return an operation's operands for `count` tokens, and its weights."""
    rng = np.random.default_rng(3)
    alike = 3.0 * (how == "alike")
    weights = {name: rng.normal(size=shape) for name, shape in WEIGHTS[kind].items()}
    if "A_log" in weights:
        weights["A_log"] += DECAYS[how]
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


def run(
    kind: str, role: str, given: list[np.ndarray], weights: Arrays, state: np.ndarray, *numbers, lowering: str = "portable"
) -> list[np.ndarray]:
    """Run a function of one operation in the interpreter; return its result and the state after it."""
    module, width = ModelModule("alone", lambda name: "f32"), len(given[0])
    with module.step(Function(role, width), (STATES[kind],), 512) as step:
        function = current_function()
        result = OPERATIONS[kind](step, *(ops.constant(x, F32) for x in given))
        name = STATES[kind].name
        carried = next(v for v in function.inputs if v.name == name)
        function.returns({1: carried}, result=result, after=step.states[name])
    lowered = lower(module, lowering)
    (called,) = lowered.functions
    sources = {name: param.source for name, param in lowered.params.items()}
    packed = {name: own.pack(*(weights[n].view(np.uint8) for n, _ in own.tensors)) for name, own in sources.items()}
    tokens = np.int32(0) if role == "decode" else np.zeros(width, np.int32)
    return interpreter.run(lowered, called, [tokens, *numbers, state], packed)


def defined(kind: str, given: list[np.ndarray], weights: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return results and the last state of layer 1 by the kernel's definition, token by token in f64."""
    result, after = run(kind, "verify", given, weights, state, np.int32(0), lowering="kernels")
    return result, after[1]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def started(kind: str) -> np.ndarray:
    """Return a random state of all layers."""
    return np.random.default_rng(4).normal(size=STATES[kind].shape).astype(np.float32)


@pytest.mark.parametrize("how", DECAYS)
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(("width", "length"), [(8, 8), (8, 1), (44, 30), (64, 64), (65, 65), (150, 150), (150, 64), (150, 3)])
def test_a_chunk_is_the_recurrence_and_ignores_padding(kind, how, width, length):
    given, weights = drawn(kind, width, how)
    state = started(kind)
    expected, last = defined(kind, [x[:length] for x in given], weights, state)
    result, after = run(kind, "prefill", given, weights, state, np.int32(0), np.int32(length))
    close(result[:length], expected)
    close(after[1], last)
    np.testing.assert_array_equal(after[0], state[0])
    result, after = run(kind, "verify", [x[:length] for x in given], weights, state, np.int32(0))
    close(result, expected)
    close(after[1], last)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", STATES)
def test_decode_and_batch_are_the_recurrence(kind, lowering):
    given, weights = drawn(kind, 3, "slow")
    states = [started(kind) * scale for scale in (1, 2, 3)]
    together = np.concatenate(states)
    result, after = run(kind, "batch", given, weights, together, np.array([5, -1, 0], np.int32), lowering=lowering)
    for i, state in enumerate(states):
        expected, last = defined(kind, [x[i : i + 1] for x in given], weights, state)
        own = [x[i : i + 1] for x in given]
        single, single_after = run(kind, "decode", own, weights, state, np.int32(7), lowering=lowering)
        close(single, expected)
        close(single_after[1], last)
        own = after[2 * i : 2 * i + 2]
        if i == 1:
            np.testing.assert_array_equal(own, state)
        else:
            close(result[i], expected[0])
            close(own[1], last)
            np.testing.assert_array_equal(own[0], state[0])


def test_rejects_a_layer_without_a_state():
    with pytest.raises(EmitError, match="'scan' is not a recurrent state of layer 1"):
        of_one_layer = State("scan", (1, HEADS, WIDE, DEEP), kind="recurrent", layers=(0,))
        with ModelModule("alone", lambda name: "f32").step(Function("verify", 8), (of_one_layer,), 16) as step:
            selective_scan(step, 1, *(ops.constant(x, F32) for x in drawn("selective_scan", 8, "slow")[0]))


def test_the_page_on_states_quotes_existing_code_and_names_every_operation():
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    for path, code in re.findall(r"```python\n# (.*?)\n(.*?)```", page, re.DOTALL):
        assert code in (ROOT / path).read_text(encoding="utf-8"), path
    for path in re.findall(r"`((?:emitter|tests|vmfb)/[\w./]+\.py)`", page):
        assert (ROOT / path).is_file(), path
    assert all(f"`{name}`" in page for name in OPERATIONS) and all(f"| {kind} |" in page for kind in KINDS)
