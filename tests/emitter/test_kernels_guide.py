"""The guide to the kernels: its examples, its MLIR, its commands, and its change of the layout."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from castiron.pipelines.cli import main as cli
from castiron.reference.tiny import tiny_model
from castiron.vmfb.cache_folder import cache_folder
from tests.mutants.running import Copy

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
MODEL = "smollm2-135m-instruct"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", GUIDE, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def test_the_python_examples_are_correct():
    test = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "docs/kernels.md", None, 0)
    assert len(test.examples) > 10
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_mlir_is_that_of_the_command(capsys):
    """Lines have the same order, and lines are left out only at `...`."""
    (shown,) = blocks("mlir")
    (command,) = re.findall(r"`castiron (emit .*--isa avx2.*?)` prints", GUIDE)
    assert cli.main(shlex.split(command)) == 0
    printed = "\n".join(line.strip() for line in capsys.readouterr().out.splitlines())
    constants, *pieces = [piece.strip() for piece in shown.split("...\n")]
    assert all(f"{line}\n" in printed for line in constants.splitlines())
    at = 0
    for piece in filter(None, pieces):
        at = printed.index(f"{piece}\n", at)


def test_files_and_names_in_the_guide_exist():
    named = re.findall(r"`((?:emitter|pipelines|tests)/[\w./]+)`", GUIDE)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path
    for folder, cell in re.findall(r"^\| `(emitter/[\w/]+)` \| (.*) \|$", GUIDE, re.MULTILINE):
        for file in re.findall(r"`(\w+\.py)`", cell):
            assert (ROOT / folder / file).is_file(), f"{folder}/{file}"
    sources = "".join(path.read_text() for path in (ROOT / "emitter").rglob("*.py"))
    for name in re.findall(r"`(?:[A-Z]\w+\.)?(_?[A-Za-z]\w+)`", GUIDE):
        assert re.search(rf"\b{name}\b", sources), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_work(tmp_path):
    """They run in one folder, in order, with a small model in place of the guide's."""
    model = tiny_model("llama", tmp_path / "models" / MODEL, num_hidden_layers=4)
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    assert sum(line.startswith("castiron ") for line in lines) >= 6
    # Share iree-compile's results with other tests, but not the tiles that `tune` finds.
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "compile").symlink_to(cache_folder("compile"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CASTIRON_CACHE": str(tmp_path / "cache"),
    }
    for line in lines:
        command = re.sub(r"^castiron ", f"{sys.executable} -m castiron ", line)
        command = re.sub(rf"(?<!/){MODEL}", str(model), command)
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
        assert done.stdout.strip() or " -o " in line, line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_change_in_the_guide_is_correct_and_changes_the_golden_text(tmp_path):
    """In a copy of castiron with the change, the tests that the guide names pass."""
    root = Copy(tmp_path).root
    (change,) = blocks("diff")
    for part in change.split("--- ")[1:]:
        path, *lines = part.splitlines()
        text = (root / path).read_text()
        for old, new in zip(lines[::2], lines[1::2], strict=True):
            assert old[0] == "-" and new[0] == "+" and text.count(f"{old[1:]}\n") == 1, old
            text = text.replace(f"{old[1:]}\n", f"{new[1:]}\n")
        (root / path).write_text(text)

    def status(*words: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, cwd=root, env=environment, capture_output=True).returncode

    assert status("tests/emitter/test_packing.py") == 0
    assert status("tests/emitter/test_matmul_kernels.py", "-k", "host_matches and gemv") == 0
    assert status("tests/emitter/test_golden.py", "-k", "golden_one and gemv") == 1
