"""Test the work of a model, in bytes and FLOP, against the same work computed from its sizes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from castiron.emitter.layers.kv_cache import CACHES
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.pipelines.compile.bundle_manifest import work_of
from castiron.pipelines.evaluate.bench import Workload
from castiron.pipelines.evaluate.bench_engines import Settings
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support import toy_text

SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 2048,
           "tie_word_embeddings": True}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
           "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip
QWEN3_30B_A3B = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                 "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
                 "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
                 "max_position_embeddings": 40960, "tie_word_embeddings": False}  # fmt: skip
STARCODER2 = {"model_type": "starcoder2", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 1024, "max_position_embeddings": 2048,
              "sliding_window": None}  # fmt: skip
WIDTHS, CONTEXT = (8, 32, 128), 2048


def workload(config: dict, codec: str, cache: str = "f32") -> Workload:
    """Return the workload of a model with matrices in `codec`, without compiling it."""
    stored = lambda name: "f32" if "norm" in name or "bias" in name else codec
    module = build(config, stored, CONTEXT, WIDTHS, cache=cache)
    lowered = lower(module, "kernels", "avx2", 2)
    work = {name: work_of(function, CONTEXT) for name, function in lowered.functions.items()}
    functions = [SimpleNamespace(role="prefill", width=width, name=f"prefill_{width}", is_long=False) for width in WIDTHS]
    facts = {"context": CONTEXT, "widths": lambda role: WIDTHS}
    return Workload(SimpleNamespace(compile={"work": work}, functions=functions, **facts))


def decode_bytes(config: dict, codec: str) -> float:
    """Return the bytes that the first token of a sequence reads."""
    return workload(config, codec).decode_bytes(0, 1)


def matrices(config: dict, mlp: int = 3) -> int:
    """Return the number of weights in the matrices of a dense layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    return hidden * head_dim * 2 * (heads + config["num_key_value_heads"]) + mlp * hidden * config["intermediate_size"]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_work_of_a_dense_model_follows_from_its_sizes(tied, cache):
    found, layers, hidden = workload(SMOLLM2 | {"tie_word_embeddings": tied}, "q4_1", cache), 30, 576
    elements, head = layers * matrices(SMOLLM2), 49152 * hidden
    norms = (2 * layers + 1) * hidden * 4
    # A token reads one row of an untied embedding table, and all of a table that is also the output head.
    weights = (elements + head) * 20 / 32 + norms
    # Four operations for each pair of a position and a visible one, and each element of the heads.
    attention = 4 * layers * hidden * sum(range(1, 513))
    assert found.prefill_flops(512) == pytest.approx(2 * elements * 512 + 2 * head + attention, rel=2e-3)
    for depth, tokens in ((0, 64), (1000, 32)):
        positions = np.arange(depth, depth + tokens) + 1
        cached = 2 * layers * 3 * 64 * {"f32": 4, "f16": 2, "q8_0": 36 / 32}[cache] * positions.mean()
        assert found.decode_bytes(depth, tokens) == pytest.approx(weights + cached, rel=1e-4)


def test_a_partial_call_counts_by_its_tokens():
    found = workload(SMOLLM2, "q4_1")
    assert found.prefill_flops(100) == pytest.approx(100 / 128 * found.prefill_flops(128), rel=0.1)
    assert found.prefill_flops(1) < found.prefill_flops(2) < found.prefill_flops(9)


def test_an_mlp_of_two_matrices_counts_two():
    weights = 4 * (4 * matrices(STARCODER2, mlp=2) + 1024 * 512)
    assert decode_bytes(STARCODER2, "f32") == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(("config", "active"), [(MIXTRAL, 12.88e9), (QWEN3_30B_A3B, 3.35e9)])
def test_a_token_reads_only_its_own_experts(config, active):
    """`active`: the published number of active parameters, which includes embedding and head."""
    table = config["vocab_size"] * config["hidden_size"]
    assert decode_bytes(config, "bf16") == pytest.approx(2 * (active - table), rel=0.005)


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_distinguishes_layers_with_and_without_experts(dense):
    two = QWEN3_30B_A3B | {"num_hidden_layers": 2, "intermediate_size": 2048}
    mlp, experts = 3 * 2048 * 2048, 3 * 2048 * 768 * 8 + 2048 * 128
    difference = decode_bytes(two | dense, "bf16") - decode_bytes(two, "bf16")
    assert difference == pytest.approx(2 * (mlp - experts), rel=0.01)


def test_a_sliding_window_limits_the_cache_bytes():
    config = {**SMOLLM2, "model_type": "mistral", "sliding_window": 256}
    found = workload(config, "q4_1")
    assert found.decode_bytes(1000, 8) - found.decode_bytes(0, 1) == 2 * 30 * 3 * 64 * 4 * 255


def test_a_bundle_without_work_has_none(tmp_path):
    bundle = open_bundle(toy_text.write(tmp_path / "toy"))
    found = Workload(bundle.manifest)
    assert found.shares(Settings(1), {}, {}) == {"decode_roofline": None, "prefill_peak_share": None}
