"""An HF directory: one file or many, what is there and what is not."""

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

from castiron.pipelines.checkpoints import CheckpointError, missing_and_left_over, open_checkpoint

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
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


def test_what_stands_beside_the_weights(directory):
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
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert open_checkpoint(directory).chat_template == "named"
    (directory / "chat_template.jinja").write_text("beside")
    assert open_checkpoint(directory).chat_template == "beside"


def _save(directory, tensors):
    save_file(tensors, directory / "model.safetensors")


def _state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_stored_copy_of_the_tied_head_is_in_order(model, directory):
    required = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    state = _state(model)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    _save(directory, state)
    assert missing_and_left_over(required, open_checkpoint(directory)) == []
    state["lm_head.weight"][3, 3] += 1
    _save(directory, state)
    assert missing_and_left_over(required, open_checkpoint(directory)) == [
        "lm_head.weight differs from model.embed_tokens.weight, to which the config ties it"
    ]


def test_all_violations_at_once(model, directory):
    required = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    state = _state(model)
    del state["model.norm.weight"]
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)
    _save(directory, state)
    assert sorted(missing_and_left_over(required, open_checkpoint(directory))) == [
        "model.layers.1.mlp.up_proj.weight is [96, 63], the config calls for [96, 64]",
        "model.layers.2.mlp.up_proj.weight [96, 64] is left over",
        "model.norm.weight [64] is missing",
    ]


def _header(content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + data


def _entry(**tensors) -> bytes:
    """name = (dtype, shape, offsets)"""
    keys = ("dtype", "shape", "data_offsets")
    return json.dumps({name: dict(zip(keys, values)) for name, values in tensors.items()}).encode()


BAD_SAFETENSORS = {
    "empty": b"",
    "shorter than a header's length": b"\1\0",
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "header is no JSON": _header(b"{nonsense"),
    "header is no object": _header(b"[]"),
    "truncated data": _header(_entry(x=("F32", [4], [0, 16])), b"\0" * 15),
    "data left over": _header(_entry(x=("F32", [4], [0, 16])), b"\0" * 20),
    "offsets backwards": _header(_entry(x=("F32", [4], [16, 0])), b"\0" * 16),
    "shape against offsets": _header(_entry(x=("F32", [5], [0, 16])), b"\0" * 16),
    "overlap": _header(_entry(x=("F32", [4], [0, 16]), y=("F32", [4], [8, 24])), b"\0" * 24),
    "hole": _header(_entry(x=("F32", [4], [0, 16]), y=("F32", [4], [20, 36])), b"\0" * 36),
    "shape overflows": _header(_entry(x=("F32", [1 << 62, 16], [0, 16])), b"\0" * 16),
    "negative shape": _header(_entry(x=("F32", [-4], [0, 16])), b"\0" * 16),
    "unknown dtype": _header(_entry(x=("Q9", [4], [0, 16])), b"\0" * 16),
    "name twice": _header(
        b"{%s,%s}" % ((_entry(x=("F32", [4], [0, 16]))[1:-1],) * 2),
        b"\0" * 16,
    ),
    "unread dtype": _header(_entry(x=("I64", [2], [0, 16])), b"\0" * 16),
    "no dimensions": _header(_entry(x=("F32", [], [0, 4])), b"\0" * 4),
}


@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_malformed_safetensors_end_in_a_sentence(name, directory):
    (directory / "model.safetensors").write_bytes(BAD_SAFETENSORS[name])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory)
    assert str(directory / "model.safetensors") in str(error.value)
    assert "\n" not in str(error.value)


def _sharded(directory, weight_map):
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _generation(directory, **content):
    (directory / "generation_config.json").write_text(json.dumps(content))


BAD_DIRECTORIES = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "config not UTF-8": (lambda d: (d / "config.json").write_bytes(b"\xff"), "is not UTF-8"),
    "no model type": (lambda d: (d / "config.json").write_text("{}"), "names no model_type"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "shard missing": (lambda d: _sharded(d, {"x": "b.safetensors"}), "b.safetensors is missing"),
    "shard outside": (lambda d: _sharded(d, {"x": "../b.safetensors"}), "not a file beside it"),
    "tensor not in its shard": (lambda d: _sharded(d, {"x": "a.safetensors"}), "a.safetensors lacks x"),
    "map of numbers": (lambda d: _sharded(d, {"x": 1}), "no weight_map"),
    "map is a list": (lambda d: _sharded(d, []), "no weight_map"),
    "tensor in two shards": (
        lambda d: (
            shutil.copy(d / "model.safetensors", d / "b.safetensors"),
            _sharded(d, {"model.norm.weight": "a.safetensors", "model.embed_tokens.weight": "b.safetensors"}),
        ),
        "and so does another shard",
    ),
    "eos in words": (lambda d: _generation(d, eos_token_id="x"), "eos_token_id is 'x'"),
    "bos in words": (lambda d: _generation(d, bos_token_id="x"), "bos_token_id is 'x'"),
    "template not UTF-8": (lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"), "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_malformed_directories_end_in_a_sentence(name, directory):
    damage, sentence = BAD_DIRECTORIES[name]
    damage(directory)
    with pytest.raises(CheckpointError, match=sentence) as error:
        open_checkpoint(directory)
    assert "\n" not in str(error.value)


def test_a_path_that_is_nothing_names_the_catalogue(tmp_path):
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        open_checkpoint(tmp_path / "absent.gguf")
