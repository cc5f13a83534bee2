"""The two lowerings of one graph give equal numbers, and `kernels` fuses what its docs promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from castiron.emitter.abi import LOWERINGS
from castiron.emitter.graph.ir import current_function
from castiron.emitter.graph.types import F32, EmitError, TensorType
from castiron.emitter.layers import route
from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.reference import interpreter
from castiron.reference.tiny import COMMON

CONTEXT, WIDTH = 40, 8
CONFIG = {"model_type": "llama", **COMMON, "num_hidden_layers": 2}
TOKENS = np.array([3, 1, 4, 1, 5, 9, 0, 0], np.int32)


def params_of(module, model: ModelModule) -> dict[str, np.ndarray]:
    """Return random weights; vectors are large enough that every layer matters."""
    found = {}
    for param in module.params.values():
        raws = []
        for name, codec in param.source.tensors:
            shape, seed = model.weights[name].shape, sum(map(ord, name))
            vector = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).view(np.uint8)
            raws.append(raw_rows(codec, *shape, seed) if len(shape) == 2 else vector)
        found[param.name] = param.source.pack(*raws)
    return found


def prefilled(module, model: ModelModule, cache: str = "f32", width: int = 8) -> tuple[np.ndarray, ...]:
    """Return the logits and the two caches after a prefill of six tokens, padded to `width`."""
    empty = np.zeros(model.functions["decode_step"].states[0].shape, CACHES[cache].dtype.numpy)
    given = [np.resize(TOKENS, width), np.int32(0), np.int32(6), empty, empty]
    return tuple(interpreter.run(module, f"prefill_{width}", given, params_of(module, model))[1:])


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3}


def mixed(name: str) -> str:
    return "q8_0" if ".w3." in name or "v_proj" in name else "q4_1"


@pytest.mark.parametrize("codec", ["f32", "f16", "q4_0", "q4_1", "q5_0", "q8_0"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, MIXTRAL],
    ids=["plain", "biases", "tied", "experts"],
)
def test_both_lowerings_compute_the_same(codec, overrides):
    compare_lowerings({**CONFIG, **overrides}, lambda name: codec)


def test_both_lowerings_compute_the_same_with_mixed_codecs():
    compare_lowerings({**CONFIG, **MIXTRAL}, mixed)


@pytest.mark.parametrize("cache, limit", [("f16", 2.0**-10), ("q8_0", 2.0**-7)])
@pytest.mark.parametrize("heads", [4, 2])
def test_both_lowerings_round_cached_rows_alike(heads, cache, limit):
    """A key next to the middle of two stored numbers may be rounded to either."""
    compare_lowerings({**CONFIG, "num_attention_heads": heads}, lambda name: "f32", cache, limit)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_tie_of_experts_goes_to_the_lower_index(lowering):
    logits = np.array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2], [0, 1, 0, 1, 0]], np.float32)
    module = ModelModule("alone", lambda name: "f32")
    with module.function("route", logits=TensorType(logits.shape, F32)) as (given,):
        chosen, weights = route(given, 3, normalised=True)
        current_function().returns({}, chosen=chosen, weights=weights)
    chosen, weights = interpreter.run(lower(module, lowering), "route", [logits], {})
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [1, 3, 0]]
    np.testing.assert_allclose(weights[:2], 1 / 3, rtol=1e-6)


def compare_lowerings(config, codec, cache="f32", limit=2e-5):
    """Check logits, argmax and caches of a prefill and a decode step through both lowerings."""
    model = build(config, codec, CONTEXT, [WIDTH], cache=cache)
    results = {}
    for lowering in ("portable", "kernels"):
        module = lower(model, lowering)
        first, k, v = prefilled(module, model, cache)
        given = [np.int32(7), np.int32(6), k, v]
        best, second, k, v = interpreter.run(module, "decode_step", given, params_of(module, model))
        cached = (CACHES[cache].values(rows[:, :7]) for rows in (k, v))
        results[lowering] = first, second, *cached, best
    for portable, kernels in zip(results["portable"], results["kernels"]):
        assert kernels.dtype == portable.dtype
        np.testing.assert_allclose(kernels, portable, atol=limit * max(1.0, np.abs(portable).max()))


def kernels_of(model: ModelModule, function: str) -> Counter:
    ops = lower(model, "kernels").functions[function].ops
    return Counter(op.attrs["kernel"].name.split("_")[0] if op.kind == "kernel" else op.kind for op in ops)


def test_a_decoded_layer_is_five_dispatches():
    """Norm with qkv, attention with rope and append, output with residual, GLU, down with residual."""
    counts = kernels_of(build(CONFIG, lambda name: "q4_1", CONTEXT, []), "decode_step")
    assert counts.pop("parameter") and counts == {
        **{"gemv": 4 * 2 + 1, "attention": 2, "embed": 1, "argmax": 1},
        **{"constant": 1, "reshape": 2},
    }


def test_projections_with_different_codecs_are_not_stacked():
    codec = lambda name: "q8_0" if "v_proj" in name else "q4_1"
    counts = kernels_of(build(CONFIG, codec, CONTEXT, []), "decode_step")
    assert counts["gemv"] == 5 * 2 + 1 and counts["concatenate"] == 2


def test_all_experts_are_two_dispatches():
    """Gate with up, and down; gate and up are two dispatches if their codecs differ."""
    # qkv, output, router, experts
    for codec, experts in (lambda name: "q4_1", 2), (mixed, 3):
        counts = kernels_of(build({**CONFIG, **MIXTRAL}, codec, CONTEXT, []), "decode_step")
        assert counts["gemv"] == (3 + (codec is mixed) + experts) * 2 + 1 and "dot_general" not in counts


RECURRENT = {
    **{"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 2, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
}


@pytest.mark.parametrize("function", ["decode_step", "prefill_8", "verify_4", "decode_batch_3"])
def test_a_delta_net_is_four_kernels_in_every_function(function):
    """Kernels read their columns of stacked projections, without slices or concatenations."""
    counts = kernels_of(build({**CONFIG, **RECURRENT}, lambda name: "q4_1", CONTEXT, [WIDTH], [4], [3]), function)
    assert counts["causal"] == counts["gated"] == 2 and counts["gemv"] + counts["few"] == 2 * 4 + 1
    assert not counts.keys() & {"slice", "concatenate", "multiply", "logistic", "dynamic_update_slice"}


def test_rejects_unknown_lowerings_and_instruction_sets():
    model = build(CONFIG, lambda name: "f32", CONTEXT, [])
    with pytest.raises(EmitError, match="'fast'.*kernels, portable"):
        lower(model, "fast")
    with pytest.raises(EmitError, match="'sse2'.*avx2"):
        lower(model, "kernels", "sse2")
    with pytest.raises(EmitError, match="unknown numerics: 'rough'; use one of exact"):
        lower(model, numerics="rough")


def test_fast_numerics_quantise_x_a_single_time_for_all_matmuls():
    """Only for several tokens and quantised weights."""
    model = build(CONFIG, lambda name: "f16" if "o_proj" in name else "q4_1", CONTEXT, [8], (4,), (3,))
    exact, fast = lower(model), lower(model, numerics="fast")
    assert ops_of(fast, "decode_step") == ops_of(exact, "decode_step")
    for function in ("prefill_8", "verify_4", "decode_batch_3"):
        ops = ops_of(fast, function)
        assert Counter(name.split("_")[0] for name in ops if name.startswith("quantise_x8")) == {
            "quantise": 3 * 2 + (function != "prefill_8")
        }
        assert {p.numerics for p in matmuls_of(fast, function) if p.codec == "q4_1" and p.tokens > 1} == {"int8"}
        assert {p.numerics for p in matmuls_of(fast, function) if p.codec == "f16"} == {"f32"}
    eight_bits = build(CONFIG, lambda name: "q8_0", CONTEXT, [8])
    for isa, numerics in (("avx2", "f32"), ("avxvnni", "int8"), ("avx512", "int8"), ("neoni8mm", "int8")):
        matmuls = matmuls_of(lower(eight_bits, isa=isa, numerics="fast"), "prefill_8")
        assert {p.numerics for p in matmuls if p.tokens > 1} == {numerics}
    with pytest.raises(EmitError, match="lowering 'portable' does not support numerics 'fast'"):
        lower(model, "portable", numerics="fast")


@pytest.mark.parametrize(("codec", "isa", "numerics"), [
    ("q4_0", "avxvnni", "int8"), ("q4_1", "amx", "int8"), ("q8_0", "avx2", "f32"), ("f16", "avxvnni", "f32"),
])  # fmt: skip
def test_draft_numerics_quantise_x_of_one_token_where_that_is_faster(codec, isa, numerics):
    """The logits of a decode step stay near the exact ones."""
    model, found = build(CONFIG, lambda name: codec, CONTEXT, []), {}
    for name in ("exact", "draft"):
        module = lower(model, isa=isa, numerics=name)
        empty = np.zeros(model.functions["decode_step"].states[0].shape, np.float32)
        given = [np.int32(3), np.int32(0), empty, empty]
        found[name] = interpreter.run(module, "decode_step", given, params_of(module, model))[1]
    assert {p.numerics for p in matmuls_of(module, "decode_step")} == {numerics}
    distance = np.sqrt(np.mean((found["draft"] - found["exact"]) ** 2)) / np.std(found["exact"])
    assert 5e-4 < distance < 10 * 0.005 if numerics == "int8" else distance == 0


def test_a_matrix_unit_splits_x_a_single_time_for_all_matmuls():
    """Exact numerics on AMX split x for five or nine tokens and more, and give the logits of other CPUs."""
    model = build(CONFIG, lambda name: "f16" if "o_proj" in name else "q4_1", CONTEXT, [8, 40], (2,), (4, 9))
    plain, split, fast = lower(model), lower(model, isa="amx"), lower(model, isa="amx", numerics="fast")
    for function, in_fast in ("prefill_40", {"bf16_matrix"}), ("decode_batch_9", {"bf16_matrix", "int8"}):
        batched = [p for p in matmuls_of(split, function) if p.tokens > 1]
        assert {p.numerics for p in batched} == {"bf16_split"}
        assert {p.numerics for p in matmuls_of(fast, function) if p.tokens > 1} == in_fast
        inputs = [name for name in ops_of(split, function) if name.startswith("split_x")]
        assert len(inputs) == 4 * 2 + (function != "prefill_40")
    assert {(p.codec, p.numerics) for p in matmuls_of(split, "prefill_8") if p.tokens > 1} == {
        ("q4_1", "bf16_split"),
        ("f16", "f32"),
    }
    assert {p.numerics for p in matmuls_of(fast, "prefill_8") if p.codec == "q4_1" and p.tokens > 1} == {"int8"}
    for function in ("decode_step", "verify_2", "decode_batch_4"):
        assert {p.numerics for p in matmuls_of(split, function)} == {"int24", "f32"}
    logits = [prefilled(module, model, width=40)[0] for module in (plain, split, fast)]
    assert np.abs(logits[1] - logits[0]).max() < 1e-5 < np.abs(logits[2] - logits[0]).max() < 0.1


def test_fast_numerics_quantise_x_of_experts_if_pairs_are_grouped():
    """x of gate and up, and x of down, which has a row for each pair; GEMVs of few pairs stay exact."""
    model = build({**CONFIG, **MIXTRAL}, lambda name: "q4_1", CONTEXT, [8], (2,))
    fast = lower(model, numerics="fast")
    for function, numerics in ("prefill_8", "int8"), ("verify_2", "int24"), ("decode_step", "int24"):
        assert {p.numerics for p in matmuls_of(fast, function) if p.experts} == {numerics}
    # x of qkv, of the output projection, of router, gate and up, and of down
    rounded = [name for name in ops_of(fast, "prefill_8") if name.startswith("quantise_x8")]
    assert len(rounded) == 4 * 2 and sum(name.startswith("quantise_x8_24x") for name in rounded) == 2


def ops_of(module, function: str) -> list[str]:
    return [op.attrs["kernel"].name if op.kind == "kernel" else op.kind for op in module.functions[function].ops]


def matmuls_of(module, function: str) -> list:
    kernels = [op.attrs["kernel"] for op in module.functions[function].ops if op.kind == "kernel"]
    return [kernel.matmul for kernel in kernels if kernel.matmul]


@pytest.mark.parametrize("codec", ["q4_0", "q4_1", "q5_0", "q8_0"])
def test_fast_logits_and_caches_are_near_the_exact_ones(codec):
    """Rounding x costs a matmul 0.005 of the result's deviation: x's step is 2.1 / 127 of its own.

    A model adds several such errors; a wrong result would have a distance of 1.
    """
    model = build(CONFIG, lambda name: codec, CONTEXT, [WIDTH])
    found = {}
    for numerics in ("exact", "fast"):
        logits, k, v = prefilled(lower(model, isa="avxvnni", numerics=numerics), model)
        found[numerics] = logits, k[:, :6], v[:, :6]
    for exact, fast in zip(found["exact"], found["fast"], strict=True):
        distance = np.sqrt(np.mean((fast - exact) ** 2)) / np.std(exact)
        assert 5e-4 < distance < 10 * 0.005
