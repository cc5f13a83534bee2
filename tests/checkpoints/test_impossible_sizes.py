"""Configs with larger sizes than their tensors are rejected before anything is built."""

from __future__ import annotations

import json

import numpy as np
import pytest

from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.reference.tiny import COMMON, tiny_model
from tests.support.tiny_gguf import HIDDEN, LAYERS, write_llama

HUGE = 10**12
LAYER = "the tensors have 3 layers"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of tiny HF directories by family."""
    directory = tmp_path_factory.mktemp("models")
    found = {name: tiny_model(name, directory / name) for name in ("llama", "smollm3", "gemma2", "qwen3_moe", "mixtral")}
    for path in found.values():
        assert open_checkpoint(path).config["num_hidden_layers"] == COMMON["num_hidden_layers"]
    return found


def refusal(capsys, model, tmp_path) -> str:
    """Return the one-line error of `castiron compile`, which must write nothing."""
    assert cli.main(["compile", str(model), "-o", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err.replace(str(model), "")) < 300 and not (tmp_path / "out").exists()
    return err


@pytest.mark.parametrize(
    ("family", "key", "value", "why"),
    [
        *((family, "num_hidden_layers", HUGE, LAYER) for family in ("smollm3", "gemma2")),
        ("llama", "num_hidden_layers", 4, LAYER),
        ("llama", "num_hidden_layers", 10**400, f"num_hidden_layers is 1000000000000...0000000000000, but {LAYER}"),
        *(("llama", key, HUGE, "no tensor is longer than 211") for key in
          ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")),
        ("qwen3_moe", "moe_intermediate_size", HUGE, "no tensor is longer than"),
        ("qwen3_moe", "num_experts", HUGE, "the tensors have 6 experts"),
        ("qwen3_moe", "num_experts_per_tok", HUGE, "the tensors have 6 experts"),
        ("mixtral", "num_local_experts", 7, "the tensors have 6 experts"),
    ],
)  # fmt: skip
def test_impossible_sizes_in_a_config_are_rejected(models, family, key, value, why, capsys, tmp_path):
    config = models[family] / "config.json"
    valid = config.read_text()
    # The length of a list with a value per layer would be an error of its own.
    changed = {name: found for name, found in json.loads(valid).items() if name not in ("layer_types", "no_rope_layers")}
    config.write_text(json.dumps(changed | {key: value}))
    try:
        message = refusal(capsys, models[family], tmp_path)
    finally:
        config.write_text(valid)
    assert key in message and why in message and str(models[family]) in message


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("block_count", f"num_hidden_layers is 2147483647, but the tensors have {LAYERS} layers"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
    ],
)
def test_impossible_sizes_in_gguf_metadata_are_rejected(key, why, capsys, tmp_path):
    path = write_llama(tmp_path / "tiny.gguf", {f"llama.{key}": 2**31 - 1, "llama.attention.head_count_kv": 1})
    message = refusal(capsys, path, tmp_path)
    assert why in message and str(path) in message


def test_a_high_layer_number_counts_as_one_layer(capsys, tmp_path):
    """Layer numbers in names are no more trusted than sizes in the config."""
    tensors = {"blk.999999999.attn_norm.weight": np.ones(HIDDEN, np.float32)}
    path = write_llama(tmp_path / "tiny.gguf", {"llama.block_count": 10**9}, tensors)
    assert f"the tensors have {LAYERS + 1} layers" in refusal(capsys, path, tmp_path)
