"""Each detail of a family, removed from its graph or changed, moves the logits far from HF's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Op
from castiron.emitter.layers import ClampedSwiGLU
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import portable, portable_attention
from castiron.emitter.lowering.rewrite import rewrite
from castiron.emitter.models import FAMILIES
from castiron.reference import hf
from tests.emitter.family_harness import LENGTH, TOLERANCE, Model, Pair, pair, prompt
from tests.emitter.test_models import EPSILON, shape

# The min error of a lost detail, far above rounding.
FAR = 20 * TOLERANCE

# Without a rotary embedding a bias of k adds the same to every score of a query.
WITHOUT_EFFECT = {
    "gpt2": {"bias left out (transformer.h.attn.k)"},
    # The family divides weights by their sum itself.
    "lfm2_moe": {"weights of experts normalised the other way (model.layers.feed_forward)"},
}

Spoil = Callable[[Op], None]


def leave_out(op: Op, operand: int = 0) -> None:
    """Replace the operation by its operand."""
    op.kind, op.operands, op.attrs = "reshape", (op.operands[operand],), {}


def with_attrs(**changes) -> Spoil:
    return lambda op: op.attrs.update(changes)


def with_weight(**changes) -> Spoil:
    return lambda op: op.attrs.update(weight=replace(op.attrs["weight"], **changes))


def without(*dropped: int, **changes) -> Spoil:
    """Return a fault that leaves out these operands and changes attributes."""

    def spoil(op: Op) -> None:
        op.operands = tuple(value for i, value in enumerate(op.operands) if i not in dropped)
        op.attrs.update(changes)

    return spoil


def swap(op: Op, i: int, j: int) -> None:
    operands = list(op.operands)
    operands[i], operands[j] = operands[j], operands[i]
    op.operands = tuple(operands)


# How many operands a prefill's recurrences have, convolutions without a bias.
RECURRENCES = {"causal_conv": 5, "gated_delta": 10, "selective_scan": 10}
SWAPPED = {"gated_delta": (0, 1), "selective_scan": (2, 3)}
# Which operand is the state, and which has the form of the result.
_STATE, _LIKE = -3, {"causal_conv": 0, "gated_delta": 2, "selective_scan": 0}


def without_recurrence(op: Op) -> None:
    """Return each token's own input, without a state."""
    op.kind, op.attrs, op.operands = "identity", {}, (op.operands[_LIKE[op.kind]], op.operands[_STATE])


def spoilt_ways(op: Op, constants: set) -> Iterator[tuple[str, Spoil]]:
    """Yield faults of one operation of the graph, by name."""
    attrs = op.attrs
    if op.kind == "add":
        yield "the stream of a residual dropped", lambda op: leave_out(op, 1)
        yield "a block dropped from its residual", leave_out
    elif op.kind == "attention":
        yield "attention scale doubled", with_attrs(scale=2 * attrs["scale"])
        if attrs["window"] is not None:
            yield "window one longer", with_attrs(window=attrs["window"] + 1)
            yield "window one shorter", with_attrs(window=attrs["window"] - 1)
            yield "window forgotten", with_attrs(window=None)
        if attrs["softcap"] is not None:
            yield "soft cap of attention forgotten", with_attrs(softcap=None)
        if attrs["sinks"]:
            yield "sinks forgotten", without(len(op.operands) - 1, sinks=False)
    elif op.kind == "rope":
        yield "rotary embedding left out", leave_out
        yield "cos and sin swapped", lambda op: swap(op, 1, 2)
        yield "halves for pairs", with_attrs(interleaved=not attrs["interleaved"])
    elif op.kind in ("rms_norm", "layer_norm", "head_norms"):
        yield "norm left out", leave_out
        # One that no config sets is too small to matter.
        if attrs["eps"] == EPSILON:
            yield "epsilon forgotten", with_attrs(eps=0.0)
        if len(op.operands) > 2:
            yield "bias of a norm left out", without(2)
    elif op.kind == "linear" and len(op.operands) > 2:
        yield "bias left out", without(2)
    elif op.kind == "causal_conv":
        yield "convolution left out", without_recurrence
        if len(op.operands) > RECURRENCES[op.kind]:
            yield "bias of a convolution left out", without(2)
    elif op.kind in RECURRENCES:
        yield "recurrence left out", without_recurrence
        yield "what is read and what is written swapped", lambda op: swap(op, *SWAPPED[op.kind])
    elif op.kind == "activation":
        yield "another activation", with_attrs(function="relu" if attrs["function"] == "silu" else "silu")
    elif op.kind == "weight":
        weight = attrs["weight"]
        if weight.name.endswith("sin"):
            yield "rotary halves swapped", with_weight(values=lambda: -weight.values())
        if len(weight.shape) == 3:
            yield "filters reversed", with_weight(transform=lambda w: np.ascontiguousarray(w[..., ::-1]))
        if weight.transform is not None:
            yield f"transform of {weight.name.rpartition('.')[2]} forgotten", with_weight(transform=None)
    elif op.kind in ("multiply", "divide") and op.operands[1] in constants:
        yield "constant factor left out", leave_out
    elif op.kind == "tanh":
        yield "tanh left out", leave_out
    elif op.kind == "route":
        yield "weights of experts normalised the other way", with_attrs(normalised=not attrs["normalised"])
        yield "other scores of experts", with_attrs(scores="softmax" if attrs["scores"] == "sigmoid" else "sigmoid")
        if len(op.operands) > 1:
            yield "correction of experts left out", without(1)
        if attrs["groups"] != (1, 1):
            yield "groups of experts forgotten", with_attrs(groups=(1, 1))
            yield "groups of experts rated by others", with_attrs(rated=3 - attrs["rated"])
    elif op.kind == "experts":
        if attrs["gated"]:
            yield "gate and up swapped", lambda op: swap(op, 3, 4)
        else:
            yield "another activation of experts", with_attrs(function="relu")
        if len(op.operands) > 6:
            yield "biases of experts left out", without(*range(6, len(op.operands)))
        if isinstance(glu := attrs["function"], ClampedSwiGLU):
            yield "another alpha", with_attrs(function=replace(glu, alpha=2 * glu.alpha))
            yield "no limit", with_attrs(function=replace(glu, limit=1e9))


