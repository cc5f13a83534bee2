"""Tensors that a directory stores stacked, transposed or in MXFP4 are read as HF computes with them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from castiron.pipelines.checkpoints.checkpoint import EMBEDDINGS, CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from tests.checkpoints.test_text_part import MODELS, vision_model
from tests.emitter.family_harness import Pair, assert_same_logits, prompt

BLOCK = 32


def quantised(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random MXFP4 blocks [*shape[:-1], groups, 16] and exponents [*shape[:-1], groups]."""
    random = np.random.default_rng(seed)
    groups = (*shape[:-1], shape[-1] // BLOCK)
    scales = random.integers(122, 126, groups).astype(np.uint8)
    scales[..., 0, 0] = 90
    return random.integers(0, 256, (*groups, BLOCK // 2)).astype(np.uint8), scales


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A gpt-oss with experts in MXFP4."""
    path = tiny_model("gpt_oss", tmp_path_factory.mktemp("mxfp4"))
    tensors = load_file(path / "model.safetensors")
    for seed, name in enumerate(sorted(tensors)):
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            experts, inner, out = tensors.pop(name).shape
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantised((experts, out, inner), seed)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": True}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def oracle(directory):
    return hf.load(directory, threads=1)


def test_experts_in_mxfp4_stay_when_the_others_are_quantised(directory, tmp_path):
    own = shutil.copytree(directory, tmp_path / "model")
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    # llama.cpp supports this limit only.
    (own / "config.json").write_text(json.dumps(config | {"swiglu_limit": 7.0}), encoding="utf-8")
    made = quantise(own, tmp_path / "out.gguf", Options(weights="q8_0"), lambda stage, done: None)
    before, after = open_checkpoint(own).tensors, open_checkpoint(made.file).tensors
    for name, tensor in after.items():
        if ".experts." in name and name.endswith("weight"):
            assert tensor.codec == "mxfp4" and np.array_equal(tensor.data, before[name].data), name
    assert after["model.layers.1.self_attn.q_proj.weight"].codec == "q8_0"


@pytest.mark.parametrize("lowering", ["portable", "kernels"])
def test_logits_of_experts_in_mxfp4_are_those_of_hf(directory, oracle, lowering):
    checkpoint = open_checkpoint(directory)
    tokens = prompt(checkpoint.config["vocab_size"], 30)
    assert_same_logits(Pair(oracle, checkpoint).ours(lowering), tokens, hf.logits(oracle, tokens))


def test_blocks_without_exponents_are_rejected(directory, tmp_path):
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="experts.down_proj_blocks has the type U8; supported are"):
        open_checkpoint(tmp_path)


def test_names_of_the_first_gpt2_checkpoints_are_read(tmp_path):
    """The published files have no "transformer." before names, and causal masks among the weights."""
    today = open_checkpoint(tiny_model("gpt2", tmp_path / "today")).tensors
    stored = load_file(tmp_path / "today" / "model.safetensors")
    first = {name.removeprefix("transformer."): values for name, values in stored.items()}
    first |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.ones(1, np.float32)}
    (tmp_path / "first").mkdir()
    save_file(first, tmp_path / "first" / "model.safetensors")
    (tmp_path / "first" / "config.json").write_bytes((tmp_path / "today" / "config.json").read_bytes())
    tensors = open_checkpoint(tmp_path / "first").tensors
    assert tensors.keys() == today.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.dequantise(), today[name].dequantise())
    np.testing.assert_array_equal(
        tensors["transformer.h.1.mlp.c_fc.weight"].dequantise(), stored["transformer.h.1.mlp.c_fc.weight"].T
    )


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_next", "nemotron_h"])
def test_stacked_experts_equal_hfs(model_type, tmp_path):
    """HF's modules store experts stacked, and read files that do."""
    apart = open_checkpoint(tiny_model(model_type, tmp_path)).tensors
    stored, stacks = load_file(tmp_path / "model.safetensors"), {}
    for name in sorted(name for name in stored if ".experts." in name):
        head, number, leaf = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)_proj\.weight", name).groups()
        stacks.setdefault((head, leaf), {})[int(number)] = stored.pop(name)
    stacked = {key: np.stack([parts[number] for number in sorted(parts)]) for key, parts in stacks.items()}
    for (head, leaf), values in stacked.items():
        if leaf == "gate":
            stored[f"{head}.gate_up_proj"] = np.concatenate([values, stacked[head, "up"]], 1)
        elif leaf == "down" or (head, "gate") not in stacked:
            stored[f"{head}.{leaf}_proj"] = values
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = open_checkpoint(tmp_path)
    assert found.tensors.keys() == apart.keys()
    models, tokens = Pair(hf.load(tmp_path, threads=1), found), prompt(211, 12)
    assert_same_logits(models.ours(), tokens, hf.logits(models.oracle, tokens), steps=0)


@pytest.mark.parametrize(("model_type", "name"), [("glm4_moe_lite", "model.layers.47.eh_proj"), ("nemotron_h", "mtp.fc")])
def test_layers_for_multi_token_prediction_are_left_out(model_type, name, tmp_path):
    directory = tiny_model(model_type, tmp_path)
    before = open_checkpoint(directory).tensors.keys()
    stored = load_file(directory / "model.safetensors")
    stored[f"{name}.weight"] = np.ones((4, 8), np.float32)
    save_file(stored, directory / "model.safetensors")
    assert open_checkpoint(directory).tensors.keys() == before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gemma3"])
def test_a_tied_model_may_store_only_its_head(family, tmp_path):
    """transformers loads it into both the head and the embedding."""
    vision = family in MODELS
    path = vision_model(family, tmp_path) if vision else tiny_model(family, tmp_path / "model", tie_word_embeddings=True)
    embedding = {"gpt2": "transformer.wte.weight", "gemma3": "model.language_model.embed_tokens.weight"}.get(
        family, "model.embed_tokens.weight"
    )
    expected, stored = open_checkpoint(path), load_file(path / "model.safetensors")
    stored.pop("lm_head.weight", None)
    save_file({"lm_head.weight" if name == embedding else name: each for name, each in stored.items()}, path / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    found = open_checkpoint(path)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(tensor.data, expected.tensors[name].data) for name, tensor in found.tensors.items())
    if not vision:
        oracle, tokens = hf.load(path, threads=1), prompt(211, 20)
        assert_same_logits(Pair(oracle, found).ours(), tokens, hf.logits(oracle, tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_model_may_store_both(family, tmp_path):
    path = tiny_model(family, tmp_path / "model", tie_word_embeddings=True)
    stored = load_file(path / "model.safetensors")
    embedding = next(each for each in EMBEDDINGS if each in stored)
    for head, problems in ((stored[embedding], 0), (stored[embedding] + 1, 1)):
        save_file({**stored, "lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
        checkpoint = open_checkpoint(path)
        required = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name != "lm_head.weight"}
        found = missing_and_left_over(required, checkpoint)
        assert len(found) == problems and all("differs from" in problem for problem in found)


def test_a_head_that_is_not_tied_is_no_embedding(tmp_path):
    path = tiny_model("llama", tmp_path / "model", tie_word_embeddings=False)
    stored = load_file(path / "model.safetensors")
    del stored["model.embed_tokens.weight"]
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight \[211, 64\] is missing"):
        build_model(open_checkpoint(path), Options(context=64))
