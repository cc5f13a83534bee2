"""Test that paths mistaken for a checkpoint have an error that names the right one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.options import default_bundle
from castiron.pipelines.locate import is_bundle, model_name
from castiron.reference import tiny
from tests.cli.test_cli import complaint
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json

bundle = toy_text.bundle


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and len(message) < 300 + len(str(path))
    return message


def test_the_error_of_an_adapter_names_its_base_and_the_option(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "is an adapter of org/base, not a model; give its base model, and the adapter with --adapter" in refusal(tmp_path)
    # Some trainers also write the base's config into the adapter's directory.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "is an adapter of org/base" in refusal(tmp_path)
    for broken in ("", "[]", '{"base_model_name_or_path": 1}'):
        (tmp_path / "adapter_config.json").write_text(broken)
        assert "is an adapter, not a model" in refusal(tmp_path)


def test_a_merged_model_beside_its_adapter_is_a_model(llama, tmp_path):
    merged = shutil.copytree(llama, tmp_path / "merged")
    (merged / "adapter_config.json").write_text("{}")
    assert open_checkpoint(merged).config["model_type"] == "llama"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_checkpoint_names_its_directory(llama, name, monkeypatch):
    assert f"give its directory, {llama}" in refusal(llama / name)
    monkeypatch.chdir(llama)
    assert f"give its directory, {llama}" in refusal(name)


def test_gguf_files_are_recognised_by_their_bytes_and_listed(tmp_path):
    write_llama(tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert "give one of the files: a.gguf, b.gguf" in refusal(tmp_path)
    assert open_checkpoint((tmp_path / "a.gguf").rename(tmp_path / "pytorch_model.bin")).format == "gguf"


def test_a_bundle_is_not_a_checkpoint(bundle, llama, tmp_path, capsys):
    packed = tmp_path / "toy.castiron"
    assert cli.main(["pack", bundle, "-o", str(packed)]) == 0
    for location in (Path(bundle), packed):
        assert is_bundle(location)
        assert "is a bundle; give the checkpoint" in refusal(location)
    assert not is_bundle(llama) and not is_bundle(tmp_path)
    capsys.readouterr()
    assert cli.main(["compile", bundle, "-o", str(tmp_path / "out")]) == 1
    assert "is a bundle" in complaint(capsys)


def test_a_folder_of_the_hubs_cache_is_rejected_with_the_models_name(tmp_path):
    (folder := tmp_path / "models--org--two--dashes").mkdir()
    assert "is a folder of the hub's cache; give the model's name, org/two--dashes" in refusal(folder)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/model.Q4_1.gguf", "model.Q4_1"),
        ("models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("hub/models--org--tiny/snapshots/abc", "tiny"),
        ("hub/models--org--two--dashes/snapshots/abc", "two--dashes"),
        ("hub/models--gpt2/snapshots/abc", "gpt2"),
    ],
)
def test_the_name_of_a_model_follows_from_its_path(path, name, monkeypatch, tmp_path):
    assert str(default_bundle(path)) == f"build/{name}"
    folder = tmp_path / path
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert model_name(Path(".")) == name


def test_inspect_lists_ignored_config_keys_and_unsupported_ones(llama, tmp_path, capsys):
    trained = shutil.copytree(llama, tmp_path / "trained")
    config = json.loads((llama / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"unsloth_version": "1", "max_length": 20}))
    assert cli.main(["inspect", str(trained), "--json"]) == 0
    facts = read_json(capsys.readouterr().out)
    assert facts["ignored_keys"] == ["max_length", "unsloth_version"] and facts["refused"] is None
    assert cli.main(["inspect", str(trained)]) == 0
    assert "max_length, unsloth_version (without effect" in capsys.readouterr().out
    (trained / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8}))
    assert cli.main(["inspect", str(trained), "--json"]) == 0
    facts = read_json(capsys.readouterr().out)
    assert facts["ignored_keys"] == [] and "'attention_chunk_size'" in facts["refused"]


def test_ignore_key_ignores_a_config_key(llama, tmp_path, capsys):
    odd = shutil.copytree(llama, tmp_path / "odd")
    config = json.loads((llama / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8}))
    emit = ["emit", str(odd), "--lowering", "portable", "--context", "8", "-o", str(tmp_path / "text")]
    assert cli.main(emit) == 1
    assert "--ignore-key" in complaint(capsys)
    assert cli.main([*emit, "--ignore-key", "attention_chunk_size"]) == 0
    assert cli.main([*emit, "--ignore-key", "attention_chunk_siz"]) == 1
    assert "no key 'attention_chunk_siz'; remove --ignore-key for this key" in complaint(capsys)
    compiled = ["compile", str(odd), "--context", "8", "--lowering", "portable", "--batch", "none", "--verify-widths", "none"]
    assert cli.main([*compiled, "-o", str(tmp_path / "out"), "--ignore-key", "attention_chunk_size"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "out")]) == 0
    assert "attention_chunk_size (by --ignore-key)" in capsys.readouterr().out
    assert cli.main(["diff", str(odd), "--tokens", "1,2,3", "--ignore-key", "attention_chunk_size", "--json"]) == 0


def test_ignore_key_ignores_a_key_of_a_gguf_file(tmp_path):
    path = write_llama(tmp_path / "odd.gguf", {"llama.attention.sink_multiplier": 2.0})
    with pytest.raises(CheckpointError, match="llama.attention.sink_multiplier; ignore a key with --ignore-key"):
        open_checkpoint(path)
    assert open_checkpoint(path, ignore_keys=["llama.attention.sink_multiplier"]).config["model_type"] == "llama"


def test_an_error_escapes_control_characters_of_an_adapters_config(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a\n\x1b[2J\ud800" * 100}))
    assert r"is an adapter of a\n\x1b[2J\ud800" in refusal(tmp_path)
    with open(tmp_path / "adapter_config.json", "r+b") as file:
        file.truncate(10**10)
    assert "is an adapter, not a model" in refusal(tmp_path)
