"""A layer takes few dispatches on a GPU, and no dispatch writes a dequantised weight."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import pytest

from castiron.emitter.graph.printer import print_module
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.reference.tiny import FAMILIES
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.targets import resolve
from tests.emitter.family_harness import pair

PUBLISHED_CONFIGS = Path(__file__).parent.parent / "emitter" / "published_configs.json"
HIDDEN, INNER, VOCAB, WIDTH = 512, 1280, 3000, 16
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    **LLAMA, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64, "sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
# The max number of dispatches of a layer in decoding, and families of which all layers take fewer.
LIMIT = 8
FEWER = {"gemma4_text": 7, "gpt2": 5}
# Dispatches of a layer in decoding.
MODELS = {"llama": (LLAMA, 5), "gemma2": (GEMMA, 5), "mixtral": (MIXTRAL, 7)}


@cache
def flow(family: str, layers: int, target: str, folder: Path) -> str:
    """Return the module of a model after IREE has formed its dispatches."""
    config = {**MODELS[family][0], "num_hidden_layers": layers}
    module = build(config, lambda name: "f32" if "norm" in name else "q4_k", 256, (WIDTH,))
    out = folder / f"{family}-{layers}-{target}.mlir"
    compile_mlir(print_module(lower(module, "gpu")), resolve(target), out, extra_flags=("--compile-to=flow",))
    return out.read_text()


def dispatches(text: str, function: str) -> list[str]:
    """Return the lines of a function's dispatches."""
    body = re.split(rf"util\.func (?:public|private) @{function}(?:\$async)?\(", text)[1].split("util.func")[0]
    return re.findall(r"flow\.dispatch @.*", body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.mark.parametrize("target", ["vulkan", "cuda"])
@pytest.mark.parametrize("family", MODELS)
def test_a_layer_takes_few_dispatches(family, target, folder):
    counts = [len(dispatches(flow(family, layers, target, folder), "decode_step")) for layers in (2, 4)]
    assert counts[1] - counts[0] == 2 * MODELS[family][1]
    # The embedding, the last norm with the logits, and the largest logit in two dispatches.
    assert counts[0] - 2 * MODELS[family][1] <= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_any_family_takes_few_dispatches(family, tmp_path):
    module = lower(pair(family, tmp_path / "checkpoint").layers(64, ()), "gpu")
    kernels = [op for op in module.functions["decode_step"].ops if op.kind == "kernel"]
    layers = [re.search(r"\b(?:layers|h)\.(\d+)", op.path) for op in kernels]
    counts = Counter(found[1] for found in layers if found)
    assert len(counts) > 2 and max(counts.values()) <= FEWER.get(family, LIMIT), counts
    # IREE adds no dispatch of its own to a layer, but one to an embedding that is a sum.
    compile_mlir(print_module(module), resolve("vulkan"), tmp_path / "flow.mlir", extra_flags=("--compile-to=flow",))
    formed = len(dispatches((tmp_path / "flow.mlir").read_text(), "decode_step"))
    assert formed - len(kernels) <= (family == "gpt2")


@pytest.mark.parametrize("model", ["E2B", "E4B"])
def test_a_layer_of_gemma_4_takes_few_dispatches(model):
    """The norms of real sizes, unlike those of tiny models, are not cheap for every matmul that reads them."""
    config = json.loads(PUBLISHED_CONFIGS.read_text())["Gemma 4 E2B"]
    if model == "E4B":
        kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 7
        config |= {"hidden_size": 2560, "intermediate_size": 10240, "num_key_value_heads": 2, "layer_types": kinds,
                   "num_hidden_layers": 42, "num_kv_shared_layers": 18, "use_double_wide_mlp": False}  # fmt: skip
    module = lower(build(config, lambda name: "f32" if "norm" in name or "scalar" in name else "q4_k", 1024, ()), "gpu")
    paths = [op.path for op in module.functions["decode_step"].ops if op.kind == "kernel"]
    counts = Counter(found[1] for path in paths if (found := re.search(r"\blayers\.(\d+)", path)))
    # The last layer has the model's last norm too.
    assert len(counts) == config["num_hidden_layers"] and max(counts.values()) <= LIMIT + 1
    assert [layer for layer, count in counts.items() if count > LIMIT] == [str(config["num_hidden_layers"] - 1)]


@pytest.mark.parametrize("function", ["decode_step", f"prefill_{WIDTH}"])
@pytest.mark.parametrize("family", MODELS)
def test_no_dispatch_writes_a_dequantised_weight(family, function, folder):
    smallest = HIDDEN * HIDDEN // 2
    for line in dispatches(flow(family, 2, "vulkan", folder), function):
        # A state that is updated in place is a name here, not a type.
        for shape in re.findall(r"tensor<([\dx]+)x[a-z]\w+>", line.rsplit(" -> ", 1)[1]):
            assert prod(map(int, shape.split("x"))) < smallest, line