def ways(module: ModelModule) -> dict[str, list[Callable[[ModelModule], None]]]:
    """Return faults by name, each in up to three layers, the middle one first."""
    found: dict[str, list[tuple[str, int]]] = {}
    for i, op in enumerate(_ops(module)):
        for name, _ in spoilt_ways(op, _constants(module)):
            found.setdefault(f"{name} ({_role(op)})", []).append((name, i))

    def spoil(name: str, index: int) -> Callable[[ModelModule], None]:
        return lambda module: dict(spoilt_ways(_ops(module)[index], _constants(module)))[name](_ops(module)[index])

    return {name: [spoil(*ops_[i]) for i in dict.fromkeys((len(ops_) // 2, 0, len(ops_) - 1))] for name, ops_ in found.items()}


def _ops(module: ModelModule) -> list[Op]:
    return module.functions[f"prefill_{LENGTH}"].ops


def _constants(module: ModelModule) -> set:
    return {value for op in _ops(module) if op.kind == "constant" for value in op.results}


def _role(op: Op) -> str:
    """Return the module path without the number of the layer."""
    return ".".join(part for part in op.path.split(".") if not part.isdigit())


def last_logits(models: Pair, module: ModelModule) -> np.ndarray:
    # Without the verifier, which would report weights that nothing reads.
    lowered = Module("spoilt")
    for function in module.functions.values():
        rewrite(function, {**portable.RULES, "identity": lambda op, *operands: operands}, lowered)
    model = Model(models.checkpoint, lowered)
    return model.prefill(prompt(models.checkpoint.config["vocab_size"]), LENGTH)[1]


@pytest.fixture(scope="module", params=FAMILIES)
def spoilable(request, tmp_path_factory):
    family = request.param
    models = pair(family, tmp_path_factory.mktemp(family), **shape(family))
    expected = hf.logits(models.oracle, prompt(models.checkpoint.config["vocab_size"]))[-1]
    return models, expected


def test_the_unspoilt_model_is_hf_s(spoilable):
    models, expected = spoilable
    assert distance(last_logits(models, models.prefill()), expected) < TOLERANCE


def test_every_detail_matters(spoilable):
    models, expected = spoilable
    unnoticed = {}
    for name, changes in ways(models.prefill()).items():
        errors = []
        # A detail may be without effect in one layer: a bias of k adds nothing to a softmax without rotary embedding.
        while changes and not any(error > FAR for error in errors):
            module = models.prefill()
            changes.pop(0)(module)
            errors.append(distance(last_logits(models, module), expected))
        if max(errors) <= FAR:
            unnoticed[name] = errors
    assert set(unnoticed) == WITHOUT_EFFECT.get(models.checkpoint.config["model_type"], set()), unnoticed


def test_a_mask_shifted_by_one_is_noticed(spoilable, monkeypatch):
    models, expected = spoilable
    seen = portable_attention._seen

    def later(position, *rest):
        return seen(ops.add(position, ops.constant(1, position.dtype, position.shape)), *rest)

    monkeypatch.setattr(portable_attention, "_seen", later)
    assert distance(last_logits(models, models.prefill()), expected) > FAR


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest logit; infinite for NaN."""
    difference = float(np.abs(logits - expected).max()) / float(np.abs(expected).max())
    return difference if np.isfinite(difference) else float("inf")
