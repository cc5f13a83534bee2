"""Graphs of families pass the checks of layer operations, which report each kind of damage."""

from __future__ import annotations

import pytest

from castiron.emitter.graph.ir import Graph, Module, Op
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.types import BF16, F16, F32, I8, I32, EmitError, TensorType
from castiron.emitter.graph.verifier import check
from castiron.emitter.layers.operations import LAYERS
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.reference import tiny

# Models of three layers that have every operation.
FAMILIES = ("llama", "stablelm", "mixtral", "gemma4_text", "qwen3_5_text", "granitemoehybrid")
OPTIONS = {"stablelm": {"qk_layernorm": True, "use_qkv_bias": True}}
# By kind of operation: the damaged part (result, operand or attribute), its value, and the error.
DAMAGE = {
    "weight": [("result", TensorType((3,), F32), "the result's type is not the weight's")],
    "values": [("result", TensorType((3,), F32), "the result's type is not that of the tensor")],
    "embedding": [("result", TensorType((8, 31), F32), "needs tokens [T] and a table")],
    "linear": [
        ("result", TensorType((8, 31), F32), "needs x [T, in], a weight [out, in]"),
        ("swap", (0, 1), "needs x [T, in], a weight [out, in]"),
    ],
    "rms_norm": [("eps", -1.0, "a positive epsilon"), ("result", TensorType((8, 31), F32), "needs x, weights")],
    "layer_norm": [("eps", 0.0, "a positive epsilon"), ("swap", (0, 1), "needs x, weights")],
    "head_norms": [("result", TensorType((8, 4, 9), F32), "needs x, weights"), ("drop", 1, "has 1 operands, needs 2")],
    "rope": [
        ("rotary_dim", 64, "needs heads [T, heads, head_dim] and tables"),
        ("mode", "batch", "needs heads [T, heads, head_dim] and tables"),
    ],
    "attention": [
        ("layer", 3, "the layer is out of range"),
        ("layer", -1, "the layer is out of range"),
        ("window", 0, "the layer is out of range, or the ring"),
        ("mode", "batch", "the positions must be i32"),
        ("mode", "verify", "the positions must be i32"),
        ("cache", "window", "the layer is out of range, or the ring is too short for its window and tokens"),
        ("swap", (0, 1), "the results must be f32 [T, heads * head_dim] and the two caches"),
        ("sinks", True, "sinks must be f32 [heads]"),
        ("drop", 6, "the positions must be i32"),
        ("caches", (BF16, BF16), "; both must be tensor<"),
        ("caches", (F16, F32), "; both must be tensor<"),
        # Bytes, but no scales among them.
        ("caches", (I8, I8), "; both must be tensor<"),
        ("result", TensorType((8, 31), F32), "the results must be f32 [T, heads * head_dim] and the two caches"),
    ],
    "activation": [
        ("function", "swish2", "unknown function"),
        ("result", TensorType((8, 31), F32), "the result's type differs"),
    ],
    "route": [
        ("top_k", 7, "needs logits [T, experts]"),
        ("scores", "tanh", "needs logits [T, experts]"),
        ("groups", (4, 1), "needs logits [T, experts]"),
        ("groups", (6, 6), "needs logits [T, experts]"),
        ("result", TensorType((8, 2), F32), "needs logits [T, experts]"),
    ],
    "experts": [
        ("experts", 3, "their stacked weights"),
        ("function", "no", "their stacked weights"),
        ("gated", False, "their stacked weights"),
    ],
    "argmax_rows": [("result", TensorType((2,), I32), "needs logits [vocab]")],
    "causal_conv": [
        ("layer", 2, "the layer is out of range, or the state's type changes"),
        ("mode", "batch", "the positions must be i32"),
        ("result", TensorType((8, 31), F32), "operands do not fit the state"),
        ("drop", 1, "malformed attributes or shapes"),
    ],
    "gated_delta": [
        ("layer", -1, "the layer is out of range, or the state's type changes"),
        ("mode", "verify", "the layer is out of range, or the state's type changes"),
        ("swap", (1, 2), "operands do not fit the state"),
        ("swap", (4, 5), "operands do not fit the state"),
        ("result", TensorType((8, 4, 8), F32), "operands do not fit the state"),
    ],
    "selective_scan": [
        ("layer", 2, "the layer is out of range, or the state's type changes"),
        ("drop", 9, "the positions must be i32"),
        ("swap", (0, 2), "operands do not fit the state"),
        ("swap", (1, 4), "operands do not fit the state"),
        ("result", TensorType((8, 8, 9), F32), "operands do not fit the state"),
    ],
}


def module(family: str) -> Module:
    config = {"model_type": family, **tiny.COMMON, **tiny.FAMILIES[family], **OPTIONS.get(family, {})}
    return build(config, lambda name: "f32", 16, (8,), verify=(4,), batches=(3,))


def operation(kind: str) -> tuple[Module, Graph, Op]:
    """Return a module, its prefill with an operation of that kind, and the operation."""
    for family in FAMILIES:
        found = module(family)
        function = found.functions["prefill_8"]
        for op in function.ops:
            if op.kind == kind:
                return found, function, op
    raise AssertionError(f"no family here has {kind}")


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_families_are_valid_and_not_lowered(family):
    check(module(family), LAYERS)
    with pytest.raises(EmitError, match="unknown operation for this stage of lowering"):
        check(module(family), LOWERED)
    with pytest.raises(EmitError, match="unknown operation for this stage of lowering"):
        check(lower(module(family), "portable"), LAYERS)


def test_rejects_a_ring_that_a_chunk_would_overwrite():
    """Sixteen rows for chunks of eight tokens."""
    _, _, op = operation("attention")
    for window, problem in ((8, None), (9, "the layer is out of range, or the ring is too short for its window and tokens")):
        op.attrs = {**op.attrs, "cache": "window", "window": window}
        assert LAYERS["attention"].check(op) == problem


def test_bidirectional_attention_needs_a_cache_of_one_layer():
    _, _, op = operation("attention")
    op.attrs = {**op.attrs, "bidirectional": True}
    assert LAYERS["attention"].check(op) is None
    op.attrs["layer"] = 1
    assert "a positional cache of one layer" in LAYERS["attention"].check(op)


def test_every_operation_of_the_table_is_damaged_here():
    assert set(DAMAGE) == set(LAYERS) - set(LOWERED)


@pytest.mark.parametrize(("kind", "what", "value", "words"), [(k, *row) for k, rows in DAMAGE.items() for row in rows])
def test_rejects_damage_before_lowering(kind, what, value, words):
    broken, function, op = operation(kind)
    operands = list(op.operands)
    if what == "result":
        op.results[0].type = value
    elif what == "swap":
        first, second = value
        operands[first], operands[second] = operands[second], operands[first]
        op.operands = tuple(operands)
    elif what == "caches":
        for cache, dtype in zip((3, 4), value, strict=True):
            for holder in (operands[cache], op.results[cache - 2]):
                holder.type = TensorType(holder.shape, dtype)
    elif what == "drop":
        op.operands = tuple(v for i, v in enumerate(operands) if i != value)
    else:
        op.attrs = {**op.attrs, what: value}
    with pytest.raises(EmitError) as error:
        lower(broken, "portable")
    message = str(error.value)
    assert message.startswith(f"function {function.name}, {kind} in ") and words in message and "\n" not in message
