"""What is often taken for a checkpoint is told apart, each in a sentence that says what to give instead."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.pipelines.checkpoints import CheckpointError, find_checkpoint, open_checkpoint
from castiron.pipelines.commands.options import default_bundle
from castiron.pipelines.places import is_bundle, model_name
from castiron.reference import tiny
from tests.pipelines import toy_text
from tests.pipelines.test_cli import complaint
from tests.pipelines.tiny_gguf import write_llama
from tests.pipelines.toy_text import read_json


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return toy_text.write(tmp_path_factory.mktemp("bundle") / "toy")


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    said = str(error.value)
    assert str(path) in said and "\n" not in said and len(said) < 300 + len(str(path))
    return said


def test_an_adapter_names_its_base_and_says_how_it_is_taken(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "is an adapter of org/base, not a model: give its base, and this with --adapter" in refusal(tmp_path)
    # Trainers write the base's config beside it.
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


def test_a_pipe_is_neither_a_file_nor_a_directory(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is neither a file nor a directory" in refusal(tmp_path / "pipe")


def test_a_gguf_file_is_known_by_its_bytes(tmp_path):
    assert open_checkpoint(write_llama(tmp_path / "pytorch_model.bin")).format == "gguf"


def test_a_folder_of_gguf_files_names_them(tmp_path):
    write_llama(tmp_path / "a.gguf")
    write_llama(tmp_path / "b.gguf")
    assert "give one of a.gguf, b.gguf" in refusal(tmp_path)


def test_a_bundle_is_not_a_checkpoint(bundle, llama, tmp_path, capsys):
    packed = tmp_path / "toy.castiron"
    assert cli.main(["pack", str(bundle), "-o", str(packed)]) == 0
    for place in (bundle, packed):
        assert is_bundle(place)
        assert "is a bundle, and this needs the checkpoint" in refusal(place)
    assert not is_bundle(llama) and not is_bundle(tmp_path)
    capsys.readouterr()
    assert cli.main(["compile", str(bundle), "-o", str(tmp_path / "out")]) == 1
    assert "is a bundle" in complaint(capsys)


@pytest.fixture
def hub(llama, tmp_path):
    """A cache of the hub with one model of one snapshot, whose files are links to blobs."""
    repository = tmp_path / "hub" / "models--org--tiny-llama"
    snapshot = repository / "snapshots" / "abc123"
    for folder in ("blobs", "refs", "snapshots/abc123"):
        (repository / folder).mkdir(parents=True)
    for file in llama.iterdir():
        (repository / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return repository.parent


def test_of_a_folder_of_the_hubs_cache_the_snapshot_in_use_is_taken(hub):
    repository = hub / "models--org--tiny-llama"
    snapshot = repository / "snapshots" / "abc123"
    for place in (repository, repository / "snapshots", snapshot):
        assert find_checkpoint(place) == snapshot == open_checkpoint(place).path
    (repository / "snapshots" / "def456").mkdir()
    assert "give one of abc123, def456" in refusal(repository)
    (repository / "refs" / "main").write_text("abc123\n")
    assert find_checkpoint(repository) == snapshot
    assert "give a model's folder in it: models--org--tiny-llama" in refusal(hub)


def test_a_folder_without_a_snapshot_says_so(tmp_path):
    place = tmp_path / "models--org--gone"
    (place / "refs").mkdir(parents=True)
    assert "without a snapshot" in refusal(place)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/model.Q4_1.gguf", "model.Q4_1"),
        ("models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("hub/models--org--tiny/snapshots/abc", "tiny"),
        ("hub/models--org--two--dashes", "two--dashes"),
        ("hub/models--gpt2", "gpt2"),
    ],
)
def test_a_model_is_called_as_people_call_it(path, name, monkeypatch, tmp_path):
    assert str(default_bundle(path)) == f"build/{name}"
    folder = tmp_path / path
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert model_name(Path(".")) == name


def test_a_trainers_leftovers_are_listed_and_what_is_refused_is_said(llama, tmp_path, capsys):
    trained = shutil.copytree(llama, tmp_path / "trained")
    config = json.loads((llama / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"unsloth_version": "1", "max_length": 20}))
    assert cli.main(["inspect", str(trained), "--json"]) == 0
    facts = read_json(capsys.readouterr().out)
    assert facts["ignored_keys"] == ["max_length", "unsloth_version"] and facts["refused"] is None
    assert cli.main(["inspect", str(trained)]) == 0
    assert "max_length, unsloth_version (no part" in capsys.readouterr().out
    (trained / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8}))
    assert cli.main(["inspect", str(trained), "--json"]) == 0
    facts = read_json(capsys.readouterr().out)
    assert facts["ignored_keys"] == [] and "'attention_chunk_size'" in facts["refused"]


def test_a_key_is_left_out_when_that_is_asked_for(llama, tmp_path, capsys):
    odd = shutil.copytree(llama, tmp_path / "odd")
    config = json.loads((llama / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8}))
    emit = ["emit", str(odd), "--lowering", "portable", "--context", "8", "-o", str(tmp_path / "text")]
    assert cli.main(emit) == 1
    assert "--ignore-key" in complaint(capsys)
    assert cli.main([*emit, "--ignore-key", "attention_chunk_size"]) == 0
    assert cli.main([*emit, "--ignore-key", "attention_chunk_siz"]) == 1
    assert "no key 'attention_chunk_siz' that could be ignored" in complaint(capsys)
    compiled = ["compile", str(odd), "--context", "8", "--lowering", "portable", "--batch", "none", "--speculate", "none"]
    assert cli.main([*compiled, "-o", str(tmp_path / "out"), "--ignore-key", "attention_chunk_size"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "out")]) == 0
    assert "attention_chunk_size (by --ignore-key)" in capsys.readouterr().out
    assert cli.main(["diff", str(odd), "--tokens", "1,2,3", "--ignore-key", "attention_chunk_size", "--json"]) == 0


def test_a_key_of_a_gguf_file_is_left_out_when_that_is_asked_for(tmp_path):
    path = write_llama(tmp_path / "odd.gguf", {"llama.attention.sink_multiplier": 2.0})
    with pytest.raises(CheckpointError, match="llama.attention.sink_multiplier; --ignore-key"):
        open_checkpoint(path)
    assert open_checkpoint(path, ignore_keys=["llama.attention.sink_multiplier"]).config["model_type"] == "llama"


@pytest.mark.parametrize("named", [b"", b".", b"..", b"/", b"../../x", b"\xff", b"a\0b", b"x" * 5000])
def test_a_folder_of_the_hub_whose_ref_names_no_snapshot_has_the_one_there_is(llama, named, tmp_path):
    hub = tmp_path / "models--org--name"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_bytes(named)
    shutil.copytree(llama, hub / "snapshots/0123")
    assert find_checkpoint(hub) == hub / "snapshots/0123"
    (hub / "refs/main").unlink()
    os.mkfifo(hub / "refs/main")
    assert find_checkpoint(hub) == hub / "snapshots/0123"


def test_what_a_folder_says_is_quoted_on_one_line(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a\n\x1b[2J\ud800" * 100}))
    assert r"is an adapter of a\n\x1b[2J\ud800" in refusal(tmp_path)
    with open(tmp_path / "adapter_config.json", "r+b") as file:
        file.truncate(10**10)
    assert "is an adapter, not a model" in refusal(tmp_path)
