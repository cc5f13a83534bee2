"""A draft of another vocabulary is refused before anything is compiled."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import castiron
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.open_model import check_draft_model
from castiron.pipelines.errors import PipelineError
from castiron.reference import tiny
from tests.cli.test_cli import complaint
from tests.support import served, toy_text

MODELS = ("same", "other", "bare", "larger")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write copies of a checkpoint, with other tokens, without a tokenizer, and with more ids."""
    location = tmp_path_factory.mktemp("drafts")
    first = served.checkpoint(location / "model", num_hidden_layers=1)
    for name in MODELS[:3]:
        shutil.copytree(first, location / name)
    text = (first / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    one, two = (next(word for word, index in vocabulary.items() if index == at) for at in (60, 61))
    content = json.loads(text)
    content["model"]["vocab"] |= {one: vocabulary[two], two: vocabulary[one]}
    (location / "other/tokenizer.json").write_text(json.dumps(content))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (location / "bare" / name).unlink()
    size = json.loads((first / "config.json").read_text())["vocab_size"]
    tiny.tiny_model("llama", location / "larger", num_hidden_layers=1, vocab_size=size + 3)
    shutil.copy(first / "tokenizer.json", location / "larger")
    return location


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch, tmp_path):
    def compile_modules(*_, **__):
        raise AssertionError("a module was compiled before the draft was checked")

    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("castiron.pipelines.compile.compile_model.compile_modules", compile_modules)


def test_a_draft_with_a_different_vocabulary_is_refused(folder, capsys):
    model, other = str(folder / "model"), str(folder / "other")
    different = "different vocabularies from token 60 on"
    for argv in (["run", model, "a"], ["chat", model], ["serve", model, "--port", "0"]):
        assert cli.main([*argv, "--draft-model", other]) == 1
        assert different in complaint(capsys)
    with pytest.raises(PipelineError, match=different):
        castiron.load(model, draft=other)
    with pytest.raises(PipelineError, match="bare has no tokenizer"):
        check_draft_model(folder / "bare", model)
    # Unused ids at the end are no difference, and a hub or catalogue name is like a path.
    for name in ("same", "larger"):
        check_draft_model(folder / name, model)


def test_a_compiled_model_is_compared_with_a_checkpoint(folder, tmp_path):
    bundle = toy_text.write(tmp_path / "toy")
    with pytest.raises(PipelineError, match="different vocabularies"):
        check_draft_model(bundle, folder / "model")
    # The toy has no functions that check proposals.
    with pytest.raises(PipelineError, match=f"{re.escape(str(bundle))} has no verify functions"):
        check_draft_model(folder / "model", bundle)
