"""--save-temps, --iree-flag and --module: a bundle's MLIR, compiler flags, and modules compiled by
hand.
"""

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

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from castiron.vmfb.run.session import Session
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json
from tests.test_end_to_end import greedy

SMALL = ["--context", "16", "--batch", "none", "--verify-widths", "none", "--threads", "1"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("kept") / "tiny.gguf"))


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """A folder with a bundle `out`, and with `kept`, what `--save-temps` wrote."""
    folder = tmp_path_factory.mktemp("made")
    assert cli.main(["compile", checkpoint, "-o", str(folder / "out"), "--save-temps", str(folder / "kept"), *SMALL]) == 0
    return folder


def error(capsys, *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(list(argv)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("castiron: ")
    return err


def tokens(folder: Path) -> list[int]:
    return greedy(Session(open_bundle(folder), 1), [1, 2, 3], 7)


def test_the_text_before_lowering_is_mlir_and_has_the_layers(made):
    text = (made / "kept/layers.mlir").read_text()
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    ir.Module.parse(text, context)
    assert '"castiron.linear"' in text and 'name = "model.layers.1.mlp.up_proj.weight"' in text


def test_the_script_compiles_the_same_module_and_replaces_it(made, tmp_path):
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
    assert (tmp_path / "kept/model.vmfb").read_bytes() == (tmp_path / "out/model.vmfb").read_bytes()
    assert open_bundle(tmp_path / "out").manifest.modules == ("model.vmfb",) and tokens(tmp_path / "out") == tokens(
        made / "out"
    )
    assert "custom_module" in json.loads((tmp_path / "out/manifest.json").read_text())["compile"]


def test_flags_reach_the_compiler_the_manifest_and_the_key(checkpoint, tmp_path, capsys):
    with_flag = ["compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL, "--iree-flag=--iree-opt-level=O2", "--json"]
    assert cli.main(["compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL]) == 0
    capsys.readouterr()
    for up_to_date in (False, True):
        assert cli.main(with_flag) == 0
        assert read_json(capsys.readouterr().out)["up_to_date"] is up_to_date
    assert open_bundle(tmp_path / "out").manifest.compile["flags"][-1] == "--iree-opt-level=O2"
    assert "--iree-opt-level=O2" in (tmp_path / "out/compile.log").read_text()


def test_invalid_compiler_flags_end_in_one_line(checkpoint, tmp_path, capsys):
    assert "--iree-flag=" in error(capsys, "compile", checkpoint, "-o", str(tmp_path / "out"), "--iree-flag=O2")
    message = error(capsys, "compile", checkpoint, "-o", str(tmp_path / "out"), *SMALL, "--iree-flag=--iree-nonsense")
    assert "--iree-nonsense" in message and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def mine(made, tmp_path_factory):
    """A module of the kept text with other locations."""
    return changed(made, tmp_path_factory.mktemp("mine"), 'loc("model.layers.1', 'loc("my.layers.1')


def changed(made: Path, tmp_path: Path, old: str, new: str) -> Path:
    """Replace `old` in the kept text and compile it; return the module's path."""
    text = (made / "kept/module.mlir").read_text()
    assert old in text
    (tmp_path / "mine.mlir").write_text(text.replace(old, new))
    command = shlex.split((made / "kept/commands.sh").read_text().splitlines()[-2].replace("module.mlir", "mine.mlir"))
    command = [Path(sys.executable).parent / command[0], *command[1:-1], "mine.vmfb"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "mine.vmfb"


def test_a_custom_module_runs_and_inspect_names_it(made, mine, checkpoint, tmp_path, capsys):
    assert cli.main(["compile", str(made / "out"), "--module", str(mine), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/model.vmfb").read_bytes() == mine.read_bytes()
    assert tokens(tmp_path / "out") == tokens(made / "out")
    assert cli.main(["inspect", str(tmp_path / "out")]) == 0
    assert re.search(rf"^module +not castiron's: {mine}", capsys.readouterr().out, re.MULTILINE)
    # castiron compile writes its own module again, and with --save-temps the text also where nothing has changed.
    for _ in range(2):
        compile_ = ["compile", checkpoint, "-o", str(tmp_path / "out"), "--save-temps", str(tmp_path), *SMALL, "--json"]
        assert cli.main(compile_) == 0 and not read_json(capsys.readouterr().out)["up_to_date"]
        assert (tmp_path / "out/model.vmfb").read_bytes() == (made / "out/model.vmfb").read_bytes()
        assert (tmp_path / "module.mlir").read_text() == (made / "kept/module.mlir").read_text()
        (tmp_path / "module.mlir").unlink()


def test_a_packed_bundle_becomes_a_directory(made, mine, tmp_path, capsys):
    pack_bundle(open_bundle(made / "out"), tmp_path / "one.castiron")
    argv = ["compile", str(tmp_path / "one.castiron"), "--module", str(mine)]
    assert "write a new bundle with -o DIR" in error(capsys, *argv)
    assert cli.main([*argv, "-o", str(tmp_path / "out")]) == 0
    assert tokens(tmp_path / "out") == tokens(made / "out")
    before, after = open_bundle(made / "out").manifest, open_bundle(tmp_path / "out", full_check=True).manifest
    assert before.files["weights.irpa"] == after.files["weights.irpa"] and before.functions == after.functions


@pytest.mark.parametrize(
    ("old", "new", "expected_message"),
    [
        (
            "@decode_step(",
            "@decode(",
            "has no function decode_step, which the manifest lists; compile the MLIR file that castiron compile --save-temps",
        ),
        ('"model"::"model.norm.weight"', '"model"::"model.gone.weight"', "does not fit the bundle's weights"),
    ],
)
def test_a_module_that_does_not_fit_is_rejected_and_the_bundle_stays(made, tmp_path, capsys, old, new, expected_message):
    shutil.copytree(made / "out", tmp_path / "out")
    mine = changed(made, tmp_path, old, new)
    assert expected_message in error(capsys, "compile", str(tmp_path / "out"), "--module", str(mine))
    assert open_bundle(tmp_path / "out").manifest == open_bundle(made / "out").manifest


def test_modules_of_other_types_and_files_that_are_none_are_rejected(made, checkpoint, tmp_path, capsys):
    """A module for fewer positions has caches of other shapes."""
    other = compile_model(checkpoint, tmp_path / "other", Options(max_context=8, batch=(), verify_widths=(), threads=1)).bundle
    message = error(capsys, "compile", str(made / "out"), "--module", str(other / "model.vmfb"))
    assert "has inputs (i32, i32, 2x8x" in message and "manifest lists (i32, i32, 2x" in message
    (tmp_path / "text.vmfb").write_text("module {}")
    assert "cannot read module" in error(capsys, "compile", str(made / "out"), "--module", str(tmp_path / "text.vmfb"))
    assert "no such file: /no/such" in error(capsys, "compile", str(made / "out"), "--module", "/no/such")


def test_weights_as_arguments_have_their_names(checkpoint, capsys):
    capsys.readouterr()
    argv = ["emit", checkpoint, "--lowering", "portable", "--function", "decode_step"]
    assert cli.main([*argv, *SMALL, "--weights", "f32"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "func.func public" in line]
    arguments = re.findall(r"%([\w.$-]+): tensor", line)
    assert arguments[:2] == ["token", "position"] and len(set(arguments)) == len(arguments)
    assert "model.layers.1.mlp.down_proj.weight" in arguments and not any("arg_" in name for name in arguments)
