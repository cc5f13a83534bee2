"""What a compiler engineer does: sees all MLIR, gives flags, compiles by hand, and puts the module into the bundle."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from castiron.pipelines import cli
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.pipelines.tiny_gguf import write_llama
from tests.pipelines.toy_text import read_json

SMALL = ["--context", "16", "--batch", "none", "--speculate", "none", "--threads", "1"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("kept") / "tiny.gguf"))


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """The folder of a bundle `out` and of what `--keep` wrote, `kept`."""
    folder = tmp_path_factory.mktemp("made")
    assert cli.main(["compile", checkpoint, "-o", str(folder / "out"), "--keep", str(folder / "kept"), *SMALL]) == 0
    return folder


def error(capsys, *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(list(argv)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("castiron: ")
    return err


def tokens(place: Path) -> list[int]:
    session = Session(open_bundle(place), 1)
    found = [session.prefill([1, 2, 3])]
    found += [session.step(found[-1]) for _ in range(6)]
    return found


def test_the_text_before_lowering_is_mlir_and_has_the_layers(made):
    text = (made / "kept/layers.mlir").read_text()
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    ir.Module.parse(text, context)
    assert '"castiron.linear"' in text and 'name = "model.layers.1.mlp.up_proj.weight"' in text


def test_the_commands_make_the_module_of_the_bundle(made, tmp_path):
    shutil.copytree(made / "kept", tmp_path / "kept")
    lines = (tmp_path / "kept/commands.sh").read_text().splitlines()
    compile_, repack = (shlex.split(line) for line in lines[-2:])
    assert repack == ["castiron", "repack", str(made / "out"), "--module", "model.vmfb"]
    subprocess.run([Path(sys.executable).parent / compile_[0], *compile_[1:]], cwd=tmp_path / "kept", check=True)
    assert (tmp_path / "kept/model.vmfb").read_bytes() == (made / "out/model.vmfb").read_bytes()


def test_a_bundle_that_is_up_to_date_keeps_its_text_too(made, checkpoint, tmp_path, capsys):
    assert cli.main(["compile", checkpoint, "-o", str(made / "out"), "--keep", str(tmp_path), *SMALL, "--json"]) == 0
    assert read_json(capsys.readouterr().out)["up_to_date"]
    assert (tmp_path / "module.mlir").read_text() == (made / "kept/module.mlir").read_text()


def test_flags_are_the_compilers_the_manifests_and_the_keys(made, checkpoint, tmp_path, capsys):
    with_flag = ["compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL, "--iree-flag=--iree-opt-level=O2", "--json"]
    assert cli.main(["compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL]) == 0
    capsys.readouterr()
    for up_to_date in (False, True):
        assert cli.main(with_flag) == 0
        assert read_json(capsys.readouterr().out)["up_to_date"] is up_to_date
    assert open_bundle(tmp_path / "out").manifest.compile["flags"][-1] == "--iree-opt-level=O2"
    assert "--iree-opt-level=O2" in (tmp_path / "out/compile.log").read_text()


def test_a_flag_that_is_none_is_one_sentence(checkpoint, tmp_path, capsys):
    assert "--iree-flag=" in error(capsys, "compile", checkpoint, "-o", str(tmp_path / "out"), "--iree-flag=O2")
    said = error(capsys, "compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL, "--iree-flag=--iree-nonsense")
    assert "--iree-nonsense" in said and not (tmp_path / "out").exists()


def changed(made: Path, tmp_path: Path, old: str, new: str) -> Path:
    """A module of the kept text with another piece of it."""
    text = (made / "kept/module.mlir").read_text()
    assert old in text
    (tmp_path / "mine.mlir").write_text(text.replace(old, new))
    command = shlex.split((made / "kept/commands.sh").read_text().splitlines()[-2].replace("module.mlir", "mine.mlir"))
    command = [Path(sys.executable).parent / command[0], *command[1:-1], "mine.vmfb"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "mine.vmfb"


def test_a_module_of_ones_own_runs_in_the_bundle_which_says_so(made, checkpoint, tmp_path, capsys):
    mine = changed(made, tmp_path, 'loc("model.layers.1', 'loc("my.layers.1')
    capsys.readouterr()
    assert cli.main(["repack", str(made / "out"), "--module", str(mine), "-o", str(tmp_path / "out"), "--json"]) == 0
    facts = read_json(capsys.readouterr().out)
    assert facts["module"] == str(mine)
    assert (tmp_path / "out/model.vmfb").read_bytes() == mine.read_bytes()
    assert tokens(tmp_path / "out") == tokens(made / "out")
    assert cli.main(["inspect", str(tmp_path / "out")]) == 0
    assert re.search(rf"^module +not castiron's: {mine}", capsys.readouterr().out, re.MULTILINE)
    # castiron compile would put back its own.
    assert cli.main(["compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL, "--json"]) == 0
    assert not read_json(capsys.readouterr().out)["up_to_date"]
    assert (tmp_path / "out/model.vmfb").read_bytes() == (made / "out/model.vmfb").read_bytes()


def test_a_packed_bundle_becomes_a_directory(made, tmp_path, capsys):
    pack_bundle(open_bundle(made / "out"), tmp_path / "one.castiron")
    argv = ["repack", str(tmp_path / "one.castiron"), "--module", str(made / "out/model.vmfb")]
    assert "give a directory with -o" in error(capsys, *argv)
    assert cli.main([*argv, "-o", str(tmp_path / "out")]) == 0
    assert tokens(tmp_path / "out") == tokens(made / "out")


def test_in_its_place_the_rest_of_the_bundle_stays(made, tmp_path):
    shutil.copytree(made / "out", tmp_path / "out")
    assert cli.main(["repack", str(tmp_path / "out"), "--module", str(made / "out/model.vmfb")]) == 0
    before, after = open_bundle(made / "out").manifest, open_bundle(tmp_path / "out", full_check=True).manifest
    assert before.files["weights.irpa"] == after.files["weights.irpa"] and before.functions == after.functions


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("@decode_step(", "@decode(", "has no function decode_step"),
        ('"model"::"model.norm.weight"', '"model"::"model.gone.weight"', "does not load with the bundle's weights"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_and_the_bundle_stays(made, tmp_path, capsys, old, new, says):
    shutil.copytree(made / "out", tmp_path / "out")
    mine = changed(made, tmp_path, old, new)
    assert says in error(capsys, "repack", str(tmp_path / "out"), "--module", str(mine))
    assert open_bundle(tmp_path / "out").manifest == open_bundle(made / "out").manifest


def test_other_types_are_refused(made, checkpoint, tmp_path, capsys):
    """A module of another context, whose caches have other shapes."""
    other = compile_model(checkpoint, tmp_path / "other", Options(context=8, batch=(), speculate=(), threads=1)).bundle
    said = error(capsys, "repack", str(made / "out"), "--module", str(other / "model.vmfb"))
    assert "has inputs (i32, i32, 2x8x" in said and "manifest says (i32, i32, 2x16x" in said


def test_what_is_no_module_is_refused(made, tmp_path, capsys):
    (tmp_path / "text.vmfb").write_text("module {}")
    assert "is no module that" in error(capsys, "repack", str(made / "out"), "--module", str(tmp_path / "text.vmfb"))
    assert "/no/such is not there" in error(capsys, "repack", str(made / "out"), "--module", "/no/such")


def test_weights_as_arguments_have_their_names(checkpoint, capsys):
    capsys.readouterr()
    argv = ["emit", checkpoint, "--lowering", "portable", "--weights-as", "arguments", "--function", "decode_step"]
    assert cli.main([*argv, *SMALL, "--weights", "f32"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "func.func public" in line]
    arguments = re.findall(r"%([\w.$-]+): tensor", line)
    assert arguments[:2] == ["token", "position"] and len(set(arguments)) == len(arguments)
    assert "model.layers.1.mlp.down_proj.weight" in arguments and not any("arg_" in name for name in arguments)


def test_tune_names_the_functions_before_it_compiles(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("castiron.pipelines.tuning.search.Bench.__init__", lambda *_: pytest.fail("it compiled"))
    said = error(capsys, "tune", checkpoint, *SMALL, "--functions", "decode,prefill_8")
    assert "no function 'decode'; --functions takes decode_step, prefill_8" in said


def test_the_kept_script_runs_as_it_is(made, tmp_path):
    """With the `castiron` and `iree-compile` of this environment."""
    shutil.copytree(made / "out", tmp_path / "out")
    shutil.copytree(made / "kept", tmp_path / "kept")
    script = tmp_path / "kept/commands.sh"
    script.write_text(script.read_text().replace(str(made / "out"), str(tmp_path / "out")))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/castiron").write_text(f'#!/bin/sh\nexec {sys.executable} -m castiron "$@"\n')
    (tmp_path / "bin/castiron").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([script], env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    assert "repacked" in json.loads((tmp_path / "out/manifest.json").read_text())["compile"]
