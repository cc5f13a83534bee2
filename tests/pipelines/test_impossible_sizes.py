"""Configs that ask for more than their tensors hold are refused before anything is built."""

from __future__ import annotations

import json

import numpy as np
import pytest

from castiron.pipelines import cli
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.reference.tiny import COMMON, tiny_model
from tests.pipelines.tiny_gguf import HIDDEN, LAYERS, write_llama

HUGE = 10**12
LAYER = "has tensors of 3 layers"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of tiny HF directories by family."""
    directory = tmp_path_factory.mktemp("models")
    return {name: tiny_model(name, directory / name) for name in ("llama", "smollm3", "gemma2", "qwen3_moe", "mixtral")}


def refusal(capsys, model, tmp_path) -> str:
    """What compile says, as the one sentence that it is."""
    assert cli.main(["compile", str(model), "-o", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err.replace(str(model), "")) < 300 and not (tmp_path / "out").exists()
    return err


@pytest.mark.parametrize(
    ("family", "key", "value", "why"),
    [
        *((family, "num_hidden_layers", HUGE, LAYER) for family in ("llama", "smollm3", "gemma2", "qwen3_moe")),
        ("llama", "num_hidden_layers", 4, LAYER),
        ("llama", "num_hidden_layers", 10**400, f"more than 10^20 and {LAYER}"),
        *(("llama", key, HUGE, "has no tensor longer than 211") for key in
          ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")),
        ("qwen3_moe", "moe_intermediate_size", HUGE, "has no tensor longer than"),
        ("qwen3_moe", "num_experts", HUGE, "has tensors of 6 experts"),
        ("qwen3_moe", "num_experts_per_tok", HUGE, "has tensors of 6 experts"),
        ("mixtral", "num_local_experts", 7, "has tensors of 6 experts"),
    ],
)  # fmt: skip
def test_of_an_hf_directory(models, family, key, value, why, capsys, tmp_path):
    config = models[family] / "config.json"
    sound = config.read_text()
    # A list for each layer would be caught by its length.
    changed = {name: found for name, found in json.loads(sound).items() if name not in ("layer_types", "no_rope_layers")}
    config.write_text(json.dumps(changed | {key: value}))
    try:
        said = refusal(capsys, models[family], tmp_path)
    finally:
        config.write_text(sound)
    assert key in said and why in said and str(models[family]) in said


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("block_count", f"num_hidden_layers as 2147483647 and has tensors of {LAYERS} layers"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
    ],
)
def test_of_a_gguf_file(key, why, capsys, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", {f"llama.{key}": 2**31 - 1, "llama.attention.head_count_kv": 1})
    said = refusal(capsys, path, tmp_path)
    assert why in said and str(path) in said


def test_a_layer_of_a_high_number_is_one_layer(capsys, tmp_path):
    """Names are as little to be trusted as sizes."""
    tensors = {"blk.999999999.attn_norm.weight": np.ones(HIDDEN, np.float32)}
    path = write_llama(tmp_path / "tiny.gguf", {"llama.block_count": 10**9}, tensors)
    assert f"has tensors of {LAYERS + 1} layers" in refusal(capsys, path, tmp_path)


def test_sound_sizes_are_taken(models):
    for path in models.values():
        assert open_checkpoint(path).config["num_hidden_layers"] == COMMON["num_hidden_layers"]
