"""Test castiron cache, and the commands of docs/caches.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile import open_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path
from castiron.pipelines.errors import PipelineError
from castiron.vmfb import cache_folder as cache_module
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.cache_folder import KINDS, cache_root, claim
from tests.cli.test_cli import complaint
from tests.support.toy_text import read_json

DOCS = Path(__file__).parents[2] / "docs" / "caches.md"
COMMANDS = re.findall(r"^castiron (.*)$", "\n".join(re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)), re.MULTILINE)


@pytest.fixture(autouse=True)
def filled(tmp_path, monkeypatch):
    """Fill the cache with 1 MB of models, 0.5 MB of old compiled code and a foreign file."""
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    for name, size, days in (("models/a.gguf", 1_000_000, 1), ("compile/k.vmfb", 500_000, 40), ("mine", 9, 90)):
        path = tmp_path / "cache" / name
        claim(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - days * 86400,) * 2)


def cache(capsys, *argv: str) -> dict:
    assert cli.main(["cache", *argv, "--json"]) == 0
    return read_json(capsys.readouterr().out)


def test_the_cache_is_listed_by_kind(capsys):
    facts = cache(capsys)
    assert facts["folder"] == str(cache_root()) and facts["bytes"] == 1_500_000 and not facts["cleared"]
    assert [row["kind"] for row in facts["kinds"]] == list(KINDS)
    models = facts["kinds"][0]
    assert models["files"] == 1 and models["bytes"] == 1_000_000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", models["newest"])
    assert [row["kind"] for row in cache(capsys, "list", "compile")["kinds"]] == ["compile"]
    assert cli.main(["cache"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{cache_root()}: 1.5 MB\n") and all(f"  {kind} " in out for kind in KINDS)


def test_clearing_reports_what_it_removed(capsys):
    assert cache(capsys, "clear", "--older-than", "50")["bytes"] == 0
    facts = cache(capsys, "clear", "--older-than", "30")
    assert facts["cleared"] and {row["kind"]: row["bytes"] for row in facts["kinds"] if row["bytes"]} == {"compile": 500_000}
    assert cli.main(["cache", "clear", "models"]) == 0
    assert capsys.readouterr().out.endswith(f"1.0 MB cleared from {cache_root()}\n")
    assert [path.name for path in cache_root().iterdir()] == ["mine"]


def test_an_age_without_clearing_and_unknown_kinds_are_rejected(capsys):
    assert cli.main(["cache", "--older-than", "3"]) == 1
    assert "castiron cache clear --older-than" in complaint(capsys)
    for argv in (["clear", "everything"], ["clear", "--older-than", "soon"], ["clear", "--older-than", "-1"], ["empty"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["cache", *argv])
        assert stop.value.code == 2 and "see castiron cache --help" in capsys.readouterr().err


def test_a_missing_cache_has_0_bytes_and_is_not_created(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "none"))
    assert cache(capsys)["bytes"] == cache(capsys, "clear")["bytes"] == 0
    assert not (tmp_path / "none").exists()


def test_help_and_docs_name_the_variables_and_every_kind(capsys):
    with pytest.raises(SystemExit):
        cli.main(["cache", "--help"])
    for text in (capsys.readouterr().out, DOCS.read_text()):
        assert all(word in text for word in ("CASTIRON_CACHE", "XDG_CACHE_HOME", "~/.cache/castiron", *KINDS))
    assert {"cache", "cache clear"} <= set(COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_docs_works(line, capsys):
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def test_the_history_of_chats_is_cleared_only_by_name():
    history = cache_root() / "chat" / "history"
    claim(history)
    history.write_text('"hi"\n')
    assert cli.main(["cache", "clear"]) == 0 and history.exists()
    assert cli.main(["cache", "clear", "chat"]) == 0 and not history.exists()


def test_a_model_of_the_users_is_not_cleared_and_reported(capsys):
    model = cache_root() / "models" / "mine.gguf"
    model.write_bytes(b"mine")
    assert cli.main(["cache", "clear"]) == 0
    err = capsys.readouterr().err
    assert model.read_bytes() == b"mine" and err.count("\n") == 1 and f"mine.gguf in {model.parent}" in err
    assert not (cache_root() / "models" / "a.gguf").exists()


def test_a_folder_of_the_users_with_the_name_of_a_bundle_stays(path, tmp_path, capsys, monkeypatch):
    """Neither the first run of a model, nor one with all functions, nor castiron rm deletes it."""

    def fail(model, out, *_):
        raise PipelineError(f"{out} is not empty")

    (checkpoint := tmp_path / "checkpoint").mkdir()
    folder = cached_path(checkpoint, Options().for_one_sequence())
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr(open_model, "compile_to", fail)
    assert cli.main(["run", str(checkpoint), "a", "-n", "1", "--raw"]) == 1
    assert str(folder) in complaint(capsys) and (folder / "notes.txt").read_text() == "mine"
    assert cli.main(["rm", str(checkpoint)]) == 1 and (folder / "notes.txt").exists()
    monkeypatch.setattr(open_model, "compile_to", lambda *_: path)
    assert open_model.open_or_compile(checkpoint).path == path and (folder / "notes.txt").exists()


def test_a_cache_that_cannot_be_written_compiles_into_a_temporary_folder(path, tmp_path, capsys, monkeypatch):
    """Also if it has a bundle of another version of castiron."""
    (checkpoint := tmp_path / "checkpoint").mkdir()
    cached, made = cached_path(checkpoint, Options()), []

    def compile_to(model, out, *_):
        made.append(out)
        if out == cached:
            raise BundleError(f"cannot write {out}: Read-only file system")
        return path

    monkeypatch.setattr(cache_module, "_reported", [])
    monkeypatch.setattr(open_model, "compile_to", compile_to)
    monkeypatch.setattr(os, "access", lambda *_: False)
    run = ["run", str(checkpoint), "a", "-n", "1", "--raw"]
    assert cli.main(run) == 0
    shutil.copytree(path, cached)
    assert cli.main(run) == 0
    assert capsys.readouterr().err.count("cannot be written (no permission to write)") == 1
    assert [path.is_relative_to(cache_root()) for path in made] == [False, True, False]
