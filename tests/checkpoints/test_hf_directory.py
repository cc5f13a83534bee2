"""HF directories: one weights file or several, the files beside them, and damaged ones."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from castiron.pipelines.checkpoints.checkpoint import CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint

CONFIG = transformers.LlamaConfig(
    vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=[2, 5],
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


@pytest.fixture
def directory(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "5GB"), (torch.bfloat16, "40KB"), (torch.float16, "40KB")])
def test_tensors_are_those_that_were_saved(model, dtype, shard, tmp_path):
    AutoModelForCausalLM.from_config(CONFIG).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    required = {name: tuple(t.shape) for name, t in peer.items() if name != "lm_head.weight"}
    assert missing_and_left_over(required, checkpoint) == []
    codec = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    for name in required:
        tensor = checkpoint.tensors[name]
        assert tensor.codec == codec
        assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
        assert np.array_equal(tensor.dequantise(), peer[name].float().numpy())


def test_files_beside_the_weights_are_read(directory):
    checkpoint = open_checkpoint(directory)
    assert checkpoint.format == "hf"
    assert checkpoint.config["model_type"] == "llama"
    assert (checkpoint.tokenizer, checkpoint.chat_template) == (None, None)
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (1, (2, 5))
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text('{"chat_template": "in config"}')
    checkpoint = open_checkpoint(directory)
    assert checkpoint.eos_token_ids == (7,)
    assert checkpoint.tokenizer == {"version": "1.0"}
    assert checkpoint.chat_template == "in config"
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_checkpoint(directory).chat_template == "named"
    (directory / "chat_template.jinja").write_text("beside")
    assert open_checkpoint(directory).chat_template == "beside"


def test_stored_heads_and_wrong_tensors_are_compared_with_the_config(model, directory):
    """A copy of the tied head is accepted; all problems are reported together."""
    required = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, directory / "model.safetensors")
    assert missing_and_left_over(required, open_checkpoint(directory)) == []
    state["lm_head.weight"][3, 3] += 1
    del state["model.norm.weight"]
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)
    save_file(state, directory / "model.safetensors")
    assert sorted(missing_and_left_over(required, open_checkpoint(directory))) == [
        "lm_head.weight differs from model.embed_tokens.weight, to which the config ties it",
        "model.layers.1.mlp.up_proj.weight is [96, 63], the config requires [96, 64]",
        "model.layers.2.mlp.up_proj.weight [96, 64] is left over",
        "model.norm.weight [64] is missing",
    ]


def _header(content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + data


def _entry(**tensors) -> bytes:
    """Return a header with a tensor per argument, given as (dtype, shape, offsets)."""
    keys = ("dtype", "shape", "data_offsets")
    return json.dumps({name: dict(zip(keys, values)) for name, values in tensors.items()}).encode()


BAD_SAFETENSORS = {
    "empty": b"",
    "shorter than a header's length": b"\1\0",
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "truncated data": _header(_entry(x=("F32", [4], [0, 16])), b"\0" * 15),
    "overlap": _header(_entry(x=("F32", [4], [0, 16]), y=("F32", [4], [8, 24])), b"\0" * 24),
    "shape overflows": _header(_entry(x=("F32", [1 << 62, 16], [0, 16])), b"\0" * 16),
    "unread dtype": _header(_entry(x=("I64", [2], [0, 16])), b"\0" * 16),
    "no dimensions": _header(_entry(x=("F32", [], [0, 4])), b"\0" * 4),
}


def _sharded(directory, weight_map):
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BAD_DIRECTORIES = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "config not UTF-8": (lambda d: (d / "config.json").write_bytes(b"\xff"), "is not UTF-8"),
    "no model type": (lambda d: (d / "config.json").write_text("{}"), "has no model_type"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "shard missing": (lambda d: _sharded(d, {"x": "b.safetensors"}), "b.safetensors is missing"),
    "shard outside": (lambda d: _sharded(d, {"x": "../b.safetensors"}), "is not a file name"),
    "tensor not in its shard": (lambda d: _sharded(d, {"x": "a.safetensors"}), "a.safetensors lacks x"),
    "map of numbers": (lambda d: _sharded(d, {"x": 1}), "no weight_map"),
    "tensor in two shards": (
        lambda d: (
            shutil.copy(d / "model.safetensors", d / "b.safetensors"),
            _sharded(d, {"model.norm.weight": "a.safetensors", "model.embed_tokens.weight": "b.safetensors"}),
        ),
        "which is also in another shard",
    ),
    **{
        name: (lambda d, data=data: (d / "model.safetensors").write_bytes(data), "/model.safetensors")
        for name, data in BAD_SAFETENSORS.items()
    },
    "eos is text": (lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_malformed_directories_end_in_one_line(name, directory):
    damage, message = BAD_DIRECTORIES[name]
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(directory)
    assert "\n" not in str(error.value)


def test_a_missing_path_names_the_catalogue(tmp_path):
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        open_checkpoint(tmp_path / "absent.gguf")
